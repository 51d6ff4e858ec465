"""The first process in the container of a managed platform, and its helpers."""
