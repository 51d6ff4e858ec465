"""The probes of a host: one function for each fact, with a result for JSON. Any probe may raise or hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

from .. import processes
from ..agent import node, node_folder

TOOLS = ("rsync", "zstd", "docker", "podman", "conda")
WRITTEN_BYTES = 1 << 16  # enough to exceed a quota

_SIOCGIFFLAGS, _SIOCGIFMTU, _UP = 0x8913, 0x8921, 1  # linux/sockios.h, linux/if.h
_CONDA = ("miniconda3", "anaconda3", "miniforge3", "mambaforge")
# Files apply by file name in all folders, the last wins; of equal names the first folder's counts (systemd's order).
_CONF = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")


def own_name() -> dict[str, Any]:
    """Return the `name` and the `addresses` that the name resolves to on this host, maybe none."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return {"name": name, "addresses": []}
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
    """Return the room for the folder, existing or not: `path`, `size_mb`, `free_mb`, `inodes` (None: no limit).

    `is_noexec`: programs on this file system cannot be run.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    found = os.statvfs(there)
    return {
        "path": str(path),
        "size_mb": found.f_blocks * found.f_frsize >> 20,
        "free_mb": found.f_bavail * found.f_frsize >> 20,
        "inodes": found.f_favail if found.f_files else None,
        "is_noexec": bool(found.f_flag & os.ST_NOEXEC),
    }


def limits() -> dict[str, Any]:
    """Return `nofile` and `memlock` (bytes), each [soft, hard]; -1 is no limit."""
    import resource

    return {
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
    }


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Return the RDMA devices: `name`, `state` of the first port, as `ACTIVE` or `DOWN`."""
    found = []
    for device in sorted(root.glob("*")):
        state = "unknown"
        with contextlib.suppress(OSError):
            state = (device / "ports/1/state").read_text().rpartition(":")[2].strip()
        found.append({"name": device.name, "state": state})
    return found


def write(workdir: Path) -> dict[str, Any]:
    """Return `error`: None if a file could be written in the folder; creates the folder if absent."""
    try:
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # All hosts may share a home folder, and run this probe at the same time.
        probe = workdir / f".write-test.{socket.gethostname()}.{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(os.urandom(WRITTEN_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return {"error": f"{error.filename or workdir}: {error.strerror}"}
    return {"error": None}


def leftovers(workdir: Path) -> list[dict[str, Any]]:
    """Return the running processes of earlier jobs below `workdir` without an agent: `pid`, `job`, `command`."""
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
            found.append({"pid": pid, "job": variables.get("CLOUDTRAIN_JOB", "?"), "command": _command(pid)})
    return found


def tools() -> list[str]:
    """Return the programs on this host that a job may need."""
    found = [name for name in TOOLS if shutil.which(name)]
    home = Path.home()  # conda is only on the PATH of a terminal's shell
    if "conda" not in found and any((home / folder / "bin/conda").exists() for folder in _CONDA):
        found.append("conda")
    return found


def memory_mb() -> int | None:
    """Return how much memory (MiB) is available now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return None


def logind(root: Path = Path("/")) -> dict[str, Any]:
    """Return `kills`: whether a logout ends all the user's processes on this host, and `lingers`.

    Source: systemd's logind.conf: with KillUserProcesses=yes all processes of a session end with the session.
    """
    name = user()
    if not (root / "run/systemd/system").is_dir():
        return {"kills": False, "lingers": False}
    settings: dict[str, str] = {"KillExcludeUsers": "root"}
    for path in _conf_files(root):
        for line in path.read_text(errors="replace").splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith(("#", ";")):
                settings[key.strip()] = value.strip()
    only = settings.get("KillOnlyUsers", "").split()
    kills = settings.get("KillUserProcesses", "no").lower() in ("yes", "true", "on", "1")
    kills = kills and name not in settings["KillExcludeUsers"].split() and (not only or name in only)
    return {"kills": kills, "lingers": (root / "var/lib/systemd/linger" / name).exists()}


def boot_id() -> str:
    """Return an id that is new with each boot of the machine; containers of one machine share the id."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def user() -> str:
    """Return the login name."""
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


def _asked(interface: str, question: int, form: str) -> int | None:
    answer = node.ask_interface(interface, question)
    return None if answer is None else int(struct.unpack_from(form, answer)[0])


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return ""


def _conf_files(root: Path) -> list[Path]:
    """Return logind's files, the decisive file last."""
    main = [path for folder in _CONF if (path := root / folder / "logind.conf").is_file()][:1]
    further: dict[str, Path] = {}
    for folder in _CONF:
        for path in (root / folder / "logind.conf.d").glob("*.conf"):
            further.setdefault(path.name, path)
    return [*main, *(further[name] for name in sorted(further))]
