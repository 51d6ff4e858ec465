"""`python -m cloudtrain.entrypoints.container ROOT ORDER ...`: the command of a managed platform's container.

Any Python 3 must parse this file and its packages, to report a version too old for the rest.
"""

import json
import sys
from pathlib import Path


def refuse(root: Path, source: str) -> int:
    """Write the exit report of a Python too old for the package to the platform's place; return the exit code."""
    words = (
        f"the image's Python is {sys.version.split()[0]}, and cloudtrain needs 3.10 or newer: name an image or an "
        "environment with a newer Python, or leave `image` out for the default"
    )
    print(words, file=sys.stderr, flush=True)
    fields = {"e": "ended", "state": "failed", "reason": "error", "kind": "config", "message": words}
    report, place = f"{words}  ::ct {json.dumps(fields)}", None  # as events.format_line writes the event
    if not source.startswith("env:"):
        place = json.loads((root / source).read_text())["places"].get("failure")
    if place is None:
        print(report, flush=True)
    else:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(report)
    return 64


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(refuse(Path(sys.argv[1]), sys.argv[2]))
    from .container import main

    sys.exit(main(sys.argv[1:]))
