"""What goes wrong in a thread of the view, in a few words: there is no other place to tell it."""

from __future__ import annotations

from cloudtrain.launcher.errors import CloudtrainError

__all__ = ["in_words"]


def in_words(error: Exception) -> str:
    """Return what went wrong on one line; what should never happen says so."""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    is_known = isinstance(error, CloudtrainError | OSError)
    return first if is_known else f"cloudtrain itself failed: {type(error).__name__}: {first}"
