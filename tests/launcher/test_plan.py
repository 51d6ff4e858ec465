"""The plan: ranks, the split of a batch, time limit and worst-case bill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher import plan as plans
from cloudtrain.launcher.backend import Capacity
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.plan import Batch, Plan

CPU = Capacity(0, 0.0, "your own machine")
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Return a function that plans a task with these settings, each `key=value`."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text("name: x\ntask: task.py\n")

    def plan(*settings: str, capacity: Capacity = CPU) -> Plan:
        return plans.make(configs.load(tmp_path / "cloudtrain.yaml", overrides=settings), capacity)

    return plan


def test_plan_counts_a_rank_for_each_gpu(planned: Callable[..., Plan]) -> None:
    """`auto` is the instance's GPUs, and one rank where it has none."""
    gpus = planned("resources.instances=2", "training.global_batch_size=64", capacity=Capacity(8, 32.0, "list"))
    assert (gpus.instances, gpus.nproc_per_node, gpus.ranks) == (2, 8, 16)
    assert planned("resources.instances=2").ranks == 2


def test_plan_says_the_ranks_out_loud(planned: Callable[..., Plan]) -> None:
    """The product is written out, so that nobody takes instances for ranks."""
    lines = planned("resources.instances=2", "distributed.nproc_per_node=8", "training.global_batch_size=64").lines()
    assert lines[0].startswith("2 instances x 8 = 16 ranks")


@pytest.mark.parametrize(
    ("settings", "batch"),
    [
        (("training.global_batch_size=256",), Batch(256, 64, 1)),
        (("training.global_batch_size=256", "training.micro_batch_size=16"), Batch(256, 16, 4)),
        (("training.global_batch_size=4",), Batch(4, 1, 1)),
    ],
)
def test_plan_splits_the_batch(planned: Callable[..., Plan], settings: tuple[str, ...], batch: Batch) -> None:
    """global = micro x ranks x accumulation; without a micro-batch, a rank's whole share."""
    plan = planned("resources.instances=4", *settings)
    assert plan.batch == batch
    assert batch.global_size == batch.micro_size * plan.ranks * batch.accumulation


@pytest.mark.parametrize(
    ("size", "micro", "near"), [(96, 16, "64 or 128"), (3, 1, "4"), (10, None, "8 or 16"), (48, 16, "64")]
)
def test_plan_refuses_a_batch_that_cannot_be_split(
    planned: Callable[..., Plan], size: int, micro: int | None, near: str
) -> None:
    """The hint holds the nearest sizes that can."""
    settings = ["resources.instances=4", f"training.global_batch_size={size}"]
    with pytest.raises(ConfigError, match=f"batch of {size} cannot be split over 4 ranks") as caught:
        planned(*settings, *([f"training.micro_batch_size={micro}"] if micro else []))
    assert near in caught.value.faults[0].hint


def test_plan_multiplies_price_instances_and_time(planned: Callable[..., Plan]) -> None:
    """The worst case is every instance for the whole of the longest duration."""
    plan = planned("resources.instances=3", "limits.max_duration=90m", "training.global_batch_size=3",
                   capacity=Capacity(0, 2.0, "a list of today"))  # fmt: skip
    assert (plan.hourly_usd, plan.worst_case_usd) == (6.0, 9.0)


def test_plan_of_an_unknown_price_has_no_worst_case(planned: Callable[..., Plan]) -> None:
    """Unknown is not free."""
    plan = planned(capacity=Capacity(0, None, "nobody knows"))
    assert (plan.hourly_usd, plan.worst_case_usd) == (None, None)
    assert "price unknown: nobody knows" in plan.lines()


@pytest.mark.parametrize(
    ("duration", "cap_s", "deadline_s"), [("12h", 43200, 43080), ("60s", 60, 45), ("8m", 480, 360)]
)
def test_plan_leaves_time_to_save_before_the_cap(
    planned: Callable[..., Plan], duration: str, cap_s: int, deadline_s: int
) -> None:
    """Two minutes, or a quarter of a short job."""
    plan = planned(f"limits.max_duration={duration}")
    assert (plan.cap_s, plan.deadline_s) == (cap_s, deadline_s)


def test_plan_has_no_batch_for_a_script(tmp_path: Path) -> None:
    """What a script does with its ranks is its own affair."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: train.py\n")
    assert plans.make(configs.load(tmp_path / "cloudtrain.yaml"), CPU).batch is None


def test_plan_has_the_published_names(planned: Callable[..., Plan]) -> None:
    """Scripts read these from --json."""
    assert {"instances", "ranks", "hourly_usd", "cap_s", "deadline_s", "worst_case_usd"} <= set(planned().dump())
