"""The state of a checkpoint's model that is no tensor (`get_extra_state`), read from plain.pt without torch.

The pickle is read with inert objects in place of all classes, so that no code of the file runs.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from ..checkpoints import folder as checkpoints


def names(checkpoint: Path) -> list[str]:
    """Return the names of the state that is no tensor. Raises ValueError for an unreadable file, OSError."""
    try:
        with zipfile.ZipFile(checkpoint / checkpoints.PLAIN) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(inner) as file:
                found = _Reader(file).load()
        return [str(name) for name in found.get("extra") or {}]
    except OSError:
        raise
    except Exception as error:  # pickle documents no complete list
        raise ValueError(f"{checkpoints.PLAIN} is not readable: {type(error).__name__}: {error}") from error


class _Inert(dict[Any, Any]):
    """An inert object: takes any arguments, items and state, and ignores the state."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Take an item as a list does."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()
