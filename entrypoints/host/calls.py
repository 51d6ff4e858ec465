"""The host's end of one ssh channel: calls in, answers out, until the channel ends.

A message in either direction is a line of JSON, followed by `size` bytes. A call names a verb, MODULE.FUNCTION of this
package; the module is imported on the verb's first call. The function takes the call's `ask` as keyword arguments, the
bytes as `payload`, and if it has a positional parameter, the host as `here`. It returns JSON or None; resources that a
verb keeps open end with the channel.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path

from ..errors import Refused

TYPE_CHECKING = False  # as in typing, but the import of typing costs each call of a host 4 ms
if TYPE_CHECKING:
    from typing import Any, BinaryIO


class Here:
    """This host: the folder of jobs and caches, the folder of our package, the user's own umask, the host's name."""

    def __init__(self, workdir: Path, runtime: str, umask: int, name: str) -> None:
        self.workdir, self.runtime, self.umask, self.name = workdir, runtime, umask, name


def serve(workdir: str, runtime: str, umask: int) -> None:
    """Answer calls from standard input until its end. `runtime` is the folder that our package was imported from."""
    # The launcher sends no call before the first answer, so no input is buffered yet. fd 0 and 1 must not reach the
    # verbs' children: a child would consume a call, or its output would look like an answer.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    here = Here(Path(workdir), runtime, umask, os.uname().nodename)
    # The address at which the client reached sshd: behind a forwarded port, this machine's own address.
    address = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    _answer(answers, {"workdir": workdir, "name": here.name, "address": address, "home": str(Path.home())})
    while line := calls.readline():
        call = json.loads(line)
        payload = calls.read(call.get("size", 0))
        if len(payload) < call.get("size", 0):
            return  # the channel has ended in the middle of a call
        answer, data = _run_verb(call["verb"], {**call["ask"], **({"payload": payload} if payload else {})}, here)
        _answer(answers, answer, data)


def clock() -> dict[str, Any]:
    """Return this host's time, in unix seconds."""
    return {"now_s": time.time()}


def _run_verb(verb: str, ask: dict[str, Any], here: Here) -> tuple[dict[str, Any], bytes]:
    """Call the verb; return the answer and its bytes."""
    try:
        module, _, name = verb.partition(".")
        found = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        answer: dict[str, Any] = found(*[here] * found.__code__.co_argcount, **ask) or {}
        return {"told": answer}, answer.pop("payload", b"")
    except Refused as error:
        return {"refused": str(error)}, b""
    except Exception as error:  # an error of one call must not end the channel
        place = getattr(error, "filename", None)
        words = f"{getattr(error, 'strerror', None) or error!r}{f': {place}' if place else ''}"
        return {"failed": words, "kind": type(error).__name__}, b""


def _answer(out: BinaryIO, answer: dict[str, Any], data: bytes = b"") -> None:
    out.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n")
    out.write(data)
    out.flush()
