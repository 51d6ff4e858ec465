"""JSON files that are whole or absent, whatever dies while they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["read_json", "write_json"]


def write_json(path: Path, value: Any) -> None:
    """Write `value` by write, fsync and rename. Raises OSError, leaving what was there before."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Return the file's value, or None where there is no file or it holds no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
