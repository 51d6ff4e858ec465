"""Container images on the user's own host: found by digest, pulled once, tried before a job relies on them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

from .. import processes
from ..contract import EnvironmentSpec, PreparedEnvironment
from ..errors import Refused
from . import builds, dockerrun, interpreter
from .dockerrun import Container

ANSWER_S = 30.0
TRIAL_S = 180.0  # a first start unpacks the image on some storage drivers
WRITE = "\nimport pathlib\npathlib.Path(sys.argv[1]).touch()\n"
_IMAGE = re.compile(r"^[\w.:/-]+@sha256:[0-9a-f]{64}$")


def digest_fault(image: str | None) -> str | None:
    """Return the fault of an image name without a digest, and the cure; None if the name is right."""
    if not image:
        return "no image is named; set it to REPOSITORY@sha256:..."
    if _IMAGE.match(image):
        return None
    if "@" in image:
        return f"`{image}` does not end in a whole digest: `@sha256:` and 64 hexadecimal digits"
    shown = image if re.fullmatch(r"[\w.:/-]+", image) else "IMAGE"
    return (
        f"`{image}` names an image by a tag, which may mean different images on different hosts or days; name it by its"
        f" digest, as `docker inspect --format '{{{{index .RepoDigests 0}}}}' {shown}` prints it"
    )


def ready(spec: EnvironmentSpec) -> PreparedEnvironment:
    """Return how to start the image's Python in a container.

    The image is pulled if absent, and its Python is started with the job's mounts, user and GPUs. Raises Refused.
    """
    if fault := digest_fault(spec.image):
        raise Refused(fault)
    container = _client(spec)
    Path(container.home).mkdir(mode=0o700, parents=True, exist_ok=True)
    pulled = _pull(spec, container)
    found = _try(container, spec.gpus)
    container = replace(container, python=found.path)
    tool = Path(container.client).name + (" (rootless)" if container.is_rootless else "")
    detail = f"{tool} {container.image.rpartition('@')[0]} ({pulled}): {found.words}"
    return PreparedEnvironment(python=found.path, container=asdict(container), detail=detail)


def _client(spec: EnvironmentSpec) -> Container:
    """Return the client found on this host. Raises Refused if the client is absent or cannot run containers."""
    kind = spec.kind
    client = shutil.which(kind)
    if client is None:
        other = {"docker": "podman", "podman": "docker"}[kind]
        there = f", or use {other}, which is here" if shutil.which(other) else ""
        raise Refused(f"there is no {kind} on this host; install it{there}")
    home = Path(spec.workdir).expanduser().absolute() / "home"
    made = Container(client, kind, spec.image or "", spec.python or "python3", str(home))
    if kind == "docker" and "podman" in _ask(made, ["--version"]):
        made = replace(made, kind="podman")
    if made.kind == "podman":
        return replace(made, is_rootless=_ask(made, ["info", "--format={{.Host.Security.Rootless}}"]).strip() == "true")
    options = _ask(made, ["info", "--format={{json .SecurityOptions}}"])
    return replace(made, is_rootless="name=rootless" in options, is_remapped="name=userns" in options)


def _ask(container: Container, arguments: list[str]) -> str:
    argv = [container.client, *arguments]
    tool = Path(container.client).name
    try:
        done = processes.completed(argv, ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{tool} gives no answer: {error}; see whether `{tool} info` works on this host") from error
    # `docker info` prints its template's result, and exits 0, without a daemon (before 23.0).
    if done.returncode or "Cannot connect" in done.stderr:
        raise Refused(f"{tool} does not work on this host: {dockerrun.explain(container, done.stderr or done.stdout)}")
    return done.stdout


def _pull(spec: EnvironmentSpec, container: Container) -> str:
    """Pull the image if absent; return in words how the image was obtained. Raises Refused."""

    def is_there() -> bool:
        argv = [container.client, "image", "inspect", container.image]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return processes.completed(argv, ANSWER_S).returncode == 0
        return False

    if is_there():
        return "there already"
    name = hashlib.sha256(container.image.encode()).hexdigest()[:24]
    log = Path(spec.workdir).expanduser().absolute() / "env" / f"image-{name}.{os.uname().nodename}.txt"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One lock per host: on a network home folder the pull of another host does not help this host.
    lock = log.with_suffix(f".{os.uname().nodename}.pull")
    with builds.lock(lock, builds.LIMIT_S, f"pulling {container.image}", is_there) as held:
        if held is None or is_there():
            return "pulled by another job"
        log.unlink(missing_ok=True)
        began_s = time.monotonic()
        code = builds.run([container.client, "pull", container.image], log, builds.LIMIT_S, held)
        text = log.read_text(errors="replace")
        if code is None:
            raise Refused(
                f"pulling {container.image} is not done after {builds.LIMIT_S:.0f} s, last: {builds.last_words(text)};"
                f" pull it by hand: {Path(container.client).name} pull {container.image}"
            )
        if code:
            raise Refused(f"{container.image} cannot be pulled: {dockerrun.explain(container, text)}")
        return f"pulled in {time.monotonic() - began_s:.0f} s"


def _try(container: Container, gpus: tuple[str, ...]) -> interpreter.Interpreter:
    """Start the image's Python in the same way as the job; return the interpreter's answers. Raises Refused.

    The trial writes a file where the job's files will lie: the file's owner shows whether users are mapped correctly.
    """
    tool = Path(container.client).name
    witness = Path(container.home) / f".trial-{os.uname().nodename}-{os.getpid()}"
    trial = dockerrun.Start(f"trial-{os.uname().nodename.lower()}", os.getpid(), 0, 0, container.home, gpus=gpus)
    program = ["-I", "-c", interpreter.ASK + WRITE, str(witness)]
    argv = dockerrun.container_argv(container, trial, [], {"HOME": container.home}, program)
    try:
        done = processes.completed(argv, TRIAL_S)
        if done.returncode in (125, 126, 127):
            why = dockerrun.explain(container, done.stderr)
            raise Refused(f"{tool} cannot start {container.python} in {container.image}: {why}")
        found = interpreter.from_answer(done.stdout, done.stderr, f"{container.python} in {container.image}")
        if done.returncode or witness.stat().st_uid != os.geteuid():
            last = builds.last_words(done.stderr) or f"files made inside belong to user {witness.stat().st_uid}"
            raise Refused(f"{container.image} cannot write to {container.home} as you: {last}; set `workdir` elsewhere")
        return found
    except subprocess.TimeoutExpired as error:
        dockerrun.remove(container, trial.name)
        message = f"{container.image} is not up after {TRIAL_S:.0f} s; see whether `{tool} run` works here"
        raise Refused(message) from error
    except FileNotFoundError as error:
        message = f"files that {tool} writes to {container.home} are not visible here; set `workdir` to a local folder"
        raise Refused(message) from error
    finally:
        witness.unlink(missing_ok=True)
