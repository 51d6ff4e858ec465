"""Notes on the code of a config: guesses from the text of the files, as warnings before a submit."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from cloudtrain.entrypoints.foreign import text_of
from cloudtrain.entrypoints.rank import variables
from cloudtrain.entrypoints.stores import STORES

from ..backend_table import traits
from . import accelerate
from .codefiles import is_in_code, is_installed, kind_of, lists_of_packages, names_in
from .schema import JobConfig
from .schemafaults import quoted

_SUBMODULE = re.compile(r"^[ \t]*path[ \t]*=(.+)$", re.MULTILINE)
_OF_TORCH = re.compile(r"""^[\s"']*torch\s*(={2,3}\s*[\w.+*]+)""", re.MULTILINE)
_LISTS = re.compile(r"^# dependencies\s*=", re.MULTILINE)
# The call by which a script saves a file; a folder kept after the end; an option to continue from a checkpoint.
_SAVES = re.compile(r"\b(?:torch\.save|save_file|save_pretrained|joblib\.dump|pickle\.dump|\w+\.save)\(")
_SCHEMES = "|".join(["abfs", *(name for name in STORES if name != "file")])
_FOLDERS = re.compile(rf"CLOUDTRAIN_(?:CHECKPOINT|OUTPUT)_DIR|\b(?:{_SCHEMES})://")
_RESUMES = re.compile(r"""["'](--?(?:resume|restore|continue|load|init|ckpt|checkpoint|snapshot)[\w-]*)["']""")
_JOINS = re.compile(
    r"distributed|process_group|accelerat|lightning|fabric|transformers|deepspeed|composer|horovod|\bray\b"
)
# A file run by a command, or by a shell for the command; the first line of a shell script.
_RUN = re.compile(r"(?:^\s*|[;&|(]\s*)(?:(?:source|\.|(?:ba|z|k|da)?sh)\s+(?:-\S+\s+)*)?([\w./\\-]+)")
_SHELL = re.compile(r"#!.*sh\b")
_IMPORTED = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
_ACCELERATED = re.compile(r"Accelerator|\b(?:transformers|trl)\b.*Trainer", re.DOTALL)
_PLACES = re.compile(r"MASTER_|WORLD_SIZE|RANK|init_method|tcp:|local[_-]rank")
_OF_ENVIRONMENT = re.compile(r"environ|getenv|RANK|WORLD_SIZE|MASTER_|is_(torchelastic|initialized|launched)|launcher")
# A rank for each host of SageMaker, as in AWS's examples for one process a host.
_BY_HOST = re.compile(r"SM_CURRENT_HOST.*(?:environ\[.RANK.\]\s*=|init_process_group\([^)]*\brank\s*=)", re.DOTALL)
# Behind the name of a variable, where the variable may be missing; of a variable without a substitute.
_DEFAULT = (r"[\"']\s*(?:,|\)\s*(?:is|or|and|:))", r"[\"']\s*[,)]")
_OF_SHELL = re.compile(r"(?<!\$)\$\{?(?!CLOUDTRAIN_)([A-Z]\w+)\b", re.ASCII)
_LOOPBACK = re.compile(r"tcp://(localhost|127\.)")
_LOCAL_RANK = re.compile(r"""(?:add_argument|option)\(\s*(?:["']-\w["'],\s*)?["'](--local[_-]rank)["']""")


def notes_of(config: JobConfig, folder: Path, ranks: int = 1, *, knows_torch: bool = False) -> Iterator[str]:
    """Yield the notes on the code in `folder`, before the code is shipped; a note is a warning, and refuses nothing.

    Missing modules, empty git submodules, unused lists of packages, lost files. The notes on a script are guesses from
    the text of its file. `ranks`: of the plan, which knows the GPUs of a machine. `knows_torch`: the plan compares the
    nodes' torch with the requirements (planning/images.py).
    """
    several = ranks > 1 or config.resources.instances > 1 or config.distributed.nproc_per_node not in ("auto", 1)
    yield from _submodules(folder)
    yield from _packages(config, folder, knows_torch=knows_torch)
    yield from _windows(config, folder)
    if config._left_out:
        names, cure = ", ".join(config._left_out), 'to pass the word as text, put it into quotes: "false"'
        yield f"{names}: false or null, so the option is left out, and the script's default counts; {cure}"
    if config.script:
        yield from _script(config, config.script, text_of(folder / config.script), several=several)
    if program := config.script or config.task or (config.module and f"{config.module.replace('.', '/')}.py"):
        yield from _of_platforms(config, program, text_of(folder / program))
        yield from _elsewhere(config, program, folder)
    if entry := config.script or (config.module and f"{config.module.replace('.', '/')}.py"):
        text = text_of(folder / entry)
        if several and not config.distributed.allow_alone:
            yield from _meeting(config, entry, text)
        if ranks > config.resources.instances and _BY_HOST.search(text) and not re.search("(?i)local_?rank", text):
            yield f"{entry} gives each host one rank (SM_CURRENT_HOST): set `distributed.nproc_per_node: 1`"
        yield from _accelerate(config, entry, folder)
        yield from _launchers(config, entry, folder)
    words = [*config.args, *config.resume_args]
    if left := [name for word in words for name in _OF_SHELL.findall(word) if name not in variables.OF_TORCHRUN]:
        names = quoted(f"${name}" for name in dict.fromkeys(left))
        theirs = "".join(f"'{name}" for name in left)
        ours = dict.fromkeys(each for backend in variables.OF_PLATFORMS for each in _names(theirs, backend).values())
        own = [f"${name}" for name in ours if name.isupper()]
        use = f"; write {quoted(own)}" if own else ""
        yield f"args: no shell replaces {names}: the script gets this text{use}"


def _submodules(folder: Path) -> Iterator[str]:
    """Yield a note for each empty git submodule in the folder."""
    top = next((each for each in (folder, *folder.resolve().parents) if (each / ".git").exists()), folder).resolve()
    for path in map(str.strip, _SUBMODULE.findall(text_of(top / ".gitmodules"))):
        place = top / path
        if place.is_relative_to(folder.resolve()) and place.is_dir() and not any(place.iterdir()):
            yield f"code: the git submodule `{path}` is empty, and shipped so; git submodule update --init {path}"


def _packages(config: JobConfig, folder: Path, *, knows_torch: bool) -> Iterator[str]:
    """Yield a note for each list of packages, in a file or in the header of the script, without an installation."""
    for key, wanted in lists_of_packages(config):
        text = text_of(folder / wanted.partition("[")[0])
        read = re.findall(r"^[^#\n]*?\$\{([A-Z0-9_]+)\}", text, re.MULTILINE)
        if lost := ", ".join(sorted({*read} - {*config.secrets, *config.env})):
            yield f"{wanted} reads {lost}: set `secrets: [{lost}]`, unless each node has the variable"
        if key == "requirements" and not knows_torch and (pinned := _OF_TORCH.search(text)):
            yield f"{wanted} asks for torch {pinned[1]}: with another torch on a node, the job fails at its start"
    if any(lists_of_packages(config)) or any("install" in line for line in config.setup):
        return
    script = config.script or config.task
    if script and _lists_packages(text_of(folder / script)):
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
    """Yield a note for lost files, for a missing `resume_args`, and for ranks that train alone."""
    is_kept = any(not name.startswith("!") for name in config.keep)
    named = "\n".join([text, *config.args, *config.env.values()])
    kept = any(map(_FOLDERS.search, (named, *_names(text, config.backend).values())))
    if _SAVES.search(text) and not (config.keep or config.outputs or kept):
        lost = "files outside CLOUDTRAIN_CHECKPOINT_DIR are lost with the machines"
        yield f"{script} saves files, and `keep` is not set: {lost}; name the files in `keep`"
    if is_kept and not config.resume_args and (option := _RESUMES.search(text)):
        again = "after a fault or a stop the script starts without this option"
        yield f"{script} takes {option[1]}, and `resume_args` is not set: {again}: write the option in `resume_args`"
    if several and text and not config.distributed.allow_alone and not _JOINS.search(text):
        yield f"{script} does not name torch.distributed: each rank would train alone, on all of the data"


@functools.lru_cache(maxsize=32)  # the candidates of a job have the same script
def _names(text: str, backend: str) -> dict[str, str]:
    """Return the platform's names that strings of the text begin with, each with what stands for the name."""
    found: dict[str, str] = {}
    table = variables.OF_PLATFORMS.get(backend, {})
    for ours, name in ((ours, name) for ours, names in table.items() for name in names.split()):
        pattern = re.escape(name).replace(r"\*", r"([\w-]*)")
        for match in re.finditer(f"[\"']({pattern})", text):
            found.setdefault(match[1], ours.replace("*", (match[2].upper() if "*" in name else "") or "X"))
    return found


def _of_platforms(config: JobConfig, script: str, text: str) -> Iterator[str]:
    """Yield notes on variables and paths of platforms in the script, which a job on this backend does not have."""
    here, words, nobodys = _names(text, config.backend), f"{text}\n{config.args}\n{config.env}", _names(text, "")
    for backend in (name for name in variables.OF_PLATFORMS if name != config.backend):
        lost = {
            theirs: ours
            for theirs, ours in _names(text, backend).items()
            if not (theirs in config.env or (ours and (ours in words or ours in here.values())))
            # The script serves both, or reads a number with a default.
            and not re.search(rf"[\"']{re.escape(theirs)}[\"'] (?:not )?in ", text)
            and (
                re.search("_DIR|INPUT", ours) or not re.search(rf"get(?:env)?\([\"']{theirs}{_DEFAULT[not ours]}", text)
            )
            and (not backend or theirs not in nobodys)
        }
        use = ", ".join(dict.fromkeys(filter(None, lost.values())))
        if lost:
            whose = f"only {traits(backend).help.rstrip('.')} has" if backend else "no job of cloudtrain has"
            own = next((f", or `env: {{{theirs}: ${ours}}}`" for theirs, ours in lost.items() if "CLOUD" in ours), "")
            yield f"{script} uses {', '.join(lost)}, which {whose}{f': use {use}{own}' if use else ''}"
    for theirs, ours in here.items():
        name = ours.removeprefix("CLOUDTRAIN_INPUT_").lower()
        is_there = name in map(str.lower, config.inputs)
        if name != ours.lower() and re.search(rf"environ\[.{theirs}.\]", text) and not is_there:
            yield f"{script} reads {theirs}, and `inputs` has no `{name}`"


def _windows(config: JobConfig, folder: Path) -> Iterator[str]:
    """Yield a note for each path of Windows, and for each file of `setup` that bash misreads (scripts: the packing)."""
    for word in (*config.args, *config.resume_args):
        path = word.rpartition("=")[2]
        if "\\" in path and kind_of(folder / (plain := path.replace("\\", "/"))):
            yield f"args: a path has slashes on the nodes: write `{plain}` in place of `{path}`"
        elif re.match(r"[A-Za-z]:[\\/]", path):
            yield f"args: no node has `{path}`: name the data under `inputs`, and write `$CLOUDTRAIN_INPUT_NAME` here"
    if ";" in (path := config.env.get("PYTHONPATH", "")):
        yield f"env.PYTHONPATH: a colon parts the folders on the nodes: write `{path.replace(';', ':')}`"
    for name in dict.fromkeys(name for line in config.setup for name in _RUN.findall(line)):
        plain = name.replace("\\", "/")
        if plain != name and (kind_of(folder / plain) == "file" or re.search(r"\w\\\w", name)):
            yield f"setup: bash drops the backslashes of `{name}`: write `{plain}`"
        elif "\r\n" in (text := text_of(folder / name)) and not (name.endswith((".sh", ".bash")) or _SHELL.match(text)):
            yield f"setup: {name} has Windows line ends (CRLF), and fails on a node: sed -i 's/\\r$//' {name}"


def _elsewhere(config: JobConfig, script: str, folder: Path) -> Iterator[str]:
    """Yield notes on a module to start and on imports that may lie in a folder beside the path: a `src` layout."""
    first, start = (config.module or "").partition(".")[0], folder / (config.distributed.workdir or "")
    path = variables.expanded(config.env.get("PYTHONPATH", ""), {"CLOUDTRAIN_CODE_DIR": str(folder.absolute())})
    places = [start, *(start / each for each in path.split(os.pathsep) if each)]
    if first and not any(is_in_code(each, first) for each in places) and not is_installed(first):
        near = next((each.parent.name for each in folder.glob(f"*/{first}") if each.is_dir()), None)
        there = f"; {near}/ has it: set `distributed.workdir: {near}`, or `env.PYTHONPATH`" if near else ""
        yield f"module: `{first}` is neither in the code folder nor installed here; the nodes must have it{there}"
    lists = "\n".join(text_of(folder / name.partition("[")[0]) for _, name in lists_of_packages(config))
    is_installed_there = re.search(r"^\s*\.", lists, re.MULTILINE) or any("install" in line for line in config.setup)
    if "PYTHONPATH" in config.env or is_installed_there:
        return
    paths = (folder, (folder / script).parent, start)
    for name in dict.fromkeys(_IMPORTED.findall(text_of(folder / script))):
        if any(kind_of(path / f"{name}{end}") for path in paths for end in ("", ".py")) or is_installed(name, folder):
            continue
        for place in sorted(file.parents[1].name for file in folder.glob(f"*/{name}/__init__.py"))[:1]:
            yield f"{script} imports {name}, which lies in {place}: set `env: {{PYTHONPATH: {place}}}`"


def _meeting(config: JobConfig, script: str, text: str) -> Iterator[str]:
    """Yield notes on ranks that would meet at a place of the script's own, or not know the local rank."""
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
    """Yield a note on unread settings of `accelerate config` for a script with Accelerate."""
    name, start = config.env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "$"), folder / (config.distributed.workdir or "")
    if not name.startswith("$") and (PurePath(name).is_absolute() or kind_of(start / name) != "file"):
        yield f"{accelerate.KEY}: deepspeed_config_file names {name}, which is not in the shipped code"
    is_set = config.distributed.accelerate_config or any(name.startswith("ACCELERATE_") for name in config.env)
    if is_set or not _ACCELERATED.search(text_of(folder / script)):
        return
    unread = []
    for place in (each for each in (folder / script).parents if each.is_relative_to(folder)):
        for below in ("", *(each for each in names_in(place, "") if re.search("config|accelerate", each))):
            names = [name for suffix in (".yaml", ".yml", ".json") for name in names_in(place / below, suffix)]
            paths = [place / below / name for name in names]
            unread += [path.relative_to(folder).as_posix() for path in paths if accelerate.is_settings(text_of(path))]
    what = "which `accelerate launch` would"
    if len(unread) > 1:
        yield f"nothing reads {unread[0]}, nor {len(unread) - 1} more, {what}: set `{accelerate.KEY}` to the right file"
    elif unread:
        yield f"nothing reads {unread[0]}, {what}: set `{accelerate.KEY}: {unread[0]}`"
    elif file := accelerate.own_default():
        yield f"nothing reads {file}, {what}: copy it into the code, and set `{accelerate.KEY}: {file.name}`"


def _launchers(config: JobConfig, script: str, folder: Path) -> Iterator[str]:
    """Yield notes on what other launchers would read: options among `args`, and a file of variables of DeepSpeed's."""
    from . import launch_line  # of a script alone

    text, words = text_of(folder / script), [word.partition("=")[0] for word in config.args if word.startswith("--")]
    named = {word: word[2:].replace("-", "_") for word in words}
    has_deepspeed = "deepspeed" in text or "--deepspeed" in words
    for launcher in ("torchrun", *(["deepspeed"] if has_deepspeed else [])):
        options = {name: it for name, it in launch_line.remedies(launcher).items() if it and not it.startswith("!")}
        for word, name in named.items():
            if name in options and not re.search(rf"\b{name.replace('_', '[-_]')}\b", text):
                yield f"args: {word} is an option of the `{launcher}` launcher: leave it out; {options[name]}"
    if not has_deepspeed:
        return
    for shown, file in ((".deepspeed_env", folder), ("~/.deepspeed_env", Path.home())):
        lines = text_of(file / ".deepspeed_env").splitlines()
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
    """Yield each variable of the environment set by the statement or call, with the value."""
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
