"""Runs a node's command, as the first process of its container: `python -I -S node_init.py SPEC`, SPEC in JSON.

Mounts the paths of the spec, writes the byte READY, and starts the command, which has the container's output. SIGTERM
goes on to the command's shell.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

READY = b"\0"
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MNT_DETACH = 1, 32, 4096, 16384, 2

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the command until its end; return its exit code."""
    spec = json.loads(sys.argv[1])
    processes: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def terminate(signum: int, frame: FrameType | None) -> None:
        told.append(signum)
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGTERM, terminate)
    for source, target, is_read_only in spec["mounts"]:
        _mount(source, target, is_read_only)
    if spec["stores"] is not None:
        _LIBC.umount2(spec["stores"].encode(), MNT_DETACH)
    os.write(1, READY)
    process = subprocess.Popen(
        ["bash", "-c", spec["command"]],
        cwd=spec["cwd"],
        env=spec["env"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    processes.append(process)
    if told:  # before the process existed
        process.terminate()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _mount(source: str, target: str, is_read_only: bool) -> None:
    """Mount a folder or a file at target."""
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    flags = [MS_BIND | MS_REC, *([MS_BIND | MS_REMOUNT | MS_RDONLY] if is_read_only else [])]
    for flag in flags:
        if _LIBC.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flag), None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"mount {source} at {target}: {os.strerror(error)}")


if __name__ == "__main__":
    sys.exit(main())
