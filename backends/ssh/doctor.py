"""The findings of `doctor ssh` and `hosts` about the user's own machines."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

from cloudtrain.entrypoints.agent.gpulocks import SPARE
from cloudtrain.launcher.backend import Check, HostUse, LeftFiles, Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError

from ..channel import copies
from ..channel.calls import Call, Fleet
from . import check
from .block import Ssh
from .hosts_placement import examine
from .request import of_config


def checks(fleet: Fleet, config: JobConfig | None, trial: Callable[[JobConfig], Request]) -> list[Check]:
    """Return the checks of the config's hosts; `trial` returns a request for a name that no job has."""
    own = _own_ssh()
    if own.verdict == "fail" or config is None or not config.block(Ssh).hosts:
        return [own]
    body = trial(config).body
    if faults := [fault for fault in check.faults(body) if not fault.is_warning]:
        return [own, *(Check(fault.key, "fail", fault.message, fault.hint) for fault in faults)]
    return [own, *examine(body, fleet)]


def hosts(fleet: Fleet, config: JobConfig) -> list[HostUse]:
    """Return the use of each GPU of the config's hosts, in the config's order, and the jobs in line."""
    found = of_config(config)
    locks = {"lock_folder": config.block(Ssh).gpu_locks}
    rows: list[HostUse] = []
    for host, answer in fleet.ask({host: Call("survey.holders", locks) for host in found}, is_urgent=True).items():
        if answer.error is None:
            rows += _uses(host.name, answer.reply)
        else:
            is_unknown = answer.error.exit_code == ConfigError.exit_code  # the config names the host wrongly
            absence = "unknown" if is_unknown else "unreachable"
            rows.append(HostUse(host.name, "-", "", absence, detail=answer.error.message))
    return rows


def held(fleet: Fleet, config: JobConfig) -> list[LeftFiles]:
    """Return the folders in the hosts' work folders."""
    return copies.left(fleet, {host: {} for host in of_config(config)}, remove=False)


def _uses(host: str, reply: dict[str, Any]) -> Iterator[HostUse]:
    held = {holder["name"]: holder for holder in reply["holders"] or ()}
    spares = [held.pop(name) for name in list(held) if name.startswith(SPARE)]
    working = {holder.get("job") for holder in held.values()}
    busy = {process["gpu"]: process for process in reply["gpu_processes"] or ()}
    gpus = reply["gpus"] or {"gpus": [], "fault": None}
    units = [
        (unit, f"{gpu['index']}{f' slice {number}' if gpu['mig'] else ''}", gpu["name"])
        for gpu in gpus["gpus"]
        for number, unit in enumerate(gpu["slices"] if gpu["mig"] else [gpu["uuid"]])
    ] or [("machine", "-", "")]
    for unit, label, model in units:
        if holder := held.get(unit):
            yield HostUse(host, label, model, "held", holder.get("user"), holder.get("job"), holder.get("since_s"))
        elif process := busy.get(unit):
            yield HostUse(host, label, model, "busy", process["owner"], f"{process['name']} ({process['pid']})")
        else:
            yield HostUse(host, label, model, "free")
    for spare in (each for each in spares if each.get("job") not in working):
        yield HostUse(host, "spare", "", "waits", spare.get("user"), spare.get("job"), spare.get("since_s"))
    for place, ticket in enumerate(reply.get("waiting") or (), 1):
        who, times = (ticket["user"], ticket["job"], ticket["time_s"]), ticket.get("start_s")
        yield HostUse(host, f"line {place}", f"{ticket['locks']} wanted", "waits", *who, start_s=times)
    if gpus.get("fault"):
        yield HostUse(host, "-", "", "broken", detail=gpus["fault"]["text"])


def _own_ssh() -> Check:
    command = shutil.which("ssh")
    if command is None:
        return Check("ssh", "fail", "there is no `ssh` here", "install OpenSSH's client")
    reply = subprocess.run([command, "-V"], capture_output=True, text=True, check=False).stderr.strip()
    return Check("ssh", "ok", reply.partition(",")[0])
