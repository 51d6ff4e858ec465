"""A machine's place on this one: a command that sees its own folders at the platform's paths, and its own processes.

Needs root, or a kernel that lets users make namespaces. Where neither works (`mode()` says which), the command runs as
a plain process, and the platform's paths are rewritten in its arguments and variables.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain import entrypoints
from cloudtrain.launcher.errors import ConfigError

__all__ = ["Cell", "Running", "addresses", "mode", "start"]

LOCK_PORT = 46_997  # of UDP, on a block's last address: held while the block is in use
TRIES = 100  # each of 46,750 blocks is as likely
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Cell:
    """What to run, and what it may see. `folder` is ours: its /tmp, its hosts, and `output.log`, all that it writes."""

    argv: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    hostname: str
    places: Mapping[str, Path]  # absolute path inside -> what is there
    names: Mapping[str, str] = field(default_factory=dict)  # host -> address
    hidden: Sequence[Path] = ()  # folders of this machine that are empty in there
    cwd: str = "/"
    stdin: str | None = None
    detaches: bool = False


@dataclass(frozen=True)
class Running:
    """A started cell; its exit code is the process's."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def code(self) -> int | None:
        """Return its exit code, None while it runs."""
        found = self.process.poll()
        return found if found is None or found >= 0 else 128 - found

    def terminate(self) -> None:
        """Send SIGTERM to its first process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        """Kill everything in it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1 if mode() == "none" else signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def mode() -> str:
    """Return the best that works here: `root`, `user` (a user namespace) or `none`."""
    asked = os.environ.get("CLOUDTRAIN_SANDBOX")
    return next((name for name in ("root", "user") if asked in (None, name) and _works(name)), "none")


def start(cell: Cell) -> Running:
    """Start it; it dies with the calling thread."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    order = {
        "parent": os.getpid(),
        "mode": mode(),
        "argv": list(cell.argv),
        "env": dict(cell.env),
        "cwd": cell.cwd,
        "hostname": cell.hostname,
        "binds": _binds(cell) if mode() != "none" else [],
        "rebuilt": sorted({_there(Path(place).parent) for place in cell.places if not _is_given(place)}),
        "new_root": str(cell.folder / "root"),
        "stdin": cell.stdin,
        "detaches": cell.detaches,
    }
    (cell.folder / "root").mkdir(exist_ok=True)
    if mode() == "none":
        moved = functools.partial(_moved, cell.places)
        order |= {"argv": [moved(word) for word in cell.argv], "cwd": moved(cell.cwd)}
        order["env"] = {key: moved(value) for key, value in cell.env.items()}
    output = cell.folder / "output.log"
    return Running(_spawn(order, output), output)


def addresses(count: int) -> tuple[tuple[str, ...], socket.socket]:
    """Return loopback addresses that no other rehearsal on this machine uses, and their lock, to be closed at last.

    Raises ConfigError where this machine has none: all of 127.* is loopback on Linux.
    """
    for _ in range(TRIES):
        block = f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"
        lock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            lock.bind((f"{block}.254", LOCK_PORT))
        except OSError:
            lock.close()
            continue
        return tuple(f"{block}.{number}" for number in range(1, count + 1)), lock
    raise ConfigError("no loopback address can be had for the nodes", where="127.*", hint="is `lo` up? `ip link` says")


def _works(name: str) -> bool:
    if sys.platform != "linux":
        return False
    order = {"parent": os.getpid(), "mode": name, "argv": ["true"], "env": {"PATH": SYSTEM_PATH}, "cwd": "/"}
    order |= {"hostname": "probe", "binds": [], "rebuilt": ["/opt"], "stdin": None, "detaches": False}
    done = subprocess.run(_command(), input=json.dumps(order).encode(), capture_output=True, check=False, cwd="/")
    return done.returncode == 0 and not done.stderr


def _command() -> list[str]:
    return [sys.executable, "-I", "-m", "cloudtrain.launcher.rehearsal.cell"]


def _spawn(order: dict[str, object], output: Path) -> subprocess.Popen[bytes]:
    """Start the cell. Its order goes through a pipe: it may hold secrets, which are never written to a disk."""
    with output.open("ab") as log:
        process = subprocess.Popen(
            _command(), stdin=subprocess.PIPE, stdout=log, stderr=log, env={"PATH": SYSTEM_PATH}, cwd="/"
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its output says why
        pipe.write(json.dumps(order).encode())
    return process


def _is_given(place: str) -> bool:
    """Return whether there is something to mount the place on, or will be: /tmp is the cell's own."""
    return place.startswith("/tmp/") or Path(place).exists()


def _there(folder: Path) -> str:
    """Return the folder, or the nearest one above it that this machine has."""
    return str(next(each for each in (folder, *folder.parents) if each.is_dir()))


def _binds(cell: Cell) -> list[tuple[str, str]]:
    """Return what is mounted where, in order: a later place may lie inside an earlier one."""
    tmp, hosts, empty = (cell.folder / name for name in ("tmp", "hosts", "empty"))
    tmp.mkdir(exist_ok=True)
    tmp.chmod(0o1777)
    empty.mkdir(exist_ok=True)
    names = {"localhost": "127.0.0.1", cell.hostname: "127.0.0.1", **cell.names}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    # An outer one first: what is kept may lie in what is hidden, and the other way round.
    covered = sorted({"/tmp": tmp, **{str(folder): empty for folder in cell.hidden}, **_of_python(cell)}.items())
    return [
        *((str(source), place) for place, source in covered),
        *((str(source), place) for place, source in cell.places.items()),
        (str(hosts), "/etc/hosts"),
    ]


def _of_python(cell: Cell) -> dict[str, Path]:
    """Return this Python's folders that lie in what is hidden, and cloudtrain's: an editable one is in a clone."""
    prefixes = [Path(named) for prefix in (sys.prefix, sys.base_prefix) for named in (prefix, os.path.realpath(prefix))]
    kept = [*prefixes, *map(Path, entrypoints.__path__)]
    hidden = [*cell.hidden, Path("/tmp")]
    return {str(path): path for path in kept if any(path.is_relative_to(one) for one in hidden)}


def _moved(places: Mapping[str, Path], text: str) -> str:
    """Return the text with every place as it is here: the longest names first, and what is put in is not read again."""
    names = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
    return re.sub(names, lambda found: str(places[found[0]]), text) if names else text
