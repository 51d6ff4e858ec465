"""Faults in a Slurm request, found without a connection; sbatch --test-only finds the site's refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning.request_rules import places

_LOGIN = re.compile(r"(?:[A-Za-z0-9_.][A-Za-z0-9_.+-]{0,63}@)?[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]{0,253}")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=[^\x00-\x1f\x7f]+)?")
_VALUE = re.compile(r"[^\x00-\x20\x7f\"'`$\\;<>-][^\x00-\x20\x7f\"'`$\\;<>]*")  # no space, quote or command
_PYTHON = re.compile(r"[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*")
_MEMORY = re.compile(r"\d{1,9}[KMGT]?")
_PATH = re.compile(r"(?:/|~/)[^\x00-\x1f\x7f]*|~")
_LOCAL_DISKS = ("/tmp/", "/var/", "/dev/", "/run/")
_WORDS = ("partition", "account", "qos", "constraint", "reservation", "licenses", "gres", "nodelist", "exclude")
# Options that the request, the send or the agents depend on, with the config's key in their place.
_PLANNED = {
    "nodes": "resources.instances",
    "time": "limits.max_duration",
    "job-name": "name",
    "gpus": "resources.accelerators",
    "gpus-per-node": "resources.accelerators",
    "cpus-per-task": "slurm.cpus_per_node",
    **{word: f"slurm.{word}" for word in (*_WORDS, "mem", "exclusive")},
}
_FORBIDDEN = (
    *("array", "chdir", "comment", "error", "export", "export-file", "hold", "input", "no-kill", "no-requeue"),
    *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "test-only", "wait", "wrap"),
)


def faults(body: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a Slurm request."""
    block, order = body["settings"], body["order"]
    yield from _places(block)
    for field in _WORDS:
        if block[field] is not None and not _VALUE.fullmatch(block[field]):
            yield Fault(f"`{block[field]}` has characters that sbatch's option must not have", key=f"slurm.{field}")
    for number, module in enumerate(block["modules"]):
        if not _VALUE.fullmatch(module):
            yield Fault(f"`{module}` is not a module's name", key=f"slurm.modules[{number}]")
    yield from _node(block)
    container, image = block["container"], block["image"]
    if container != "none" and not image:
        hint = "name the image, for example `image: docker://registry/train:1` or /shared/train.sif"
        yield Fault(f"`container: {container}` needs an `image`", key="image", hint=hint)
    if image and container == "none":
        hint = "--set slurm.container=apptainer, or leave `image` out"
        yield Fault("on this backend `image` goes with `container`", key="image", hint=hint, is_warning=True)
    yield from _raw(block["raw"])
    for key, uri in places(order["checkpoint_dir"], order["inputs"], order["outputs"]).items():
        if not re.match(r"/|~/", uri):
            hint = "use a whole path on the shared disk, for example /scratch/me/data or ~/data"
            yield Fault(f"`{uri}` is no path on the cluster's shared disk", key=key, hint=hint)
        elif container != "none" and re.search(r"[,:]", uri):
            yield Fault(f"`{uri}` has a comma or a colon, which a container's mounts cannot have", key=key)


def _places(block: dict[str, Any]) -> Iterator[Fault]:
    login, workdir = block["login"], block["workdir"]
    if login is not None and not _LOGIN.fullmatch(login):
        yield Fault(f"`{login}` is not a login node", key="slurm.login", hint="for example me@cluster")
    if not _PATH.fullmatch(workdir):
        hint = "write the whole path, or ~/..."
        yield Fault(f"`{workdir}` is a path on the cluster", key="slurm.workdir", hint=hint)
    elif f"{workdir}/".startswith(_LOCAL_DISKS):
        message = f"`{workdir}` is probably a disk of each node, but the job needs a shared disk"
        yield Fault(message, key="slurm.workdir", hint="use a folder in the home folder or scratch", is_warning=True)


def _node(block: dict[str, Any]) -> Iterator[Fault]:
    mem = block["mem"]
    if mem is not None and not _MEMORY.fullmatch(mem):
        yield Fault(f"`{mem}` is no amount of memory", key="slurm.mem", hint="for example 240G or 4096M")
    elif mem == "0" and not block["exclusive"]:
        hint = "add `exclusive: true`, or state the amount"
        yield Fault("`mem: 0` takes all memory of nodes that others share", key="slurm.mem", hint=hint)
    if not _PYTHON.fullmatch(block["python"]):
        yield Fault(f"`{block['python']}` is not an interpreter", key="slurm.python")
    if block["cpus_per_node"] is None and not block["exclusive"]:
        hint = "--set slurm.cpus_per_node=N, or slurm.exclusive=true"
        yield Fault("each rank and its data loader share one core", key="slurm", hint=hint, is_warning=True)


def _raw(options: list[str]) -> Iterator[Fault]:
    for number, option in enumerate(options):
        key, found = f"slurm.raw[{number}]", _OPTION.fullmatch(option)
        if not found:
            yield Fault(f"`{option}` is not an option of sbatch", key=key, hint="write --option or --option=value")
        elif instead := _PLANNED.get(found[1]):
            yield Fault(f"`--{found[1]}` changes the plan", key=key, hint=f"set {instead} instead")
        elif found[1] in _FORBIDDEN:
            message = f"`--{found[1]}` is an option that cloudtrain itself sets"
            yield Fault(message, key=key, hint="leave the option out")
        elif found[1] == "signal":
            hint = "set limits.max_duration: a script gets SIGTERM 2 minutes before the end, and on pre-emption"
            hint += "; distributed.stop_signal names another signal"
            yield Fault("`--signal` has a key in its place", key=key, hint=hint)
