"""A notice on the local desktop, by `notify-send` if installed."""

from __future__ import annotations

import subprocess

from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.entrypoints.notices.sending import TIMEOUT_S, Fault

__all__ = ["show"]


def show(notice: Notice) -> None:
    """Show the notice. Raises Fault."""
    urgency = "normal" if notice.event in ("succeeded", "started") else "critical"
    body = "\n".join(notice.lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    command = ["notify-send", "--app-name=cloudtrain", f"--urgency={urgency}", "--", notice.title, body]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Fault(f"notify-send: {type(error).__name__}") from None
    if done.returncode != 0:
        raise Fault(f"notify-send ended with code {done.returncode}")
