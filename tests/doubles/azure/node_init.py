"""Runs a node's processes, as the first process of its container: `python -I -S node_init.py SPEC`, SPEC in JSON.

Mounts the paths of the spec, starts the command once for each process, and writes the processes' output to its own
output in frames: process (1 byte), kind (1 byte), length (4 bytes), content. SIGTERM goes on to every process's shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

READY, OUTPUT, ENDED = 0, 1, 2
FRAME = struct.Struct(">BBI")
READ_BYTES = 1 << 16
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MNT_DETACH = 1, 32, 4096, 16384, 2

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the spec until every process has ended; return the first exit code that is not 0."""
    spec = json.loads(sys.argv[1])
    processes: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def terminate(signum: int, frame: FrameType | None) -> None:
        told.append(signum)
        for process in processes:
            if process.poll() is None:
                process.terminate()

    signal.signal(signal.SIGTERM, terminate)
    for source, target, is_read_only in spec["mounts"]:
        _mount(source, target, is_read_only)
    if spec["stores"] is not None:
        _LIBC.umount2(spec["stores"].encode(), MNT_DETACH)
    _send(0, READY, b"")
    selector = selectors.DefaultSelector()
    for number, env in enumerate(spec["processes"]):
        process = _start(spec, env)
        processes.append(process)
        if told:  # before the process existed
            process.terminate()
        os.set_blocking(process.stdout.fileno(), False)
        selector.register(process.stdout, selectors.EVENT_READ, number)
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        _pass_on(selector, 0.02)
        for number, process in enumerate(processes):
            if number not in codes and process.poll() is not None:
                _pass_on(selector, 0.0)  # its last output goes before its end
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                codes[number] = code
                _send(number, ENDED, str(code).encode())
    return next((code for code in codes.values() if code), 0)


def _start(spec: dict[str, Any], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", "-c", spec["command"]],
        cwd=spec["cwd"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _pass_on(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Send all output that is readable now."""
    while True:
        found = selector.select(timeout_s)
        if not found:
            return
        for key, _ in found:
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                _send(key.data, OUTPUT, data)
        timeout_s = 0.0


def _send(process: int, kind: int, data: bytes) -> None:
    rest = memoryview(FRAME.pack(process, kind, len(data)) + data)
    while rest:
        rest = rest[os.write(1, rest) :]


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
