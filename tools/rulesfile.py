"""What the scripts that make the backends' rules.json have in common: to write one, or to compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = Path(__file__).parents[1] / "backends"


def main(options: list[str], backend: str, source: str, table: Callable[[], dict[str, Any]]) -> int:
    """Write the table into the backend's folder or, with `--check`, compare; return the exit code."""
    target = BACKENDS / backend / "rules.json"
    text = json.dumps(table(), indent=1, sort_keys=False) + "\n"
    if options != ["--check"]:
        target.write_text(text)
        print(f"wrote {target}")
        return 0
    if target.read_text() == text:
        return 0
    print(f"backends/{backend}/rules.json is not what {source} says: run tools/{backend}_table.py, look at the diff")
    return 1
