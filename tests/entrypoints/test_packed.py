"""The packed controller: real sweeps of tiny trainings on two slots of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cloudtrain.entrypoints import events, processes
from cloudtrain.entrypoints.checkpoints import weights
from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.entrypoints.sweep.journal import NAME, Journal
from cloudtrain.entrypoints.sweep.packed import PARTNER_S, _Driver, _Gang
from cloudtrain.entrypoints.sweep.search import Search, Segment, values_of
from cloudtrain.entrypoints.sweep.segments import SegmentEnd, place_of, trial_spec
from doubles import one_node, warmpython
from doubles.waiting import until

TASK = """
import os, time, torch
from torch import nn
from torch.nn import functional as F

class Points:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        time.sleep(float(os.environ.get("NAP_S", "0")))
        return torch.arange(6.0).mul(index).sin() + 0.1 * torch.rand(6), index % 3

def dataset(params, split): return Points(37 if split == "train" else 11)
def model(params):
    if os.environ.get("BREAK"):
        raise ValueError("broken by the environment")
    return nn.Sequential(nn.Linear(6, params["width"]), nn.Dropout(0.3), nn.Linear(params["width"], 3))
def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
def evaluate(model, batch): return {"loss": loss(model, batch)}
"""
SPACE = {"training.optimizer.lr": {"log": [1e-3, 1e-1]}, "params.width": [8, 16]}
SEARCH = {"algorithm": "halving", "space": SPACE, "trials": 9, "parallel": 2, "rungs": [2, 6, 12], "factor": 3}


@dataclass
class Sweep:
    """A sweep in a folder, started by boot as on every platform."""

    folder: Path
    search: dict[str, Any] = field(default_factory=lambda: SEARCH)
    slots: int = 1
    nodes: int = 1
    training: dict[str, Any] = field(default_factory=dict)
    run_spec: dict[str, Any] = field(default_factory=lambda: {"kind": "sweep", "target": "task.py"})
    own: dict[str, Any] = field(default_factory=dict)  # further settings of the sweep
    checkpoint: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> JobSpec:
        """Return the sweep's spec."""
        training = {
            "global_batch_size": 8,
            "max_steps": 12,
            "seed": 1,
            "log_every": 1,
            "optimizer": {"name": "adamw"},
            "schedule": {"name": "cosine"},
            **self.training,
        }
        sweep = {"search": self.search, "slots": self.slots, "nproc_per_node": 2 * self.slots // self.nodes, "keep": 2}
        sweep |= {"instances": 1, "until": "rung"}
        sweep |= self.own
        found = {
            "job": "s",
            "run": self.run_spec,
            "training": training,
            "params": {"width": 8},
            "sweep": sweep,
            "checkpoint": self.checkpoint,
            "timeout_s": 60,
        }
        return JobSpec.load(found)

    def start(self, **more: str) -> subprocess.Popen[str]:
        """Start the controller."""
        for node in range(self.nodes):
            (self.folder / "result" / str(node)).mkdir(parents=True, exist_ok=True)
        (self.folder / "task.py").write_text(TASK)
        (self.folder / "spec.json").write_text(json.dumps(self.spec().dump()))
        environment = {
            **os.environ,
            **one_node.variables(),
            "OMP_NUM_THREADS": "1",
            "SWEEP_TEST": str(self.folder),
            "CLOUDTRAIN_SPEC": str(self.folder / "spec.json"),
            "CLOUDTRAIN_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            "CLOUDTRAIN_OUTPUT_DIR": str(self.folder / "output"),
            "CLOUDTRAIN_RESULT_DIR": str(self.folder / "result"),
            **more,
        }
        command = [sys.executable, "-m", "cloudtrain.entrypoints.agent.boot"]
        if self.nodes > 1:  # each rank is a node
            node = (
                'export CLOUDTRAIN_RESULT_DIR="$CLOUDTRAIN_RESULT_DIR/$RANK"; mkdir "$CLOUDTRAIN_RESULT_DIR"; exec "$@"'
            )
            worker = [sys.executable, "-m", "cloudtrain.entrypoints.agent.worker", "sweep"]
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.nodes), "--no-python"]
            command = [sys.executable, "-m", *torchrun, "sh", "-c", node, "sh", *worker]
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True)

    def run(self, **more: str) -> tuple[int, list[dict[str, Any]]]:
        """Run the controller to its end; return exit code and events."""
        child = self.start(**more)
        told, _ = child.communicate(timeout=280)
        assert processes.with_environment(SWEEP_TEST=str(self.folder)) == []
        return child.returncode, parsed(told)


def parsed(text: str) -> list[dict[str, Any]]:
    """Return the events among the lines."""
    return [fields for line in text.splitlines() if (fields := events.parse(line)[1])]


def stopped(sweep: Sweep, **more: str) -> list[dict[str, Any]]:
    """Start the sweep, and send SIGTERM while segments run; return the events."""
    child, journal = sweep.start(**more), sweep.folder / "checkpoints" / NAME
    until(lambda: journal.exists() and journal.read_text().count('"e": "start"') >= 4, timeout_s=100)
    child.send_signal(signal.SIGTERM)
    told, _ = child.communicate(timeout=100)
    assert child.returncode == 75
    return parsed(told)


def losses(found: list[dict[str, Any]]) -> dict[int, list[tuple[int, str]]]:
    """Return each trial's losses as hexadecimal numbers, by step; a step that was trained twice has one loss."""
    by_trial: dict[int, set[tuple[int, str]]] = {}
    for each in found:
        if each["e"] == "step":
            by_trial.setdefault(each["trial"], set()).add((each["step"], each["loss"].hex()))
    return {trial: sorted(steps) for trial, steps in sorted(by_trial.items())}


def losses_alone(folder: Path, spec: JobSpec) -> list[tuple[int, str]]:
    """Train a trial's spec in one piece; return the losses as hexadecimal numbers, by step."""
    (folder / "task.py").write_text(TASK)
    (folder / "spec.json").write_text(json.dumps(spec.dump()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CLOUDTRAIN_SPEC": "spec.json"}
    environment["CLOUDTRAIN_CHECKPOINT_DIR"] = "alone"
    args = ["-m", "cloudtrain.entrypoints.trainer.train"]
    done = warmpython.run(args, folder, environment, 100)
    assert done.returncode == 0, done.stderr
    return [(each["step"], each["loss"].hex()) for each in parsed(done.stdout) if each["e"] == "step"]


def results(folder: Path) -> dict[tuple[int, int], float | None]:
    """Return the results in the journal."""
    journal = Journal(folder / "checkpoints")
    journal.close()
    return journal.state.results


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder and the events of an uninterrupted sweep of nine trials."""
    sweep = Sweep(tmp_path_factory.mktemp("whole"))
    code, found = sweep.run()
    assert code == 0
    return sweep.folder, found


@pytest.mark.slow
def test_sweep_ends_with_the_best_trials_weights(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """Nine trials, three promoted, one finished; the losers' checkpoints are deleted, all but the best two."""
    folder, found = whole
    counts = [sum(rung == at for _, rung in results(folder)) for at in range(3)]
    assert counts == [9, 3, 1]
    (done,) = (each for each in found if each["e"] == "done" and "trial" not in each)
    assert results(folder)[done["best_trial"], 2] == done["best"]
    own = folder / "checkpoints" / "trials" / str(done["best_trial"]) / "output" / "model.pt"
    assert (folder / "output" / "model.pt").read_bytes() == own.read_bytes()
    kept = sorted(path.name for path in (folder / "checkpoints" / "trials").iterdir())
    assert len(kept) == 2
    assert str(done["best_trial"]) in kept
    told = [each for each in found if each["e"] == "trial"]
    assert sum(each["state"] == "running" for each in told) == sum(each["state"] != "running" for each in told) == 13


@pytest.mark.slow
def test_trials_equal_trainings_alone(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """A trial has the losses of the same training in one piece."""
    folder, found = whole
    best = next(each["best_trial"] for each in found if each["e"] == "done" and "trial" not in each)
    values = values_of(Search.load(SEARCH), results(folder), best, 2)
    spec = trial_spec(Sweep(tmp_path).spec(), Segment(best, 2, 6, 12, values))
    assert losses(found)[best] == losses_alone(tmp_path, spec)


@pytest.mark.slow
@pytest.mark.soak
def test_stopped_sweep_goes_on_with_the_same_trials(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """SIGTERM while two segments run: they save, and the next start ends with the same results and losses."""
    folder, expected = whole
    sweep = Sweep(tmp_path)
    told = stopped(sweep, NAP_S="0.02")
    assert json.loads((tmp_path / "result" / "outcome.json").read_text())["outcome"] == "saved"
    assert len(results(tmp_path)) < 13
    code, found = sweep.run()
    assert code == 0
    assert results(tmp_path) == results(folder)
    assert losses([*told, *found]) == losses(expected)


@pytest.mark.slow
def test_killed_trial_starts_again(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """kill -9 of a trial's rank, as for want of memory, changes no result."""
    child = Sweep(tmp_path).start(NAP_S="0.02")
    own = str(tmp_path / "checkpoints" / "trials" / "1")
    found = until(lambda: processes.with_environment(CLOUDTRAIN_CHECKPOINT_DIR=own), timeout_s=100)
    os.kill(found[0], signal.SIGKILL)
    told, _ = child.communicate(timeout=200)
    assert child.returncode == 0
    assert results(tmp_path) == results(whole[0])
    states = [each["state"] for each in parsed(told) if each["e"] == "trial" and each["trial"] == 1]
    assert states[:4] == ["running", "saved", "running", "paused"]


@pytest.mark.slow
@pytest.mark.soak
def test_population_copies_and_pairs_of_ranks(tmp_path: Path) -> None:
    """A population of four, two ranks a trial: the lowest trial goes on from a copy of the highest."""
    space = {"training.optimizer.lr": SPACE["training.optimizer.lr"]}
    search = {**SEARCH, "algorithm": "pbt", "space": space, "trials": 4, "rungs": [2, 4]}
    code, found = Sweep(tmp_path, search, slots=2, training={"max_steps": 4}).run()
    assert code == 0
    (copied,) = (
        each for each in found if each["e"] == "trial" and each["state"] == "running" and each["source"] is not None
    )
    first = {trial: value for (trial, rung), value in results(tmp_path).items() if rung == 0 and value is not None}
    assert copied["trial"] == max(first, key=first.__getitem__)
    assert copied["source"] == min(first, key=first.__getitem__)
    (resumed,) = (e for e in found if e["e"] == "restart" and e.get("trial") == copied["trial"])
    assert (resumed["step"], len(results(tmp_path))) == (2, 8)


@pytest.mark.slow
@pytest.mark.soak
def test_failing_trials_and_a_short_deadline(tmp_path: Path) -> None:
    """A trial that fails counts as worst, and names its cause; a deadline in reach ends the sweep as saved."""
    space = {"params.width": [8, -1], "env.BREAK": ["", "yes"]}
    search = {**SEARCH, "algorithm": "grid", "space": space, "trials": 4, "rungs": [3]}
    code, found = Sweep(tmp_path / "failing", search, training={"max_steps": 3}).run()
    ends = {each["trial"]: each["state"] for each in found if each["e"] == "trial"}
    assert (code, ends) == (0, {0: "done", 1: "failed", 2: "failed", 3: "failed"})
    assert results(tmp_path / "failing")[1, 0] is None
    code, found = Sweep(tmp_path / "short").run(CLOUDTRAIN_DEADLINE="1")
    assert code == 75
    assert results(tmp_path / "short") == {}


@pytest.mark.slow
def test_deadline_ends_a_sweep_with_a_finished_model(tmp_path: Path) -> None:
    """No segment starts that would not end in time, so the sweep leaves before its deadline; more time continues it."""
    search = {**SEARCH, "algorithm": "random", "trials": 50, "rungs": [12]}
    deadline_s = time.time() + 20
    code, found = Sweep(tmp_path, search).run(NAP_S="0.02", CLOUDTRAIN_DEADLINE=f"{deadline_s:.0f}")
    assert time.time() < deadline_s + 5
    assert code == 75
    assert json.loads((tmp_path / "result" / "outcome.json").read_text())["reason"] == "deadline"
    assert any(each["state"] == "done" for each in found if each["e"] == "trial")
    assert (tmp_path / "output" / "model.pt").exists()


def test_journal_cut_at_every_byte_has_the_last_whole_line(tmp_path: Path) -> None:
    """A torn line is ignored and cut, and the next line is whole."""
    journal = Journal(tmp_path)
    for trial in range(2):
        segment = {"trial": trial, "rung": 0, "from_step": 0, "until_step": 2, "values": {"a": 1}, "source": None}
        journal.add("start", segment=segment, place="a")
        journal.add("end", trial=trial, rung=0, value=None if trial else 0.5, start_s=1.0, step_s=0.1)
    journal.close()
    whole = (tmp_path / NAME).read_bytes()
    for size in range(len(whole) + 1):
        (tmp_path / NAME).write_bytes(whole[:size])
        cut, lines = Journal(tmp_path), whole[:size].count(b"\n")
        assert len(cut.state.results) == lines // 2
        assert len(cut.state.open) == lines % 2
        cut.add("end", trial=7, rung=0, value=0.1, start_s=None, step_s=None)
        cut.close()
        again = Journal(tmp_path)
        again.close()
        assert again.state == cut.state
        assert (7, 0) in again.state.results


def test_damaged_line_drops_itself_and_its_trial_trains_again(tmp_path: Path, capsys: Any) -> None:
    """A flipped bit, zeros, a line of another version: the other lines count, and the lost segment is open again."""
    journal = Journal(tmp_path)
    for trial, rung in ((0, 0), (1, 0), (0, 1)):
        segment = {"trial": trial, "rung": rung, "from_step": 0, "until_step": 2, "values": {"a": 1}, "source": None}
        journal.add("start", segment=segment, place="a")
        journal.add("end", trial=trial, rung=rung, value=0.25, start_s=1.0, step_s=0.1)
    journal.close()
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        for damaged in (
            lines[number].replace(b"0", b"9", 1),
            bytes(len(lines[number]) - 1) + b"\n",
            b'{"e": "end", "trial": 0, "rung": 0, "value": "low"}\n',
        ):
            (tmp_path / NAME).write_bytes(b"".join([*lines[:number], damaged, *lines[number + 1 :]]))
            found = Journal(tmp_path)
            found.close()
            assert f"line {number + 1} is damaged" in capsys.readouterr().out
            lost = {1: (0, 0), 3: (1, 0), 5: (0, 1)}.get(number)
            assert set(found.state.open) == ({lost} if lost else set())
            if lost == (0, 0):  # its checkpoint is of the later rung, so it trains from the beginning
                assert found.state.open[lost].is_new
                assert set(found.state.results) == {(1, 0)}


class _Slots:
    """Two slots of a machine without trainings: each segment ends at once with its trial's number as value."""

    slots, place = 2, "a"

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ends: list[SegmentEnd] = []

    def start(self, segment: Segment) -> None:
        self.begun.append(segment.trial)
        self.ends.append(SegmentEnd(segment.trial, segment.rung, "done", segment.until_step, float(segment.trial)))

    def look(self) -> list[SegmentEnd]:
        ends, self.ends = self.ends, []
        return ends

    def finish(self, exported: int | None, kept: Any) -> None:
        assert exported == 0

    def end(self) -> None:
        pass


def test_failures_are_forgotten_for_good_and_all_trials_train_again(tmp_path: Path, capfd: Any) -> None:
    """After a resume the failed trials begin again beside an interrupted one, and stay forgotten at a later start."""
    search = {**SEARCH, "algorithm": "random", "trials": 5, "rungs": [2]}
    spec = JobSpec(sweep={"search": search, "until": "rung", "keep": None, "metric": None})
    journal, slots = Journal(tmp_path), _Slots()
    for trial in range(4):  # the last is interrupted
        journal.add("start", segment=asdict(Segment(trial, 0, 0, 2, {})), place="a")
    for trial in range(3):
        journal.add("end", trial=trial, rung=0, value=None, start_s=None, step_s=None)
    driver: Any = _Driver(spec, journal, [slots], None)  # type: ignore[list-item]
    driver._forget_failures()
    told = [event for line in capfd.readouterr().out.splitlines() if (event := events.parse(line)[1])]
    assert [(each["trial"], each["state"], each["sweep"]["done"]) for each in told] == [
        (n, "saved", 0) for n in range(3)
    ]
    journal.close()
    journal = Journal(tmp_path)
    assert (journal.state.results, {trial for trial, _ in journal.state.open}) == ({}, {0, 1, 2, 3})
    assert _Driver(spec, journal, [slots], None).drive() == 0  # type: ignore[list-item]
    journal.close()
    assert sorted(slots.begun) == [0, 1, 2, 3, 4]


def end_of(state: str, value: float | None = None, *, is_fault: bool = False) -> SegmentEnd:
    """Return the end of a segment on a machine."""
    return SegmentEnd(0, 0, state, 4, value, is_fault=is_fault)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (end_of("paused", 0.5), end_of("done"), 0),
        (end_of("paused", 0.5), end_of("failed", is_fault=True), 0),  # lost its peer as that one left
        (end_of("done", 0.5), end_of("failed"), 1),
        (end_of("failed", is_fault=True), end_of("failed"), 1),
        (end_of("failed", is_fault=True), end_of("done"), 0),
        (end_of("done"), end_of("saved"), 1),
    ],
)
def test_end_of_a_trial_on_two_machines(first: SegmentEnd, second: SegmentEnd, chosen: int) -> None:
    """An error of the training counts, then the first machine's result, then a fault, then a stop."""

    class Machine:
        slots, place = 1, "a"

        def __init__(self, ends: list[SegmentEnd]) -> None:
            self.ends = ends

        def look(self) -> list[SegmentEnd]:
            found, self.ends = self.ends, []
            return found

    for order in (1, -1):
        machines = [Machine([each]) for each in (first, second)][::order]
        assert _Gang(machines, 0).look() == [(first, second)[chosen]]  # type: ignore[arg-type]


def test_machines_that_share_a_folder_have_one_place(tmp_path: Path) -> None:
    """Many that ask at once agree; a folder of its own has another place; no file of a race stays."""
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(lambda _: place_of(tmp_path), range(64)))
    (tmp_path / "other").mkdir()
    assert len(found) == 1
    assert place_of(tmp_path) in found
    assert place_of(tmp_path / "other") not in found
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [".place"]


@pytest.mark.slow
def test_patience_counts_the_best_evaluation_and_exports_it(tmp_path: Path) -> None:
    """A trial's value is its best evaluation, its step the one that was trained, its output the best checkpoint."""
    monitor = {"metric": "loss", "mode": "min", "patience": 2, "min_delta": 0.2}
    space = {"training.optimizer.lr": [0.5, 0.4]}
    search = {**SEARCH, "algorithm": "grid", "space": space, "trials": 2, "rungs": [12]}
    sweep = Sweep(tmp_path, search, training={"monitor": monitor, "eval_every": 1}, checkpoint={"keep_best": True})
    code, found = sweep.run()
    assert code == 0
    for end in (each for each in found if each["e"] == "trial" and each["state"] == "done"):
        evals = [e for e in found if e["e"] == "eval" and e["trial"] == end["trial"]]
        done = next(e for e in found if e["e"] == "done" and e.get("trial") == end["trial"])
        assert end["value"] == done["best"]
        assert end["step"] == max(e["step"] for e in evals)
    (done,) = (each for each in found if each["e"] == "done" and "trial" not in each)
    folder = tmp_path / "checkpoints" / "trials" / str(done["best_trial"])
    best = torch.load(tmp_path / "output" / "model.pt", weights_only=True)
    assert all(torch.equal(value, best[name]) for name, value in weights.from_checkpoint(folder).items())


@pytest.mark.slow
@pytest.mark.soak
def test_trial_on_two_machines_has_the_losses_of_one_machine(tmp_path: Path) -> None:
    """Four controllers train two trials at once, each by a pair; all results are those of two ranks on one machine."""
    search = {**SEARCH, "trials": 3, "rungs": [2, 6]}
    apart = Sweep(tmp_path / "apart", search, nodes=4, own={"instances": 2, "nproc_per_node": 1})
    beside = Sweep(tmp_path / "beside", search, slots=2)
    (code, found), (_, expected) = apart.run(), beside.run()
    assert code == 0
    assert len(results(tmp_path / "apart")) == 4
    assert losses(found) == losses(expected)
    assert results(tmp_path / "apart") == results(tmp_path / "beside")
    assert (tmp_path / "apart" / "output" / "model.pt").exists()


@pytest.mark.slow
def test_task_without_the_metric_fails_early_and_begins_again(tmp_path: Path) -> None:
    """After three failures without a result the sweep fails with the cause; a mended sweep trains all trials."""
    sweep = Sweep(tmp_path, {**SEARCH, "trials": 6, "rungs": [2]}, training={"monitor": {"metric": "accuracy"}})
    code, found = sweep.run()
    assert code != 0
    failed = [each for each in found if each["e"] == "trial" and each["state"] == "failed"]
    assert 3 <= len(failed) <= 4
    cause = json.loads((tmp_path / "result" / "rank-0.json").read_text())["message"]
    assert cause.startswith("no trial has a result; the first failure: the evaluation has no accuracy; it has loss")
    begun = {each["trial"] for each in failed}
    sweep.training = {}
    code, found = sweep.run()
    assert code == 0
    assert len(results(tmp_path)) == 6
    trials = [each for each in found if each["e"] == "trial"]  # the failures count no more, for all who read the log
    assert {each["trial"] for each in trials[: len(begun)] if each["state"] == "saved"} == begun
    assert trials[0]["sweep"]["done"] == 0


@pytest.mark.slow
@pytest.mark.soak
def test_rungs_in_epochs_end_where_the_epochs_end(tmp_path: Path) -> None:
    """Trials with different batch sizes pause after the same epochs, and have the losses of a training in one piece."""
    training = {"max_steps": None, "epochs": 4}
    search = {**SEARCH, "space": {"training.global_batch_size": [4, 8]}, "trials": 4, "rungs": [1, 2, 4], "factor": 2}
    sweep = Sweep(tmp_path, search, training=training)
    code, found = sweep.run()
    assert code == 0
    ends = {(e["trial"], e["rung"]): e["step"] for e in found if e["e"] == "trial" and e["state"] in ("paused", "done")}
    batches = [values_of(Search.load(search), {}, trial, 0)["training.global_batch_size"] for trial in range(4)]
    assert all(step == -(-(1, 2, 4)[rung] * 37 // batches[trial]) for (trial, rung), step in ends.items())
    assert sorted(rung for _, rung in ends) == [0, 0, 0, 0, 1, 1, 2]
    best = next(trial for trial, rung in ends if rung == 2)
    values = {"training.global_batch_size": batches[best]}
    spec = trial_spec(sweep.spec(), Segment(best, 2, 2, 4, values))
    assert losses(found)[best] == losses_alone(tmp_path, spec)


SCRIPT = """
import argparse, pickle, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--steps", type=int)
parser.add_argument("--resume", action="store_true")
given, state, stops = parser.parse_args(), Path("state.pkl"), []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
step, error = pickle.loads(state.read_bytes()) if given.resume else (0, 1.0)
print("begins at", step, flush=True)
while step < given.steps and not stops:
    step, error = step + 1, error * (1 - given.lr) + given.lr**2 / 10
    print(f"step {step}/{given.steps} loss {error:.17g}", flush=True)
    if step % 3 == 0:
        print(f"validation: f1={1 - error:.17g}", flush=True)
    time.sleep(0.05)
state.with_suffix(".new").write_bytes(pickle.dumps((step, error)))
state.with_suffix(".new").replace(state)
"""


def script_sweep(folder: Path, **changes: Any) -> Sweep:
    """Return a sweep of nine trials of a script without torch, which keeps its state in its working directory."""
    search = {**SEARCH, "space": {"args.lr": {"uniform": [0.05, 0.4]}}, "mode": "max", "rungs": [4, 10, 30]}
    progress = {"metrics": {"f1": r"f1=(\S+)"}}
    run = {"kind": "sweep", "target": "fit.py", "args": ["--steps", "30", "--lr", "1"], "keep": ["state.pkl"]}
    run |= {"resume_args": ["--resume"], "progress": progress}
    (folder / "fit.py").parent.mkdir(parents=True, exist_ok=True)
    (folder / "fit.py").write_text(SCRIPT)
    return Sweep(folder, search, run_spec=run, own={"kind": "script", "metric": "f1"}, **changes)


def error_after(lr: float, steps: int) -> float:
    """Return the script's error after the steps."""
    error = 1.0
    for _ in range(steps):
        error = error * (1 - lr) + lr**2 / 10
    return error


@pytest.mark.slow
def test_script_pauses_at_its_rungs_and_goes_on(tmp_path: Path) -> None:
    """The trials of a script pause at the first metric after a rung, and continue from their own kept files.

    A stop saves the running trials, and the next start ends the sweep. A pause, a stop and a continuation change no
    figure: each result is that of the script in one piece at the same step.
    """
    told = stopped(script_sweep(tmp_path))
    code, found = script_sweep(tmp_path).run()
    assert code == 0
    found = [*told, *found]
    assert [sum(rung == at for _, rung in results(tmp_path)) for at in range(3)] == [9, 3, 1]
    search = Search.load(script_sweep(tmp_path).search)
    ends = [each for each in found if each["e"] == "trial" and each["state"] in ("paused", "done")]
    for each in ends:
        (lr,) = values_of(search, {}, each["trial"], 0).values()
        assert each["step"] % 3 == 0
        assert (4, 10, 30)[each["rung"]] <= each["step"] < (30, 30, 31)[each["rung"]]
        assert each["value"] == 1 - error_after(lr, each["step"])
    steps = {trial: [step for step, _ in points] for trial, points in losses(found).items()}
    assert all(seen == list(range(1, len(seen) + 1)) for seen in steps.values())
    assert max(map(len, steps.values())) == 30


@pytest.mark.slow
@pytest.mark.soak
def test_scripts_without_steps_train_to_their_own_ends(tmp_path: Path) -> None:
    """Each trial of a random search is the whole script; the first one's end says whether a further one fits."""
    sweep = script_sweep(tmp_path)
    sweep.search |= {"algorithm": "random", "trials": 4, "rungs": [1]}
    sweep.own["until"] = "end"
    code, found = sweep.run()
    ends = [each for each in found if each["e"] == "trial" and each["state"] == "done"]
    assert (code, sorted(each["trial"] for each in ends)) == (0, [0, 1, 2, 3])
    assert {each["step"] for each in ends} == {30}
    late = script_sweep(tmp_path / "late")
    late.search |= {"algorithm": "random", "trials": 50, "rungs": [1], "parallel": 1}
    late.own["until"] = "end"
    code, found = late.run(CLOUDTRAIN_DEADLINE=f"{time.time() + 12:.0f}")
    assert code == 75
    (left,) = (each for each in found if each["e"] == "preempt")
    assert re.search(r"trial [1-9] to its end needs .*s, .*s are left", left["not_begun"])
    assert all(each["state"] in ("running", "done") for each in found if each["e"] == "trial")


@pytest.mark.soak
@pytest.mark.slow
def test_machine_of_a_failed_one_is_not_held(tmp_path: Path) -> None:
    """torchrun of the machine that has ended waits 300 s for one that failed; the trial has its result after 60 s."""
    sweep = script_sweep(tmp_path, nodes=2)
    sweep.search |= {"algorithm": "random", "trials": 1, "rungs": [1]}
    sweep.own |= {"until": "end", "instances": 2, "nproc_per_node": 1}
    last = "\nimport os\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    (tmp_path / "fit.py").write_text(SCRIPT + last)
    begin_s = time.monotonic()
    code, found = sweep.run()
    assert PARTNER_S < time.monotonic() - begin_s < 2 * PARTNER_S
    (end,) = (each for each in found if each["e"] == "trial" and each["state"] == "done")
    assert (code, end["step"]) == (0, 30)


@pytest.mark.slow
def test_script_without_the_metric_names_the_cure(tmp_path: Path) -> None:
    """A sweep of a script that prints no such metric fails early, and says how to name the metric's pattern."""
    sweep = script_sweep(tmp_path)
    sweep.own["metric"] = "accuracy"
    code, found = sweep.run()
    assert code != 0
    words = [each for each in found if each["e"] == "trial" and each["state"] == "failed"]
    assert len(words) >= 3
    assert len({each["trial"] for each in words}) < 9


@pytest.mark.slow
def test_script_that_ends_before_its_rung_is_not_started_again(tmp_path: Path) -> None:
    """A trial whose script ended by itself is done at its own step; on higher rungs its result counts as it is."""
    sweep = script_sweep(tmp_path)
    sweep.search |= {"trials": 3, "rungs": [3, 30, 90]}
    sweep.run_spec["args"] = ["--steps", "6", "--lr", "1"]
    child = sweep.start()
    text, _ = child.communicate(timeout=100)
    assert child.returncode == 0
    ends = [each for each in parsed(text) if each["e"] == "trial" and each["state"] == "done"]
    early, later = (each for each in ends if each["rung"])
    assert (early["rung"], early["step"], later["rung"], later["step"]) == (1, 6, 2, 6)
    assert early["value"] == later["value"]
    assert "ended by itself at step 6, before step 30" in text
    assert text.count("begins at") == 4  # three trials to the first rung, and the best to its own end
