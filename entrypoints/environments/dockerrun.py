"""A node's boot in a container of docker or podman, on the user's own host: the command line, and a reliable end.

    the agent -> docker run (a child of the agent's) ... daemon ... -> container_init.py, process 1 -> boot

The container's processes are not descendants of the agent. So the agent holds a pipe to their standard input: if the
agent or the client dies, container_init.py reads the pipe's end and the container ends. Containers are also removed by
name. Secrets go through that pipe: a container's variables lie in the daemon's files, and `docker inspect` shows them.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from .. import atomic_json, processes
from . import builds, container_init

NOTE = "container.json"
PATIENCE_S = 10.0  # for a client's answer
# Variables that the client itself reads. The job's values must not mislead the client, so they go on the command line.
_CLIENTS_OWN = re.compile(r"^(PATH|HOME|TMPDIR|LD_\w+|XDG_\w+|DOCKER_\w+|_?CONTAINERS?_\w+|STORAGE_\w+|GO[A-Z]+)$")
# The variables of the host's environment that a container sees; the rest describes the host.
_INHERITED = re.compile(
    r"^(CLOUDTRAIN_\w+|CUDA_VISIBLE_DEVICES|NCCL_\w+|GLOO_\w+|(https?|no|all)_proxy)$", re.IGNORECASE
)
_CLIENT_FAILED = (125, 126, 127)  # docker's and podman's own codes: no code of ours has run

_CURES = {
    r"permission denied while trying to connect|dial unix .* permission denied": (
        "have an administrator add you to the group docker (`sudo usermod -aG docker USER`), then log in again"
    ),
    r"Cannot connect to the Docker daemon|Is the docker daemon running": "start it: `sudo systemctl start docker`",
    r"could not select device driver|unknown or invalid runtime name: nvidia": (
        "install nvidia-container-toolkit, `sudo nvidia-ctk runtime configure --runtime=docker`, restart docker"
    ),
    r"unresolvable CDI devices|nvidia\.com/gpu|stat nvidia": (
        "`sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml` makes GPUs known"
    ),
    r"nvml error|driver/library version mismatch|initialization error": "see whether nvidia-smi works on this host",
    r"unauthorized|authentication required|denied: |403 Forbidden": (
        "log in to the registry on this host, or check the name"
    ),
    r"manifest unknown|not found: manifest|name unknown|repository does not exist": "check the name and its digest",
    r"no such image|image not known|No such image": "push the image to a registry that this host reaches",
    r"no such host|name resolution|i/o timeout|connection refused|network is unreachable|TLS hand|x509|pinging": (
        "the host does not reach the registry: set its proxy for the daemon, or load the image there by hand"
    ),
    r"no space left|disk quota": "free some space where the images lie",
    r"executable file .*not found|no such file or directory.*(exec|stat)|exec.*no such file": (
        "set `python` to an interpreter that is in the image"
    ),
    r"newuidmap|/etc/subuid|cannot set up namespace|cannot clone": (
        "rootless containers need uidmap and lines in /etc/subuid"
    ),
    r"bind source path does not exist|statfs|permission denied": "set `workdir` to a folder on a local disk",
    r"setrlimit": "raise the limits of your login in /etc/security/limits.conf, or default_ulimits in containers.conf",
    r"unknown flag|unknown shorthand": "update it: docker from 20.10 and podman from 3.4 on will do",
}


@dataclass(frozen=True)
class Container:
    """The client, image and user settings for a job's containers on a host; `home` is the folder that is HOME inside.

    `kind` is how the client behaves: Debian's and Fedora's `docker` may be podman.
    """

    client: str
    kind: str
    image: str
    python: str
    home: str
    is_rootless: bool = False
    is_remapped: bool = False  # docker's daemon maps users to other users


@dataclass(frozen=True)
class Start:
    """One start of a node's boot. `folder` is the node's folder, and boot's working folder; `gpus` are UUIDs.

    `mounts`: paths of the host, the same inside, and whether the mount is read-only.
    """

    job: str
    attempt: int
    node: int
    generation: int
    folder: str
    mounts: tuple[tuple[str, bool], ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the container's name."""
        return f"ct-{self.job}-{self.attempt}-{self.node}-{self.generation}"

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels that all starts of this node share."""
        return {f"cloudtrain.{key}": str(getattr(self, key)) for key in ("attempt", "job", "node")}


def container_argv(
    container: Container, start: Start, names: Sequence[str], values: Mapping[str, str], program: Sequence[str]
) -> list[str]:
    """Return the command line that runs `program`, arguments of the container's Python, in the start's folder.

    `names` are variables whose values the client takes from its own environment, so no process list shows the values;
    `values` are public variables.
    """
    argv = [container.client, "run", "--rm", "--interactive", f"--name={start.name}", "--network=host", "--ipc=host"]
    argv += ["--log-driver=none", "--security-opt=label=disable", "--pull=never", f"--workdir={start.folder}"]
    argv += [f"--label={key}={value}" for key, value in start.labels.items()]
    argv += [*_user(container), *_limits(container), *_gpus(container, start.gpus)]
    for path, is_read_only in _outermost([*start.mounts, (container.home, False), (start.folder, False)]).items():
        fields = ["type=bind", f"source={path}", f"target={path}"]
        argv += ["--mount", _as_csv([*fields, "readonly"] if is_read_only else fields)]
    argv += [f"--env={key}={value}" for key, value in sorted(values.items())]
    argv += [f"--env={key}" for key in sorted(names)]
    return [*argv, f"--entrypoint={container.python}", container.image, *program]


def command(
    container: Container,
    start: Start,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    program: Sequence[str],
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the client's environment; `program` runs below container_init.py.

    The client's standard input must be a pipe that its parent keeps open: the end of the pipe ends the container. The
    result holds no secrets, even if `environment` has them: `hand` must be called once the client runs.
    """
    login = processes.user_name(os.geteuid())  # inside, the user id has no name, and torch's caches need a name
    values = {"HOME": container.home, "USER": login, "LOGNAME": login}
    values |= {key: value for key, value in environment.items() if key in values or _CLIENTS_OWN.match(key)}
    values = {key: value for key, value in values.items() if key not in secrets}
    passed = {key: value for key, value in environment.items() if key not in values and key not in secrets}
    inside = ["-u", "-m", "cloudtrain.entrypoints.environments.container_init", container.python, *program]
    return container_argv(container, start, list(passed), values, inside), {**os.environ, **passed}


def hand(pipe: IO[bytes], secrets: Mapping[str, str]) -> None:
    """Send the secrets, also an empty mapping, to container_init.py by the client's standard input, which stays open.

    Returns at once: the pipe has no reader before the container runs, and holds 64 KiB.
    """

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # the client is gone: its exit code has the reason
            pipe.write(json.dumps(dict(secrets)).encode() + b"\n")
            pipe.flush()

    threading.Thread(target=write, daemon=True).start()


def exec_argv(container: Container, name: str, argv: Sequence[str], is_terminal: bool) -> list[str]:
    """Return the command line that runs `argv` in the running container, as the container's user, beside the job.

    `is_terminal`: the standard input is a terminal. The command sees the public variables, but not the secrets.
    """
    return [container.client, "exec", "--interactive", *(["--tty"] if is_terminal else []), name, *argv]


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the host's own environment that a container sees."""
    return {key: value for key, value in environ.items() if _INHERITED.match(key)}


def boot_code(code: int) -> int:
    """Return boot's exit code, negative if a signal killed boot, from the client's exit code."""
    return -(code - 128) if 128 < code < 160 and code != 143 else code  # 143 is boot's own: stopped


def client_fault(container: Container, code: int, log: Path) -> str | None:
    """Return the client's error if the client could not start the container, else None; `log` has its output."""
    if code not in _CLIENT_FAILED:
        return None
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")[-4000:]
    return f"{Path(container.client).name} cannot start the container: {explain(container, text)}"


def explain(container: Container, text: str) -> str:
    """Return a client's last lines with the cure."""
    said = builds.last_words(text) or "it said nothing"
    return f"{said}; {builds.cure(text, _CURES, f'try `{Path(container.client).name} run` by hand')}"


def remove(container: Container, *names: str) -> str | None:
    """Kill and remove containers, and check that they are gone; return the obstacle, or None."""
    end_s = time.monotonic() + PATIENCE_S
    # Podman sends SIGTERM and waits ten seconds, unless the container was made with --stop-timeout=0 (_limits).
    gone, said = ["--ignore"] if container.kind == "podman" else [], "no answer"
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            done = processes.completed([container.client, "rm", "--force", *gone, *names], left_s)
            said = done.stderr.strip().rpartition("\n")[2] or said
            there = processes.completed([container.client, "ps", "--all", "--format={{.Names}}"], max(1.0, left_s))
            if there.returncode == 0 and not set(names) & set(there.stdout.replace(",", "\n").split()):
                return None
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        time.sleep(0.2)
    tool = Path(container.client).name
    return f"{tool} does not remove {', '.join(names)}: {said}; remove by hand: {tool} rm --force {' '.join(names)}"


def note(container: Container, start: Start) -> None:
    """Write the note for `sweep` and `running` into the node's folder; call before each start. Raises OSError."""
    record = {"container": asdict(container), "labels": start.labels, "name": start.name}
    atomic_json.write_json(Path(start.folder) / NOTE, record)


def running(folder: Path) -> tuple[Container, str, int] | None:
    """Return the running container of the node's job, its name, and boot's pid inside; None if no container runs."""
    found = processes.with_environment(CLOUDTRAIN_LOG_DIR=str(folder / "log"), **container_init.MARK)
    if not found or (noted := atomic_json.read_json(folder / NOTE)) is None:
        return None
    return Container(**noted["container"]), noted["name"], processes.pid_inside(min(found))


def sweep(folder: Path) -> str | None:
    """Remove the containers that a dead agent has left; return the obstacle, or None."""
    if (noted := atomic_json.read_json(folder / NOTE)) is None:
        return None
    container = Container(**noted["container"])
    filters = [f"--filter=label={key}={value}" for key, value in noted["labels"].items()]
    try:
        done = processes.completed([container.client, "ps", "--all", *filters, "--format={{.Names}}"], PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{container.client} gives no answer: {error}"
    if done.returncode:
        return f"{container.client} ps: {done.stderr.strip()}"
    names = done.stdout.split()
    return remove(container, *names) if names else None


def _user(container: Container) -> list[str]:
    """Return the flags by which files made inside belong to the user outside."""
    own = f"{os.geteuid()}:{os.getegid()}"
    if container.kind == "podman":
        return [f"--user={own}", *(["--userns=keep-id"] if container.is_rootless else [])]
    if container.is_rootless:
        return ["--user=0:0"]  # the user who runs the daemon
    groups = [f"--group-add={group}" for group in sorted(set(os.getgroups()) - {os.getegid()})]
    return [f"--user={own}", *groups, *(["--userns=host"] if container.is_remapped else [])]


def _limits(container: Container) -> list[str]:
    """Return the flags for training's higher limits than a service has."""
    has_infiniband = Path("/dev/infiniband").is_dir()
    flags = ["--device=/dev/infiniband"] if has_infiniband else []
    if container.kind == "podman":
        # Podman's default is 2048 processes, too few for the data loaders and threads of a few ranks.
        flags += ["--stop-timeout=0", "--pids-limit=-1"]
    elif not container.is_rootless:
        flags += ["--ulimit=memlock=-1:-1", "--ulimit=stack=67108864:67108864"]
    if has_infiniband and not container.is_rootless:
        flags += ["--cap-add=IPC_LOCK"]
    elif has_infiniband and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        flags += ["--ulimit=memlock=-1:-1"]
    return flags


def _gpus(container: Container, gpus: Sequence[str]) -> list[str]:
    if not gpus:
        return []
    if container.kind == "podman":
        return [f"--device=nvidia.com/gpu={uuid}" for uuid in gpus]
    return ["--gpus", f'"device={",".join(gpus)}"']  # quoted again: docker reads the value as one line of CSV


def _outermost(mounts: Sequence[tuple[str, bool]]) -> dict[str, bool]:
    """Return each path once, parents first, without paths that a parent's mount shows in the same mode."""
    modes: dict[str, bool] = {}
    for given, is_read_only in mounts:
        path = os.path.normpath(given)
        modes[path] = is_read_only and modes.get(path, True)
    kept: dict[str, bool] = {}
    for path, is_read_only in sorted(modes.items()):
        above = [mode for parent, mode in kept.items() if path.startswith(parent.rstrip("/") + "/")]
        if not above or above[-1] != is_read_only:
            kept[path] = is_read_only
    return kept


def _as_csv(fields: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
