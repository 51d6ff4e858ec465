"""The variables that a script's rank sets for libraries."""

import os
from types import ModuleType

import pytest
import torch

from cloudtrain.entrypoints.scripts import rank


@pytest.mark.parametrize("has_gpu", [False, True])
def test_accelerate_uses_all_ranks_on_the_cpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate ignores torchrun's ranks on a machine without a GPU, unless a variable asks for the CPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")  # restored after the test
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    rank._set_accelerate(ModuleType("accelerate.state"))
    assert os.environ.get("ACCELERATE_USE_CPU") == (None if has_gpu else "true")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)


def test_deepspeed_finds_its_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher sets three variables besides torchrun's; the job's own win."""
    for name, value in (("CLOUDTRAIN_NODE_RANK", "1"), ("CLOUDTRAIN_NUM_NODES", "2"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_SIZE", "8")
    for name in ("CROSS_RANK", "CROSS_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    rank._set_deepspeed(ModuleType("deepspeed.constants"))
    assert [os.environ[name] for name in ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")] == ["1", "2", "8"]
