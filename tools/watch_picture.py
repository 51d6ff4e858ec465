#!/usr/bin/env python3
"""Draw docs/images/watch.svg: the screen of `cloudtrain watch` during a real run of examples/digits.

    .venv/bin/python tools/watch_picture.py

The script starts the job on two local instances, runs `cloudtrain watch` in a terminal of 80x24, and draws the screen
at step 2500 of 4000. The picture loads no font and no file from the network.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "watch.svg"
CLOUDTRAIN = str(Path(sys.executable).with_name("cloudtrain"))
COLUMNS, ROWS, STEPS, DRAWN_AT, LIMIT_S = 80, 24, 4000, 2500, 600.0
# launcher/live/screen.py writes each row as: move to the row, reset, clear the row, styled text.
ROW = re.compile(r"\x1b\[(\d+);1H\x1b\[0m\x1b\[K((?:[^\x1b]|\x1b\[[\d;]*m)*)")
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def submit(home: Path) -> dict[str, str]:
    """Start the job in a registry of its own; return the environment that finds the registry."""
    environment = {**os.environ, "CLOUDTRAIN_HOME": str(home), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    settings = [f"training.max_steps={STEPS}", "local.price_per_hour=6USD", "budget.limit=2USD", "retry=null"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [CLOUDTRAIN, "submit", "-d", "--name", "digits", "-f", "examples/digits/cloudtrain.yaml", *options]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return environment


def watch(environment: dict[str, str]) -> list[str]:
    """Return the rows of the screen, with their colours, at the first look after step DRAWN_AT."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(CLOUDTRAIN, [CLOUDTRAIN, "watch", "digits"], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written, deadline_s = "", time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 1.0)[0]:
            written += os.read(terminal, 1 << 16).decode("utf-8", errors="ignore")
        rows = {int(number): text for number, text in ROW.findall(written)}
        step = re.search(r"step (\d+)/", " ".join(rows.values()))
        if step and int(step[1]) >= DRAWN_AT and len(rows) >= ROWS:
            os.write(terminal, b"q")
            os.waitpid(child, 0)
            return [rows[number] for number in sorted(rows)]
    raise TimeoutError(f"step {DRAWN_AT} was not seen within {LIMIT_S:.0f} s")


def draw(rows: list[str]) -> str:
    """Return the rows as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for row in rows:
        console.print(Text.from_ansi(row), no_wrap=True, crop=True)
    picture = FONT_FACE.sub("", console.export_svg(title="cloudtrain watch digits", unique_id="watch"))
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


def main() -> None:
    """Run the job, draw the screen, stop the job."""
    with tempfile.TemporaryDirectory() as home:
        environment = submit(Path(home))
        try:
            PICTURE.write_text(draw(watch(environment)), encoding="utf-8")
        finally:
            subprocess.run([CLOUDTRAIN, "stop", "digits", "--now", "-y"], env=environment, check=False)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
