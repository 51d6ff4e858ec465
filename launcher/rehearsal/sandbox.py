"""A node's sandbox on this machine: a command with its own folders at the platform's paths, and its own processes.

Needs root, or a kernel that allows user namespaces. If neither works (see `mode()`), the command runs as a plain
process, and the platform's paths are replaced in arguments and variables.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from cloudtrain import entrypoints

from ..errors import ConfigError
from .cell import SandboxOrder
from .stage import NodeRun

LOCK_PORT = 46_997  # UDP port on a block's last address, bound while the block is in use
TRIES = 100  # each of 46,750 blocks is equally likely
_COMMAND = [sys.executable, "-I", "-m", "cloudtrain.launcher.rehearsal.cell"]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Running:
    """A started sandbox, with the exit code of the process."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def code(self) -> int | None:
        """Return the exit code, None while running."""
        found = self.process.poll()
        return found if found is None or found >= 0 else 128 - found

    def kill(self) -> None:
        """Kill all processes of the sandbox."""
        self.process.send_signal(signal.SIGUSR1 if mode() == "none" else signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def mode() -> str:
    """Return the best working mode: `root`, `user` (a user namespace) or `none`."""
    asked = os.environ.get("CLOUDTRAIN_SANDBOX")
    return next((name for name in ("root", "user") if asked in (None, name) and _works(name)), "none")


def start(node: NodeRun, folder: Path, hidden: Sequence[Path] = (), stdin: str | None = None) -> Running:
    """Start the node's command in a sandbox, which dies with the calling thread.

    `folder` holds its /tmp, its hosts file, and its whole output, `output.log`. `hidden`: folders of this machine that
    appear empty inside.
    """
    (folder / "root").mkdir(parents=True, exist_ok=True)
    moved = functools.partial(_moved, node.places if mode() == "none" else {})
    places = (Path(place) for place in node.places if not place.startswith("/tmp/"))  # each sandbox has its own /tmp
    absent = [place for place in places if not place.exists()]
    order = SandboxOrder(
        os.getpid(),
        mode(),
        [moved(word) for word in node.argv],
        {key: moved(value) for key, value in node.env.items()},
        moved(node.cwd),
        node.hostname,
        binds=_binds(node, folder, hidden) if mode() != "none" else [],
        rebuilt=sorted({_there(place.parent) for place in absent}),
        new_root=str(folder / "root"),
        stdin=stdin,
        detaches=node.detaches,
    )
    output = folder / "output.log"
    return Running(_spawn(order, output), output)


def addresses(count: int) -> tuple[tuple[str, ...], socket.socket]:
    """Return loopback addresses unused by any rehearsal on this machine, and their lock, which the caller closes last.

    Raises ConfigError if no block is free. On Linux all of 127.* is loopback.
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
    hint = "check with `ip link` that `lo` is up"
    raise ConfigError("no free loopback address for the nodes", where="127.*", hint=hint)


def _works(name: str) -> bool:
    if sys.platform != "linux":
        return False
    order = SandboxOrder(os.getpid(), name, ["true"], {"PATH": SYSTEM_PATH}, "/", "probe", rebuilt=["/opt"])
    text = json.dumps(asdict(order)).encode()
    done = subprocess.run(_COMMAND, input=text, capture_output=True, check=False, cwd="/")
    return done.returncode == 0 and not done.stderr


def _spawn(order: SandboxOrder, output: Path) -> subprocess.Popen[bytes]:
    """Start the sandbox. The order goes through a pipe: it may hold secrets, which are never written to a disk."""
    with output.open("ab") as log:
        environ = {"PATH": SYSTEM_PATH}
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environ, cwd="/")
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # the output gives the reason
        pipe.write(json.dumps(asdict(order)).encode())
    return process


def _there(folder: Path) -> str:
    """Return the folder, or its nearest existing parent."""
    return str(next(each for each in (folder, *folder.parents) if each.is_dir()))


def _binds(node: NodeRun, folder: Path, hidden: Sequence[Path]) -> list[tuple[str, str]]:
    """Return sources and mount points, in order: a later place may lie inside an earlier place."""
    tmp, hosts, empty = (folder / name for name in ("tmp", "hosts", "empty"))
    tmp.mkdir(exist_ok=True)
    tmp.chmod(0o1777)
    empty.mkdir(exist_ok=True)
    names = {"localhost": "127.0.0.1", node.hostname: "127.0.0.1", **node.names}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    # Outer folders first: kept folders may lie in hidden folders, and the reverse.
    covered = sorted({"/tmp": tmp, **{str(path): empty for path in hidden}, **_of_python(hidden)}.items())
    places = [*covered, *node.places.items()]
    return [*((str(source), place) for place, source in places), (str(hosts), "/etc/hosts")]


def _of_python(hidden: Sequence[Path]) -> dict[str, Path]:
    """Return folders of Python and cloudtrain inside hidden folders; an editable install lies in a clone."""
    prefixes = [Path(named) for prefix in (sys.prefix, sys.base_prefix) for named in (prefix, os.path.realpath(prefix))]
    kept = [*prefixes, *map(Path, entrypoints.__path__)]
    return {str(path): path for path in kept if any(path.is_relative_to(one) for one in (*hidden, Path("/tmp")))}


def _moved(places: Mapping[str, Path], text: str) -> str:
    """Return the text with local paths for the places: the longest names first, in a single pass."""
    names = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
    return re.sub(names, lambda found: str(places[found[0]]), text) if names else text
