"""The variables that a script's rank sets for libraries."""

import os
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "False True 0"), ("gc.disable()", "False False 0"), ("x = []; gc.freeze()", "False True n")],
)
def test_import_of_torch_collects_no_garbage(tmp_path: Path, before: str, after: str) -> None:
    """The collection goes on after the import, if the script has it on; what the script has frozen stays so."""
    (tmp_path / "torch.py").write_text("import gc\nduring = gc.isenabled()\n")
    code = f"""import gc, sys
from cloudtrain.entrypoints.scripts import rank
sys.path.insert(0, {str(tmp_path)!r})
{before}
rank.watch_imports({{}})
import torch
print(torch.during, gc.isenabled(), "n" if gc.get_freeze_count() else 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == after, done.stderr
