"""Verbs for a preflight: the state of a host, the holders of its GPUs, and the routes of its addresses.

Each probe runs in a thread of its own with a time limit: if a disk, a resolver or a driver hangs, `errors` has a reason
in place of the fact, and all other facts are still returned.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from .. import processes
from ..agent import gpulocks, gpus
from ..errors import Refused

TYPE_CHECKING = False  # as in typing, but the import of typing costs each call of a host 4 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .calls import Here

    Probe = Callable[[], Any]

PATIENCE_S = 4.5  # within this time a hanging probe is recognized; all other probes answer within a second


def facts(
    here: Here,
    *,
    python: str | None = None,
    checkpoint: str | None = None,
    lock_folder: str | None = None,
    tmp: str | None = None,
    patience_s: float = PATIENCE_S,
) -> dict[str, Any]:
    """Return the facts about this host; `errors` maps a failed probe to the reason, its fact is None.

    `python`: the job's interpreter (None: skip), `checkpoint` the folder of checkpoints, `lock_folder` the folder of
    the GPU locks if not the usual folder; `tmp` the job's TMPDIR if the config sets it; `patience_s`: a
    probe that takes longer has failed.
    """
    from . import probes  # `holders`, called on many hosts at once, needs no other probe

    looks: dict[str, Probe] = {
        "own_name": probes.own_name,
        "interfaces": probes.interfaces,
        **_use(lock_folder),
        "disk": lambda: probes.disk(here.workdir),
        "shm": lambda: probes.disk(Path("/dev/shm")),
        "tmp": lambda: probes.temporary(tmp),
        "load": probes.load,
        "limits": probes.limits,
        "infiniband": probes.infiniband,
        "write": lambda: probes.write(here.workdir),
        "leftovers": lambda: probes.leftovers(here.workdir),
        "logind": probes.logind,
    }
    if checkpoint:
        looks["checkpoint_disk"] = lambda: probes.disk(Path(checkpoint).expanduser())
    if python:
        looks["python"] = lambda: probes.interpreter(python, here.umask, 0.9 * patience_s)
    found, errors = probed(looks, patience_s)
    system = os.uname()
    own = {
        "name": system.nodename,
        "kernel": system.release,
        "machine": system.machine,
        "boot_id": processes.boot_id(),
        "user": processes.user_name(os.getuid()),
        "workdir": str(here.workdir),
        "cores": processes.cores(),
    }
    return {**own, **found, "errors": errors}


def holders(*, lock_folder: str | None = None) -> dict[str, Any]:
    """Return `holders` (from gpulocks), `waiting`, the GPUs and the processes on the GPUs: for `cloudtrain hosts`."""
    return probed(_use(lock_folder), PATIENCE_S)[0]


def address(*, interface: str | None = None) -> dict[str, Any]:
    """Return the own `address`: of the interface, else on the route out; sends no packet. Raises Refused."""
    import socket

    from ..agent import node

    if interface:
        found = node.address_of(interface)
        if found is None:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise Refused(f"the interface {interface} has no IPv4 address here; there are {there}: fix `interface`")
        return {"address": found}
    try:
        return {"address": node.towards(node.ELSEWHERE)}
    except OSError as error:
        words = error.strerror or str(error)
        raise Refused(f"this host cannot reach {node.ELSEWHERE}: {words}; set the host's `address`") from error


def _use(lock_folder: str | None) -> dict[str, Probe]:
    """Return the probes of the GPUs, their processes and their locks."""
    return {
        "gpus": gpus.found,
        "gpu_processes": gpus.in_use,
        "holders": lambda: gpulocks.holders(gpulocks.folder(lock_folder, make=False)),
        "waiting": lambda: _waiting(lock_folder),
    }


def _waiting(lock_folder: str | None) -> list[dict[str, Any]]:
    """Return the jobs in line on this host, in order: `job`, `user`, `priority`, `time_s`, `start_s`, `locks`."""
    locks = gpulocks.folder(lock_folder, make=False)
    if not (locks / "queue").is_dir():
        return []
    from ..agent import queue_line  # most hosts have no queue

    return [{**each.dump(), "locks": each.needs[""]} for each in queue_line.tickets(locks)]


def probed(probes: dict[str, Probe], patience_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all probes at once; return the results, and the reasons of the failures."""
    results: dict[str, Any] = {}
    errors: dict[str, str] = {}

    def look(name: str, probe: Probe) -> None:
        try:
            results[name] = probe()
        except Exception as error:
            errors[name] = (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:500]

    threads = [threading.Thread(target=look, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    found, why = dict(results), dict(errors)  # a late thread writes into dicts that are no longer read
    for name in probes.keys() - found.keys() - why.keys():
        why[name] = f"no answer within {patience_s:.1f} s"
    return {name: found.get(name) for name in probes}, why
