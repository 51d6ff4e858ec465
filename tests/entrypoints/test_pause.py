"""A training paused by `training.pause_at` equals the uninterrupted training, bit for bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from trainerruns import Run, run

pytestmark = pytest.mark.slow

RUNGS = (1, 3, 9)
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9}


def train(folder: Path, pause_at: int | None, **settings: Any) -> tuple[Run, dict[str, Any]]:
    """Run two ranks to the pause or the end, from the newest checkpoint on; return the run and its outcome."""
    checkpoint = {"every_steps": None, "blocking": None, "keep_best": True}
    settings |= {"max_steps": 14, "ema_decay": 0.9, "monitor": {"metric": "loss", "patience": 50}}
    done = run(folder, checkpoint=checkpoint, pause_at=pause_at, **settings)
    return done, done.outcome()


def said(found: list[dict[str, Any]], event: str, name: str) -> list[tuple[int, str]]:
    """Return the field of every such event, by step, as hexadecimal numbers."""
    return [(each["step"], float(each[name]).hex()) for each in found if each["e"] == event and name in each]


def _content(shard: Path) -> bytes:
    """Return the bytes of a shard without the name of its save."""
    data, name = shard.read_bytes(), json.loads((shard.parent / "trainer.json").read_text())["save"].encode()
    assert name in data[:200]
    return data.replace(name, b"", 1)


def state(folder: Path) -> dict[str, Any]:
    """Return the sums of the last checkpoint's tensors, and the monitor's memory in the checkpoint."""
    last = folder / "checkpoints" / "step-00000014"
    sums = {path.name: hashlib.sha256(_content(path)).hexdigest() for path in last.glob("*.safetensors")}
    assert sums
    told = json.loads((last / "trainer.json").read_text().partition("\n")[0])
    names = ("samples", "metrics", "best", "best_of", "best_step", "stale", "evaluated_step", "config_sha256")
    return sums | {name: told[name] for name in names}


MOMENTUM = pytest.param({"optimizer": SGD}, marks=pytest.mark.soak)  # the optimizer's state is saved as AdamW's


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.soak), MOMENTUM],
    ids=["ddp", "fsdp", "momentum"],
)
def test_run_paused_at_every_rung_equals_the_uninterrupted(settings: dict[str, Any], tmp_path: Path) -> None:
    """Losses, evaluations, weights, averages and optimizer state are equal; no evaluation is repeated."""
    whole = train(tmp_path / "whole", None, **settings)[0].events
    parts: list[dict[str, Any]] = []
    for rung in RUNGS:
        paused, outcome = train(tmp_path / "paused", rung, **settings)
        told = paused.only("paused")
        assert (outcome["outcome"], outcome["step"], told["step"]) == ("paused", rung, rung)
        assert told["value"] == outcome["metrics"]["loss"] == paused.values("eval", "loss")[rung]
        assert not (tmp_path / "paused" / "output" / "model.pt").exists()
        parts += paused.events
    last, outcome = train(tmp_path / "paused", None, **settings)
    assert outcome["outcome"] == "done"
    parts += last.events
    assert [each["changed"] for each in parts if each["e"] == "restart"] == [[]] * len(RUNGS)
    for name in ("loss", "lr"):
        assert said(parts, "step", name) == said(whole, "step", name)
    evaluated = said(parts, "eval", "loss")
    assert [step for step, _ in evaluated] == [1, 3, 6, 9, 12, 14]
    assert set(evaluated) >= set(said(whole, "eval", "loss"))
    assert state(tmp_path / "paused") == state(tmp_path / "whole")
    weights = [(tmp_path / run / "output" / "model.pt").read_bytes() for run in ("whole", "paused")]
    assert weights[0] == weights[1]


def test_pause_at_an_earlier_step_or_at_the_end(tmp_path: Path) -> None:
    """A resumed job at or beyond the pause ends as paused without a step; a pause after the end changes nothing."""
    train(tmp_path, 6)
    for earlier in (6, 4):
        done, outcome = train(tmp_path, earlier)
        assert (outcome["outcome"], outcome["step"]) == ("paused", 6)
        assert not [each for each in done.events if each["e"] in ("step", "eval", "checkpoint")]
    done, outcome = train(tmp_path, 20)
    assert (outcome["outcome"], outcome["step"]) == ("done", 14)
    assert list(done.values("eval", "loss")) == [12, 14]
