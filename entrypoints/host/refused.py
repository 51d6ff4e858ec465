"""What a verb says no with: words for the user, with the cure in them."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(RuntimeError):
    """What was asked cannot be done here; the text says what, where, and how to mend it."""
