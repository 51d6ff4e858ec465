"""Virtual environments made from a requirements file: each built once on a host, found again by a key of its inputs.

`env/KEY/` is the environment, with the mark `complete.json` written last (a venv cannot be moved, so it is built in
place); `env/KEY.log` is pip's output; a builder holds `env/KEY.lock` alone, the users of the environment share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from .. import atomic_json, foreign
from ..contract import EnvironmentSpec, PreparedEnvironment
from ..errors import Refused
from ..format import quantity
from . import builds, interpreter
from .interpreter import Interpreter

FORM = 2  # part of the key: increase it if the way of building changes
UNUSED_DAYS = 30.0
MARK, LAST_USED = "complete.json", "used"
SEEN = ("torch", "numpy", "pip", "setuptools")  # of this interpreter, by a rehearsal's environment

_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTION = re.compile(
    r"^(-r|--requirement|-c|--constraint|-f|--find-links|-e|--editable)(?:\s*=\s*|\s+|(?=[^-\s=]))(.+)$"
)
_LOCAL = re.compile(
    r"^((?:[\w.-]*/|file:)[^\s\[]*|\.\.?|[^\s:;@]+\.(?:whl|zip|tar\.gz|tar\.bz2|tar\.xz))(\[[^]]*\])?(\s*[;#].*)?$"
)
# In conda's form: `numpy=1.26`, `numpy=1.26.4=py311_0`, `numpy==1.26.4=py311_0`.
_CONDA = re.compile(r"^\w[\w.-]*(\[[^]]*\])?\s*(=[^=]|==[^=,;@\s]+=)")
_Named = tuple[Path, str]  # a local file or folder, and the line of the requirements with its name
FULL = r"No space left|Disk quota"
CURES = {
    FULL: "free some space on this host, or set `workdir` to a larger disk",
    r"\(constraint\) ((?:torch|triton|pytorch-triton|nvidia)\S*)": (
        "the installed {1} is not replaced: loosen that requirement, or choose another image or interpreter"
    ),
    r"ensurepip is not|No module named '?(venv|ensurepip)": (
        "install the package python3-venv, or set `python` to another"
    ),
    r"ModuleNotFoundError: No module named": (
        "a package's build imports it, but does not ask pip for it: leave that package to `setup`; there, install "
        "the module, then the package by `pip install --no-build-isolation PACKAGE`"
    ),
    r"Could not read from remote|unable to access '|could not read Username|Authentication failed": (
        "this machine does not reach that repository, or has no key for it: ship the package with the code "
        "(`./PACKAGE`), or write `git+https://${TOKEN}@...` and `secrets: [TOKEN]`"
    ),
    r"Cannot find command '(\w+)'": "install {1} on the machine or in the image, or ship the package with the code",
    r"requires a different Python": "choose a version for that Python, or an image or interpreter with another",
    r"do not match the hashes|hashes are required": "correct the hashes in the requirements",
    r"name resolution|NewConnectionError|ConnectTimeout|timed out|unreachable|Connection refused|ProxyError|CERTIF": (
        "the host does not reach the index: set index-url or proxy in its pip.conf, or ship wheels and `--find-links`"
    ),
    r"conflicting dependencies|ResolutionImpossible": "loosen the versions that exclude each other",
    r"Could not find a version|No matching distribution": (
        "check name and version, and that there is a wheel for this Python and machine; a private index hides its "
        "packages from a wrong password"
    ),
    r"Failed building wheel|subprocess-exited-with-error|error: command": "ask for a version that has a wheel",
}


def build(spec: EnvironmentSpec) -> PreparedEnvironment:
    """Return the environment of the interpreter, built if absent. Raises Refused with pip's last lines and the cure."""
    base = interpreter.find(spec.python)
    folder = Path(spec.workdir).expanduser().absolute() / "env"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    how = [name for name in ("holds_torch", "is_apart") if getattr(spec, name)]
    code = Path(spec.code, spec.requirements_folder)
    place = folder / key(spec.requirements or "", code, base, spec.system_site_packages, *how)
    lock = place.with_suffix(".lock")
    took = "found as built before"
    doing = f"building the environment {place.name}"
    with builds.lock(lock, builds.LIMIT_S, doing, lambda: _use(place, lock)) as held:
        if held is not None and not _is_whole(place):
            began_s, took = time.monotonic(), "fetched from the store"
            if spec.store:
                fetch_copy(spec.store, place)
            if not _is_whole(place):
                _make(spec, base, place, held)
                took = "built"
                if spec.store and spec.keeps:
                    put_copy(spec.store, place)
            took = f"{took} in {time.monotonic() - began_s:.0f} s"
    if held is not None:
        prune(spec.workdir)
    python, detail = str(place / "bin" / "python"), f"venv {place.name} ({took}) on {base.words}"
    return PreparedEnvironment(python=python, environment=variables(place), lock=str(lock), detail=detail)


def variables(place: Path) -> dict[str, str]:
    """Return the variables that activating the environment sets."""
    path = os.pathsep.join([str(place / "bin"), os.environ.get("PATH", os.defpath)])
    return {"VIRTUAL_ENV": str(place), "PATH": path}


def hold(lock: str) -> int:
    """Keep the environment from being pruned until this process ends; return the descriptor of the lock."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def prune(workdir: str) -> None:
    """Remove environments not used for 30 days and not held by a job."""
    folder = Path(workdir).expanduser() / "env"
    oldest_s = time.time() - UNUSED_DAYS * 86400
    for lock in sorted(folder.glob("*.lock")):
        place = lock.with_suffix("")
        if _last_used_s(place, lock) > oldest_s or (held := builds.try_lock(lock, fcntl.LOCK_EX)) is None:
            continue
        if _last_used_s(place, lock) <= oldest_s:  # no process used the environment before the lock was taken
            shutil.rmtree(place, ignore_errors=True)
            for path in (lock.with_suffix(".log"), lock):
                path.unlink(missing_ok=True)
        os.close(held)


def fetch_copy(uri: str, place: Path) -> None:
    """Unpack the store's copy of the environment `place`, a tar file named by the key, if the store has a copy.

    A store's failure is only printed. An account that can write to the store can change later jobs.
    """
    from ..stores.store import open_store  # few jobs need urllib

    partial = place.with_suffix(".part")
    with _tolerant(place.with_suffix(".tar"), "the copy cannot be read, so the environment is built"):
        open_store(uri).get(f"{place.name}.tar", place.with_suffix(".tar"))
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(place.with_suffix(".tar")) as archive:
            # Nothing is written outside the folder; Python 3.10.11, 3.11.3 and older have no filters.
            archive.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
            archive.extractall(partial)
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    shutil.rmtree(partial, ignore_errors=True)


def put_copy(uri: str, place: Path) -> None:
    """Put a copy of the environment `place` into the store, its mark at the end; a failure is only printed."""
    from ..stores.store import open_store

    packed, began_s = place.with_suffix(".tar"), time.monotonic()
    with _tolerant(packed, "the environment cannot be kept for later jobs"):
        store = open_store(uri)
        with tarfile.open(packed, "w") as archive:
            for name in sorted(os.listdir(place), key=lambda name: name == MARK):
                archive.add(place / name, name)
        size_mb = packed.stat().st_size / 1e6
        store.put(packed, packed.name)
        print(f"setup: copied to {uri} ({size_mb:.0f} MB, {time.monotonic() - began_s:.0f} s)", flush=True)


@contextmanager
def _tolerant(packed: Path, otherwise: str) -> Iterator[None]:
    """Print a failure in place of raising the error, and remove the packed file at the end."""
    try:
        yield
    except FileNotFoundError:
        pass  # no copy yet
    except (OSError, tarfile.TarError) as error:
        print(f"setup: {otherwise}: {error}", flush=True)
    finally:
        packed.unlink(missing_ok=True)


def check(requirements: str, folder: Path) -> set[Path]:
    """Return the named files and folders, or raise Refused for a line that no environment can be built from."""
    named = list[_Named]()
    list(_lines(requirements, folder, folder, named))
    return {path for path, _ in named}


def key(requirements: str, folder: Path, base: Interpreter, sees_system: bool, *how: str) -> str:
    """Return the environment's name: equal for equal requirements, local files and interpreter.

    `folder` is the start of relative paths; `how` names further options. Raises Refused if a file that the requirements
    name is absent.
    """
    named = list[_Named]()
    lines = list(_lines(requirements, folder, folder, named))
    files = {  # the path of a named folder does not matter
        f"{line} {file.relative_to(path)}": foreign.sha256_of(file)
        for path, line in named
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file() and "__pycache__" not in file.parts
    }
    about = {**asdict(base), "packages": base.packages if sees_system or how else None}
    about |= dict.fromkeys(("has_torch", "has_pip", "torch"))
    inputs = json.dumps([FORM, lines, files, about, sees_system, *how], sort_keys=True)
    return hashlib.sha256(inputs.encode()).hexdigest()[:24]


def _use(place: Path, lock: Path) -> bool:
    """Return whether the environment is complete; if so, mark it as used."""
    held = builds.try_lock(lock, fcntl.LOCK_SH)
    if held is None:
        return False
    try:
        if not _is_whole(place):
            return False
        (place / LAST_USED).touch()
        return True
    finally:
        os.close(held)


def _is_whole(place: Path) -> bool:
    """Return whether the build has finished, and the interpreter below still exists."""
    return (place / MARK).exists() and os.access(place / "bin" / "python", os.X_OK)


def _last_used_s(place: Path, lock: Path) -> float:
    for path in (place / LAST_USED, lock):  # an environment never completed is as old as the last try
        with suppress(OSError):
            return path.stat().st_mtime
    return time.time()


def _make(spec: EnvironmentSpec, base: Interpreter, place: Path, held: int) -> None:
    """Build the environment in its place, from nothing. Raises Refused."""
    end_s = time.monotonic() + builds.LIMIT_S
    log = place.with_suffix(".log")
    log.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    # If the interpreter's pip is visible inside, use it: to install pip takes 3 s, and needs ensurepip.
    has_pip = base.has_pip and spec.holds_torch
    flags = ["--system-site-packages"] * spec.system_site_packages + ["--without-pip"] * has_pip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    code = builds.run([base.path, "-I", "-m", "venv", *flags, str(place)], log, builds.LIMIT_S, held, environment)
    _check(code, log, "the environment could not be made")
    if spec.is_apart:
        show(place, base, [lay_out(place / "shown")])
    elif spec.system_site_packages and base.is_venv:  # `--system-site-packages` skips the packages of a venv
        show(place, base, base.sites)
    if spec.requirements:
        folder = Path(spec.code, spec.requirements_folder)
        # In the folder of the named files: pip reads nested files relative to the file that names them.
        own = folder / f".cloudtrain-{os.uname().nodename}-{os.getpid()}.txt"
        file = folder / spec.requirements_file if spec.requirements_file else own
        if file is own:
            own.write_text(spec.requirements)
        limits = []
        if spec.holds_torch and base.torch:
            (place / "torch.txt").write_text("\n".join(base.torch) + "\n")
            limits = ["-c", str(place / "torch.txt")]
        try:
            install = [str(place / "bin" / "python"), "-I", "-m", "pip", "install", "--progress-bar=off", *limits]
            left_s = max(1.0, end_s - time.monotonic())
            with seen_by_builds(place, base) if spec.system_site_packages else nullcontext():
                code = builds.run([*install, "-r", file.name], log, left_s, held, environment, folder, shows=spec.shows)
        finally:
            own.unlink(missing_ok=True)
        _check(code, log, "the requirements could not be installed")
    atomic_json.write_json(place / MARK, {"interpreter": asdict(base), "built_s": time.time()})
    (place / LAST_USED).touch()


def show(place: Path, base: Interpreter, sites: Sequence[str], name: str = "parent.pth") -> Path:
    """Let the environment see these folders' packages and .pth files; return the file there that names them."""
    file = place / "lib" / "python{}.{}".format(*base.version) / "site-packages" / name
    file.write_text("".join(f"import site; site.addsitedir({site!r})\n" for site in sites))
    return file


@contextmanager
def seen_by_builds(place: Path, base: Interpreter) -> Iterator[None]:
    """Let the builds of pip in this environment see the interpreter's packages, as many import torch: flash-attn.

    pip hides the interpreter's own folders from a build, by their names. A build sees them by links, after the packages
    that the build asks for. The links end with the installation, and lie outside the environment: pip removes nothing.
    """
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as below:
        links = [Path(below, str(number)) for number, _ in enumerate(base.sites)]
        for link, site in zip(links, base.sites, strict=True):
            link.symlink_to(site)
        file = show(place, base, [str(link) for link in links], "below.pth")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def lay_out(folder: Path) -> str:
    """Make a folder of links to the files of SEEN and of their requirements; return its path.

    A rehearsal's environment sees only these packages of this interpreter, like an image with torch. So an import that
    the requirements lack fails in the rehearsal.
    """
    from importlib import metadata  # takes 60 ms

    folder.mkdir(parents=True, exist_ok=True)
    waiting, seen = list(SEEN), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(found.locate_file(top))).absolute())
        named = (re.match(r"[\w.-]+", line) for line in found.requires or () if "extra ==" not in line)
        waiting += [match[0] for match in named if match]
    return str(folder)


def _check(code: int | None, log: Path, what: str) -> None:
    if code == 0:
        return
    text = log.read_text(errors="replace")
    last = builds.last_words(text)
    if code is None:
        said = f"not done after {builds.LIMIT_S:.0f} s, last: {last}; raise the limit, or ship wheels"
    else:
        cures = {**CURES, FULL: _room(log.parent)}
        said = f"{last.rstrip('.')}; {builds.cure(text, cures, 'see the log')}"
    raise Refused(f"{what}: {said}. All of it: {os.uname().nodename}:{log}")


def _room(folder: Path) -> str:
    """Return the cure for a full disk: the environment's disk, or the smaller one where pip unpacks and builds."""
    scratch = Path(tempfile.gettempdir())
    there, here = (shutil.disk_usage(each).free for each in (scratch, folder))
    if there >= here:
        return f"{quantity(here)}B are free in {folder}: free some space, or set `workdir` to a larger disk"
    words = f"pip unpacks and builds in {scratch}, which has {quantity(there)}B free"
    return f"{words}: set `env: {{TMPDIR: FOLDER}}` to a folder on a larger disk ({folder} has {quantity(here)}B free)"


def _lines(text: str, folder: Path, start: Path, named: list[_Named]) -> Iterator[str]:
    """Yield the requirements without comments; add the local files and folders that they name to `named`.

    As pip has it, a file of requirements is relative to `folder`, and a package to `start`, where pip runs.
    """
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = " ".join(_COMMENT.sub("", line).split())
        if not line:
            continue
        yield line
        if _CONDA.match(line):
            raise Refused(
                f"the requirements say `{line}`, which pip does not read; write `NAME==VERSION`: "
                "`pip list --format=freeze` prints such lines, also in conda's environments"
            )
        option = _OPTION.match(line)
        if option and option[1] in ("-e", "--editable"):
            raise Refused(
                f"the requirements say `{line}`, but the environment is not this job's alone and outlives its folder;"
                f" leave `-e` out, or write `setup: [pip install {line}]` in place of the line; without an installation"
                " the ranks find modules beside the script, at the code's root, and by `env: {PYTHONPATH: src}` in src"
            )
        if option is None:
            if local := _LOCAL.match(line.partition(" @ ")[2] or line):
                named.append((_local(local[1], start, line), line))
        elif not re.match(r"https?://|.*\$\{", option[2]):
            is_links = option[1] in ("-f", "--find-links")
            path = _local(option[2], start if is_links and not (folder / option[2]).exists() else folder, line)
            is_new = all(path != known for known, _ in named)  # otherwise a loop
            named.append((path, line))
            if is_new and not is_links:
                yield from _lines(foreign.read_text(path), path.parent, start, named)


def _local(name: str, folder: Path, line: str) -> Path:
    """Return the path that a requirement names. Raises Refused if the path does not exist."""
    path = Path(re.sub(r"^file:(//(localhost)?(?=/))?", "", name.strip("'\""))).expanduser()
    found = (folder / path).resolve()
    if not found.exists():
        hint = "a relative path starts at the folder of the file that `requirements` names; is it excluded?"
        hint = hint if "\\" not in name else "a path has slashes on the nodes"
        if path.is_absolute():
            hint = (
                "a path of the machine that wrote the file: write `NAME==VERSION` (`pip list --format=freeze` prints "
                "such lines, also in conda's environments), or ship the file with the code"
            )
        raise Refused(f"the requirements say `{line}`, but there is no {found}; {hint}")
    return found
