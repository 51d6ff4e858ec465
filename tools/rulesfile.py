"""What the scripts that make the backends' rules.json have in common: to write one, or to compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = Path(__file__).parents[1] / "backends"


def main(
    options: list[str],
    backend: str,
    source: str,
    table: Callable[[], dict[str, Any]],
    serving: Callable[[], dict[str, Any]],
) -> int:
    """Write the tables into the backend's folder or, with `--check`, compare; return the exit code.

    `table`: the rules of a job's request; `serving`: those of the requests of an endpoint.
    """
    code = 0
    for name, made in (("rules.json", table), ("rules_serving.json", serving)):
        target = BACKENDS / backend / name
        text = json.dumps(made(), indent=1, sort_keys=False) + "\n"
        if options != ["--check"]:
            target.write_text(text)
            print(f"wrote {target}")
        elif target.read_text() != text:
            hint = f"run tools/{backend}_table.py, look at the diff"
            print(f"backends/{backend}/{name} is not what {source} says: {hint}")
            code = 1
    return code
