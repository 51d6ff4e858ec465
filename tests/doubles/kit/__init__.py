"""Shared parts of the clouds' stand-ins."""
