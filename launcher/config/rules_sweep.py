"""Rules of the section `sweep`: the space and its keys, the rungs, and the size of a grid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from cloudtrain.entrypoints.sweep.search import BATCH, COPYING, PAUSING
from cloudtrain.entrypoints.sweep.space import SpaceError, dimensions, grid

from ..errors import Fault
from . import fields, schema
from .yamlfile import YamlNode, find, given, whole_at

_FEWEST = 4  # trials of pbt
_PAUSE = ", ".join(PAUSING[:-1]) + f" and {PAUSING[-1]}"
_VARYING = ("training", "params", "env", "args")
_LENGTHS = ("training.max_steps", "training.pause_at", "training.monitor")
_FREE = ("params", "env", "args")  # sections whose keys the user names
_NAME_FORMS = {  # section: the pattern of a name, the noun, and the hint
    "env": ("[A-Za-z_][A-Za-z0-9_]*", "variable", "a variable's name has letters, digits and `_`"),
    "args": (r"[^\s=]+", "option", "an option's name has no blank and no `=`"),
}
# A copy of a trial needs the same state.
_FIXED = ("training.optimizer.name", "training.strategy", "training.parallel", BATCH)


def faults_of(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for every broken rule of the section; a value of the wrong type is the schema's fault."""
    node = find(root, ("sweep",))
    written = node.data() if node is not None else None
    if not isinstance(written, dict) or not isinstance(written.get("space"), dict):
        return
    for key in written["space"]:
        if problem := _problem(root, str(key)):
            yield _fault(root, "sweep.space", *problem)
    try:
        space, trials = dimensions(written["space"]), written.get("trials")
        count = len(grid(space)) if written.get("algorithm") == "grid" else 0
        if isinstance(trials, int) and trials < count:
            hint = f"`trials: {count}`, or leave it out"
            yield _fault(root, "sweep.trials", f"the grid has {count} trials", hint)
    except SpaceError as error:
        yield _fault(root, "sweep.space", f"`{error.key}`: {error.message}", error.hint)
    yield from _rungs(root, written)
    yield from _steps_of_script(root, written)
    if written.get("algorithm") in COPYING:
        yield from _copies(root, written)
    yield from _pauses(root, written)
    named = find(root, ("checkpoint", "resume"))
    if named is not None and named.data() not in ("auto", "never"):
        message = "one checkpoint cannot be resumed by all trials of a sweep"
        yield Fault(message, "checkpoint.resume", named.place, "begin from its weights: `init_from`")


def _fault(root: YamlNode, key: str, message: str, hint: str) -> Fault:
    """Return a fault at the key, or at the nearest section above that the file has."""
    steps = tuple(key.split("."))
    nodes = (find(root, steps[:count]) for count in range(len(steps), 0, -1))
    return Fault(message, key, next(filter(None, nodes), root).place, hint)


def _problem(root: YamlNode, key: str) -> tuple[str, str] | None:
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
    key, hint, is_task = "sweep.algorithm", "`algorithm: random` trains each trial to the end", _is_task(root)
    last = _steps(root, written)
    if not last:
        steps = "`training.max_steps` or `training.epochs`" if is_task else "`sweep.steps`"
        yield _fault(root, key, f"{_PAUSE} need {steps}, which rungs divide", hint)
        return
    if not is_task and written.get("algorithm") in COPYING:
        message = f"{written['algorithm']} copies checkpoints of a `task`, and a script's are unknown"
        yield _fault(root, key, message, "`algorithm: asha`")
    if not is_task and written.get("instances") not in (None, 1):
        yield _fault(root, key, f"{_PAUSE} cannot pause a script on several machines at once", hint)
    first = written.get("first_rung")
    if isinstance(first, int) and first > last:
        message = f"the first rung is beyond the end of the training, {last}"
        yield _fault(root, "sweep.first_rung", message, "use a smaller number")


def _steps_of_script(root: YamlNode, written: dict[str, Any]) -> Iterator[Fault]:
    if "steps" in written and _is_task(root):
        message = "`steps` are those of a script, and a task has `training.max_steps`"
        yield _fault(root, "sweep.steps", message, "use `training.max_steps`")


def _pauses(root: YamlNode, written: dict[str, Any]) -> Iterator[Fault]:
    patience = find(root, ("training", "monitor", "patience"))
    if patience is not None and patience.data() is not None and written.get("algorithm", "asha") in PAUSING:
        message = "a search with pauses ends bad trials by itself, and `patience` would end them between two rungs"
        yield _fault(root, "training.monitor.patience", message, "leave `patience` out")


def _copies(root: YamlNode, written: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of a search whose trials continue from copies of other trials."""
    name = written["algorithm"]
    if isinstance(count := written.get("trials"), int) and count < _FEWEST:
        message = f"{name} replaces a quarter of the trials, and {count} have no quarter"
        yield _fault(root, "sweep.trials", message, f"at least {_FEWEST} trials")
    for key in written["space"]:
        if str(key).startswith(_FIXED):
            message = f"`{key}` cannot vary with {name}: a trial continues from another trial's weights and optimizer"
            yield _fault(root, "sweep.space", message, "leave the key out, or use `algorithm: asha`")
    chosen = find(root, ("training", "schedule", "name")) or find(root, ("training", "schedule"))
    if chosen is not None and chosen.data() != "constant":
        message = f"{name} needs a constant schedule: a trial changes its learning rate by itself"
        yield Fault(message, "training.schedule", chosen.place, "`schedule: {name: constant}`")


def _is_task(root: YamlNode) -> bool:
    return given(root, "task") is not None


def _steps(root: YamlNode, written: dict[str, Any]) -> int | None:
    """Return the steps or epochs of a whole training; None if the config does not name them."""
    steps = written.get("steps")
    if _is_task(root):
        return whole_at(root, "training", "max_steps") or whole_at(root, "training", "epochs")
    return steps if isinstance(steps, int) else None
