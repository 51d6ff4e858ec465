"""The host's end of one ssh channel: calls in, answers out, until the channel ends.

A message in either direction is a line of JSON, followed by `size` bytes. A call names a verb, a function of a module
below. The function takes the call's `ask` as keyword arguments, and the bytes as `payload`, and returns JSON; resources
that a verb keeps open end with the channel.
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

# verb -> module of this package and function; imported on the verb's first call
VERBS = {
    "clock": "host.calls:clock",
    "look": "host.verbs:look",
    "near_end": "host.verbs:near_end",
    "read": "host.verbs:read",
    "stop": "host.verbs:stop",
    "close_admission": "host.verbs:close_admission",
    "give_up": "host.verbs:give_up",
    "script": "host.verbs:script",
    "unpack": "host.verbs:unpack",
    "tree": "host.files:tree",
    "get": "host.files:get",
    "holders": "host.survey:holders",
    "listen": "host.reachability:listen",
    "dial": "host.reachability:dial",
    "close_listener": "host.reachability:close_listener",
    "address": "host.survey:address",
    "environment": "environments.prepare:prepare",
    "offer": "host.copying:offer",
    "fetch": "host.copying:fetch",
    "newest": "host.copying:newest",
    "begin_model": "host.models:begin",
    "put_model": "host.models:put",
    "keep_model": "host.models:keep",
    "use_model": "host.models:use",
    "back_model": "host.models:back",
    "slurm_run": "host.slurm:run",
    "slurm_discard": "host.slurm:discard",
    "slurm_door": "host.slurm:door",
    "slurm_look": "host.slurm:look",
    "slurm_ask": "host.slurm:ask",
    "slurm_read": "host.slurm:read",
    "slurm_near_end": "host.slurm:near_end",
    "slurm_stop": "host.slurm:stop",
    "slurm_enter": "host.slurm:enter",
}
# Verbs whose first parameter is the host (`here`).
VERBS_OF_HOST = {
    "jobs": "host.verbs:jobs",
    "make": "host.verbs:make",
    "start": "host.verbs:start",
    "has": "host.files:has",
    "basis": "host.files:basis",
    "put": "host.files:put",
    "keep": "host.files:keep",
    "facts": "host.survey:facts",
    "slurm_prepare": "host.slurm:prepare",
    "slurm_jobs": "host.slurm:jobs",
}


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
    is_of_host = verb in VERBS_OF_HOST
    try:
        module, _, name = (VERBS_OF_HOST if is_of_host else VERBS)[verb].partition(":")
        found = getattr(importlib.import_module(f"cloudtrain.entrypoints.{module}"), name)
        answer: dict[str, Any] = found(here, **ask) if is_of_host else found(**ask)
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
