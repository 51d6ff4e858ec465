"""Reads the order on standard input, writes the folder, and prints the result or the fault as JSON."""

from __future__ import annotations

import json
import sys

from cloudtrain.entrypoints.export import build
from cloudtrain.entrypoints.export.order import ExportOrder

if __name__ == "__main__":
    try:
        print(json.dumps(build.build(ExportOrder.load(json.load(sys.stdin)))))
    except build.ExportError as error:
        print(json.dumps({"fault": str(error), "hint": error.hint}))
        sys.exit(1)
