"""The error of a verb that cannot do its work: a message for the user, with the cure."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(RuntimeError):
    """The request cannot be done on this host; the text has the reason, the place, and the cure."""
