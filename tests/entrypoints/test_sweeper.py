"""Steps that the sweeper removes from the bucket, and entries that must stay."""

import shutil
from pathlib import Path

import pytest
from savedentries import checkpoint

from cloudtrain.entrypoints.checkpoints.sweeper import sweep
from cloudtrain.entrypoints.stores.folder import FolderStore

SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a folder with the steps 10 to 40, which the store has too, next to a partial step."""
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path / "here", step, 10)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (tmp_path / "there/step-00000015.tmp").mkdir()
    (tmp_path / "there/step-00000015.tmp/x.safetensors").touch()
    (tmp_path / "there/model").mkdir()
    (tmp_path / "there/model/step-00000001").touch()
    return tmp_path / "here"


def test_steps_deleted_locally_are_deleted_in_the_store(here: Path) -> None:
    """Older steps are removed; foreign entries stay, and so does the best step, which exists locally."""
    store = FolderStore(here.parent / "there")
    shutil.rmtree(here / "step-00000020")
    shutil.rmtree(here / "step-00000030")
    assert sweep(here, store) == ["step-00000015.tmp", "step-00000020", "step-00000030"]
    left = {name.partition("/")[0] for name in store.names("")}
    assert left == {"step-00000010", "step-00000040", "model"}
    assert sweep(here, store) == []


def test_steps_of_a_trial_are_deleted_below_the_trials_name(here: Path) -> None:
    """The steps of a packed sweep's trial have names of their own, and those of other trials stay."""
    place = here.parent / "bucket" / "trials"
    for trial in ("1", "2"):
        shutil.copytree(here.parent / "there", place / trial)
    store = FolderStore(here.parent / "bucket")
    shutil.rmtree(here / "step-00000030")
    assert sweep(here, store, "trials/2/") == ["step-00000015.tmp", "step-00000030"]
    assert not (place / "2" / "step-00000030" / "manifest.json").exists()
    assert (place / "1" / "step-00000030" / "manifest.json").exists()


@pytest.mark.parametrize("missing", ["manifest.json", SHARD])
def test_nothing_is_deleted_before_the_newest_is_uploaded(here: Path, missing: str) -> None:
    """The platform copies at its own pace: until then a resume needs the older steps."""
    store = FolderStore(here.parent / "there")
    shutil.rmtree(here / "step-00000030")
    store.delete(f"step-00000040/{missing}")
    assert sweep(here, store) == []


def test_later_steps_stay(here: Path) -> None:
    """Steps after the newest local step stay: they are from an earlier run, before a rollback."""
    store = FolderStore(here.parent / "there")
    shutil.rmtree(here / "step-00000040")
    assert sweep(here, store) == ["step-00000015.tmp"]
    shutil.rmtree(here)
    here.mkdir()
    assert sweep(here, store) == []
