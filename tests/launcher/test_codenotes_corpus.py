"""The notes on scripts, tried on other people's scripts: at most 2 % may have a note that a user would mind."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config import codenotes
from cloudtrain.launcher.config.schema import JobConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric")
LEAST, MOST_SHARE = 200, 0.02
_TRAINS = re.compile(r"distributed|init_process_group|Accelerator|deepspeed")
_STARTS = re.compile(r"environ|__main__|argparse|init_process_group")


def corpus() -> Iterator[Path]:
    """Yield the files of this repository and of the test's packages that start or join ranks."""
    specs = (importlib.util.find_spec(name) for name in PACKAGES)
    installed = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    for folder in (ROOT / "examples", ROOT / "tests" / "scripts", *installed):
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(errors="replace")
            if _TRAINS.search(text) and _STARTS.search(text):
                yield path


def notes_of(config: JobConfig, script: Path) -> list[str]:
    """Return the notes on how the script's ranks meet, and on settings beside it."""
    meeting = codenotes._meeting(config, script.name, script.read_text(errors="replace"))
    beside = (find(config, script.name, script.parent) for find in (codenotes._accelerate, codenotes._launchers))
    return [*meeting, *(note for notes in beside for note in notes)]


def test_notes_on_a_corpus_of_scripts_are_no_false_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot meet, `--local_rank`, settings of Accelerate and DeepSpeed: two machines, no other key."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: train.py\nresources: {instances: 2}\n")
    config = configs.load(tmp_path / "cloudtrain.yaml")
    scripts = list(corpus())
    told = {path: notes for path in scripts if (notes := notes_of(config, path))}
    assert len(scripts) >= LEAST
    assert len(told) <= MOST_SHARE * len(scripts), told
