"""Long steps in preparing a host: one at a time for all callers, output in a log, time limited.

The process that the lock protects inherits the lock: if the holder dies, the next caller waits for that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .. import processes
from ..errors import Refused

LIMIT_S = 1800.0  # CUDA builds of torch with their libraries are 3 GB; a slow mirror takes long
POLL_S = 0.1
WORDS = 4  # lines at the end of a tool's output
_NOISE = re.compile(
    r"^\s*$|^\[notice\]|^WARNING: (You are using pip|Running pip as|The director)|^note: |^hint: See above"
    r"|^ERROR: ResolutionImpossible: for help"
)
_FAULT = re.compile(
    r"^\s*(?:(?:ERROR|Error|error|fatal|FATAL|ssh)\b|[\w.]+(?:Error|Exception): |.*Permission denied \(|Host key verif)"
)
LONGEST = 300  # characters of a line: pip lists all versions of a package
_SATISFIED = b"Requirement already satisfied: "  # pip's words for each package of the image


@contextlib.contextmanager
def lock(path: Path, limit_s: float, doing: str, done: Callable[[], bool]) -> Iterator[int | None]:
    """Hold the lock alone; yield its descriptor, for `run`, or None once `done` returns True.

    The caller checks again with the lock held: another process may have done the work between the last check and the
    lock. Raises Refused if another process holds the lock for longer than `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    while True:
        if done():
            yield None
            return
        if (held := try_lock(path, fcntl.LOCK_EX)) is not None:
            break
        if time.monotonic() > end_s:
            since = f"has been working on it for over {limit_s:.0f} s"
            raise Refused(f"{doing}: {_holder(path)} {since}; stop that process, or try again later")
        time.sleep(POLL_S)
    try:
        os.truncate(held, 0)
        os.pwrite(held, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield held
    finally:
        os.close(held)


def try_lock(path: Path, how: int) -> int | None:
    """Return the lock as processes.try_lock does. Raises Refused if the file system has no locks."""
    try:
        return processes.try_lock(path, how)
    except OSError as error:
        message = f"{path} cannot be locked: {error.strerror}; set `workdir` to a local disk, or a share with locks"
        raise Refused(message) from error


def run(
    argv: Sequence[str],
    log: Path,
    limit_s: float,
    held: int,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    shows: bool = False,
) -> int | None:
    """Run a command to its end, append its output to the log; return the exit code, None if the time ran out.

    `shows`: the output goes to standard output as well, while the command runs, without the packages that are there.
    """
    end_s = time.monotonic() + limit_s
    with log.open("ab") as file, log.open("rb") as written:
        file.write(f"$ {' '.join(argv)}\n".encode())
        file.flush()
        written.seek(file.tell())
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            pass_fds=(held,),
            preexec_fn=processes.die_with_parent,
        )
        try:
            is_over, rest = not shows, b""
            while not is_over:
                is_over = child.poll() is not None or time.monotonic() > end_s
                *lines, rest = (rest + written.read()).split(b"\n")
                lines = [line + b"\n" for line in lines if not line.startswith(_SATISFIED)]
                sys.stdout.buffer.write(b"".join(lines) + (rest if is_over else b""))
                sys.stdout.flush()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
            return child.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def last_words(text: str) -> str:
    """Return the last lines with a tool's errors, joined by ` | `."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.search(line) and not line.startswith("$ ")]
    lines = [line if len(line) <= LONGEST else f"{line[: LONGEST - 100]} ... {line[-90:]}" for line in lines]
    faults = [line for line in lines if _FAULT.search(line)]
    return " | ".join(list(dict.fromkeys(faults or lines))[-WORDS:])[-1500:]


def cure(text: str, cures: Mapping[str, str], otherwise: str) -> str:
    """Return the first cure whose pattern occurs in the text, with the pattern's group in the place of `{1}`."""
    for pattern, words in cures.items():
        if found := re.search(pattern, text, re.IGNORECASE):
            return words.replace("{1}", found[1]) if "{1}" in words else words
    return otherwise


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
