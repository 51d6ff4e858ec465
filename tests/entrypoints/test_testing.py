"""The test of a task, in real runs: after the last step, and of another job's weights, on any number of ranks."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainerruns import Run, run, whole_run
from wholejobs import TESTED

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.checkpoints import folder as folders
from cloudtrain.entrypoints.checkpoints import weights
from cloudtrain.entrypoints.trainer import testing

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"text": TESTED % "", "max_steps": 10, "eval_every": 5, "micro_batch_size": 4}


def figures(done: Run) -> dict[str, Any]:
    """Return metrics-test.json."""
    assert done.code == 0, done.errors
    found: dict[str, Any] = json.loads((done.folder / "output/metrics-test.json").read_text())
    return found


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a job with an average of its weights, kept best checkpoints, and a test at the end."""
    checkpoint = {"keep_best": True}
    folder = tmp_path_factory.mktemp("parent")
    return run(
        folder, 2, job="parent", ema_decay=0.9, checkpoint=checkpoint, evaluate={"checkpoint": "last"}, **SETTINGS
    )


def test_test_after_the_last_step_equals_the_exported_model(parent: Run) -> None:
    """Table and loss are those of model.pt in plain torch; the trained weights and the average are compared."""
    found = figures(parent)
    namespace: dict[str, Any] = {}
    exec(TESTED % "", namespace)
    net: nn.Module = namespace["model"]({})
    net.load_state_dict(torch.load(parent.folder / "output/model.pt", weights_only=True))
    samples = [namespace["dataset"]({}, "test")[index] for index in range(53)]
    with torch.no_grad():
        score = net(torch.stack([x for x, _ in samples])).double()
    target = torch.tensor([y for _, y in samples])
    table = torch.zeros(3, 3, dtype=torch.int64)
    table.index_put_((target, score.argmax(1)), torch.tensor(1), accumulate=True)
    assert found["confusion"] == table.tolist()
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(score, target)), rel=1e-5)
    assert (found["n"], found["split"], found["step"], found["weights"]) == (53, "test", 10, "average")
    first, second, *_ = found["compared"]
    assert (first["weights"], second["weights"], first["step"], second["step"]) == ("average", "trained", 10, 10)
    assert first["loss"] == found["loss"] != second["loss"]
    event = parent.only("test")["test"]
    assert event["accuracy"] == pytest.approx(found["accuracy"], rel=1e-3)
    assert [each["e"] for each in parent.events][-2:] == ["test", "done"]


def test_figures_are_equal_on_any_number_of_ranks(parent: Run, tmp_path: Path) -> None:
    """A job of its own tests the parent's weights: the whole file is the parent's to the bit, without a training.

    The first predictions are those of the figures, in order, the same bytes on any number of ranks.
    """
    place = {"CLOUDTRAIN_INPUT_INIT_FROM": str(parent.folder / "checkpoints")}
    spec: dict[str, Any] = {"init_from": {"checkpoint": "last"}, "job": "later", **SETTINGS}
    spec["evaluate"] = {"only": True, "predictions": 40}
    same = ("n", "accuracy", "loss", "macro_f1", "classes", "confusion", "calibration", "worst", "batch_size")
    there, files = figures(parent), set()
    for ranks in (1, 2, 3, 4):
        done = run(tmp_path / str(ranks), ranks, env=place, **spec)
        found = figures(done)
        assert {name: found[name] for name in same} == {name: there[name] for name in same}
        assert (found["job"], found["parent"]["job"], found["parent"]["step"]) == ("later", "parent", 10)
        assert [each["e"] for each in done.events] == ["start", "test"]
        assert list((done.folder / "checkpoints").glob("step-*")) == []
        files.add((done.folder / "output/predictions-test.jsonl.gz").read_bytes())
    (predictions,) = files
    rows = [json.loads(line) for line in gzip.decompress(predictions).splitlines()]
    assert [row["index"] for row in rows] == list(range(40))
    worst = [each for each in found["worst"] if each["index"] < 40]
    assert worst == [rows[each["index"]] for each in worst] != []


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("None", "there is no split 'test': dataset(params, 'test') returned None"),
        ("raises", "dataset(params, 'test') raised KeyError"),
        ("train", "is the training split"),
    ],
)
def test_missing_split_is_refused_before_the_first_step(which: str, words: str, tmp_path: Path) -> None:
    """An impossible test ends the job at the start."""
    done = run(tmp_path, 1, evaluate={}, **{**SETTINGS, "text": TESTED % which})
    assert (done.code, done.values("step", "loss")) == (1, {})
    assert words in done.errors


def test_best_checkpoint_is_tested_where_the_last_is_not_the_best(tmp_path: Path) -> None:
    """If a high rate ruins the last weights, the figures belong to the best step, beside the last step's."""
    schedule = {"optimizer": {"name": "sgd", "lr": 10.0}, "schedule": {"name": "constant", "warmup_steps": 10}}
    settings = {**SETTINGS, **schedule, "eval_every": 2, "on_nan": "stop", "clip_norm": 50.0}
    done = run(tmp_path, 1, checkpoint={"keep_best": True}, evaluate={}, **settings)
    found = figures(done)
    step = json.loads((tmp_path / "checkpoints/best.json").read_text())["step"]
    assert step < 10
    assert (found["checkpoint"], found["step"]) == ("best", step)
    assert [(each["checkpoint"], each["step"]) for each in found["compared"]] == [("best", step), ("last", 10)]
    assert found["compared"][0]["loss"] != found["compared"][1]["loss"]


def test_task_without_outputs_has_its_means(tmp_path: Path) -> None:
    """Without `outputs` the figures are the means of `evaluate` over the split."""
    text = (TESTED % "").partition("def outputs")[0]
    done = run(tmp_path, 1, evaluate={}, **{**SETTINGS, "text": text})
    found = figures(done)
    net = weights.from_checkpoint(tmp_path / "checkpoints/step-00000010")
    assert (found["kind"], found["n"], len(net)) == ("means", 53, 4)
    assert f"test on test (53 samples, step 10): loss {found['loss']:.4g}" in done.output


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ('{"target": 0 * batch[1] - 100, "score": model(batch[0])}', "is -100, and score has 3 classes from 0 on"),
        ('{"target": batch[1], "score": batch[2]}', "failed: IndexError"),
    ],
)
def test_failed_test_leaves_the_training_done(outputs: str, words: str, tmp_path: Path) -> None:
    """The event and the line name the fault; the job ends as done, with its weights."""
    text = (TESTED % "").partition("def outputs")[0] + f"def outputs(model, batch): return {outputs}\n"
    done = whole_run(tmp_path, 2, evaluate={}, **{**SETTINGS, "text": text})
    event = done.only("test")
    assert event["failed"]
    assert words in done.output
    assert (tmp_path / "output/model.pt").exists()
    assert done.events[-1]["e"] == "done"


SHARDED = """
def outputs(model, batch):
    global calls
    calls += 1
    if RANK == 1 and calls == 3 and "before" == %r: raise KeyError("no label")
    if RANK == 1 and calls == 3: model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    return {"target": batch[1], "score": model(batch[0])}
"""


@pytest.mark.parametrize(("where", "fault"), [("before", "KeyError: 'no label'"), ("inside", "ZeroDivisionError")])
def test_fault_of_one_rank_of_a_sharded_model_leaves_the_training_done(where: str, fault: str, tmp_path: Path) -> None:
    """The other ranks wait for the rank's part of the weights; all ranks leave, and the job ends as done."""
    text = "import os\nRANK, calls = int(os.environ['RANK']), 0\n" + (TESTED % "").partition("def outputs")[0]
    settings = {**SETTINGS, "text": text + SHARDED % where, "strategy": "fsdp"}
    done = whole_run(tmp_path, 2, evaluate={"batch_size": 4}, **settings)
    assert done.only("test")["failed"].startswith(fault)
    assert [each["e"] for each in done.events][-2:] == ["test", "done"]
    assert done.outcome()["outcome"] == "done"
    assert (tmp_path / "output/model.pt").exists()


def test_later_test_compares_the_best_with_the_last(parent: Run, tmp_path: Path) -> None:
    """Of a folder of checkpoints the best is tested, its average and its trained weights, and beside them the last."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(parent.folder / "checkpoints", folder)
    folders.mark_best(folder, 5, "loss", 1.0)
    spec: dict[str, Any] = {"evaluate": {"only": True}, "init_from": {}, **SETTINGS}
    found = figures(run(tmp_path / "later", 2, env={"CLOUDTRAIN_INPUT_INIT_FROM": str(folder)}, **spec))
    rows = [(each["checkpoint"], each["step"], each["weights"]) for each in found["compared"]]
    assert rows == [("best", 5, "average"), ("best", 5, "trained"), ("last", 10, "average")]
    assert (found["checkpoint"], found["step"], found["weights"]) == rows[0]
    assert found["compared"][2]["loss"] == figures(parent)["loss"]


def test_predictions_need_outputs(tmp_path: Path) -> None:
    """The message names the function that the task lacks."""
    text = (TESTED % "").partition("def outputs")[0]
    means = run(tmp_path, 1, evaluate={"predictions": 1}, **{**SETTINGS, "text": text})
    assert "evaluate.predictions needs the task's `outputs(model, batch)`" in means.errors


def test_any_number_of_metrics_fits_into_the_event() -> None:
    """The event has the headline and the first metrics; the file has all."""
    result = {"job": "a", "split": "test", "kind": "means", "n": 5, "compared": []}
    result |= {f"a_metric_with_a_long_name_{number}": number / 7 for number in range(500)}
    found = testing.short(result)
    assert len(events.format_line("test", "", {"test": found})) <= events.MAX_BYTES
    assert (found["n"], found["a_metric_with_a_long_name_1"]) == (5, 0.1429)
