"""The imports of the code follow the architecture's arrows."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cloudtrain.launcher import cli
from cloudtrain.launcher.backend_table import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
# The parts of entrypoints that the launcher's side may use: modules at the top, folders, modules in folders.
FROM_ENTRYPOINTS = {"atomic_json", "contract", "errors", "events", "foreign", "format", "processes", "records"}
FROM_ENTRYPOINTS |= {"environments", "host", "notices", "terms"}
FROM_ENTRYPOINTS |= {"agent.node_folder", "agent.node_logs", "rank.rehearsal", "rank.savings"}
FROM_ENTRYPOINTS |= {
    *("checkpoints.folder", "models.folder", "models.order", "models.scratch", "models.tensors", "rank.tracebacks"),
    *("rank.variables", "serve.connections", "stores", "sweep.search", "sweep.space"),
    *("trainer.contradictions", "trainer.optimizer_facts", "trainer.strategies"),
}
# The rooms of the launcher that a backend may use: neither the life of a job nor the shown lines.
FROM_LAUNCHER = {"backend", "backend_table", "config", "errors", "job", "metering", "plan", "planning"}
FROM_LAUNCHER |= {"prices", "rehearsal", "store", "text"}
# The rooms of a folder, from the top down: a room imports only rooms behind it, also inside functions, for types, and
# by names in strings. A file at the top of the folder is a separate room.
LAUNCHER = """
cli
api
commands
completion
ui
live
report
selftest
rehearsal
sweeps
models
jobs
logs
notices
money
advice
planning
prices
store
backend
metering
config
text
channels
backend_table
job
plan
errors
"""
ENTRYPOINTS = """
train
container
host
agent
sweep
serve
export
trainer
scripts
environments
replication
models
checkpoints
stores
rank
notices
contract
atomic_json
foreign
events
format
terms
records
processes
errors
"""
ROOMS = {"launcher": LAUNCHER.split(), "entrypoints": ENTRYPOINTS.split()}
MOST_AT_THE_TOP = 9  # modules, without `__init__` and the stub of a public name
STUBS = {"train"}
# The duties of a backend. A file in a backend's folder is named by a duty, or by a duty and a part: `prices_list`.
DUTIES = {
    *("api", "backend", "block", "channel", "check", "doctor", "files", "hosts", "jobs", "logs", "machine", "models"),
}
SHARED = {"adapter", "cloud", "edge", "http", "job_folder"}  # for all platforms: see docs/architecture.md
SHARED_FOLDERS = {"channel"}  # calls to hosts and files from hosts: for ssh and for Slurm's login nodes
DUTIES |= {"preflight", "prices", "records", "rehearsal", "request", "sdk", "serving", "status"}
# Third-party modules that entrypoints may use, imported on first use.
SDKS = {"azure", "boto3", "botocore", "google", "onnxruntime", "transformers"}
HTTP = {"anyio", "h11", "starlette", "uvicorn"}  # of entrypoints/serve, which no job runs


@functools.cache
def import_nodes(folder: str) -> list[tuple[Path, ast.Import | ast.ImportFrom]]:
    """Return every import in the folder, inside functions too, with its file below the root."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes(), str(path)))
        found += [(path.relative_to(ROOT), node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    return found


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (file, module) for every import in the folder; `from a import b` is a.b."""
    for file, node in import_nodes(folder):
        origin = f"{absolute(file, node)}." if isinstance(node, ast.ImportFrom) else ""
        yield from ((str(file), f"{origin}{alias.name}") for alias in node.names)


def absolute(file: Path, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that `from ... import` names in the file."""
    package = ("cloudtrain", *file.parent.parts)
    base = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join((*base, *filter(None, [node.module])))


RUN_AS_TEXT = {"bootstrap.py"}  # has no package, so no relative imports


@pytest.mark.parametrize("folder", ["launcher", "backends", "templates", "entrypoints"])
def test_imports_are_relative_inside_a_folder(folder: str) -> None:
    """Tools that read imports as paths follow a relative import; an absolute import crosses a border of the folders."""
    wrong, bare = [], {"launcher", "backends", "templates", "entrypoints"}
    for file, node in import_nodes(folder):
        if isinstance(node, ast.Import):
            wrong += [(str(file), each.name) for each in node.names if each.name.split(".")[0] in bare]
        else:
            name, is_relative = absolute(file, node), node.level > 0
            is_inside = f"{name}.".startswith(f"cloudtrain.{folder}.") and file.name not in RUN_AS_TEXT
            is_wrong = is_inside != is_relative or name.split(".")[0] in bare
            wrong += [(str(file), name)] if is_wrong else []
    assert wrong == []


@pytest.mark.parametrize("backend", BUILT_IN)
def test_every_backend_uses_the_same_file_names(backend: str) -> None:
    """A reader of a backend finds the same duty under the same file name in a different backend."""
    names = {path.stem for path in (ROOT / "backends" / backend).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name.split("_")[0] for name in names - {"__init__", "__pycache__"}} <= DUTIES
    assert {"backend", "block", "check", "records", "rehearsal", "request"} <= names


def test_launcher_knows_no_concrete_backend() -> None:
    """A backend is found through the table, as a string, and imported on first use."""
    assert [found for found in imports("launcher") if found[1].startswith("cloudtrain.backends")] == []


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each string of a file with its line, without docstrings."""
    tree = ast.parse(file.read_bytes(), str(file))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_backends_are_named_in_the_table_alone() -> None:
    """No string of the launcher is a backend's name, or a dotted path that begins with a name.

    A text with spaces is for people and may name a backend. `ssh` in launcher/cli.py is an alias of the command `exec`,
    and `local` in the schema of `training` is a strategy.
    """
    of_training = "launcher/config/schema_training.py"
    path = re.compile(rf"(cloudtrain\.backends\.)?({'|'.join(BUILT_IN)})([.:/].*)?")
    found = [
        (str(file.relative_to(ROOT)), line, text)
        for file in sorted((ROOT / "launcher").rglob("*.py"))
        for line, whole in texts(file)
        for text in whole.splitlines()
        if path.fullmatch(text.split(": ")[0])
        if not (text.startswith("local") and str(file.relative_to(ROOT)) == of_training)
    ]
    table = "launcher/backend_table.py"
    assert [(file, text) for file, line, text in found if file != table] == [("launcher/cli.py", "ssh")]
    assert {text for file, line, text in found if file == table} == {*BUILT_IN, *BUILT_IN.values()}


def test_launcher_uses_only_the_light_parts_of_entrypoints() -> None:
    """The launcher uses the event grammar, formats and messages for people, and small tools, but no code of a node."""
    used = {name.split(".", 2)[2] for _, name in imports("launcher") if name.startswith("cloudtrain.entrypoints.")}
    assert [name for name in used if not {name.split(".")[0], ".".join(name.split(".")[:2])} & FROM_ENTRYPOINTS] == []


def modules_in_strings(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (file, module) for every string of the folder's files that is the dotted name of a cloudtrain module."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cloudtrain."):
                yield str(path.relative_to(ROOT)), node.value


def room(name: str) -> str:
    """Return the room of a dotted module name or of a file's path below a top folder."""
    return re.split(r"[./]", name)[1]


@pytest.mark.parametrize("folder", ROOMS)
def test_imports_run_downwards(folder: str) -> None:
    """A room imports only rooms behind it in the table: no circles, and a reader can begin at the bottom."""
    order = {name: place for place, name in enumerate(ROOMS[folder])}
    found = [*imports(folder), *modules_in_strings(folder)]
    ours = [
        (file, name.removeprefix("cloudtrain.")) for file, name in found if name.startswith(f"cloudtrain.{folder}.")
    ]
    arrows = [(file, name) for file, name in ours if room(name) in order]  # without prefixes of names
    assert [(file, name) for file, name in arrows if order[room(file)] > order[room(name)]] == []


def test_imports_have_no_circle() -> None:
    """No module needs itself, not even by an import inside a function or for types: a reader can begin anywhere."""
    arrows: dict[str, set[str]] = {}
    for folder in ("launcher", "backends", "templates", "entrypoints"):
        arrows |= {_module(path.relative_to(ROOT)): set() for path in (ROOT / folder).rglob("*.py")}
    for folder in ("launcher", "backends", "templates", "entrypoints"):
        for file, name in imports(folder):
            target = name if name in arrows else name.rpartition(".")[0]
            arrows[_module(Path(file))] |= {target} & arrows.keys() - {_module(Path(file))}
    while leaves := {name for name, targets in arrows.items() if not targets}:  # only circles have no leaf
        arrows = {name: targets - leaves for name, targets in arrows.items() if name not in leaves}
    while roots := arrows.keys() - set().union(*arrows.values()):
        arrows = {name: targets for name, targets in arrows.items() if name not in roots}
    assert {name: sorted(targets) for name, targets in arrows.items()} == {}


def _module(file: Path) -> str:
    """Return the dotted name of a file's module; a package's `__init__.py` is the package."""
    return ".".join(("cloudtrain", *file.with_suffix("").parts)).removesuffix(".__init__")


MOST_ATTRIBUTES = 15  # that a constructor sets; more is several classes in one
LARGE = {  # the number today, not to grow
    "LogStream": 19,  # two readers, of the cache and of the backend, and their order
    "Membership": 20,  # leader and follower in turn, and the times of both
    "WeightShard": 26,  # the optimizer's state of a shard, and its journal
    "Steps": 24,  # every form in which a script's output reports steps
    "FileKeeper": 19,
    "ShardServer": 16,
    "EntryFeed": 18,
    "LogCacheWriter": 16,
    "Agreement": 16,
    "Rounds": 17,
    "Links": 16,
    "Site": 16,
}


def test_no_class_sets_many_attributes() -> None:
    """A constructor with thirty attributes hides which of them change together."""
    found = {}
    for path in (path for folder in ("launcher", "backends", "entrypoints") for path in (ROOT / folder).rglob("*.py")):
        for kind in (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ClassDef)):
            makers = [each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            stores = (node for maker in makers for node in ast.walk(maker) if isinstance(node, ast.Attribute))
            names = {
                node.attr for node in stores if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
            }
            if len(names) > MOST_ATTRIBUTES:
                found[kind.name] = len(names)
    assert found == LARGE


def test_planning_imports_no_store() -> None:
    """The same config gives the same plan and request, whatever this machine's home has stored."""
    stores = ("cloudtrain.launcher.store", "cloudtrain.launcher.advice")
    assert [
        found for found in imports("launcher/planning") if f"{found[1]}.".startswith(tuple(f"{s}." for s in stores))
    ] == []


@pytest.mark.parametrize("folder", ROOMS)
def test_every_room_is_in_the_table(folder: str) -> None:
    """Each folder and file has its place in the table, and few modules are at the top."""
    entries = [path for path in (ROOT / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {path.stem for path in entries} - {"__init__"} == set(ROOMS[folder])
    assert (
        len([path for path in entries if path.is_file() and path.stem not in {"__init__", *STUBS}]) <= MOST_AT_THE_TOP
    )


LEAST_LINES = 35  # of a module; a smaller module belongs to its main user
SMALL_KINDS = re.compile(r"(.*/)?__(init|main)__\.py|launcher/commands/.*|backends/[^/]+/(block|records|request)\.py")
SMALL = {"entrypoints/errors.py": "the root of the errors", "entrypoints/train.py": "the stub of a public name"}


def test_no_module_is_too_small() -> None:
    """A module below 35 lines is a duty file of a backend, a command, or in the list with a reason."""
    files = [path for folder in ("launcher", "backends", "entrypoints") for path in (ROOT / folder).rglob("*.py")]
    small = {str(path.relative_to(ROOT)) for path in files if len(path.read_bytes().splitlines()) < LEAST_LINES}
    assert {file for file in small if not SMALL_KINDS.fullmatch(file)} == set(SMALL)


def test_class_names_are_unique() -> None:
    """A class name has one meaning in the product."""
    places: dict[str, list[str]] = {}
    for path in (path for folder in ("launcher", "backends", "entrypoints") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_bytes(), str(path)).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("folder", ["launcher", "backends"])
def test_torch_is_imported_only_on_the_nodes(folder: str) -> None:
    """No module imports torch or numpy, not even inside a function."""
    assert [found for found in imports(folder) if found[1].split(".")[0] in ("torch", "numpy")] == []


def test_entrypoints_import_no_other_cloudtrain_code() -> None:
    """They ship alone: imports are the standard library, torch, numpy, each other, and an SDK inside functions."""
    allowed = {*sys.stdlib_module_names, "torch", "numpy", *SDKS}
    foreign = [
        (file, name)
        for file, name in imports("entrypoints")
        if not name.startswith("cloudtrain.entrypoints.") and name.split(".")[0] not in allowed
        if not (file.startswith("entrypoints/serve/") and name.split(".")[0] in HTTP)
    ]
    assert foreign == []


def test_entrypoints_import_an_sdk_on_first_use() -> None:
    """A job that uses no cloud service needs no SDK on its machines."""
    files = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "entrypoints").rglob("*.py"))]
    names = [f"cloudtrain.{'.'.join(file.parts)}" for file in files if file.name != "__init__"]
    probe = f"import importlib, sys; [importlib.import_module(name) for name in {names}]\n"
    # A namespace package from a .pth file has no `__file__`, and none of its modules is imported.
    probe += "print(*{name.split('.')[0] for name in sys.modules if getattr(sys.modules[name], '__file__', None)})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert SDKS & set(done.stdout.split()) == set()


def test_backends_use_only_the_lower_rooms_of_the_launcher() -> None:
    """A backend reads what a node wrote by modules of the port."""
    used = {(file, name.split(".")[2]) for file, name in imports("backends") if name.startswith("cloudtrain.launcher.")}
    assert [(file, name) for file, name in used if name not in FROM_LAUNCHER] == []


def test_backends_do_not_know_each_other() -> None:
    """Code for two backends belongs to the launcher, or to SHARED; each folder can be removed without the rest."""
    crossing = [
        (file, name)
        for file, name in imports("backends")
        if name.startswith("cloudtrain.backends.")
        and name.split(".")[2] not in {file.split("/")[1], *SHARED, *SHARED_FOLDERS}
    ]
    assert crossing == []
    assert {path.stem for path in (ROOT / "backends").glob("*.py")} == {"__init__", *SHARED}


EMPTY = re.compile(r"(\[\]|\{\}|(\w+\.)?(dict|list|set|deque|defaultdict|OrderedDict|WeakValueDictionary)\(.*\))")


def test_backends_keep_no_state_in_modules() -> None:
    """Connections and caches belong to a backend's object: no module has an empty container or a rebound global."""
    found = []
    for path in sorted((ROOT / "backends").rglob("*.py")):
        tree = ast.parse(path.read_bytes(), str(path))
        values = [node.value for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value]
        found += [(path.name, node.lineno) for node in values if EMPTY.fullmatch(ast.unparse(node))]
        found += [(path.name, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert found == []


@pytest.mark.parametrize("name", ["launcher", "backends", "templates", "entrypoints"])
def test_ruff_refuses_the_bare_names(tmp_path: Path, name: str) -> None:
    """`import launcher` from the repository's root makes a second copy of every class; the linter refuses it."""
    file = tmp_path / "probe.py"
    file.write_text(f"from {name}.cli import main\n\n__all__ = ['main']\n")
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--no-cache", "--config", ROOT / "pyproject.toml"]
    done = subprocess.run([*ruff, "--output-format", "concise", file], capture_output=True, text=True, check=False)
    assert (done.returncode, "TID251" in done.stdout) == (1, True), done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_command_has_a_module_of_its_name(name: str) -> None:
    """`cloudtrain NAME` is launcher/commands/NAME.py, with a docstring, its own help and a line in the table."""
    module = importlib.import_module(f"cloudtrain.launcher.commands.{name}")
    assert isinstance(module.command, click.Command)
    assert f"cloudtrain {name}" in (module.__doc__ or "")
    assert module.command.help
    assert cli.COMMANDS[name].endswith(".")
    assert module.command.name == name


def test_every_command_is_in_the_table() -> None:
    """Every file in commands/ is in the table of commands."""
    files = {path.stem for path in (ROOT / "launcher" / "commands").glob("*.py")} - {"__init__", "options"}
    assert files == set(cli.COMMANDS)


def keys_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (owner, key) if the node reads a constant key: of `plan["ranks"]`, and of `(plan or {}).get("ranks")`."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
            yield ast.unparse(owner), key
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str(key)), *_]):
            yield ast.unparse(owner), key


@pytest.mark.parametrize(
    ("folder", "names"),
    [("launcher", "plan|ref|sending"), ("backends", "plan|ref|sending"), ("entrypoints", "spec|order|verdict")],
)
def test_typed_objects_are_read_by_their_fields(folder: str, names: str) -> None:
    """No module reads a plan, a handle or a message by a string key: their `load` alone knows the JSON names."""
    found = [
        (str(path.relative_to(ROOT)), owner, key)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes(), str(path)))
        for owner, key in keys_of(node)
        if re.search(rf"\b({names})$", owner)
    ]
    assert found == []
