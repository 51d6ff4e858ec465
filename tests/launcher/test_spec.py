"""What the nodes are told: on how many of them the job can run, and how its batch stays cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Capacity
from cloudtrain.launcher.planning import planner as plans
from cloudtrain.launcher.planning.job_spec import job_spec

TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes the spec of a task with these settings, each `key=value`."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text("name: x\ntask: task.py\n")

    def make(*settings: str) -> dict[str, Any]:
        config = configs.load(tmp_path / "cloudtrain.yaml", overrides=settings)
        return job_spec(plans.make(config, Capacity(0, 0.0, "your own machine")), config, "x-12345", 1).dump()

    return make


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (("training.global_batch_size=12", "training.micro_batch_size=2"), [1, 2, 3]),
        (("training.global_batch_size=12",), [1, 3]),
        (("training.global_batch_size=24", "training.micro_batch_size=2", "distributed.nproc_per_node=2"), [1, 2, 3]),
        (("training.global_batch_size=12", "training.strategy=hsdp", "training.shard_size=3"), [3]),
    ],
)
def test_ranks_share_the_micro_batches_evenly(
    spec: Callable[..., dict[str, Any]], settings: tuple[str, ...], counts: list[int]
) -> None:
    """A number of nodes whose ranks would not is no way to go on."""
    assert spec("resources.instances=3", "resources.min_instances=1", *settings)["node_counts"] == counts


def test_micro_batch_stays_on_fewer_nodes(spec: Callable[..., dict[str, Any]]) -> None:
    """Its default depends on the ranks, and with it the split of the samples: so it is fixed when it may shrink."""
    asked = ("resources.instances=3", "training.global_batch_size=12")
    assert spec(*asked, "resources.min_instances=1")["training"]["micro_batch_size"] == 4
    assert spec(*asked, "resources.min_instances=3")["training"]["micro_batch_size"] is None
    assert spec(*asked)["min_nodes"] == 3


def test_hang_counts_after_the_collectives_timeout(spec: Callable[..., dict[str, Any]]) -> None:
    """Where a collective notices, its message names the cause: it must come first."""
    assert spec("distributed.timeout_s=60")["hang_timeout_s"] == 360
