"""A terminal with a process, like a person's terminal, for tests of the live views."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

COMMAND = Path(sys.executable).with_name("cloudtrain")
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A terminal of 80x24 with a process, like a person's terminal."""

    def __init__(self, home: Path, argv: list[str], **environ: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(80, 24)
        self.modes = termios.tcgetattr(slave)
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        told = {**clean, "CLOUDTRAIN_HOME": str(home), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environ}

        def take() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=told, start_new_session=True, preexec_fn=take
        )
        self._slave = slave  # kept open to read its modes at the end
        self.output = b""
        self._is_lost = threading.Event()
        self._reading = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        """Change the terminal's size; the kernel signals the foreground process."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type the keys."""
        os.write(self.master, keys.encode())

    def see(self, text: str, since: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until the text was written after the position; return the position of the text's end."""
        end_s = time.monotonic() + timeout_s
        while text.encode() not in self.output[since:]:
            if self.process.poll() is not None:  # the last output may still be on its way
                end_s = min(end_s, time.monotonic() + 5.0)
            assert time.monotonic() < end_s, f"{text!r} was not written: {self.output[since:].decode(errors='replace')}"
            time.sleep(0.02)
        return self.output.index(text.encode(), since) + len(text.encode())

    def end(self) -> int:
        """Wait for the end and for all output; return the exit code."""
        code = self.process.wait(60)
        while not self._is_lost.is_set():
            with self._reading:
                if not select.select([self.master], [], [], 0.0)[0]:
                    break
            time.sleep(0.01)
        return code

    def is_given_back(self) -> bool:
        """Return whether the alternate screen was left, the cursor is visible, and the modes are restored."""
        last = self.output.rfind(LEAVE)
        is_left = last > self.output.rfind(ENTER) and b"\x1b[?25h" in self.output[:last][-40:]
        return is_left and termios.tcgetattr(self._slave) == self.modes

    def after(self) -> str:
        """Return the text in the terminal's scrollback."""
        return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", self.output[self.output.rfind(LEAVE) :].decode())

    def close(self) -> None:
        """End a running process, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.lose()
        os.close(self._slave)

    def lose(self) -> None:
        """Close the terminal like a closed window, after its reader has ended."""
        if not self._is_lost.is_set():
            self._is_lost.set()
            self._reader.join()
            os.close(self.master)

    def _read(self) -> None:
        while not self._is_lost.is_set():
            select.select([self.master], [], [], 0.05)
            with self._reading:
                if select.select([self.master], [], [], 0.0)[0]:
                    self.output += os.read(self.master, 65536)
