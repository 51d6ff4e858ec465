"""A node's interpreter, at its start: lets the warm server fork the process, and then stands in for the process.

`warmnodes` installs this file as a module of the test environment, imported at the start of torchrun and of the ranks.
The interpreter keeps its pid, its parent and its environment: it passes signals on, and ends as the warm process ends.
If no server answers, or the server cannot make an equal process, the real interpreter goes on.
"""

import array
import json
import os
import resource
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

COLD = "COLD_PYTHON"  # a job with the variable has real interpreters
MESSAGE_BYTES = 400_000
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Have the server fork this process, and wait for the fork's end; return if the interpreter itself must go on."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    with link:
        if COLD in os.environ or link.connect_ex(str(Path(__file__).with_name("warm.socket"))) != 0:
            return
        ignored = [signum for signum in PASSED_ON if signal.getsignal(signum) == signal.SIG_IGN]
        before = {signum: signal.getsignal(signum) for signum in PASSED_ON if signum not in ignored}
        early: list[int] = []
        for signum in before:
            signal.signal(signum, lambda number, frame: early.append(number))
        files = array.array("i", [0, 1, 2])
        request = json.dumps(_request(ignored)).encode()
        link.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        if link.recv(99) == b"warm":
            _stand_in(link, list(before), early)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in early:
            os.kill(os.getpid(), number)


def name_of(finder: object) -> str:
    """Return the name of a finder of modules."""
    return getattr(finder, "__name__", type(finder).__name__)


def _request(ignored: list[signal.Signals]) -> dict[str, Any]:
    """Return all properties of this process that the fork must have."""
    torch = find_spec("torch")
    umask = os.umask(0o77)
    os.umask(umask)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "args": sys.orig_argv[1:],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "path": sys.path,
        "finders": [name_of(finder) for finder in sys.meta_path],
        "torch": torch.origin if torch else None,
        "env": dict(os.environ),
        "cwd": str(Path.cwd()),
        "parent": os.getppid(),
        "ids": [os.getuid(), os.getgid(), os.getgroups()],
        "umask": umask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "ignored": ignored,
    }


def _stand_in(link: socket.socket, signums: list[signal.Signals], early: list[int]) -> NoReturn:
    """Pass signals on, and end as the fork ends."""
    _die_with_parent()

    def pass_on(number: int, frame: FrameType | None) -> None:
        link.send(str(number).encode())

    for signum in signums:
        signal.signal(signum, pass_on)
    for number in early:
        pass_on(number, None)
    code = int(link.recv(99) or -signal.SIGKILL)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code in signums:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, as torchrun and the ranks do."""
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
