"""Rules that span several keys of the config; each fault points at all the keys of the broken rule.

The rules read the tree of the file, not the finished Config: only the tree distinguishes a written value from a
default. A value of the wrong type breaks no rule, because the validation of the schema reports the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.rank import variables
from cloudtrain.entrypoints.stores import STORES, forms
from cloudtrain.entrypoints.sweep.search import BATCH, COPYING, PAUSING
from cloudtrain.entrypoints.sweep.space import Dimension, SpaceError, dimensions, grid

from ..backend_table import BUILT_IN, PLACES, plugins, similar, traits
from ..channels import CHANNEL_KINDS
from ..errors import Fault
from ..text import addresses
from . import entries, fields, foreign_keys, schema
from .schemafaults import between, both, dotted, either, named, slashed
from .yamlfile import KeyPath, YamlNode, find, given, key_place, scalars, text_at, whole_at

_RUNNABLES = ("task", "script", "module")
_OF_SCRIPTS = (
    *("resume_args", "keep", "progress", "on_stop"),
    *("distributed.stop_signal", "distributed.accelerate_config", "distributed.workdir"),
)
_IN_A_TASK = {  # what a task has in place of a script's key
    "args": "a task takes its settings from `params`",
    "distributed.workdir": "a task has the code folder as its working directory: leave the key out",
}
_PATHS = (
    *("keep", "inputs", "outputs", "init_from", "init_from.path", "code.exclude"),
    *("checkpoint.uri", "checkpoint.mirror"),
)
_LAUNCHERS = (
    *("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli"),
)
STORED = "the stored config"  # the place of a job's own values, which newer rules do not refuse
_FEWEST = 4  # trials of pbt
_WITH_PAUSES = ", ".join(PAUSING[:-1]) + f" and {PAUSING[-1]}"
_VARYING = ("training", "params", "env", "args")
_LENGTHS = ("training.max_steps", "training.pause_at", "training.monitor")
_FREE = ("params", "env", "args")  # sections whose keys the user names
_NAME_FORMS = {  # section: the pattern of a name, the noun, and the hint
    "env": ("[A-Za-z_][A-Za-z0-9_]*", "variable", "a variable's name has letters, digits and `_`"),
    "args": (r"[^\s=]+", "option", "an option's name has no blank and no `=`"),
}
# A copy of a trial needs the same state.
_FIXED = ("training.optimizer.name", "training.strategy", "training.parallel", BATCH)


def faults_of(root: YamlNode) -> list[Fault]:
    """Return a fault for every broken rule."""
    of_runs = (_one_to_run, _only_where_they_count, _exclusive, _initial, _test, _numbers, _contradictions)
    of_places = (_patterns, _mirror, _backslashes, _written, _inputs)
    of_names = (_notify, _launchers, _environment, _references)
    of_several = (_backend, _sweep, entries.faults_of)
    return [fault for rule in (*of_runs, *of_places, *of_names, *of_several) for fault in rule(root)]


def _one_to_run(root: YamlNode) -> Iterator[Fault]:
    present = [name for name in _RUNNABLES if given(root, name)]
    if len(present) > 1:
        hint = "keep one: a `task` is run by the shared trainer, a `script` or `module` by torchrun as it is"
        yield between(root, f"{both(present)} exclude each other", hint, *((name,) for name in present))
    elif not present and not foreign_keys.RUNNABLE & root.value.keys():
        hint = "add `task: task.py` (the shared trainer), `script: train.py` or `module: pkg.train`"
        yield Fault("nothing to run: no `task`, `script` or `module`", place=root.place, hint=hint)


def _only_where_they_count(root: YamlNode) -> Iterator[Fault]:
    own = next((name for name in ("script", "module") if given(root, name)), "")
    for name in ("args", *_OF_SCRIPTS) if given(root, "task") and not own else ():
        if given(root, *(path := tuple(name.split(".")))):
            hint = _IN_A_TASK.get(name, "the shared trainer does so by itself: leave the key out")
            yield between(root, f"`{name}` goes with `script` or `module`, not with `task`", hint, path, ("task",))
    if own and not given(root, "task"):
        for name, hint in (
            ("params", "give them as `args`"),
            ("training", f"the {own} trains by itself: give settings as `args`, ranks under `distributed`"),
        ):
            if given(root, name):
                yield between(root, f"`{name}` goes with `task`, not with `{own}`", hint, (name,), (own,))


def _exclusive(root: YamlNode) -> Iterator[Fault]:
    blocks = schema.blocks_of(root.value)
    for section, first, second, hint in (
        ("training", "max_steps", "epochs", "keep one of the two"),
        ("resources", "accelerators", "instance_type", "an instance type says its accelerators already: keep one"),
        *((name, *pair, "keep one of the two") for name in blocks for pair in traits(name).exclusive),
    ):
        nodes = {name: node for name in (first, second) if (node := given(root, section, name))}
        if len(nodes) == 2:
            written = [name for name, node in nodes.items() if not node.place.file.startswith("--set ")]
            if len(written) == 1:  # the command line has the other
                hint = f"--set {section}.{written[0]}=null takes the file's away"
            message = f"`{first}` and `{second}` exclude each other"
            yield between(root, message, hint, (section, second), (section, first))
    saves, stop = given(root, "on_stop"), given(root, "distributed", "stop_signal")
    if saves and stop and saves.value == "save" and stop.value in ("SIGINT", "SIGHUP", "SIGUSR2"):
        message, hint = f"`on_stop: save` does not save at {stop.value}", "leave `stop_signal` out: it saves at SIGTERM"
        yield between(root, message, hint, ("distributed", "stop_signal"), ("on_stop",))


def _initial(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults of `init_from` that more than a single key shows."""
    node = given(root, "init_from")
    if node is None:
        return
    parents = [name for name in ("job", "path") if given(root, "init_from", name)]
    if isinstance(node.value, dict) and len(parents) != 1:
        message = "`init_from` needs exactly one of `job` and `path`"
        yield between(root, message, "a job's name, or a path or uri", ("init_from",))
    if text_at(root, "checkpoint", "resume") not in ("", "auto", "never"):
        hint = "`init_from` takes the weights alone, `checkpoint.resume` the whole training: keep one of the two"
        paths: list[KeyPath] = [("init_from",), ("checkpoint", "resume")]
        yield between(root, "`init_from` and a path in `checkpoint.resume` exclude each other", hint, *paths)
    if text_at(root, "init_from", "load") == "weights+optimizer":
        for name in ("rename", "skip"):
            if given(root, "init_from", name):
                hint = "the optimizer's state goes by the same names and shapes: write `load: weights`"
                message = f"`{name}` goes with `load: weights`, not with `weights+optimizer`"
                yield between(root, message, hint, ("init_from", name), ("init_from", "load"))
    if not given(root, "task"):
        for name in ("load", "rename", "skip", "strict"):
            if given(root, "init_from", name):
                hint = "a script loads the files at $CLOUDTRAIN_INPUT_INIT_FROM by itself"
                yield between(root, f"`init_from.{name}` goes with `task`", hint, ("init_from", name))


def _test(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults of `evaluate`: for a script, with a sweep, and without weights to test."""
    if given(root, "evaluate") is None:
        return
    if not given(root, "task"):
        hint = "a script writes figures of its own to CLOUDTRAIN_OUTPUT_DIR"
        yield between(root, "`evaluate` goes with `task`", hint, ("evaluate",))
    if given(root, "sweep"):
        hint = "`eval` chooses among trials; test the best trial afterwards: `cloudtrain best`, then `evaluate`"
        message = "with `sweep`, each trial would look at the test split"
        yield between(root, message, hint, ("evaluate",), ("sweep",))
    only = given(root, "evaluate", "only")
    if only and only.value is True and not given(root, "init_from"):
        yield between(root, "`evaluate.only` tests the weights of `init_from`", "add it", ("evaluate", "only"))


def _launchers(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault if `module` is a launcher: each rank would start more ranks."""
    module = text_at(root, "module")
    if module not in _LAUNCHERS:
        return
    node = given(root, "args")
    words = [each.text or str(each.value) for each in node.value] if node and isinstance(node.value, tuple) else []
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    hint = "name the program that it would start as `script: train.py` or `module: pkg.train`, its arguments as `args`"
    if at is not None:
        rest = f" and `args: [{', '.join(words[at + 1 :])}]`" if words[at + 1 :] else ""
        hint = f"write `script: {words[at]}`{rest} in its place"
    if module.startswith("accelerate."):
        hint += "; `distributed.accelerate_config` reads the file of `accelerate config`"
    message = f"`{module}` starts ranks of its own, and cloudtrain starts one for each GPU already"
    yield between(root, message, hint, ("module",))


def _numbers(root: YamlNode) -> Iterator[Fault]:
    whole = whole_at(root, "training", "global_batch_size")
    micro = whole_at(root, "training", "micro_batch_size")
    if whole and micro and whole % micro:
        lower, upper = whole // micro * micro, (whole // micro + 1) * micro
        message = f"`global_batch_size` {whole} is not a multiple of `micro_batch_size` {micro}"
        hint = f"write {f'{lower} or ' if lower else ''}{upper}"
        yield between(root, message, hint, ("training", "global_batch_size"), ("training", "micro_batch_size"))
    fewest = whole_at(root, "resources", "min_instances")
    written = given(root, "resources", "instances")
    instances = whole_at(root, "resources", "instances") if written else 1
    if fewest and instances and fewest > instances:
        paths = [("resources", "min_instances"), *([("resources", "instances")] if written else [])]
        message = f"`min_instances` {fewest} is more than `instances` {instances}"
        yield between(root, message, "a restart continues with fewer machines, never with more", *paths)


def _contradictions(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for every contradiction of training settings, at the keys that the file has."""
    if given(root, "training") is None:
        return
    from cloudtrain.entrypoints.trainer import contradictions  # a config of a script needs none of its records

    for refusal in contradictions.of(root.data()):
        paths = [tuple(key.split(".")) for key in refusal.keys]
        yield between(root, refusal.message, refusal.cure, *(path for path in paths if given(root, *path)))


def _backslashes(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each path of Windows in a key whose path is read on a node, or is a pattern."""
    for path in (tuple(key.split(".")) for key in _PATHS):
        for place, node in scalars(find(root, path), path):
            is_path = isinstance(node.value, str) and not node.broken and (place == path or path != ("init_from",))
            if is_path and (hint := slashed(node.value)):
                yield Fault(f"`{named(node)}` is a path of Windows", dotted(place), node.place, hint)


def _patterns(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each place of files that is a pattern: no platform and no script gets a list of files by it."""
    for path in (("inputs",), ("outputs",), ("checkpoint", "uri"), ("checkpoint", "mirror")):
        for place, node in scalars(given(root, *path), path):
            # A folder here may have such a name; no name of a file is longer than 255 bytes.
            is_here = len(node.text) < 60 and (Path(node.place.file).parent / node.text).exists()
            if (folder := addresses.above_pattern(node.text)) and not is_here:
                hint = f"name the folder, `{folder}`" if folder.rpartition("://")[2].strip("/") else "name the folder"
                text = named(node).partition("?")[0] if node.text.startswith("http") else named(node)
                yield Fault(f"`{text}` is a pattern, not one file or folder", dotted(place), node.place, hint)


def _written(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each place with two keys: files of one name would replace each other."""
    places: dict[str, KeyPath] = {}
    for section in (("checkpoint", "uri"), ("checkpoint", "mirror"), ("outputs",)):
        for path, node in scalars(given(root, *section), section):
            first = places.setdefault(node.text.removeprefix("file://").rstrip("/"), path)
            if first != path and node.text and node.place.file != STORED:  # an older job goes on
                message = f"`{dotted(first)}` and `{dotted(path)}` are one place"
                yield between(root, message, "give each its own, as in URI/model", path, first)


def _inputs(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults of inputs with a place for each backend: an unknown backend, no place for the job's backend."""
    inputs, chosen = given(root, "inputs"), given(root, "backend")
    backend = schema.backend_in(chosen.data() if chosen else None)
    variables_of: dict[str, str] = {}
    for name, entry in inputs.value.items() if inputs and isinstance(inputs.value, dict) else ():
        if (other := variables_of.setdefault(name.upper(), name)) != name:
            message = f"`{other}` and `{name}` are one variable, CLOUDTRAIN_INPUT_{name.upper()}"
            yield Fault(message, f"inputs.{name}", entry.key, "give one of the two another name")
        places = entry.value if isinstance(entry.value, dict) else {}
        unknown = [other for other in places if other not in BUILT_IN and other not in plugins()]
        for other in unknown:
            yield Fault(f"unknown backend `{other}`", f"inputs.{name}.{other}", places[other].key, similar(other))
        if places and not unknown and backend not in places:
            form = PLACES.get(backend, "PLACE").replace("NAME", name)
            along = f"write `{name}: PATH`: a path beside this file goes along to any backend"
            message, hint = f"the input `{name}` has no place for the backend `{backend}`", f"add `{backend}: {form}`"
            yield Fault(message, f"inputs.{name}", entry.key, f"{hint}, or {along}")


def _mirror(root: YamlNode) -> Iterator[Fault]:
    """Yield the fault that the trainer would find in `checkpoint.mirror` on a node (entrypoints/stores/store.py)."""
    node = given(root, "checkpoint", "mirror")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*):", text := text_at(root, "checkpoint", "mirror"))
    if node is not None and text.startswith("~") and node.place.file != STORED:
        message = f"`{named(node)}` is not a whole path, and the trainer would make a folder named `~`"
        yield Fault(message, "checkpoint.mirror", node.place, "a folder that stays, such as /mnt/nas/ckpt")
    if node is None or scheme is None:
        return
    store, rest = scheme[1].lower(), scheme.string[scheme.end() :]
    message, hint = "", ""
    if store not in STORES:
        close = get_close_matches(store, STORES, 1, 0.75)
        message = f"the trainer knows no `{scheme[1]}:` store to copy checkpoints to"
        *first, last = forms("PREFIX")
        hint = f"a folder such as /mnt/nas/ckpt, file:///mnt/nas/ckpt, {', '.join(first)}, or {last}"
        hint = f"did you mean `{close[0]}://`?" if close else hint
    elif store in addresses.SERVICES:
        message, hint = addresses.at_azure(store, rest)
    elif STORES[store].bucket:
        message, hint = addresses.in_bucket(f"{store}:{rest}", store) or ("", "")
    if message:
        yield Fault(message, "checkpoint.mirror", node.place, hint)


def _notify(root: YamlNode) -> Iterator[Fault]:
    entries = given(root, "notify")
    for index, entry in enumerate(entries.value if entries and isinstance(entries.value, tuple) else ()):
        if not isinstance(entry.value, dict):
            continue
        kinds = [name for name in CHANNEL_KINDS if given(root, "notify", index, name)]
        if not kinds:
            hint = "as in `{slack: env:SLACK_URL}`"
            yield Fault(f"no receiver: no {either(CHANNEL_KINDS)}", f"notify.{index}", entry.place, hint)
        elif len(kinds) > 1:
            message = f"{both(kinds)} exclude each other"
            yield between(root, message, "write an entry for each", *(("notify", index, kind) for kind in kinds))
        else:
            yield from _entry(root, index, kinds[0])


def _entry(root: YamlNode, index: int, kind: str) -> Iterator[Fault]:
    """Yield a fault for each key that does not fit the channel (`kind`) of an entry of `notify`."""
    place = ("notify", index)
    for key in ("smtp", "sender"):
        if kind != "email" and given(root, *place, key):
            yield between(root, f"`{key}` goes with `email`", "leave it out", (*place, key), (*place, kind))
    from_job = given(root, *place, "from_job")
    if from_job is None or from_job.value is not True:
        return
    address = "smtp" if kind == "email" else kind
    if kind == "apprise":
        hint = f"a job tells by {either([each for each in CHANNEL_KINDS if each != kind])}"
        message = "on the nodes there is no Apprise: `from_job` does not go with it"
        yield between(root, message, hint, (*place, "from_job"), (*place, kind))
    elif (node := given(root, *place, address)) and not str(node.value).startswith("env:"):
        hint = f"put the address into a variable and write `{address}: env:NAME`"
        message = f"with `from_job` the address travels as a secret, and `{address}` has it in clear"
        yield between(root, message, hint, (*place, address), (*place, "from_job"))


def _environment(root: YamlNode) -> Iterator[Fault]:
    env, secrets = given(root, "env"), given(root, "secrets")
    names = env.value if env and isinstance(env.value, dict) else {}
    for name in names:
        if name in variables.OF_TORCHRUN or name.startswith("CLOUDTRAIN_"):
            message = f"`{name}` is set on every rank by cloudtrain and torchrun"
            yield Fault(message, f"env.{name}", key_place(root, ("env", name)), "remove it")
    for index, item in enumerate(secrets.value if secrets and isinstance(secrets.value, tuple) else ()):
        if item.value in names if isinstance(item.value, str) else False:
            hint = "under `env` its value would be sent in clear: remove it there"
            message = f"`{item.value}` is in both `env` and `secrets`"
            yield between(root, message, hint, ("env", item.value), ("secrets", index))


def _references(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each reference to a variable of the job that no node sets."""
    inputs = given(root, "inputs")
    names = inputs.value if inputs and isinstance(inputs.value, dict) else {}
    own = ["init_from"] if given(root, "init_from") else []
    known = [*variables.NAMES, *(f"{variables.PREFIX}INPUT_{str(name).upper()}" for name in (*names, *own))]
    for key in ("args", "resume_args", "env"):
        for path, node in scalars(given(root, key), (key,)):
            for name in variables.references(node.text) if not node.broken else ():
                if name not in known:
                    close = get_close_matches(name.upper(), known, 1, 0.8)
                    start = next((each for each in known if name.startswith(each)), None)
                    hint = f"`$${name}` keeps the text as it is" if not close else f"did you mean `${close[0]}`?"
                    entry = name.removeprefix(f"{variables.PREFIX}INPUT_")
                    if entry != name and not close:
                        hint = f"add the entry, as in `inputs: {{{entry.lower()}: ./data}}`; {hint}"
                    if start is not None:
                        hint = f"write `${{{start}}}` where a letter, digit or `_` follows"
                    yield Fault(f"no node sets the variable `{name}`", dotted(path), node.place, hint)


def _backend(root: YamlNode) -> Iterator[Fault]:
    node = given(root, "backend")
    if node and isinstance(node.value, str) and node.value not in BUILT_IN and node.value not in plugins():
        yield Fault(f"unknown backend `{named(node)}`", "backend", node.place, similar(node.value))


def _sweep(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults of `sweep`: the space and its keys, the rungs, the size of a grid."""
    node = find(root, ("sweep",))
    written = node.data() if node is not None else None
    if not isinstance(written, dict) or not isinstance(written.get("space"), dict):
        return
    space: list[Dimension] = []
    for key, form in written["space"].items():
        if problem := _no_dimension(root, str(key)):
            yield _at(root, "sweep.space", *problem)
        try:
            space += dimensions({key: form})
        except SpaceError as error:
            yield _at(root, "sweep.space", f"`{error.key}`: {error.message}", error.hint)
    is_grid, trials = written.get("algorithm") == "grid", written.get("trials")
    try:
        count = len(grid(space)) if is_grid and len(space) == len(written["space"]) else 0
        if isinstance(trials, int) and trials < count:
            hint = f"`trials: {count}`, or leave it out"
            yield _at(root, "sweep.trials", f"the grid has {count} trials", hint)
    except SpaceError as error:
        yield _at(root, "sweep.space", f"`{error.key}`: {error.message}", error.hint)
    yield from _rungs(root, written)
    if "steps" in written and given(root, "task"):
        message = "`steps` are those of a script, and a task has `training.max_steps`"
        yield _at(root, "sweep.steps", message, "use `training.max_steps`")
    if written.get("algorithm") in COPYING:
        yield from _copies(root, written)
    patience = find(root, ("training", "monitor", "patience"))
    if patience is not None and patience.data() is not None and written.get("algorithm", "asha") in PAUSING:
        message = "a search with pauses ends bad trials by itself, and `patience` would end them between two rungs"
        yield _at(root, "training.monitor.patience", message, "leave `patience` out")
    named = find(root, ("checkpoint", "resume"))
    if named is not None and named.data() not in ("auto", "never"):
        message = "one checkpoint cannot be resumed by all trials of a sweep"
        yield Fault(message, "checkpoint.resume", named.place, "begin from its weights: `init_from`")


def _at(root: YamlNode, key: str, message: str, hint: str) -> Fault:
    """Return a fault at the key, or at the nearest section above that the file has."""
    steps = tuple(key.split("."))
    nodes = (find(root, steps[:count]) for count in range(len(steps), 0, -1))
    return Fault(message, key, next(filter(None, nodes), root).place, hint)


def _no_dimension(root: YamlNode, key: str) -> tuple[str, str] | None:
    """Return the message and the hint for a key that no trial can vary."""
    first = key.split(".")[0]
    if fields.field_at(tuple(key.split("."))) is not None and first not in _VARYING:
        return f"`{key}` cannot vary between trials", "a trial may vary `training`, `params`, `args` and `env`"
    if key.startswith(_LENGTHS):
        return f"`{key}` cannot vary: unlike trials cannot be compared", "leave the key out"
    if key in _VARYING:
        return f"`{key}` is a section", f"name a key of the section, as in `{key}.NAME`"
    if first == "args" and given(root, "task") is not None:
        return f"`{key}` is for a script, and a task gets `params`", f"use `params.{key.removeprefix('args.')}`"
    if first in _FREE and "." in key:
        wanted = _NAME_FORMS.get(first)
        if wanted is None or re.fullmatch(wanted[0], key.partition(".")[2]):
            return None
        return f"`{key}` names no {wanted[1]}", wanted[2]
    if fields.field_at(tuple(key.split("."))) is None:
        names = [name for part in fields.sections(schema.model()) for name in part.model_fields]
        near = get_close_matches(key.split(".")[-1], names, 1)
        hint = f"did you mean `{fields.keys_named(near[0])[0]}`?" if near else "cloudtrain explain lists keys"
        return f"`{key}` is no key of the config", hint
    return None


def _rungs(root: YamlNode, written: dict[str, Any]) -> Iterator[Fault]:
    if written.get("algorithm", "asha") not in PAUSING:
        return
    key, hint = "sweep.algorithm", "`algorithm: random` trains each trial to the end"
    last, is_task = _steps(root, written), given(root, "task") is not None
    if not last:
        steps = "`training.max_steps` or `training.epochs`" if is_task else "`sweep.steps`"
        yield _at(root, key, f"{_WITH_PAUSES} need {steps}, which rungs divide", hint)
        return
    if not is_task and written.get("algorithm") in COPYING:
        message = f"{written['algorithm']} copies checkpoints of a `task`, and a script's are unknown"
        yield _at(root, key, message, "`algorithm: asha`")
    if not is_task and written.get("instances") not in (None, 1):
        yield _at(root, key, f"{_WITH_PAUSES} cannot pause a script on several machines at once", hint)
    first = written.get("first_rung")
    if isinstance(first, int) and first > last:
        message = f"the first rung is beyond the end of the training, {last}"
        yield _at(root, "sweep.first_rung", message, "use a smaller number")


def _copies(root: YamlNode, written: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a search whose trials continue from copies of other trials."""
    name = written["algorithm"]
    if isinstance(count := written.get("trials"), int) and count < _FEWEST:
        message = f"{name} replaces a quarter of the trials, and {count} have no quarter"
        yield _at(root, "sweep.trials", message, f"at least {_FEWEST} trials")
    for key in written["space"]:
        if str(key).startswith(_FIXED):
            message = f"`{key}` cannot vary with {name}: a trial continues from another trial's weights and optimizer"
            yield _at(root, "sweep.space", message, "leave the key out, or use `algorithm: asha`")
    chosen = find(root, ("training", "schedule", "name")) or find(root, ("training", "schedule"))
    if chosen is not None and chosen.data() != "constant":
        message = f"{name} needs a constant schedule: a trial changes its learning rate by itself"
        yield Fault(message, "training.schedule", chosen.place, "`schedule: {name: constant}`")


def _steps(root: YamlNode, written: dict[str, Any]) -> int | None:
    """Return the steps or epochs of a whole training; None if the config does not name them."""
    steps = written.get("steps")
    if given(root, "task"):
        return whole_at(root, "training", "max_steps") or whole_at(root, "training", "epochs")
    return steps if isinstance(steps, int) else None
