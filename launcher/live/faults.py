"""Text of errors in the view's threads, which only the view itself can show."""

from __future__ import annotations

from cloudtrain.launcher.errors import CloudtrainError

__all__ = ["in_words"]


def in_words(error: Exception) -> str:
    """Return the error on one line; an unexpected exception is named as a failure of cloudtrain."""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    is_known = isinstance(error, CloudtrainError | OSError)
    return first if is_known else f"cloudtrain itself failed: {type(error).__name__}: {first}"
