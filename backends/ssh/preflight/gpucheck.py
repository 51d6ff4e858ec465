"""Checks of the hosts' GPUs: enough for the plan, alike, working, and free."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain.entrypoints.agent.gpulocks import whole_span
from cloudtrain.launcher.backend import Check

from .folding import fold, groups, numbers, ranges, remote
from .hostcheck import Facts, HostRequirements

FREE = "free"  # the check's name: whether the GPUs are free of jobs and users

_CURES = {
    "no-tool": "have nvidia-smi on the PATH of a login without a terminal: {look}",
    "no-driver": "install NVIDIA's driver: {install}",
    "mismatch": "the driver was updated under its running module: {reboot}",
    "driver": "see what the driver says: {log}",
    "lost": "a GPU has fallen off the bus: {reboot}, and if it comes back: {log}",
    "silent": "keep the driver awake: {awake}; if it hangs: {reboot}",
}
_COMMANDS = {
    "look": "command -v nvidia-smi; ls /usr/bin/nvidia-smi",
    "install": "sudo apt install nvidia-driver && sudo reboot",
    "reboot": "sudo reboot",
    "log": "sudo dmesg | grep -iE 'nvrm|xid' | tail",
    "awake": "sudo nvidia-smi -pm 1",
}


class GpuUnit(NamedTuple):
    """The GPU, or the slice of a GPU, that one rank takes."""

    uuid: str
    gpu: Mapping[str, Any]


def checks(facts: Facts, needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the findings about the GPUs of the hosts that answered; `of` counts all hosts."""
    yield from _faults(facts, needs)
    units = {host: units_of(fact) for host, fact in facts.items()}
    has_some = {host: found for host, found in units.items() if found}
    if not needs.gpus:
        yield from _unplanned(has_some, needs)
        if not needs.can_wait:
            yield from _machines(facts, of)
        return
    few = {host: str(len(found)) for host, found in units.items() if len(found) < needs.gpus}
    if few:
        counts = list(groups(few))
        there = "CPUs: `--set resources.accelerators=null`"
        if has_some:
            there = f"`resources: {{accelerators: {_model(has_some)}:{min(map(int, counts)) or 1}}}`"
        cure = f"plan what is there, {there}, or leave the hosts out; {remote(few, 'nvidia-smi -L')}"
        yield Check("GPUs", "fail", f"{needs.gpus} are planned, usable are {fold(few, of)}", cure)
    else:
        kinds = {host: f"{len(found)} x {found[0].gpu['name']}" for host, found in units.items()}
        yield from _alike("GPUs", kinds, of, "the slowest sets the pace: name hosts of one kind in ssh.hosts")
    yield from _wanted_model(has_some, needs)
    drivers = {host: str(found[0].gpu["driver"]) for host, found in has_some.items()}
    if drivers:
        newest = max(drivers.values(), key=numbers)
        old = [host for host, driver in drivers.items() if driver != newest]
        cure = f"usually it works; for the driver {newest}: {remote(old, 'sudo apt full-upgrade && sudo reboot')}"
        yield from _alike("driver", drivers, of, cure)
    yield from _slices(has_some, needs)
    yield from _free(facts, {host: found for host, found in units.items() if host not in few}, needs, of)


def units_of(fact: Mapping[str, Any]) -> list[GpuUnit]:
    """Return the GPUs and slices that a job can take on the host, without GPUs that report an error."""
    gpus = (fact.get("gpus") or {}).get("gpus") or ()
    whole = [gpu for gpu in gpus if not gpu.get("fault")]
    return [GpuUnit(uuid, gpu) for gpu in whole for uuid in (gpu["slices"] if gpu["mig"] else [gpu["uuid"]])]


def _faults(facts: Facts, needs: HostRequirements) -> Iterator[Check]:
    """Yield the errors of nvidia-smi, and GPUs with an error in place of a value."""
    faults = {host: fault for host, fact in facts.items() if (fault := (fact.get("gpus") or {}).get("fault"))}
    verdict = "fail" if needs.gpus else "warn"
    for kind, hosts in groups({host: str(fault["kind"]) for host, fault in faults.items()}).items():
        commands = {name: remote(hosts, command) for name, command in _COMMANDS.items()}
        cure = _CURES.get(kind, "look at it: {log}").format(**commands)
        yield Check("GPUs", verdict, fold({host: str(faults[host]["text"]) for host in hosts}, 0), cure)
    for host, fact in facts.items():
        if gpus := [gpu for gpu in (fact.get("gpus") or {}).get("gpus") or () if gpu.get("fault")]:
            enough = len(units_of(fact)) >= needs.gpus
            words = "; ".join(f"GPU {gpu['index']}: {gpu['fault']}" for gpu in gpus)
            resets = " && ".join(f"sudo nvidia-smi --gpu-reset -i {gpu['index']}" for gpu in gpus)
            yield Check("GPUs", "warn" if enough else "fail", f"{words}: {host}", remote([host], resets))


def _unplanned(units: Mapping[str, list[GpuUnit]], needs: HostRequirements) -> Iterator[Check]:
    """Yield the setting for GPUs that the job would leave idle: idle GPUs cost as much."""
    if units:
        least = min(len(found) for found in units.values())
        words = {host: f"{len(found)} x {found[0].gpu['name']}" for host, found in units.items()}
        cure = f"for them add to the config: resources: {{accelerators: {_model(units)}:{least}}}"
        if not needs.ranks_are_chosen:
            cure += "; for the CPU: --set distributed.nproc_per_node=1"
        verdict = "warn" if needs.ranks_are_chosen else "fail"
        yield Check("GPUs", verdict, f"the job is planned without them: {fold(words, 0)}", cure)


def _wanted_model(units: Mapping[str, list[GpuUnit]], needs: HostRequirements) -> Iterator[Check]:
    wanted = (needs.gpu_model or "").lower().replace("_", "-").removeprefix("nvidia-").removeprefix("tesla-")
    others = {
        host: str(found[0].gpu["name"])
        for host, found in units.items()
        if wanted and wanted not in re.sub(r"[ _]", "-", str(found[0].gpu["name"]).lower())
    }
    if others:
        cure = f"write what is there: --set resources.accelerators={_model(units)}:{needs.gpus}"
        yield Check("GPUs", "warn", f"the config says {needs.gpu_model}: {fold(others, 0)}", cure)


def _slices(units: Mapping[str, list[GpuUnit]], needs: HostRequirements) -> Iterator[Check]:
    """Yield a warning: NCCL cannot join two slices of one GPU."""
    cut = [host for host, found in units.items() if any(unit.gpu["mig"] for unit in found)]
    if cut and needs.ranks > 1:
        cure = f"to make them whole: {remote(cut, 'sudo nvidia-smi -mig 0')}"
        yield Check("GPUs", "warn", f"cut into MIG slices, which NCCL cannot join: {ranges(cut)}", cure)


def _free(facts: Facts, units: Mapping[str, list[GpuUnit]], needs: HostRequirements, of: int) -> Iterator[Check]:
    """Yield the users of GPUs: a lock always blocks, a stranger's process blocks unless `allow_busy` is set."""
    enough: dict[str, str] = {}
    for host, there in units.items():
        fact = facts[host]
        locks = {str(holder["name"]): holder for holder in fact.get("holders") or ()}
        strangers = [process for process in fact.get("gpu_processes") or () if process["gpu"] not in locks]
        used = {process["gpu"] for process in strangers}
        unlocked = [unit for unit in there if needs.can_wait or unit.uuid not in locks]
        free = [unit for unit in unlocked if unit.uuid not in used and unit.gpu["uuid"] not in used]
        if len(free) >= needs.gpus:
            enough[host] = f"{len(free)} of {len(there)}"
            continue
        can_share = needs.allow_busy and len(unlocked) >= needs.gpus
        words = [*_locked(there, locks), *_used(there, strangers)]
        found = f"{len(free)} of {len(there)} GPUs are free, {needs.gpus} wanted: {host}: {'; '.join(words)}"
        cure = "; ".join(_ways_out(host, fact, locks, strangers, needs))
        yield Check(FREE, "warn" if can_share else "fail", found, cure)
    if enough and len(enough) == len(facts):
        yield Check(FREE, "ok", fold(enough, of))


def _machines(facts: Facts, of: int) -> Iterator[Check]:
    """Yield the jobs that hold a machine as a whole, as jobs without GPUs do."""
    locks = {
        host: holder
        for host, fact in facts.items()
        for holder in fact.get("holders") or ()
        if holder["name"] == "machine"
    }
    for host, holder in locks.items():
        cure = "; ".join(_ways_out(host, facts[host], {"machine": holder}, [], None))
        yield Check(FREE, "fail", f"{_holder_words(holder)} holds the machine: {host}", cure)
    if not locks and facts:
        yield Check(FREE, "ok", fold(dict.fromkeys(facts, "no job holds the machine"), of))


def _locked(there: list[GpuUnit], locks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    by_holder: dict[str, set[str]] = {}
    for unit in there:
        if unit.uuid in locks:
            by_holder.setdefault(_holder_words(locks[unit.uuid]), set()).add(str(unit.gpu["index"]))
    for words, indexes in by_holder.items():
        yield f"GPU {ranges(indexes)}: {words}"


def _used(there: list[GpuUnit], strangers: list[Mapping[str, Any]]) -> Iterator[str]:
    indexes = {name: int(unit.gpu["index"]) for unit in there for name in (unit.uuid, unit.gpu["uuid"])}
    for process in strangers:
        who = f" of {process['owner']}" if process.get("owner") else ", which cannot be seen from there"
        job = f" (job {process['job']})" if process.get("job") else ""
        yield f"GPU {indexes.get(process['gpu'], '?')}: pid {process['pid']}{who}, {process['name']}{job}"


def _holder_words(holder: Mapping[str, Any]) -> str:
    if "job" not in holder and "owner" not in holder:
        return "an unidentified process"
    user = holder.get("user") or holder.get("owner")
    since_s = holder.get("since_s")
    since = f", since {whole_span(time.time() - since_s)}" if since_s else ""
    return f"{user}'s job {holder.get('job', '?')}{since}"


def _ways_out(
    host: str,
    fact: Mapping[str, Any],
    locks: Mapping[str, Mapping[str, Any]],
    strangers: list[Mapping[str, Any]],
    needs: HostRequirements | None,
) -> Iterator[str]:
    me = fact.get("user")
    holders = {str(holder.get("job")): holder for holder in locks.values()}
    for job, holder in holders.items():
        # Several users may share a login: then the name that the holder gave counts.
        is_mine = holder.get("owner") == me and holder.get("user", me) == me
        ask = f"ask {holder.get('user', 'the holder')}: cloudtrain hosts"
        yield f"cloudtrain stop {shlex.quote(job)}" if is_mine else ask
    if mine := [str(process["pid"]) for process in strangers if process.get("owner") == me]:
        yield remote([host], f"kill {' '.join(mine)}")
    if others := [str(process["pid"]) for process in strangers if process.get("owner") != me]:
        look = remote([host], f"ps -fp {','.join(others)}")
        yield f"ask their owner: {look}"
    if strangers and needs is not None and not needs.allow_busy:
        yield "to share all the same: --set ssh.allow_busy=true"


def _alike(name: str, values: Mapping[str, str], of: int, cure: str) -> Iterator[Check]:
    same = len(set(values.values())) < 2
    if values:
        yield Check(name, "ok" if same else "warn", fold(values, of), "" if same else cure)


def _model(units: Mapping[str, list[GpuUnit]]) -> str:
    """Return the GPU's name in the config's form: `NVIDIA A100-SXM4-80GB` is A100, `GeForce RTX 4090` RTX-4090."""
    name = next((str(found[0].gpu["name"]) for found in units.values()), "A100")
    words = re.sub(r"\b(NVIDIA|Tesla|GeForce|Quadro)\b", "", name).split()
    first = "-".join(words[:2]) if words[:1] == ["RTX"] else (words or ["GPU"])[0].partition("-")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", first)
