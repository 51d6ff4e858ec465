"""What a job runs in, by its name alone: Python, torch, CUDA and a C compiler of images, environments, interpreters.

No registry is asked, and no program is started. images.tsv has the forms of names, with source and date.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.foreign import text_of
from cloudtrain.entrypoints.format import counted

from ..errors import Fault
from ..plan import Runtime
from . import request_rules

if TYPE_CHECKING:
    from ..config.schema import JobConfig

Version = tuple[int, ...]
LEAST = (3, 10)  # of Python, for cloudtrain on the nodes
LEAST_TORCH = (2, 7)  # of the shared trainer
_GROUPS = {
    "<torch>": r"(?P<torch>\d+[.-]\d+(\.\d+)?)",
    "<py>": r"py3(?P<py>\d*)",
    "<cuda>": r"cu(da)?(?P<cuda>[\d.]+)",
}
# In a requirements file: a package, its bounds, and a marker.
_PIN = re.compile(
    r"^[ \t]*(torch(?:vision)?)[ \t]*(?:\[[\w, -]*\])?"
    r"[ \t(]*((?:[ \t]*,?[ \t]*[=<>!~]{1,3}[ \t]*[\w.*+]+)+)[ \t)]*(;.*)?",
    re.MULTILINE | re.IGNORECASE,
)
_WHEEL = re.compile(r"^[^#\n]*?/(torch(?:vision)?)-(\d+(?:\.\d+)*)[^/\s]*\.whl", re.MULTILINE)
_CONSTRAINTS = re.compile(r"^[ \t]*(?:-c|--constraint)[ \t=]*(\S+)", re.MULTILINE)
_CLAUSE = re.compile(r"[\s(]*(\w+)\s*([<>=!~]+)\s*['\"]([\w.]+)['\"][\s)]*")
_ON_NODES = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython"}
_BOUND = re.compile(r"(==|~=|<=|>=|<|>)=?\s*v?(\d+(?:\.\d+)*)")
_COMPILES = re.compile(
    r"\btorch[._]compile\b(?!\s*[=:]?\s*(bool\s*=\s*)?(?i:false|0|no)\b)|\bmodel\.compile\(\)|dynamo_backend"
)
_PYTHON_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_BRINGS_COMPILER = re.compile(r"\bg(cc|\+\+|xx)|build-essential|clang|compilers")


@functools.cache
def _forms() -> list[tuple[re.Pattern[str], list[str]]]:
    """Return the forms of images.tsv, each with the row's Python, torch and compiler."""
    text = files("cloudtrain.launcher.planning").joinpath("images.tsv").read_text(encoding="utf-8")
    rows = [row.split("\t") for row in text.splitlines() if not row.startswith("#")]
    form = re.compile(rf"(?<!\?P)({'|'.join(_GROUPS)})")
    return [(re.compile(form.sub(lambda m: _GROUPS[m[0]], row[0]), re.IGNORECASE), row[1:4]) for row in rows]


def of(name: str, how: str, key: str = "image") -> Runtime:
    """Return the runtime with the facts of its name; `how`: whose it is, and what brings it to the nodes."""
    for form, (python, torch, compiler) in _forms():
        if found := form.search(name):
            parts = {"torch": None, "py": None, "cuda": None, "any": None, **found.groupdict()}
            minor, cuda = parts["py"] or parts["any"], parts["cuda"]
            versions = [_version(each) for each in (parts["torch"] or torch).split() if each != "?"]
            return Runtime(
                name,
                how,
                key,
                python=(3, int(minor)) if minor else _version(python) or None,
                torch=tuple(versions),
                cuda=cuda if not cuda or "." in cuda or len(cuda) < 3 else f"{cuda[:-1]}.{cuda[-1]}",
                compiler={"?": None, "no": ""}.get(compiler, compiler),
                is_sure=not parts["any"],
            )
    return Runtime(name, how, key)


def of_conda(image: str, conda: Mapping[str, Any], how: str, key: str) -> Runtime:
    """Return the environment that a conda file makes: the image's own Python and torch do not count."""
    rows = request_rules.listed(conda, "dependencies")
    rows = [one for row in rows for one in (request_rules.listed(row, "pip") if isinstance(row, dict) else (row,))]
    found = (re.match(r"(?:.*::)?(\w+)[\s=]+(\d+(?:\.\d+)+)", str(row)) for row in rows)
    exact = {each[1]: _version(each[2]) for each in found if each}
    torch = exact.get("torch") or exact.get("pytorch")
    python = exact.get("python", ())[:2] or None
    return Runtime(f"{key} on {image}", how, key, python, (torch,) if torch else (), is_sure=True)


def of_this_interpreter(path: str, how: str, key: str) -> Runtime:
    """Return the facts of the interpreter that runs cloudtrain."""
    torch: tuple[Version, ...] = ()
    with suppress(metadata.PackageNotFoundError):
        torch = (_version(metadata.version("torch")),)
    return Runtime(path, how, key, _version(platform.python_version()), torch)


def line(runtime: Runtime) -> str:
    """Return the plan's line on what runs the job."""
    words = [f"Python {_dotted(runtime.python)}"] if runtime.python else []
    words += [f"torch {_dotted(runtime.torch[0])}"] if runtime.torch else []
    words += [f"CUDA {runtime.cuda}"] if runtime.cuda else []
    words += [f"{f'a {runtime.compiler}' if runtime.compiler else 'no C'} compiler"] * (runtime.compiler is not None)
    what = {"python": "python", "conda": "environment"}.get(runtime.key.rpartition(".")[2], "image")
    facts = ", ".join(words) or "the name does not say which Python and torch"
    return f"{what}: {runtime.name} ({runtime.how}): {facts}"


def faults(config: JobConfig, runtime: Runtime | None, gpus: int, folder: Path | None) -> Iterator[Fault]:
    """Yield the faults of the runtime: an old Python, a torch that the requirements exclude, no compiler, no CUDA.

    A warning is a guess by a name or a text. `folder`: of the code; None leaves out what depends on its files.
    """
    if runtime is None:
        return
    guess = "" if runtime.is_sure else " by its name"
    other = "leave `image` out" if runtime.key == "image" else f"change {runtime.key}"
    if runtime.python and runtime.python < LEAST:
        message = f"`{runtime.name}` has Python {_dotted(runtime.python)}{guess}, and the nodes need 3.10 or newer"
        yield _fault(message, runtime.key, f"{other}, or name one with a newer Python", is_sure=runtime.is_sure)
    elif gpus and re.search(r"(?<![a-z0-9])cpu(?![a-z0-9])", runtime.name.lower()):
        message = f"`{runtime.name}` is for CPUs by its name, and each machine has {counted(gpus, 'GPU')}"
        yield _fault(message, runtime.key, "name one with CUDA", is_sure=False)
    is_old = (
        runtime.is_sure and max(runtime.torch, default=()) < LEAST_TORCH and not config.setup
    )  # may install another
    if config.task and runtime.torch and runtime.torch[0] < LEAST_TORCH and "torch" not in str(config.setup):
        message = f"`{runtime.name}` has torch {_dotted(runtime.torch[0])}, and the shared trainer needs 2.7 or newer"
        hint = f"{other}, or name one with a newer torch; a `script` may run there"
        yield _fault(message, runtime.key, hint, is_sure=is_old)
    if folder is None:
        return
    pins = _pins(config.requirements, folder, runtime) if config.requirements and runtime.torch else ()
    for package, wanted, is_asked in pins:
        excluded = [_excludes(package, wanted, each) for each in runtime.torch]
        if excluded[0]:
            has = f"`{runtime.name}` has torch {_dotted(runtime.torch[0])}, which stays"
            hint = f"loosen the line, or name an {'image' if runtime.key == 'image' else 'environment'} with that torch"
            message = f"{config.requirements} asks for {package}{wanted}, and {has}"
            yield _fault(message, "requirements", hint, is_sure=runtime.is_sure and is_asked and all(excluded))
    entry = config.task or config.script or (config.module and f"{config.module.replace('.', '/')}.py") or ""
    compiles = bool(config.task and config.training.compile)
    is_unfit = runtime.compiler == "" or (runtime.compiler == "C" and not gpus)
    text = "\n".join((_PYTHON_COMMENT.sub("", text_of(folder / entry)), *config.args)) if is_unfit else ""
    if is_unfit and (compiles or _COMPILES.search(text)) and not any(map(_BRINGS_COMPILER.search, config.setup)):
        what = "`training.compile`" if compiles else f"torch.compile in {entry}"
        message = f"{what} needs a C{'' if gpus else '++'} compiler, and `{runtime.name}` has none"
        devel = re.sub(r"-runtime(@.*)?$", "-devel", runtime.name)  # a digest is of this image alone
        hint = f"set `image: {devel}`, or install one: `setup: [apt-get update && apt-get install -y g++]`"
        key = "training.compile" if compiles else runtime.key
        yield _fault(message, key, hint, is_sure=compiles and not config.setup)  # a script there may bring one


def _fault(message: str, key: str, hint: str, *, is_sure: bool) -> Fault:
    """Return the fault; the line of a warning shows no hint, so its message has the cure."""
    return Fault(message if is_sure else f"{message}: {hint}", key, hint=hint, is_warning=not is_sure)


def _pins(wanted: str, folder: Path, runtime: Runtime) -> Iterator[tuple[str, str, bool]]:
    """Yield the bounds of torch and torchvision in the requirements, except where a marker may leave a line out.

    The third value: whether the package is asked for; a file of constraints alone installs nothing.
    """
    from cloudtrain.entrypoints.environments import requirements, venvs  # few jobs have requirements
    from cloudtrain.entrypoints.errors import Refused

    with suppress(Refused):  # a fault of the config already
        found = requirements.read(wanted, folder)
        files = {Path(): found.text, **{path: text_of(path) for path in venvs.check(found.text, found.folder)}}
        texts = {path: _WHEEL.sub(r"\1==\2", text) for path, text in files.items()}
        bounds = {Path(name).name for text in texts.values() for name in _CONSTRAINTS.findall(text)}
        asked = "\n".join(text for path, text in texts.items() if path.name not in bounds)
        for m in (each for text in texts.values() for each in _PIN.finditer(text)):
            if _holds(re.split(r"[#\\]|\s--", m[3] or "")[0].lstrip(";"), runtime.python):
                is_asked = re.search(rf"^[ \t]*{m[1]}(?![\w.-])", asked, re.MULTILINE | re.IGNORECASE)
                yield m[1].lower(), m[2].replace(" ", ""), bool(is_asked)


def _holds(marker: str, python: Version | None) -> bool:
    """Return whether the marker holds on the nodes for certain; the kind of processor is not known."""
    ways = [marker] if "(" in marker else re.split(r"\bor\b", marker)
    return not marker.strip() or any(all(_is_true(each, python) for each in re.split(r"\band\b", way)) for way in ways)


def _is_true(clause: str, python: Version | None) -> bool:
    if not (m := _CLAUSE.fullmatch(clause)):
        return False
    name, operator, value = m.groups()
    if name.startswith("python_"):
        return python is not None and operator != "!=" and not _excludes("python", operator + value, python)
    return name in _ON_NODES and operator in ("==", "!=") and (value == _ON_NODES[name]) == (operator == "==")


def _excludes(package: str, wanted: str, torch: Version) -> bool:
    """Return whether the bounds exclude this torch for certain; the version may lack its last number."""
    # torchvision 0.14 is of torch 1.13, 0.23 of 2.8; their last numbers differ: 0.15.2 is of 2.0.1.
    has = (0, torch[1] + (15 if torch >= (2,) else 1)) if package == "torchvision" else torch
    for operator, text in _BOUND.findall(wanted):
        bound = _version(text)
        mine, theirs = has[: len(bound)], bound[: len(has)]
        is_below_all = mine == theirs and operator == "<" and not any(bound[len(has) :])
        if (
            (operator == "==" and mine != theirs)
            or (operator in ("~=", ">=", ">") and mine < theirs)
            or (operator == "~=" and has[: len(bound) - 1] != bound[:-1])
            or (operator in ("<=", "<") and (mine > theirs or is_below_all))
        ):
            return True
    return False


def _version(text: str) -> Version:
    """Return the leading numbers of `2.13.0+cu126` or `2-4`."""
    numbers = re.match(r"\d+(?:[.-]\d+)*", text)
    return tuple(map(int, re.split("[.-]", numbers[0]))) if numbers else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
