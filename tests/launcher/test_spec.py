"""The job spec for the nodes: permitted node counts, and a fixed micro batch."""

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
    """Return a function that makes the spec of a task with the given settings, each `key=value`."""
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
def test_node_counts_divide_the_micro_batches_evenly(
    spec: Callable[..., dict[str, Any]], settings: tuple[str, ...], counts: list[int]
) -> None:
    """A node count whose ranks cannot share the micro batches evenly is excluded."""
    assert spec("resources.instances=3", "resources.min_instances=1", *settings)["node_counts"] == counts


def test_micro_batch_stays_on_fewer_nodes(spec: Callable[..., dict[str, Any]]) -> None:
    """The default depends on the ranks and decides the split of the samples; an elastic job fixes the micro batch."""
    asked = ("resources.instances=3", "training.global_batch_size=12")
    assert spec(*asked, "resources.min_instances=1")["training"]["micro_batch_size"] == 4
    assert spec(*asked, "resources.min_instances=3")["training"]["micro_batch_size"] is None
    assert spec(*asked)["min_nodes"] == 3


def test_hang_timeout_is_longer_than_the_collectives_timeout(spec: Callable[..., dict[str, Any]]) -> None:
    """A collective's own timeout names the cause, so the collective's timeout must come first."""
    assert spec("distributed.timeout_s=60")["hang_timeout_s"] == 360
