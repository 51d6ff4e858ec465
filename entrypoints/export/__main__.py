"""Reads the order on standard input, writes the folder, and prints the result or the fault as JSON.

The process ends with the command that started the process, and after a signal leaves no file and no process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from .. import processes
from ..models import scratch
from ..models.order import ExportOrder
from . import build


def _end(number: int, _: Any) -> None:
    processes.kill_descendants(1.0)
    scratch.remove_own()
    os._exit(128 + number)  # the thread that verifies the checkpoint would hold the exit


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _end)
    processes.die_with_parent(signal.SIGTERM)
    try:
        print(json.dumps(build.build(ExportOrder.load(json.load(sys.stdin)))))
    except build.ExportError as error:
        print(json.dumps({"fault": str(error), "hint": error.hint}))
        sys.exit(1)
