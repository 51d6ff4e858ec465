"""The section `sweep`: faults with the way out, and the search from a config."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config
from cloudtrain.launcher.backend import Capacity
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import planner, prepare, search_spec
from cloudtrain.launcher.sweeps import overview

TASK: dict[str, Any] = {"name": "s", "task": "task.py", "training": {"max_steps": 810, "eval_every": 5}}
LR = {"training.optimizer.lr": {"log": [1e-5, 1e-1]}}
CPU, GPUS = Capacity(0, 0.0, "your own machine"), Capacity(gpus=8, hourly_usd=36.0, price_source="test", machine="m")


def load(tmp_path: Path, sweep: dict[str, Any], **more: Any) -> config.JobConfig:
    """Return the config of a task with the section."""
    (tmp_path / "task.py").write_text("def model(p): ...\ndef dataset(p, s): ...\ndef loss(m, b): ...\n")
    return config.load(tmp_path / "cloudtrain.yaml", data={**TASK, **more, "sweep": {"space": LR, **sweep}})


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"space": {"training.optimizer.rl": [1, 2]}}, "`training.optimizer.rl` is no key of the config"),
        ({"space": {"resources.instances": [1, 2]}}, "cannot vary between trials"),
        ({"space": {"training.optimizer.lr": {"log": [0, 1]}}}, "cannot begin at 0"),
        ({"space": {"training.optimizer.lr": [0.1]}, "first_rung": 811}, "beyond the end of the training, 810"),
        ({"place": "jobs"}, "unknown key `place`"),
        ({"metric": {"name": "accuracy", "mode": "max"}}, "expected"),
        ({"algorithm": "pbt", "space": {"training.optimizer.name": ["sgd", "adamw"]}}, "cannot vary with pbt"),
        ({"algorithm": "pbt", "trials": 3}, "at least 4 trials|no quarter"),
        ({"space": {"training.max_steps": [10, 20]}}, "unlike trials"),
        ({"space": {"training": [10, 20]}}, "is a section"),
        ({"space": {"args.lr": [10, 20]}}, "a task gets `params`"),
        ({"space": {"checkpoint.keep": [1, 2]}}, "cannot vary between trials"),
        ({"space": {"training.optimizer.lr": [1, 2, 3]}, "algorithm": "grid", "trials": 2}, "the grid has 3 trials"),
        ({"algorithm": "grid"}, "number of points"),
        ({"space": {"params.w": {"uniform": [0, 1], "points": 10**8}}, "algorithm": "grid"}, "100,000,000 trials"),
        ({"space": {"params.w": {"int": [1, 10**15]}}, "algorithm": "grid"}, "more than 100,000"),
        ({"metric": {"name": "accuracy"}}, "expected"),
        ({"space": {"params": [1, 2]}, "factor": 1}, "factor"),
        ({"steps": 300}, r"a task has `training\.max_steps`"),
        ({"steps": 10**21}, r"1000000000|10\^9"),  # would make dozens of rungs
    ],
)
def test_faulty_sweep_is_refused(sweep: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Each fault names its key, and says how to fix the sweep."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, sweep)
    assert any(re.search(words, fault.message + fault.key) for fault in caught.value.faults)


def test_sweep_resumes_no_single_checkpoint(tmp_path: Path) -> None:
    """The trials would have begun at step 0 in silence."""
    with pytest.raises(ConfigError, match="one checkpoint cannot be resumed by all trials"):
        load(tmp_path, {"space": {"training.optimizer.lr": [0.1, 0.2]}}, checkpoint={"resume": "/mnt/step-00000040"})


@pytest.mark.parametrize("algorithm", ["grid", "asha"])
@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"args.lr": {"log": 3}}, "one of uniform, log, int, choice with a list"),
        ({"args.lr": {"choice": "abc"}}, "one of uniform, log, int, choice with a list"),
        ({"args.lr": {"log": [1, 0.1]}}, "is not below the highest value"),
        ({"args.lr": {"log": [float("nan"), 1]}}, "needs two numbers"),
        ({"args.lr": {"int": [1, 10**400]}}, "needs two numbers"),
        ({"args": {"lr": [1, 2]}}, "`args` is a section"),
        ({"args.lr": None}, "a range or a list of choices is expected"),
        ({"env.A=B": [1, 2]}, "names no variable"),
        ({"args.l r": [1, 2]}, "names no option"),
        ({}, "at least 1 items"),
        (5, "expected a mapping of keys"),
        ([], "expected a mapping of keys"),
    ],
)
def test_faulty_space_has_a_place_after_the_checks_of_the_backend(
    space: Any, words: str, algorithm: str, tmp_path: Path
) -> None:
    """A config with faults is planned too, for the backend's faults; a space without meaning has no plan."""
    (tmp_path / "train.py").write_text("")
    sweep = {"space": space, "algorithm": algorithm, "steps": 90}
    data = {"name": "s", "script": "train.py", "budget": {"limit": 5}, "local": {"price_per_hour": 1}, "sweep": sweep}
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "cloudtrain.yaml", data=data, further=prepare.refused)
    fault = next(fault for fault in caught.value.faults if words in fault.message)
    assert (fault.key, fault.place is not None) == ("sweep.space", True)


def test_search_of_a_sweep_needs_what_its_algorithm_changes(tmp_path: Path) -> None:
    """A population's trials change their learning rates; rungs need max_steps or epochs, and random search does not."""
    with pytest.raises(ConfigError, match="constant schedule"):
        load(tmp_path, {"algorithm": "pbt"}, training={**TASK["training"], "schedule": {"name": "cosine"}})
    assert load(tmp_path, {"algorithm": "pbt", "first_rung": 100}).sweep is not None
    with pytest.raises(ConfigError, match=r"max_steps` or `training\.epochs"):
        load(tmp_path, {}, training={})
    assert load(tmp_path, {"algorithm": "random"}, training={}).sweep is not None


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"training.optimizer.lr": ["abc", 0.1]}, '"abc"'),
        ({"training.optimizer.name": ["sgd", "nosuch"]}, '"nosuch"'),
        ({"training.global_batch_size": {"int": [3, 8]}}, "with the value 3"),
    ],
)
def test_each_value_of_the_space_is_checked_at_the_plan(space: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A value that makes no valid config is refused before any trial starts."""
    training = {**TASK["training"], "micro_batch_size": 4, "global_batch_size": 8}
    found = load(tmp_path, {"space": space, "algorithm": "random"}, training=training)
    (fault,) = planner.value_faults(found, planner.make(found, Capacity(0, 0.0, "your own machine")))
    assert words in fault.message


CPU, GPUS = Capacity(0, 0.0, "your own machine"), Capacity(gpus=8, hourly_usd=36.0, price_source="test", machine="m")


@pytest.mark.parametrize(
    ("sweep", "instances", "capacity", "words"),
    [
        ({"parallel": 1}, 2, CPU, "leaves some of the 2 instances without work.*`parallel: 2`.*--instances 1"),
        ({"instances": 3}, 8, GPUS, "trials of 3 instances do not divide 8 instances.*one of 1, 2, 4, 8"),
        ({"instances": 2, "parallel": 3}, 8, GPUS, "`parallel: 4`, or `--instances 6`"),
        ({"instances": 2, "slots": 2}, 2, GPUS, "has all 8 ranks of each"),
        ({"slots": 3}, 1, GPUS, "3 GPUs of a trial do not divide the 8 GPUs"),
    ],
)
def test_machines_without_work_are_refused(
    sweep: dict[str, Any], instances: int, capacity: Capacity, words: str, tmp_path: Path
) -> None:
    """Trials that leave a machine idle, or that no machines fit, are refused with the numbers that fit."""
    found = load(tmp_path, sweep, resources={"instances": instances})
    with pytest.raises(ConfigError) as caught:
        planner.make(found, capacity)
    assert re.search(words, str(caught.value), re.DOTALL)


@pytest.mark.parametrize(
    ("sweep", "capacity", "shape"),
    [
        *(({}, CPU, (4, 1, 1)), ({"parallel": 5}, CPU, (2, 1, 1)), ({}, GPUS, (8, 1, 1))),
        *(({"slots": 2}, GPUS, (4, 2, 1)), ({"instances": 2}, GPUS, (1, 8, 2)), ({"instances": 2}, CPU, (1, 1, 2))),
    ],
)
def test_trials_fill_the_machines(
    sweep: dict[str, Any], capacity: Capacity, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """The trials at once on a machine, the ranks of a trial on a machine, and the machines of a trial."""
    training = {**TASK["training"], "global_batch_size": 32}
    plan = planner.make(load(tmp_path, sweep, training=training, resources={"instances": 4}), capacity)
    assert (plan.slots, plan.slot_ranks, plan.slot_instances, plan.nproc_per_node) == (*shape, 1)


def test_plan_says_what_time_and_money_must_buy(tmp_path: Path) -> None:
    """The plan of a sweep has the trials at once, the whole money and time, and the training that fits."""
    found = load(tmp_path, {"trials": 9, "first_rung": 90}, resources={"instances": 2})
    plan = planner.make(found, GPUS)
    lines = overview.plan_lines(found.model_dump(mode="json"), plan)
    assert lines[0] == "sweep: asha over 9 trials, at most 9 at once"
    assert lines[1].startswith("rungs at steps 90, 270, 810: about 26% of the steps")
    assert re.search(
        r"all trials together have .*, at worst .* USD: enough if a whole training takes at most", lines[2]
    )


def test_values_of_a_large_grid_are_checked_in_linear_time(tmp_path: Path) -> None:
    """Each value is checked without the list of all values."""
    times = []
    for count in (100, 800):
        space = {"training.optimizer.lr": [each / 1000 for each in range(1, count + 1)]}
        found = load(tmp_path, {"space": space, "algorithm": "grid"})
        plan = planner.make(found, CPU)
        began_s = time.process_time()
        assert planner.value_faults(found, plan) == []
        times.append(time.process_time() - began_s)
    assert times[1] < 20 * times[0]


def test_arguments_of_a_script_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own arguments have no rules, so a grid over them makes a single config."""
    found = script(tmp_path, {"space": {"args.lr": [each / 1000 for each in range(1, 400)]}, "algorithm": "grid"})
    plan, made, stored = planner.make(found, CPU), list[object](), config.stored
    monkeypatch.setattr(config, "stored", lambda *told, **more: made.append(told) or stored(*told, **more))
    assert planner.value_faults(found, plan) == []
    assert len(made) == 1


def script(tmp_path: Path, sweep: dict[str, Any]) -> config.JobConfig:
    """Return the config of a script with the section."""
    (tmp_path / "fit.py").write_text("print('step 1')\n")
    sweep = {"space": {"args.lr": {"log": [1e-4, 1]}}, **sweep}
    return config.load(tmp_path / "cloudtrain.yaml", data={"name": "s", "script": "fit.py", "sweep": sweep})


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({}, "need `sweep.steps`"),
        ({"steps": 300, "instances": 2}, "cannot pause a script on several machines"),
        ({"steps": 300, "algorithm": "pbt"}, "copies checkpoints of a `task`"),
        ({"steps": 300, "first_rung": 400}, "beyond the end of the training, 300"),
    ],
)
def test_faulty_sweep_of_a_script_is_refused(sweep: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Pauses of a script need the number of its steps, and one job for all trials."""
    with pytest.raises(ConfigError, match=words):
        script(tmp_path, sweep)


def test_script_trains_to_a_rung_or_to_its_own_end(tmp_path: Path) -> None:
    """The rungs follow from `steps`; without `steps`, the only rung of a trial is its own end."""
    found = script(tmp_path, {"steps": 300})
    stored = found.model_dump(mode="json")
    assert search_spec.search_of(stored).rungs == (3, 9, 27, 81, 243, 300)
    spec = search_spec.sweep_spec(stored, planner.make(found, CPU), "script")
    assert (spec["kind"], spec["until"]) == ("script", "rung")
    found = script(tmp_path, {"algorithm": "random"})
    stored = found.model_dump(mode="json")
    assert (search_spec.search_of(stored).rungs, search_spec.unit_of(stored)) == ((1,), "scripts")
    assert search_spec.sweep_spec(stored, planner.make(found, CPU), "script")["until"] == "end"


def test_rungs_count_steps_samples_or_epochs(tmp_path: Path) -> None:
    """The first is 1/81 of the steps and at least an evaluation's; samples if the batch varies; or epochs."""
    found = load(tmp_path, {}, training={**TASK["training"], "monitor": {"metric": "accuracy", "mode": "max"}})
    stored = found.model_dump(mode="json")
    search = search_spec.search_of(stored)
    assert search.rungs == (10, 30, 90, 270, 810)
    assert (search.trials, search.mode, search_spec.metric_of(stored)) == (27, "max", "accuracy")
    space = {"training.global_batch_size": [16, 64]}
    training = {**TASK["training"], "global_batch_size": 32}
    stored = load(tmp_path, {"space": space, "first_rung": 90}, training=training).model_dump(mode="json")
    assert search_spec.search_of(stored).rungs == (2880, 8640, 25920)
    assert search_spec.unit_of(stored) == "samples"
    assert search_spec.training_of(stored, {"training.global_batch_size": 64})["max_steps"] == 405
    space = {"training.global_batch_size": [8, 16]}
    stored = load(tmp_path, {"space": space, "first_rung": 2}, training={"epochs": 20}).model_dump(mode="json")
    assert (search_spec.search_of(stored).rungs, search_spec.unit_of(stored)) == ((2, 6, 18, 20), "epochs")
