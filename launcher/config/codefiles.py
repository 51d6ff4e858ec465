"""Checks the files that a config names: each file exists, is Python, and a task file defines its functions.

Files are read and compiled, never imported: the imports of a file need torch, and may have any effect.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import importlib.util
import os
import re
import shlex
import stat
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path, PurePath

from cloudtrain.entrypoints import foreign
from cloudtrain.entrypoints.rank import variables
from cloudtrain.entrypoints.stores import STORES

from ..backend_table import traits
from ..errors import Fault, Place
from . import accelerate
from .schema import JobConfig, blocks_of
from .schemafaults import named, quoted
from .yamlfile import YamlNode, given

# The functions that a task file must define, with the arguments that the trainer passes to each function.
TASK_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "model": ("params",),
    "dataset": ("params", "split"),
    "loss": ("model", "batch"),
}
_OPTIONAL_FUNCTIONS = {"optimizer": ("model", "params"), "evaluate": ("model", "batch"), "collate": ("samples",)}
_LARGEST_SOURCE = 50_000_000  # bytes
_SUBMODULE = re.compile(r"^[ \t]*path[ \t]*=(.+)$", re.MULTILINE)
_OF_TORCH = re.compile(r"""^[\s"']*torch\s*(={2,3}\s*[\w.+*]+)""", re.MULTILINE)
_LISTS = re.compile(r"^# dependencies\s*=", re.MULTILINE)
# A file that a script saves; a folder that outlives the node; an option that continues from a checkpoint.
_SAVES = re.compile(r"\b(?:torch\.save|save_file|save_pretrained|joblib\.dump|pickle\.dump|\w+\.save)\(")
_SCHEMES = "|".join(["abfs", *(name for name in STORES if name != "file")])
_FOLDERS = re.compile(rf"CLOUDTRAIN_(?:CHECKPOINT|OUTPUT)_DIR|\b(?:{_SCHEMES})://|SM_MODEL_DIR|AIP_\w+_DIR")
_RESUMES = re.compile(r"""["'](--?(?:resume|restore|continue|load|init|ckpt|checkpoint|snapshot)[\w-]*)["']""")
_JOINS = re.compile(
    r"distributed|process_group|accelerat|lightning|fabric|transformers|deepspeed|composer|horovod|\bray\b"
)
_ACCELERATED = re.compile(r"Accelerator|\b(?:transformers|trl)\b.*Trainer", re.DOTALL)
# Options whose file or folder a script writes, and options whose folder it reads.
_WRITTEN = re.compile(r"out|log|save|dest|result|cache|dump", re.IGNORECASE)
_READ = re.compile(r"data|input|corpus|conf", re.IGNORECASE)
_PLACES = re.compile(r"MASTER_|WORLD_SIZE|RANK|init_method|tcp:|local[_-]rank")
_OF_ENVIRONMENT = re.compile(r"environ|getenv|RANK|WORLD_SIZE|MASTER_|is_(torchelastic|initialized|launched)|launcher")
_OF_SHELL = re.compile(r"(?<!\$)\$\{?(?!CLOUDTRAIN_)([A-Z]\w+)\b", re.ASCII)
_LOOPBACK = re.compile(r"tcp://(localhost|127\.)")
_LOCAL_RANK = re.compile(r"""(?:add_argument|option)\(\s*(?:["']-\w["'],\s*)?["'](--local[_-]rank)["']""")
_OF_DEEPSPEED = {  # options of its launcher, and what takes their place
    **dict.fromkeys(("hostfile", "include", "exclude"), "`backend: ssh` has machines in `ssh.hosts`"),
    **dict.fromkeys(("num_nodes", "num_gpus"), "`resources.instances` and `distributed.nproc_per_node` count"),
    **dict.fromkeys(("master_addr", "master_port", "launcher", "no_local_rank"), "cloudtrain starts the ranks"),
}


def faults_of(root: YamlNode, folder: Path) -> list[Fault]:
    """Return the faults of the files that the config in `folder` names."""
    node = given(root, "code", "dir")
    code_dir = folder / (node.value if node and isinstance(node.value, str) else ".")
    if node and isinstance(node.value, str) and _what(code_dir) != "folder":
        hint = "a path is relative to the config file" if not _what(code_dir) else "it is a file"
        return [] if node.broken else [Fault(f"no folder `{named(node)}`", "code.dir", node.place, hint)]
    of_blocks = (f"{name}.{key}" for name in blocks_of(root.value) for key in traits(name).code_files)
    keys = ("task", "script", "requirements", accelerate.KEY, *of_blocks)
    faults = [fault for key in keys for fault in _file_faults(root, key, folder, code_dir)]
    node = given(root, "distributed", "workdir")
    if node is None or node.broken or not isinstance(node.value, str):
        return [*faults, *_module_faults(root, code_dir)]
    start = code_dir / node.value
    if not start.resolve().is_relative_to(code_dir.resolve()) or _what(start) != "folder":
        hint = "the folder in which the ranks start is one of the shipped code, and relative to `code.dir`"
        return [*faults, Fault(f"no folder `{named(node)}` in the code", "distributed.workdir", node.place, hint)]
    return [*faults, *_module_faults(root, start)]


def _file_faults(root: YamlNode, key: str, folder: Path, code_dir: Path) -> Iterator[Fault]:
    node = _named_by(root, key)
    if node is None:
        return
    # `pyproject.toml[extra]` names a file and an extra of the project.
    file = code_dir / (node.value.partition("[")[0] if ".toml[" in node.value else node.value)
    inside = os.path.relpath(os.path.normpath(file), os.path.normpath(code_dir))
    if PurePath(inside).parts[:1] == ("..",) or node.value.startswith(("/", "~")):
        hint = f"only files below it are shipped to the nodes: move the file, or set `code.dir`; write `{key}` relative"
        yield Fault(f"`{named(node)}` is outside the code folder", key, node.place, hint)
    elif _what(file) != "file":
        yield Fault(f"no file `{named(node)}`", key, node.place, _missing_hint(node, key, folder, code_dir))
    elif key.endswith("requirements"):
        yield from _requirements_faults(node, code_dir, key)
    elif "." in key:  # not code: of a backend's block, or accelerate's settings
        return
    elif file.suffix == ".ipynb":
        hint = f"jupyter nbconvert --to script {shlex.quote(node.value)}; then write `{key}: {node.value[:-6]}.py`"
        yield Fault(f"`{named(node)}` is a notebook, and torchrun starts Python files", key, node.place, hint)
    elif file.suffix != ".py":
        hint = "torchrun starts Python: name a `.py` file"
        yield Fault(f"`{named(node)}` is not a Python file", key, node.place, hint)
    else:
        yield from _source_faults(file, key, node)


def _named_by(root: YamlNode, key: str) -> YamlNode | None:
    """Return the node of a key that names a file; None if the key is missing, empty or already faulty."""
    node = given(root, *key.split("."))
    is_named = node is not None and not node.broken and isinstance(node.value, str) and node.value.strip()
    return node if is_named else None


def _requirements_faults(node: YamlNode, code_dir: Path, key: str) -> Iterator[Fault]:
    """Yield the faults of a requirements file, and of the files that the requirements file includes."""
    from cloudtrain.entrypoints.environments import requirements, venvs
    from cloudtrain.entrypoints.errors import Refused

    try:
        found = requirements.read(node.value, code_dir)
        venvs.check(found.text, found.folder if key == "requirements" else code_dir)
    except Refused as refused:
        message, _, hint = str(refused).partition("; ")
        yield Fault(message, key, node.place, hint)


def _what(path: Path) -> str:
    """Return "file" or "folder"; empty text if the path does not exist, or if no file system accepts the name."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file"


def _missing_hint(node: YamlNode, key: str, folder: Path, code_dir: Path) -> str:
    wanted = folder / node.value
    if code_dir != folder and _what(wanted) == "file" and wanted.is_relative_to(code_dir):
        return f"a path is relative to `code.dir`: write `{wanted.relative_to(code_dir).as_posix()}`"
    words = node.value.split()
    for number, word in enumerate(words if len(words) > 1 else ()):  # a command line: `python train.py --lr 1`
        if _what(code_dir / word) == "file" or words[number - 1 : number] == ["-m"]:
            key = "module" if words[number - 1 : number] == ["-m"] else "script"
            rest = f" and `args: {' '.join(words[number + 1 :])}`" if words[number + 1 :] else ""
            return f"one name alone: write `{key}: {word}`{rest}"
    is_list = key.endswith("requirements")
    suffix = PurePath(node.value.partition("[")[0]).suffix or (".txt" if is_list else ".py")
    prefix = (
        PurePath(node.value) if is_list and _what(code_dir / node.value) == "folder" else PurePath(node.value).parent
    )
    names = _names_in(code_dir / prefix, suffix)
    if close := get_close_matches(PurePath(node.value).name, names, 1):
        return f"did you mean `{(prefix / close[0]).as_posix()}`?"
    if 0 < len(names) <= 6:
        kind = "Python files" if suffix == ".py" else f"`{suffix}` files"
        return f"{kind} there: {quoted((prefix / name).as_posix() for name in names)}"
    if is_list:
        return "it names a file, with one package a line, such as requirements.txt"
    return "`cloudtrain init` writes an example" if not names and suffix == ".py" else ""


def _names_in(folder: Path, suffix: str) -> list[str]:
    """Return the names in the folder that have the suffix, sorted; an empty list if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == suffix)
    except OSError:
        return []


def _module_faults(root: YamlNode, code_dir: Path) -> Iterator[Fault]:
    """Yield the faults of `module` if the code folder has the top-level package; the nodes may have other packages."""
    node = _named_by(root, "module")
    if node is None:
        return
    name, parts = node.value, node.value.split(".")
    if "/" in name or not all(parts) or parts[-1] == "py":
        path = PurePath(*re.split("[./]", name.removesuffix(".py")))
        hint = f"write `script: {path}.py`, or `module: {'.'.join(path.parts)}`" if all(parts) else "as in `pkg.train`"
        yield Fault(f"`{named(node)}` is not a valid module name", "module", node.place, hint)
        return
    if not _is_in_code(code_dir, parts[0]):
        return
    here = code_dir
    for place, part in enumerate(parts):
        is_last, file = place == len(parts) - 1, here / f"{part}.py"
        if is_last and _what(file) == "file" and _what(here / part / "__init__.py") != "file":
            yield from _source_faults(file, "module", node)
            return
        if _what(here / part) != "folder":
            wanted = f"{'/'.join(parts[: place + 1])}{'.py' if is_last else '/'}"
            known = [Path(each).stem for each in _names_in(here, ".py")] + _names_in(here, "")
            close = get_close_matches(part, known, 1)
            hint = f"did you mean `{'.'.join([*parts[:place], *close, *parts[place + 1 :]])}`?" if close else ""
            yield Fault(f"no module `{named(node)}`: the code folder holds no `{wanted}`", "module", node.place, hint)
            return
        here /= part
    if _what(here / "__main__.py") == "file":
        yield from _source_faults(here / "__main__.py", "module", node)
        return
    runs = [f"{name}.{Path(each).stem}" for each in _names_in(here, ".py") if not each.startswith("_")]
    hint = f"modules there: {quoted(runs[:6])}" if runs else f"add `{'/'.join(parts)}/__main__.py`"
    yield Fault(f"`{named(node)}` is a package without `__main__.py`, and cannot be run", "module", node.place, hint)


def _is_in_code(code_dir: Path, name: str) -> bool:
    """Return whether Python finds this module in the code folder; an installed module hides a bare folder."""
    if "file" in (_what(code_dir / f"{name}.py"), _what(code_dir / name / "__init__.py")):
        return True
    return _what(code_dir / name) == "folder" and not _is_installed(name)


def _is_installed(name: str) -> bool:
    """Return whether this Python has the top-level module; nothing is imported. A bare folder does not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _source_faults(file: Path, key: str, node: YamlNode) -> Iterator[Fault]:
    try:
        source = foreign.read(file)
    except OSError as exc:
        if exc.errno == errno.EFBIG and file.stat().st_size <= _LARGEST_SOURCE:
            return  # with embedded data: not parsed here
        yield Fault(f"`{named(node)}` cannot be read: {exc.strerror}", key, node.place)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in the user's code is not a fault of the config
            tree = ast.parse(source, os.fspath(file))
            compile(tree, os.fspath(file), "exec", dont_inherit=True)
    except SyntaxError as exc:
        if not exc.lineno:
            yield Fault(f"`{named(node)}` is not Python: {exc.msg}", key, node.place)
            return
        text = (exc.text or "").rstrip("\n")
        place = Place(os.fspath(file), exc.lineno, min(max(exc.offset or 1, 1), len(text) + 1), text)
        yield Fault(f"{exc.msg[:1].lower()}{exc.msg[1:]}", key, place, also=(node.place,))
    except (ValueError, RecursionError, MemoryError) as exc:
        yield Fault(f"`{named(node)}` is not Python: {exc}", key, node.place)
    else:
        if key == "task":
            yield from _task_faults(tree, file, node)
        if key == "script":
            yield from _relative_faults(tree, source, file, node)


def _relative_faults(tree: ast.Module, source: bytes, file: Path, node: YamlNode) -> Iterator[Fault]:
    """Yield a fault for the first top-level relative import of a script: Python runs a script outside any package."""
    found = next((each for each in tree.body if isinstance(each, ast.ImportFrom) and each.level), None)
    if found is None:
        return
    parts = PurePath(os.path.normpath(node.value)).with_suffix("").parts
    line = source.decode(errors="replace").splitlines()[found.lineno - 1]
    place = Place(os.fspath(file), found.lineno, found.col_offset + 1, line)
    hint = f"write `module: {'.'.join(parts)}` in place of `script`" if len(parts) > found.level else ""
    hint = hint or "the file is in no package: import without the dot"
    message = "a relative import works in a module of a package, not in a script"
    yield Fault(message, "script", place, hint, also=(node.place,))


def _task_faults(tree: ast.Module, file: Path, node: YamlNode) -> Iterator[Fault]:
    names = dict(_top_level(tree.body))
    if "*" in names:
        return  # `from x import *` may define the functions
    missing = [name for name in TASK_FUNCTIONS if name not in names]
    if missing:
        calls = [f"{name}({', '.join(TASK_FUNCTIONS[name])})" for name in missing]
        close = [(name, match[0]) for name in missing if (match := get_close_matches(name, names, 1, 0.7))]
        hint = "; ".join(f"is `{match}` meant to be `{name}`?" for name, match in close)
        hint = hint or "a task file holds model(params), dataset(params, split) and loss(model, batch)"
        yield Fault(f"`{named(node)}` has no {quoted(calls)}", "task", node.place, hint)
    for name, arguments in {**TASK_FUNCTIONS, **_OPTIONAL_FUNCTIONS}.items():
        function = names.get(name)
        if isinstance(function, ast.FunctionDef) and not _takes(function, len(arguments)):
            line = ast.unparse(function).splitlines()[len(function.decorator_list)]
            place = Place(os.fspath(file), function.lineno, function.col_offset + 1, line)
            message = f"`{name}` cannot be called as `{name}({', '.join(arguments)})`"
            yield Fault(message, "task", place, also=(node.place,))


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that a module defines, with the defining statement; `if`, `try` and `with` are searched too."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name), statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                yield from ((part.id, statement) for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _top_level(statement.body)
            yield from _top_level(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _takes(function: ast.FunctionDef, count: int) -> bool:
    """Return whether the function can be called with `count` positional arguments."""
    spec = function.args
    most = len(spec.posonlyargs) + len(spec.args)
    fewest = most - len(spec.defaults)
    named_only = sum(default is None for default in spec.kw_defaults)
    return (spec.vararg is not None or count <= most) and fewest <= count and not named_only


def needed(config: JobConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the keys that name files of the code, each with a path below `folder`; `args` where they name a path."""
    named = {"script": config.script, "task": config.task, accelerate.KEY: config.distributed.accelerate_config}
    yield from ((key, name) for key, name in named.items() if name and _what(folder / name) == "file")
    start = PurePath(config.distributed.workdir or ".")
    module = os.path.normpath(start.joinpath(*(config.module or "").split(".")))
    for name in (f"{module}.py", f"{module}/__main__.py") if config.module else ():
        if _what(folder / name) == "file":
            yield "module", name
    before = ""
    for option, _, value in (word.rpartition("=") for word in config.args):
        name = os.path.normpath(start / value)
        is_kept = any(PurePath(value).is_relative_to(kept) for kept in config.keep)  # the job itself writes the file
        is_read = not (is_kept or _WRITTEN.search(option or before) or name.startswith(("..", "/")))
        if is_read and (_what(folder / name) == "file" or (_READ.search(option or before) and _what(folder / name))):
            yield "args", name
        before = value
    for key, wanted in _lists_of_packages(config):
        from cloudtrain.entrypoints.environments import requirements, venvs  # few jobs have requirements
        from cloudtrain.entrypoints.errors import Refused

        yield key, requirements.split(wanted)[0]
        with contextlib.suppress(Refused):
            found, top = requirements.read(wanted, folder), folder.resolve()
            below = venvs.check(found.text, found.folder if key == "requirements" else folder)
            yield from ((key, path.relative_to(top).as_posix()) for path in below if path.is_relative_to(top))


def _lists_of_packages(config: JobConfig) -> Iterator[tuple[str, str]]:
    own = getattr(getattr(config, config.backend, None), "requirements", None)
    for key, wanted in (("requirements", config.requirements), (f"{config.backend}.requirements", own)):
        if wanted:
            yield key, wanted


def notes_of(config: JobConfig, folder: Path, ranks: int = 1) -> Iterator[str]:
    """Yield the notes on the code in `folder`, before the code is shipped; a note is a warning, and refuses nothing.

    Missing modules, empty git submodules, unused lists of packages, lost files. The notes on a script are guesses from
    the text of its file. `ranks`: of the plan, which knows the GPUs of a machine.
    """
    several = ranks > 1 or config.resources.instances > 1 or config.distributed.nproc_per_node not in ("auto", 1)
    yield from _submodules(folder)
    yield from _packages(config, folder)
    if config.script:
        yield from _script(config, config.script, _text(folder / config.script), several=several)
    if entry := config.script or (config.module and f"{config.module.replace('.', '/')}.py"):
        if several and not config.distributed.allow_alone:
            yield from _meeting(config, entry, _text(folder / entry))
        yield from _accelerate(config, entry, folder)
        yield from _deepspeed(config, entry, folder)
    words = [*config.args, *config.resume_args]
    if left := [name for word in words for name in _OF_SHELL.findall(word) if name not in variables.OF_TORCHRUN]:
        yield f"args: no shell replaces {quoted(f'${name}' for name in dict.fromkeys(left))}: the script gets this text"
    first, start = (config.module or "").partition(".")[0], folder / (config.distributed.workdir or "")
    path = variables.expanded(config.env.get("PYTHONPATH", ""), {"CLOUDTRAIN_CODE_DIR": str(folder.absolute())})
    places = [start, *(start / each for each in path.split(os.pathsep) if each)]
    if first and not any(_is_in_code(each, first) for each in places) and not _is_installed(first):
        near = next((each.parent.name for each in folder.glob(f"*/{first}") if each.is_dir()), None)
        there = f"; {near}/ has it: set `distributed.workdir: {near}`, or `env.PYTHONPATH`" if near else ""
        yield f"module: `{first}` is neither in the code folder nor installed here; the nodes must have it{there}"


def _submodules(folder: Path) -> Iterator[str]:
    """Yield a note for each git submodule in the folder that was not fetched: an empty folder."""
    top = next((each for each in (folder, *folder.resolve().parents) if (each / ".git").exists()), folder).resolve()
    for path in map(str.strip, _SUBMODULE.findall(_text(top / ".gitmodules"))):
        place = top / path
        if place.is_relative_to(folder.resolve()) and place.is_dir() and not any(place.iterdir()):
            yield f"code: the git submodule `{path}` is empty, and shipped so; git submodule update --init {path}"


def _packages(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield a note for each list of packages, in a file or in the header of the script, that no node installs."""
    for key, wanted in _lists_of_packages(config):
        text = _text(folder / wanted.partition("[")[0])
        read = re.findall(r"^[^#\n]*?\$\{([A-Z0-9_]+)\}", text, re.MULTILINE)
        if lost := ", ".join(sorted({*read} - {*config.secrets, *config.env})):
            yield f"{wanted} reads {lost}: set `secrets: [{lost}]`, unless each node has the variable"
        if key == "requirements" and (pinned := _OF_TORCH.search(text)):
            yield f"{wanted} asks for torch {pinned[1]}: with another torch on a node, the job fails at its start"
    if any(_lists_of_packages(config)) or any("install" in line for line in config.setup):
        return
    script = config.script or config.task
    if script and _lists_packages(_text(folder / script)):
        yield f"the header of {script} lists packages, and nothing installs them: set `requirements: {script}`"
    beside = [Path(), *([Path(script).parent] if script else [])]
    found = next((name for each in beside if (folder / (name := each / "requirements.txt")).is_file()), None)
    if found is not None:
        yield f"nothing installs {found} on the nodes: set `requirements: {found}`"


def _lists_packages(text: str) -> bool:
    """Return whether the header of a script lists packages (PEP 723)."""
    if "# /// script" not in text:
        return False
    from cloudtrain.entrypoints.environments.requirements import headers  # with the reader of requirements

    return any(map(_LISTS.search, headers(text)))


def _script(config: JobConfig, script: str, text: str, *, several: bool) -> Iterator[str]:
    """Yield a note for files that are lost, for a missing `resume_args`, and for ranks that do not train together."""
    is_kept = any(not name.startswith("!") for name in config.keep)
    if _SAVES.search(text) and not (config.keep or config.outputs or _FOLDERS.search(text)):
        yield (
            f"{script} saves files, and `keep` is not set: files outside CLOUDTRAIN_CHECKPOINT_DIR are lost with the"
            " machines; name the files in `keep`"
        )
    if is_kept and not config.resume_args and (option := _RESUMES.search(text)):
        yield (
            f"{script} takes {option[1]}, and `resume_args` is not set: after a fault or a stop the script starts"
            " without this option: write the option in `resume_args`"
        )
    if several and text and not config.distributed.allow_alone and not _JOINS.search(text):
        yield f"{script} does not name torch.distributed: each rank would train alone, on all of the data"


def _meeting(config: JobConfig, script: str, text: str) -> Iterator[str]:
    """Yield notes on ranks that would look for each other at a place of the script's own, or not know their number."""
    if not _PLACES.search(text):
        return
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = list(_own_places(ast.parse(text).body))
        if own:
            sets = f"{script} sets {', '.join(dict.fromkeys(own))}"
            yield f"{sets}: with values other than torchrun's the ranks do not meet; leave torchrun's as they are"
    words = repr((config.args, config.resume_args))
    if (option := _LOCAL_RANK.search(text)) and "LOCAL_RANK" not in text and "local_rank" not in words:
        yield f"{script} takes {option[1]}, which torchrun does not pass: set `args: [{option[1]}=$LOCAL_RANK]`"


def _accelerate(config: JobConfig, script: str, folder: Path) -> Iterator[str]:
    """Yield a note on settings of `accelerate config` for a script that uses Accelerate, if no key reads them."""
    name, start = config.env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "$"), folder / (config.distributed.workdir or "")
    if not name.startswith("$") and (PurePath(name).is_absolute() or _what(start / name) != "file"):
        yield f"{accelerate.KEY}: deepspeed_config_file names {name}, which is not in the shipped code"
    is_set = config.distributed.accelerate_config or any(name.startswith("ACCELERATE_") for name in config.env)
    if is_set or not _ACCELERATED.search(_text(folder / script)):
        return
    unread = []
    for place in (each for each in (folder / script).parents if each.is_relative_to(folder)):
        for below in ("", *(each for each in _names_in(place, "") if re.search("config|accelerate", each))):
            names = [name for suffix in (".yaml", ".yml", ".json") for name in _names_in(place / below, suffix)]
            paths = [place / below / name for name in names]
            unread += [path.relative_to(folder).as_posix() for path in paths if accelerate.is_settings(_text(path))]
    what = "which `accelerate launch` would"
    if len(unread) > 1:
        yield f"nothing reads {unread[0]}, nor {len(unread) - 1} more, {what}: set `{accelerate.KEY}` to the right file"
    elif unread:
        yield f"nothing reads {unread[0]}, {what}: set `{accelerate.KEY}: {unread[0]}`"
    elif file := accelerate.own_default():
        yield f"nothing reads {file}, {what}: copy it into the code, and set `{accelerate.KEY}: {file.name}`"


def _deepspeed(config: JobConfig, script: str, folder: Path) -> Iterator[str]:
    """Yield notes on what DeepSpeed's launcher would read: its options among `args`, and its file of variables."""
    text, words = _text(folder / script), {word.partition("=")[0] for word in config.args}
    if "deepspeed" not in text and "--deepspeed" not in words:
        return
    for name in (each for each in _OF_DEEPSPEED if f"--{each}" in words and not re.search(rf"\b{each}\b", text)):
        yield f"args: --{name} is an option of the `deepspeed` launcher: leave it out; {_OF_DEEPSPEED[name]}"
    for shown, file in ((".deepspeed_env", folder), ("~/.deepspeed_env", Path.home())):
        lines = _text(file / ".deepspeed_env").splitlines()
        if lost := {line.partition("=")[0].strip() for line in lines if "=" in line} - config.env.keys():
            yield f"nothing reads {shown}, which `deepspeed` would: set {', '.join(sorted(lost))} under `env`"


def _own_places(body: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what the code sets, in words. A setting below a test of the environment serves a start without torchrun."""
    for node in body:
        if isinstance(node, ast.If) and _OF_ENVIRONMENT.search(ast.unparse(node.test)):
            continue
        for name, value in _set_variables(node):
            number = value.args[0] if isinstance(value, ast.Call) and ast.unparse(value.func) == "str" else value
            is_free = name == "MASTER_PORT" and "free_port" in ast.unparse(value)
            if name in variables.OF_TORCHRUN and (is_free or isinstance(number, ast.Constant)):
                yield f"{name} to {ast.unparse(value)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("init_process_group"):
            named = [each.value for each in node.keywords if each.arg == "init_method"]
            method = next(map(ast.unparse, (*named, *node.args[1:2])), "")
            if _LOOPBACK.search(method):
                yield f"init_method to {method}"
        yield from _own_places(ast.iter_child_nodes(node))


def _set_variables(node: ast.AST) -> Iterator[tuple[object, ast.expr]]:
    """Yield each variable of the environment that the statement or call sets, with the value."""
    several: list[ast.expr] = []
    if isinstance(node, ast.Assign) and isinstance(place := node.targets[0], ast.Subscript):
        if isinstance(place.slice, ast.Constant) and ast.unparse(place.value).endswith("environ"):
            yield place.slice.value, node.value
    elif isinstance(node, ast.AugAssign) and ast.unparse(node.target).endswith("environ"):
        several = [node.value]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.update"):
        several = node.args
        yield from ((each.arg, each.value) for each in node.keywords)
    for each in several:
        if isinstance(each, ast.Dict):
            pairs = zip(each.keys, each.values, strict=True)
            yield from ((key.value, value) for key, value in pairs if isinstance(key, ast.Constant))


def _text(path: Path) -> str:
    try:
        return foreign.read_text(path)
    except (OSError, ValueError):
        return ""
