"""Contradictions of training settings: every row of the table refuses in the schema and on a rank, with the same words.

A strategy's or an optimizer's facts have one home, which the schema's lists and the trainer's makers follow.
"""

import ast
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, optim
from cloudtrain.entrypoints.trainer.contradictions import ROWS, Row
from cloudtrain.entrypoints.trainer.optimizer_facts import OPTIMIZERS
from cloudtrain.entrypoints.trainer.settings import TrainingSettings, read_spec
from cloudtrain.entrypoints.trainer.strategies.facts import FACTS
from cloudtrain.entrypoints.trainer.strategies.wrap import STRATEGIES, refusals, wrap
from cloudtrain.launcher import config
from cloudtrain.launcher.config.schema_training import OptimizerName, Strategy
from cloudtrain.launcher.errors import ConfigError

# A value for the rows about any value.
EXAMPLES: dict[str, Any] = {
    "shard_size": 2,
    "wrap_min_params": 9,
    "local": {"period": 32},
    "server": {"softsync": 2},
    "server.max_lead": 2,
    "compression_density": 0.1,
    "compression_warmup_steps": 9,
    "parallel.schedule": "gpipe",
    "parallel.cut": [2],
    "parallel.chunks": 2,
    "parallel.weights": "latest",
    "clip_norm": 1.0,
    "schedule.milestones": [4],
    "schedule.gamma": 0.5,
    "schedule.patience": 2,
    "optimizer.momentum": 0.9,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.eps": 1e-6,
    "optimizer.trust_coefficient": 0.01,
}


def put(training: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key."""
    *sections, name = key.split(".")
    for section in sections:
        training = training.setdefault(section, {})
    training[name] = value


def broken(row: Row) -> dict[str, Any]:
    """Return settings that break the row."""
    training: dict[str, Any] = {}
    other, values = row.other, row.other.values
    refused = values.start if isinstance(values, range) else next(iter(values or ()), None)
    if other.is_needed:  # the default, or a name that does not fit
        names = {"strategy": FACTS, "optimizer.name": OPTIMIZERS}.get(other.key, {})
        refused = next((name for name in names if isinstance(values, tuple) and name not in values), None)
    if refused is not None:
        put(training, other.key, refused)
    if row.under:
        put(training, *row.under)
    own = row.values.start if isinstance(row.values, range) else (row.values or (EXAMPLES[row.key],))[0]
    put(training, row.key, own)
    return training


def on_a_rank(folder: Path, training: dict[str, Any], checkpoint: dict[str, Any] | None = None) -> list[str]:
    """Return what a rank refuses in a job's spec."""
    spec = {"run": {"kind": "task"}, "training": {"global_batch_size": 32, "max_steps": 5, **training}}
    (folder / "spec.json").write_text(json.dumps(spec))
    return refusals(read_spec(folder / "spec.json").training, **(checkpoint or {}))


def in_the_schema(folder: Path, training: dict[str, Any], **sections: Any) -> dict[str, tuple[str, ...]]:
    """Return what the launcher refuses in a config, with the keys at which each fault points."""
    (folder / "task.py").write_text("def model(params): pass\ndef dataset(params, split): pass\ndef loss(m, b): pass\n")
    whole = {"name": "x", "backend": "local", "task": "task.py", "training": training, **sections}
    file = folder / "cloudtrain.yaml"
    file.write_text(json.dumps(whole, indent=1))
    lines = file.read_text().splitlines()
    try:
        config.load(file, environ={})
    except ConfigError as error:
        return {
            f"{fault.message}; {fault.hint}": tuple(
                lines[place.line - 1].split('"')[1] for place in (fault.place, *fault.also) if place
            )
            for fault in error.faults
        }
    return {}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.key}-{row.other.key}")
def test_row_refuses_on_both_sides(row: Row, tmp_path: Path) -> None:
    """The launcher and a rank refuse the same settings in the same words; a fault points at the keys of the file."""
    training = broken(row)
    on_rank, in_schema = on_a_rank(tmp_path, training), in_the_schema(tmp_path, training)
    assert set(on_rank) == set(in_schema)
    (words,) = [words for words in in_schema if words.endswith(f"; {row.cure}") and words.startswith(f"`{row.key}")]
    assert row.because in words
    names = {key.split(".")[-1] for key in (row.key, row.other.key, *(row.under or ())[:1])}
    assert set(in_schema[words]) == {name for name in names if f'"{name}"' in json.dumps(training)}


LOCAL = {"strategy": "local"}
PIPED = {"parallel": {"pipeline": 2, "schedule": "async"}}


@pytest.mark.parametrize(
    ("training", "every_steps", "words"),
    [
        ({**LOCAL, "local": {"period": 1}}, None, "averages after each step, which is ddp; write `strategy: ddp`"),
        (
            {**LOCAL, "local": {"period": 6, "group_period": 4}},
            None,
            "4 does not divide `local.period` 6; write one of 1, ",
        ),
        ({**LOCAL, "local": {"sync_steps": 20}}, None, "`local.sync_steps` 20 is no multiple of `local.period` 16"),
        (
            {**LOCAL, "eval_every": 100},
            None,
            "`eval_every` 100 is no multiple of `local.period` 16, and the ranks differ",
        ),
        ({**LOCAL, "pause_at": 100}, None, "`pause_at` 100 is no multiple of `local.period` 16"),
        (
            LOCAL,
            20,
            "`checkpoint.every_steps` 20 is no multiple of `local.period` 16, and the ranks differ then; write 16 or ",
        ),
        (LOCAL, 5, "and the ranks differ then; write 16"),
        (
            {"reproducible": "strict", "global_batch_size": 24, "micro_batch_size": 4},
            None,
            "a power of two of micro-batches, and 24 / 4 is 6; change one of the sizes",
        ),
        (
            {"max_steps": 5, "schedule": {"warmup_steps": 9}},
            None,
            "`schedule.warmup_steps` 9 is more than `max_steps` 5",
        ),
        ({**PIPED, "pause_at": 5}, 10, "`pause_at` 5 is no multiple of `checkpoint.every_steps` or `eval_every`"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_on_both_sides(
    training: dict[str, Any], every_steps: int | None, words: str, tmp_path: Path
) -> None:
    """So are numbers of steps, and the message has the nearest numbers that fit."""
    (on_rank,) = on_a_rank(tmp_path, training, {"every_steps": every_steps})
    (in_schema,) = in_the_schema(tmp_path, training, checkpoint={"every_steps": every_steps or 240})
    assert words in on_rank
    assert on_rank == in_schema


@pytest.mark.parametrize("training", [{}, LOCAL, {"strategy": "async"}, {"parallel": {"pipeline": 2}}, {"pause_at": 3}])
def test_settings_that_fit_are_not_refused(training: dict[str, Any], tmp_path: Path) -> None:
    """Defaults contradict nothing; ddp saves after any number of steps."""
    assert on_a_rank(tmp_path, training, {"every_steps": 32}) == []
    assert in_the_schema(tmp_path, {**training, "max_steps": 5}, checkpoint={"every_steps": 32}) == {}


def test_rungs_in_epochs_are_refused_between_averages(tmp_path: Path) -> None:
    """A packed sweep alone writes such rungs, so a rank refuses them."""
    for training in (LOCAL, PIPED):
        words = on_a_rank(tmp_path, {**training, "pause_epochs": 2})
        assert words == [
            "rungs in epochs end between two saves of this strategy; give `max_steps` in place of `epochs`"
        ]


def test_wrap_refuses_all_contradictions_at_once() -> None:
    """A trial of a sweep joins values that the submit has checked one at a time."""
    settings = TrainingSettings(6, strategy="fsdp", compression="bf16", reproducible="strict")
    with pytest.raises(TaskError, match=r"goes with `strategy: ddp`, not with `fsdp`.*a power of two of micro-batches"):
        wrap(settings, nn.Linear(1, 1), torch.device("cpu"), data.Split(6, 1, 2, 3))


def test_lists_of_names_are_equal() -> None:
    """A strategy and an optimizer stand in the table of facts, which the schema reads, and in the table of makers."""
    assert set(get_args(Strategy)) == set(FACTS) == set(STRATEGIES)
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS) == set(optim.OPTIMIZERS)


def test_names_of_strategies_are_compared_in_one_folder() -> None:
    """Other modules ask the table of facts, or the record: a new strategy changes no comparison elsewhere."""
    root, names, places = Path(__file__).resolve().parents[2], set(FACTS), []
    for file in [path for folder in ("entrypoints", "launcher", "backends") for path in (root / folder).rglob("*.py")]:
        here = str(file.relative_to(root))
        if here.startswith("entrypoints/trainer/strategies/"):
            continue
        kinds = ast.Compare | ast.Tuple | ast.Set | ast.List | ast.Dict
        for node in (each for each in ast.walk(ast.parse(file.read_bytes())) if isinstance(each, kinds)):
            texts = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            is_compared = isinstance(node, ast.Compare) and "strategy" in ast.unparse(node) and names & texts
            is_list = not isinstance(node, ast.Compare) and len(texts) > 1 and texts <= names
            if is_compared or is_list:
                places.append(f"{here}:{node.lineno}")
    assert places == []
