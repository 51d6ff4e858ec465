"""Tests of the search for a script's newest checkpoint."""

import os
import zipfile
from pathlib import Path

import pytest

from cloudtrain.entrypoints.scripts.keep import newest


def save(root: Path, name: str, time_s: float) -> None:
    """Write a file with the given name and time."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (time_s, time_s))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["ckpt.pt"], "ckpt.pt"),
        (["out/checkpoint-1000/trainer_state.json", "out/checkpoint-500/trainer_state.json"], "out/checkpoint-1000"),
        (["out/checkpoint-9/model.safetensors", "out/model.safetensors"], "out/checkpoint-9"),
        (["dcp/.metadata", "dcp/__0_0.distcp"], "dcp"),
        (["1700000000/model.pt", "1700000009/model.pt"], "1700000009"),
        (["checkpoint.pth.tar", "model_best.pth.tar"], "checkpoint.pth.tar"),
        (
            ["lightning_logs/version_0/checkpoints/epoch=1-step=9.ckpt", "lightning_logs/version_0/hparams.yaml"],
            "lightning_logs/version_0/checkpoints/epoch=1-step=9.ckpt",
        ),
        (["state.json", "train.log", "runs/events.out.tfevents.1"], "state.json"),
        (["snapshot.pt", "runs/1/events.out.tfevents.7"], "snapshot.pt"),  # a numbered folder of TensorBoard's
        # only the last of a series may have been cut off, so an older one with more kinds of files does not win
        (["checkpoint-1/scaler.pt", *(f"checkpoint-{step}/m.pt" for step in (1, 2, 3))], "checkpoint-3"),
        (["checkpoint-1/m.safetensors", "tmp-checkpoint-2/m.safetensors"], "checkpoint-1"),
        (["loss=0.50-epoch=5.ckpt", "loss=0.90-epoch=1.ckpt"], "loss=0.50-epoch=5.ckpt"),
        (["v_0/epoch=5.ckpt", "v_1/epoch=1.ckpt"], "v_1/epoch=1.ckpt"),
        (["train.log", "runs/events.out.tfevents.1", ".hidden", "half.tmp"], None),
    ],
)
def test_newest_of_known_forms(tmp_path: Path, files: list[str], found: str | None) -> None:
    """Folders of checkpoints come before files, a checkpoint's suffix before other suffixes, and logs never count."""
    for number, name in enumerate(files):
        save(tmp_path, name, 1000.0 + number)
    told = newest(tmp_path)
    assert (told and told[0]) == found


def test_numbers_count_in_a_series_and_times_between_series(tmp_path: Path) -> None:
    """A platform that restores the files on a new machine sets their times in any order."""
    for name, time_s in (("ckpt-2.pt", 30.0), ("ckpt-10.pt", 20.0), ("last.pt", 10.0)):
        save(tmp_path, name, time_s)
    assert newest(tmp_path) == ("ckpt-10.pt", 20.0)
    save(tmp_path, "last.pt", 40.0)
    assert newest(tmp_path) == ("last.pt", 40.0)


@pytest.mark.parametrize("marks", [("training_args.bin", "optimizer.pt"), ("__0_0.distcp",)])
def test_folder_without_its_last_file_is_skipped(tmp_path: Path, marks: tuple[str, ...]) -> None:
    """A save that was cut off is no checkpoint to resume from."""
    save(tmp_path, "checkpoint-1/trainer_state.json", 1.0)
    for name in marks:
        save(tmp_path, f"checkpoint-2/{name}", 2.0)
    assert newest(tmp_path) == ("checkpoint-1", 1.0)


def test_file_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    """torch.save writes a zip archive, whose end would be missing."""
    save(tmp_path, "a-1.pt", 1.0)
    with zipfile.ZipFile(tmp_path / "a-2.pt", "w") as archive:
        archive.writestr("data", "x" * 1000)
    whole = (tmp_path / "a-2.pt").read_bytes()
    for torn in (whole[:-30], b""):
        (tmp_path / "a-2.pt").write_bytes(torn)
        assert newest(tmp_path) == ("a-1.pt", 1.0)
    (tmp_path / "a-2.pt").write_bytes(whole)
    assert (newest(tmp_path) or ("", 0))[0] == "a-2.pt"


@pytest.mark.parametrize(
    "files", [("model.safetensors",), ("model.safetensors", "optimizer.bin", "random_states_0.pkl")]
)
def test_folder_that_was_cut_off_between_its_files_is_skipped(tmp_path: Path, files: tuple[str, ...]) -> None:
    """A folder with fewer kinds of files than its predecessor, or with an empty file, is no checkpoint."""
    for name in ("model.safetensors", "optimizer.bin", "rng_0.pkl", "rng_1.pkl"):
        save(tmp_path, f"runs/epoch_9/{name}", 1.0)
    for name in files:
        save(tmp_path, f"runs/epoch_10/{name}", 2.0)
    if "optimizer.bin" in files:
        (tmp_path / "runs/epoch_10/optimizer.bin").write_bytes(b"")
    assert (newest(tmp_path) or ("", 0))[0] == "runs/epoch_9"
    save(tmp_path, "runs/epoch_10/optimizer.bin", 2.0)
    save(tmp_path, "runs/epoch_10/rng.pkl", 2.0)
    assert (newest(tmp_path) or ("", 0))[0] == "runs/epoch_10"
