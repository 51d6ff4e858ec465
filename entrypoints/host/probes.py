"""The probes of a host: one function for each fact, with a result for JSON. Any probe may raise or hang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from .. import processes
from ..agent import node, node_folder

WRITTEN_BYTES = 1 << 16  # enough to exceed a quota

_SIOCGIFFLAGS, _SIOCGIFMTU, _UP = 0x8913, 0x8921, 1  # linux/sockios.h, linux/if.h
# Files apply by file name in all folders, the last wins; of equal names the first folder's counts (systemd's order).
_CONF = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
# Runs in the job's interpreter, which may be old. torch's version.py has the CUDA build as text, and the folders beside
# torch have the other versions: importlib.metadata takes 60 ms to import.
_LOOK = """
import json, os, re, sys
told = {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}
told.update(torch=None, cuda=None, nccl=None)
try:
    import sysconfig
    mark = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    import importlib.util
    told["pip"] = importlib.util.find_spec("pip") is not None
    told["managed"] = sys.prefix == sys.base_prefix and os.path.exists(mark)
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        beside = {}
        for name in os.listdir(os.path.dirname(os.path.dirname(spec.origin))):
            found = re.match(r"(torch|nvidia_nccl_cu\\d+)-(.+)\\.dist-info$", name)
            if found:
                beside[found.group(1)] = found.group(2)
        def version(name):
            if name in beside:
                return beside[name]
            from importlib import metadata
            try:
                return metadata.version(name.replace("_", "-"))
            except metadata.PackageNotFoundError:
                return None
        told["torch"] = version("torch")
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            text = file.read()
        build = re.search(r"^__version__ *= *['\\"](.+)['\\"]", text, re.M)
        told["torch"] = build.group(1) if build else told["torch"]
        cuda = re.search(r"^cuda *(?::[^=]+)?= *['\\"](.+)['\\"]", text, re.M)
        told["cuda"] = cuda.group(1) if cuda else None
        for name in ("nvidia_nccl_cu13", "nvidia_nccl_cu12", "nvidia_nccl_cu11"):
            if told["cuda"] and not told["nccl"]:
                told["nccl"] = version(name)
except Exception as error:
    told["fault"] = repr(error)
print("\\n" + json.dumps(told))
"""


def own_name() -> dict[str, Any]:
    """Return the `name` and the `addresses` that the name resolves to on this host, maybe none."""
    name, found = socket.gethostname(), list[Any]()
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return {"name": name, "addresses": sorted({str(entry[4][0]).partition("%")[0] for entry in found})}


def interfaces() -> list[dict[str, Any]]:
    """Return the interfaces that are up: `name`, `address` (IPv4, or None), `mtu` in bytes."""
    found = []
    for _, name in socket.if_nameindex():
        flags = _asked(name, _SIOCGIFFLAGS, "H")
        if flags is not None and flags & _UP:
            found.append({"name": name, "address": node.address_of(name), "mtu": _asked(name, _SIOCGIFMTU, "i")})
    return found


def disk(path: Path) -> dict[str, Any]:
    """Return the room for the folder, existing or not: `path`, `size_mb`, `free_mb`, `inodes` (None: no limit)."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    found = os.statvfs(there)
    return {
        "path": str(path),
        "size_mb": found.f_blocks * found.f_frsize >> 20,
        "free_mb": found.f_bavail * found.f_frsize >> 20,
        "inodes": found.f_favail if found.f_files else None,
    }


def limits() -> dict[str, Any]:
    """Return `nofile` and `memlock` (bytes), each [soft, hard]; -1 is no limit."""
    import resource

    return {
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
    }


def infiniband() -> list[str]:
    """Return the names of the RDMA devices."""
    return sorted(device.name for device in Path("/sys/class/infiniband").glob("*"))


def write(workdir: Path) -> dict[str, Any]:
    """Return `error`: None if a file could be written and locked in the folder; creates the folder if absent.

    `no_locks`: the disk has no file locks, which the start of each job needs.
    """
    try:
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # All hosts may share a home folder, and run this probe at the same time.
        probe = workdir / f".write-test.{socket.gethostname()}.{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(os.urandom(WRITTEN_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with processes.locked(probe):
                pass
        finally:
            probe.unlink(missing_ok=True)
    except processes.NoLocks as error:
        return {"error": f"{workdir}: {error.strerror}", "no_locks": True}
    except OSError as error:
        return {"error": f"{error.filename or workdir}: {error.strerror}"}
    return {"error": None}


def temporary(folder: str | None) -> dict[str, Any]:
    """Return the room of the job's folder for temporary files (None: as on this host), `noexec`, and `absent`."""
    place = Path(folder or tempfile.gettempdir())
    is_there = place.is_dir()
    noexec = is_there and bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
    return {**disk(place), "noexec": noexec, "absent": not is_there}


def load() -> dict[str, Any]:
    """Return `mean`, the processes that ran or waited in the last minute, and `cores`, of the whole machine."""
    return {"mean": float(Path("/proc/loadavg").read_text().split()[0]), "cores": os.cpu_count() or 1}


def leftovers(workdir: Path) -> list[dict[str, Any]]:
    """Return the running processes of earlier jobs below `workdir` without an agent: `pid`, `job`."""
    root = os.path.realpath(workdir) + os.sep
    agents: dict[str, bool] = {}
    found = []
    for pid, variables in processes.environments("CLOUDTRAIN_LOG_DIR"):
        log = variables["CLOUDTRAIN_LOG_DIR"]
        if not log or not (os.path.realpath(log) + os.sep).startswith(root):
            continue
        if log not in agents:
            agents[log] = node_folder.agent_pid(Path(log).parent) is not None
        # A process that ended during the search is not a leftover.
        if not agents[log] and processes.stamp(pid) is not None:
            found.append({"pid": pid, "job": variables.get("CLOUDTRAIN_JOB", "?")})
    return found


def interpreter(python: str, umask: int, patience_s: float) -> dict[str, Any]:
    """Return the job's Python: `version`, `executable`, and torch's `torch`, `cuda`, `nccl`, None if absent or unknown.

    `managed`: pip refuses to install there, since a package manager owns the folder (PEP 668). `pip`: pip is there.
    If the Python does not start, return only `error`. conda's torch includes NCCL, but the version stays unknown.
    """
    wanted = Path(python).expanduser() if python.startswith("~") else Path(python)
    command = shutil.which(wanted)
    if command is None:
        why = "may not be run" if wanted.exists() else "is not there"
        if wanted.is_dir():
            why = f"is a folder: its interpreter is {python.rstrip('/')}/bin/python"
        elif wanted.is_symlink():
            why = f"leads to {os.path.realpath(wanted)}, which is not there: make the environment again"
        return {"error": f"{python} {why}"}
    try:
        # Modules in the current folder are not modules that the job would import.
        done = processes.completed([command, "-c", _LOOK], patience_s, cwd="/", umask=umask)
    except OSError as error:
        return {"error": f"{python} does not start: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not answer within {patience_s:.0f} s"}
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = (done.stderr.strip() or done.stdout.strip() or f"it ended with code {done.returncode}").splitlines()
        return {"error": f"{python} is no Python: {words[-1][:200]}"}
    return answer if isinstance(answer, dict) else {"error": f"{python} is no Python"}


def logind(root: Path = Path("/")) -> dict[str, Any]:
    """Return `kills`: whether a logout ends all the user's processes on this host.

    Source: systemd's logind.conf: with KillUserProcesses=yes all processes of a session end with the session.
    """
    name = processes.user_name(os.getuid())
    if not (root / "run/systemd/system").is_dir():
        return {"kills": False}
    settings: dict[str, str] = {"KillExcludeUsers": "root"}
    for path in _conf_files(root):
        for line in path.read_text(errors="replace").splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith(("#", ";")):
                settings[key.strip()] = value.strip()
    only = settings.get("KillOnlyUsers", "").split()
    kills = settings.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    kills = kills and name not in settings["KillExcludeUsers"].split() and (not only or name in only)
    return {"kills": kills}


def _asked(interface: str, question: int, form: str) -> int | None:
    answer = node.ask_interface(interface, question)
    return None if answer is None else int(struct.unpack_from(form, answer)[0])


def _conf_files(root: Path) -> list[Path]:
    """Return logind's files, the decisive file last."""
    main = [path for folder in _CONF if (path := root / folder / "logind.conf").is_file()][:1]
    further: dict[str, Path] = {}
    for folder in _CONF:
        for path in (root / folder / "logind.conf.d").glob("*.conf"):
            further.setdefault(path.name, path)
    return [*main, *(further[name] for name in sorted(further))]
