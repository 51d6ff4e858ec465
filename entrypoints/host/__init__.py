"""Functions that a host runs for the launcher over one ssh channel: calls in, answers out."""
