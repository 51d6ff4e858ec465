"""Checks for jobs on a Slurm cluster, from the controller to the queue, and the use of the nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from cloudtrain.launcher.backend import Check, HostUse, LeftFiles, Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError, UnreachableError
from cloudtrain.launcher.planning import render

from ..channel import copies
from ..channel.calls import Fleet
from ..cloud import tried
from . import check
from .block import Slurm
from .channel import Done, Login, host_of
from .jobs_submission import chosen, partitions, would_start

# Disks of a single machine, by the names of `stat -f`; other names are of network disks.
LOCAL = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "ramfs", "overlayfs", "zfs")
LEAST_PYTHON = (3, 10)
# Slurm's words for a node's state, without the marks for a node that does not answer or is reserved.
_FREE, _HELD = ("idle",), ("mix", "alloc", "comp", "resv")
_tried = partial(tried, lambda doing: nullcontext())


def checks(fleet: Fleet, config: JobConfig | None, trial: Callable[[JobConfig], Request]) -> list[Check]:
    """Return the checks of the cluster, and of the config's job by a `trial` request; no job is made."""
    block = Slurm() if config is None else config.block(Slurm)
    login = Login.at(fleet, host_of(block.model_dump(mode="json")))
    try:
        where, version = login.about["name"], login.run(["sinfo", "--version"])
    except CloudtrainError as error:
        cure = error.hint or ("name it: slurm.login" if block.login is None else "")
        return [Check("login node", "fail", error.message, cure)]
    if version.code:
        cure = "is this a login node? slurm.login"
        if block.login is None:
            cure = "set slurm.login to the cluster's login node"
        return [Check("login node", "fail", f"{where}: {_words(version)}", cure)]
    found = [Check("login node", "ok", f"{where}, {version.stdout.strip()}")]
    found.append(_tried("controller", partial(_controller, login)))
    if found[-1].verdict == "fail":  # the next checks would fail for the same reason
        return [*found, _disk(login)]
    asks: dict[str, Callable[[], Check]] = {
        "partition": partial(_partition, login, block),
        "account": partial(_account, login, block),
        "site budget": partial(_budget, login, block),
        "shared disk": partial(_disk, login),
        "python": partial(_python, login, block, brings_torch=config is not None and bool(config.setup)),
    }
    if block.container != "none":
        asks["container"] = partial(_container, login, block.container)
    if config is not None:
        asks["job"] = lambda: _job(login, trial(config).body)
    return [*found, *(_tried(name, ask) for name, ask in asks.items())]


def hosts(fleet: Fleet, config: JobConfig) -> list[HostUse]:
    """Return the nodes of the config's partitions, or of the cluster, with free cores. Raises UnreachableError."""
    block = config.block(Slurm)
    login, partition = Login.at(fleet, host_of(block.model_dump(mode="json"))), block.partition
    among = [f"--partition={partition}"] if partition else []
    told = login.run(["sinfo", "-hN", *among, "-o", "%N|%t|%G|%C|%E"])
    if told.code:
        raise UnreachableError(f"Slurm does not answer: {' '.join(told.stderr.split())}", hint="try again later")
    nodes = {line.split("|", 1)[0]: line.split("|", 4) for line in told.stdout.splitlines() if line.count("|") >= 4}
    return [_use(*fields) for fields in nodes.values()]


def held(fleet: Fleet, config: JobConfig) -> list[LeftFiles]:
    """Return the folders in the cluster's work folder."""
    login = Login.at(fleet, host_of(config.block(Slurm).model_dump(mode="json")))
    return copies.left(fleet, {login.host: {}}, remove=False)


def _use(node: str, state: str, gres: str, cores: str, reason: str) -> HostUse:
    """Return a node's use; `state` may end with marks, such as `idle~` for a node that is powered off."""
    word = state.rstrip("*~#%$@^-+!")
    _, free, _, total = cores.split("/")  # allocated, idle, other, total
    model = "" if gres == "(null)" else gres.partition("(")[0]
    if word in _FREE:
        return HostUse(node, "node", model, "free", detail=f"{free} cores")
    if word in _HELD:
        return HostUse(node, "node", model, "held", user="Slurm", job=f"{free} of {total} cores are free")
    # down, drained, in maintenance, or a state that this version does not know
    return HostUse(node, "node", model, "broken", detail=f"{state}: {reason}")


def _controller(login: Login) -> Check:
    done = login.run(["scontrol", "ping"])
    up = [line for line in done.stdout.splitlines() if line.rstrip().endswith("UP")]
    if done.code or not up:
        return Check("controller", "fail", _words(done), "running jobs go on; ask the site, or try again later")
    return Check("controller", "ok", " ".join(up[0].split()))


def _partition(login: Login, block: Slurm) -> Check:
    """Return the limits of the config's partitions, else of the site's default partition."""
    found = partitions(login)
    wanted, names = (block.partition or "").split(","), ", ".join(each.name for each in found)
    mine = chosen(found, block.partition)
    if block.partition and (missing := sorted(set(wanted) - {each.name for each in found})):
        return Check("partition", "fail", f"there is no {', '.join(missing)}", f"set slurm.partition: {names}")
    if not mine:
        return Check("partition", "fail", "the site has no default partition", f"set slurm.partition: {names}")
    text = "; ".join(f"{each.in_words}, at most {'any time' if each.minutes is None else each.limit}" for each in mine)
    if down := [each.name for each in mine if not each.is_up]:
        return Check("partition", "warn", f"{', '.join(down)} takes no jobs now; {text}", "the job waits: see `sinfo`")
    return Check("partition", "ok", text)


def _account(login: Login, block: Slurm) -> Check:
    """Return the user's accounts and QOS, and whether the config's are among them."""
    done = login.run(["sh", "-c", 'sacctmgr -nP show assoc user="$(id -un)" format=account,partition,qos,defaultqos'])
    if done.code:
        return Check("account", "ok", "the site keeps no accounts")
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    accounts = list(dict.fromkeys(row[0] for row in rows))
    qos = sorted({name for row in rows if block.account in (None, row[0]) for name in row[2].split(",") if name})
    if block.account is not None and block.account not in accounts:
        return Check("account", "fail", f"{block.account} is not yours", f"set slurm.account: {', '.join(accounts)}")
    if block.qos is not None and block.qos not in qos:
        return Check("account", "fail", f"the QOS {block.qos} is not yours", f"set slurm.qos: {', '.join(qos)}")
    if not accounts:
        return Check("account", "warn", "the accounting does not know you", "ask the site for an account")
    return Check("account", "ok", f"{', '.join(accounts)}; QOS {', '.join(qos) or 'of the site'}")


def _budget(login: Login, block: Slurm) -> Check:
    """Return the account's budget of resource minutes and its use, where the site lets users read them."""
    among = [f"--accounts={block.account}"] if block.account else []
    told = login.run(["sshare", "-nP", *among, "-o", "Account,User,GrpTRESMins,GrpTRESRaw"])
    rows = [line.split("|") for line in told.stdout.splitlines() if line.count("|") == 3]
    limited = {account.strip(): (limit, used) for account, _, limit, used in rows if limit}
    if told.code or not limited:
        return Check("site budget", "ok", "the site sets none that you can read")
    parts, is_spent = [], False
    for account, (limit, used) in limited.items():
        spent = {name: float(value) for name, _, value in (each.partition("=") for each in used.split(",")) if value}
        for name, _, most in (each.partition("=") for each in limit.split(",")):
            hours, left = float(most) / 60, (float(most) - spent.get(name, 0.0)) / 60
            is_spent |= left <= 0
            parts.append(f"{account}: {max(left, 0):.0f} of {hours:.0f} {name.removeprefix('gres/')}-hours left")
    if is_spent:
        return Check("site budget", "fail", "; ".join(parts), "jobs wait until the site gives more: see `sshare`")
    return Check("site budget", "ok", "; ".join(parts))


def _disk(login: Login) -> Check:
    """Return the kind of the disk of `slurm.workdir`; only a job can prove that compute nodes see the disk."""
    place = login.about["workdir"]
    kind = login.run(["stat", "-f", "-c", "%T", place]).stdout.strip()
    if kind in LOCAL:
        found = f"{place} is on {kind}, which is often a disk of this machine alone"
        return Check("shared disk", "warn", found, "set slurm.workdir to a folder that the compute nodes see")
    return Check("shared disk", "ok", f"{place} is on {kind or 'an unknown disk'}; its jobs check the compute nodes")


def _python(login: Login, block: Slurm, *, brings_torch: bool) -> Check:
    """Return the version of the interpreter as the login node has it, and whether the interpreter has torch."""
    if block.container != "none":
        return Check("python", "ok", f"{block.python} of the image")
    ask = "import sys, importlib.util as u; v = '.'.join(map(str, sys.version_info[:3])); "
    ask += "print(v if u.find_spec('torch') else v + '-without-torch')"
    if block.modules:
        return _after_modules(login, block, ask, brings_torch=brings_torch)
    done = login.run(["sh", "-c", 'exec "$0" -c "$1"', login.path(block.python), ask])
    if done.code:
        return Check("python", "fail", f"{block.python}: {_words(done)}", "set slurm.python, or slurm.modules")
    text = done.stdout.strip().partition("-")[0]
    version = tuple(int(part) for part in text.split(".") if part.isdigit())
    if version < LEAST_PYTHON:
        cure = "name a Python of 3.10 or newer in slurm.python"
        return Check("python", "fail", f"{block.python} is {text} on the login node", cure)
    return _judged(block, done.stdout.strip(), "on the login node", brings_torch=brings_torch)


def _judged(block: Slurm, printed: str, where: str, *, brings_torch: bool) -> Check:
    version, without, _ = printed.partition("-without-torch")
    found = f"{block.python} is {version} {where}"
    if brings_torch or not without:
        return Check("python", "ok", found)
    cure = f"{block.python} -m venv ~/venv && ~/venv/bin/pip install torch, then slurm.python: ~/venv/bin/python"
    return Check("python", "warn", f"{found}, without torch", cure)


def _after_modules(login: Login, block: Slurm, ask: str, *, brings_torch: bool) -> Check:
    """Return the interpreter's version after the modules, loaded on the login node as the job's script loads them."""
    script = "refuse() { exit 64; }\n" + render.render_text("slurm/modules.sh", modules=block.modules)
    script += 'exec "$0" -c "$1"'
    bare = 'env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$HOME" USER="$USER" LOGNAME="$USER" SHELL="$SHELL"'
    done = login.run(["sh", "-c", f'exec {bare} bash -c "$@"', "sh", script, login.path(block.python), ask])
    loading = f"`module load {' '.join(block.modules)}`"
    if done.code:
        does = "fails" if done.code == 64 else f"leaves no {block.python}"
        cure = "see `module avail`: fix slurm.modules or slurm.python, unless only the compute nodes have them"
        return Check("python", "warn", f"{loading} {does} on the login node: {_words(done)}", cure)
    return _judged(block, _words(done).split()[-1], f"after {loading} on the login node", brings_torch=brings_torch)


def _container(login: Login, program: str) -> Check:
    """Return whether the container's program is there: pyxis is srun's plug-in, apptainer a command."""
    if program == "pyxis":
        has = "--container-image" in login.run(["srun", "--help"]).stdout
        found = "srun has the options of pyxis" if has else "srun has no --container-image"
    else:
        done = login.run(["sh", "-c", "command -v apptainer && apptainer --version"])
        has, found = done.code == 0, " ".join(done.stdout.split()[1:]) or "the login node has no apptainer"
    if has:
        return Check("container", "ok", found)
    return Check("container", "warn", found, "the compute nodes may have it: the job's script checks there")


def _job(login: Login, body: dict[str, Any]) -> Check:
    """Ask Slurm when the config's job would start, without a job."""
    if faults := [fault for fault in check.faults(body) if not fault.is_warning]:
        return Check(faults[0].key, "fail", faults[0].message, faults[0].hint)
    start = would_start(login, body)
    if start is None:
        return Check("job", "warn", "no such nodes are up at the moment", "the job waits for the nodes: see `sinfo -R`")
    if start.at_s is None:
        return Check("job", "ok", "Slurm takes the job")
    when = time.strftime("at %Y-%m-%d %H:%M", time.localtime(start.at_s))
    return Check("job", "ok", f"would start {'now' if start.at_s < time.time() + 60 else when} on {start.nodes}")


def _words(done: Done) -> str:
    return " ".join((done.stderr.strip() or done.stdout.strip() or f"code {done.code}").split())
