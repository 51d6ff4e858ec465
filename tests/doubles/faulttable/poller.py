"""Somebody who follows a job: asks the ssh backend for its state again and again, and prints a line each time.

    python -m doubles.faulttable.poller < ref.json

A line is `{"asked_s", "time_s", "state"}`, or `error` in the place of `state` where nobody could be asked.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

EVERY_S = 0.3


def main() -> None:
    """Ask until killed."""
    from cloudtrain.backends.ssh import backend
    from cloudtrain.launcher.errors import UnreachableError

    ref = json.load(sys.stdin)
    while True:
        asked_s = time.time()
        try:
            told = {"state": asdict(backend.state(ref))}
        except UnreachableError as error:
            told = {"error": error.message}
        print(json.dumps({"asked_s": asked_s, "time_s": time.time(), **told}), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
