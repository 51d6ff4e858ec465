"""The bottleneck of a step: the arithmetic, the advice, and a real job that waits for its data."""

from typing import Any

import pytest
import torch

from cloudtrain.entrypoints.contract import CheckpointSettings
from cloudtrain.entrypoints.rank import savings
from cloudtrain.entrypoints.trainer.diagnose import TimedRun, conclude
from cloudtrain.entrypoints.trainer.job import RankContext
from cloudtrain.entrypoints.trainer.settings import ParallelSettings, Spec, TrainingSettings
from doubles.signatures import MakeProject

SLOW_DATA = """
import time, torch
from torch import nn

class Slow:
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4), index % 2

def model(params): return nn.Linear(4, 2)
def dataset(params, split): return Slow() if split == "train" else None
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

SLOW_STAGE = """
import time, torch
from torch import nn

class Slow(nn.Module):
    def __init__(self, duration_s):
        super().__init__()
        self.linear, self.duration_s = nn.Linear(4, 4), duration_s
    def forward(self, x):
        time.sleep(self.duration_s)
        return self.linear(x)

def model(params): return nn.Sequential(Slow(0.005), Slow(0.02))
def dataset(params, split): return torch.utils.data.TensorDataset(torch.ones(64, 4))
def loss(model, batch): return model(batch[0]).mean()
"""


def spec(**training: Any) -> Spec:
    """Return a job's spec."""
    wanted = TrainingSettings(global_batch_size=8, max_steps=1, **training)
    return Spec("test", 1, "task.py", {}, wanted, CheckpointSettings(), 60.0, "")


SAME = [TimedRun(0.1), TimedRun(0.1)]


@pytest.mark.parametrize(
    ("silent", "synthetic", "training", "bound", "advice"),
    [
        (0.05, 0.1, {}, "network", "compression: bf16"),
        (0.05, 0.1, {"strategy": "fsdp"}, "network", "strategy: hsdp"),
        (0.1, 0.04, {"num_workers": 2}, "data", "num_workers: 4 (now 2)"),
        (0.1, 0.1, {}, "compute", "compile: true, more ranks; nothing else waits"),
        (0.08, 0.1, {"compile": True}, "compute", "try more ranks; then look at network"),
    ],
)
def test_conclusion(silent: float, synthetic: float, training: dict[str, Any], bound: str, advice: str) -> None:
    """The time saved without a part is the part's share; the advice is a change that the job has not made yet."""
    place = RankContext(0, 2, torch.device("cpu"))
    found = conclude(SAME, TimedRun(silent), TimedRun(synthetic), spec(**training), place)
    assert (found.bound, found.noise) == (bound, 0.0)
    assert found.network + found.data + found.compute == pytest.approx(1.0)
    assert found.sentence.startswith(f"bound by {bound}: of 100 ms a step")
    assert advice in found.sentence


def test_unclear_result_is_reported() -> None:
    """If two equal runs differ by more than the parts, the sentence names no bottleneck."""
    normal, place = [TimedRun(0.1), TimedRun(0.16)], RankContext(0, 2, torch.device("cpu"))
    found = conclude(normal, TimedRun(0.07), TimedRun(0.12), spec(), place)
    assert found.bound == "unclear"
    assert "two like runs differ by 46 %" in found.sentence


def test_network_bound_step_names_what_methods_save() -> None:
    """50 ms of 100 ms for 10 M gradients on 2 ranks: local saves 41 % with averaged AdamW, threshold 1 % nearly all."""
    place = RankContext(0, 2, torch.device("cpu"))
    found = conclude(SAME, TimedRun(0.05, (), (0.05, 0.02), 40e6), TimedRun(0.1), spec(), place)
    assert found.step.bandwidth == pytest.approx(40e6 / 0.05)
    assert "at 6.4 Gbit/s and 2 ranks: strategy: local, period 16 saves 41 %" in found.sentence
    assert "strategy: async saves" in found.sentence
    assert conclude(SAME, TimedRun(0.099, gradient_bytes=40e6), TimedRun(0.1), spec(), place).step is None


def test_all_gathered_codes_save_nothing_on_many_ranks() -> None:
    """The code of each rank goes to all others, so the saving of codes falls with the ranks, and local's stays."""
    step = savings.MeasuredStep(0.05, 40e6, 125e6)
    of_ranks = {ranks: {s.settings: s.step_s for s in savings.expected_steps(step, ranks)} for ranks in (2, 512)}
    name = "compression: threshold, 1 %"
    assert of_ranks[2][name] < 0.5 * of_ranks[2]["strategy: ddp"]
    assert of_ranks[512][name] > of_ranks[512]["strategy: ddp"]
    assert of_ranks[512]["strategy: local, period 16"] < 0.5 * of_ranks[512]["strategy: ddp"]
    words = savings.in_words(step, 512, savings.expected_steps(step, 512))
    assert words.startswith("at 1 Gbit/s and 512 ranks: strategy: local, period 16 saves")
    assert words.endswith("compression: threshold, 1 % saves nothing")


def test_one_rank_has_no_network() -> None:
    """The share of the network is 0 for one rank, whatever the times are."""
    assert conclude(SAME, TimedRun(0.05), TimedRun(0.1), spec(), RankContext(0, 1, torch.device("cpu"))).network == 0.0


def test_stages_that_wait_for_each_other() -> None:
    """The bubble is the mean share of the stages' waits; the sentence names the slowest stage, and the ways out."""
    layout = ParallelSettings(pipeline=2)
    place = RankContext(0, 2, torch.device("cpu"), pipeline=2)
    found = conclude(SAME, TimedRun(0.1), TimedRun(0.1, (0.08, 0.04)), spec(parallel=layout), place)
    assert (found.bound, found.bubble, found.compute) == ("bubble", pytest.approx(0.6), pytest.approx(0.4))
    assert "the slowest stage is 2 of 2: it computes 60 ms, the stages' mean is 40 ms" in found.sentence
    assert found.sentence.endswith("or a larger global_batch_size, or parallel.cut: timed")


@pytest.mark.slow
@pytest.mark.soak
def test_job_with_a_slow_stage(cli: Any, project: MakeProject) -> None:
    """The command measures the wait of both stages of a pipeline whose second block takes four times the first."""
    folder = project()
    (folder / "task.py").write_text(SLOW_STAGE)
    (folder / "cloudtrain.yaml").write_text(
        "name: slow\ntask: task.py\nresources: {instances: 2}\n"
        "training: {global_batch_size: 8, micro_batch_size: 2, max_steps: 5, parallel: {pipeline: 2}}\n"
    )
    done = cli.ok("diagnose", "--steps", "5", "--json", cwd=folder)
    assert "the slowest stage is 2 of 2" in done.json["sentence"]
    # The second stage takes 20 ms of each micro-batch's 25, so a step of 4 has 85 ms and the stages work 20 and 80.
    assert done.json["bubble"] == pytest.approx(1 - 50 / 85, abs=0.1)


@pytest.mark.slow
def test_job_that_waits_for_its_data(cli: Any, project: MakeProject) -> None:
    """The command really runs the job on two instances, prints the shares, and saves no checkpoint."""
    folder = project()
    (folder / "task.py").write_text(SLOW_DATA)
    (folder / "cloudtrain.yaml").write_text(
        "name: slow\ntask: task.py\nresources: {instances: 2}\ntraining: {global_batch_size: 8, max_steps: 5}\n"
    )
    done = cli.ok("diagnose", "--steps", "8", "--json", cwd=folder)
    assert (done.json["bound"], done.json["data"] > 0.5) == ("data", True)
    assert "try num_workers: 2 (now 0)" in done.json["sentence"]
    assert not list(cli.home.glob("local/*/checkpoints/step-*"))


def test_script_cannot_be_diagnosed(cli: Any, project: MakeProject) -> None:
    """Only the script itself knows its steps."""
    done = cli("diagnose", cwd=project("", script="train.py", text="pass"))
    assert (done.code, "only a `task` can be diagnosed" in done.stderr) == (2, True)
