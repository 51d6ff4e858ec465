"""A Python interpreter that will run the job: its path and its properties."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .. import processes
from ..errors import Refused
from ..records import Record

OLDEST = (3, 10)
PATIENCE_S = 60.0  # a first start from a cold network home folder
# Runs inside the interpreter. Finds packages by folder names: importlib.metadata takes 60 ms to import.
ASK = """
import hashlib, importlib.util as u, json, os, platform, re, sys, sysconfig
told = {name for path in sys.path if os.path.isdir(path) for name in os.listdir(path)}
names = sorted(name for name in told if name.endswith((".dist-info", ".egg-info")))
ours = r"(torch(?:vision|audio)?|triton|pytorch_triton\\w*|nvidia_\\w+)-([^-]+)(-py[\\d.]+)?\\.(dist|egg)-info$"
ours = [found for name in names for found in re.findall(ours, name)]
print(json.dumps({"path": sys.executable, "real": os.path.realpath(sys.executable), "version": sys.version_info[:3],
    "machine": platform.machine(), "libc": "-".join(platform.libc_ver()), "is_venv": sys.prefix != sys.base_prefix,
    "sites": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
    "packages": hashlib.sha256("\\n".join(names).encode()).hexdigest(), "has_torch": u.find_spec("torch") is not None,
    "has_pip": u.find_spec("pip") is not None, "torch": ["==".join(found[:2]).replace("_", "-") for found in ours]}))
"""


@dataclass(frozen=True)
class Interpreter(Record, checks=True):
    """An interpreter's own answers; `packages` is a hash of names and versions of the installed packages.

    `torch`: torch and the packages that are built for one version of torch, as pip's constraints.
    """

    path: str
    real: str
    version: tuple[int, int, int]
    machine: str
    libc: str
    is_venv: bool
    sites: tuple[str, ...]
    packages: str
    has_torch: bool
    has_pip: bool = False
    torch: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return a description for people."""
        number = ".".join(map(str, self.version))
        return f"Python {number} at {self.path}" + ("" if self.has_torch else ", without torch")


def find(python: str) -> Interpreter:
    """Return the interpreter of this name or path. Raises Refused if no usable interpreter is found."""
    place = shutil.which(Path(python).expanduser() if python.startswith("~") else python)
    if place is None:
        raise Refused(f"there is no interpreter `{python}` here; set `python` to the path of one{_known()}")
    return probe(str(Path(place).absolute()))


def probe(path: str) -> Interpreter:
    """Ask the interpreter for its properties. Raises Refused if the interpreter does not run, or is too old."""
    try:
        done = processes.completed([path, "-I", "-c", ASK], PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{path} does not run: {error}; set `python` to another interpreter") from error
    return from_answer(done.stdout, done.stderr, path)


def from_answer(answer: str, complaint: str, path: str) -> Interpreter:
    """Return the interpreter that printed `answer`. Raises Refused as `probe` does."""
    try:
        found = Interpreter.load(json.loads(answer.strip().rpartition("\n")[2]))
    except ValueError as error:
        last = complaint.strip().rpartition("\n")[2] or "it printed no answer"
        raise Refused(f"{path} does not work: {last}; set `python` to another interpreter") from error
    if found.version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Refused(f"{found.words} is older than {oldest}; set `python` to a newer one{_known()}")
    return found


def _known() -> str:
    """Return the newer interpreters on the path, as words."""
    names = [f"python3.{minor}" for minor in range(20, OLDEST[1] - 1, -1)]
    places = [place for name in names if (place := shutil.which(name))]
    return f" (here are {', '.join(places)})" if places else ""
