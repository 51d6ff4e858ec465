"""The checks of the task file and the settings: the fault, its place, and the fix."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer.settings import read_spec
from cloudtrain.entrypoints.trainer.task import Task, load_task

WHOLE = "def model(params): return params\ndef dataset(params, split): return [1]\ndef loss(model, batch): return 0\n"


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore sys.path: loading a task file adds its folder, as running a script would."""
    monkeypatch.syspath_prepend("")


def write(folder: Path, text: str, name: str = "my_task.py") -> Path:
    """Return the path of a new task file."""
    path = folder / name
    path.write_text(text)
    return path


def spec(folder: Path, **training: Any) -> Path:
    """Return the path of a spec with these training settings."""
    path = folder / "spec.json"
    path.write_text(
        json.dumps({"run": {"kind": "task"}, "training": {"global_batch_size": 8, "max_steps": 5, **training}})
    )
    return path


def test_task_file_imports_its_neighbours(tmp_path: Path) -> None:
    """A task file may import modules in its folder, functions are found by name; none needs the progress."""
    write(tmp_path, "SIZE = 3\n", "neighbour_of_task.py")
    task = load_task(write(tmp_path, "from neighbour_of_task import SIZE\n" + WHOLE))
    assert task.model({"a": 1}) == {"a": 1}
    assert task.evaluate is task.progress is None


@pytest.mark.parametrize(
    "form",
    [
        "def loss(model, batch, progress): return progress.step",
        "import functools\ndef f(w, model, batch, progress): return progress.step\nloss = functools.partial(f, 2.0)",
        "class Loss:\n    def __call__(self, model, batch, *, progress): return progress.step\nloss = Loss()",
    ],
)
def test_loss_of_any_form_gets_the_progress(form: str, tmp_path: Path) -> None:
    """A function, a partial function and an object that is called."""
    task = load_task(write(tmp_path, WHOLE + form))
    task.progress.step = 3
    assert task.loss(None, None) == 3


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    """One message reports a missing function, a wrong signature and a wrong kind, with a suggestion."""
    text = "def get_model(params): pass\ndef dataset(params): pass\ndef losses(model, batch): pass\nevaluate = 3\n"
    with pytest.raises(TaskError) as error:
        load_task(write(tmp_path, text))
    words = ("no function model(params)", "dataset(params) does not take 2", "did you mean `losses`")
    for part in (*words, "`evaluate` is a int"):
        assert part in str(error.value)


def test_syntax_error_has_file_and_line(tmp_path: Path) -> None:
    """The place has the form that editors accept."""
    with pytest.raises(TaskError, match=r"my_task.py:2: .*def model\(params"):
        load_task(write(tmp_path, "import os\ndef model(params\n"))


def test_error_of_the_task_file_itself_propagates(tmp_path: Path) -> None:
    """An exception of the user's own code propagates unchanged, with its traceback."""
    with pytest.raises(ZeroDivisionError):
        load_task(write(tmp_path, "1 / 0\n" + WHOLE))


class NoLength(list[int]):
    """Items whose number is not known."""

    def __len__(self) -> int:
        raise NotImplementedError("unknown")


@pytest.mark.parametrize(
    ("data", "mend"),
    [
        ([], "is empty"),
        (NoLength(), r"a NoLength whose __len__ raises NotImplementedError\('unknown'\); return its number of items"),
        (iter([1]), "return a map-style Dataset"),
        (object(), "or a torch IterableDataset"),
    ],
)
def test_dataset_must_have_length_and_items(data: Any, mend: str) -> None:
    """An empty dataset or an iterator is refused, and the message has the fix."""
    task = Task(model=len, dataset=lambda params, split: data, loss=len, code_sha256="")
    with pytest.raises(TaskError, match=mend):
        task.make_dataset({}, "train", 0)


def test_spec_fills_defaults_and_takes_null(tmp_path: Path) -> None:
    """null and a missing key both mean the default; a different learning rate gives a different hash."""
    training = read_spec(spec(tmp_path, optimizer={"name": "sgd", "lr": 0.1}, seed=None, clip_norm=None)).training
    assert (training.optimizer.name, training.optimizer.lr, training.seed, training.strategy) == ("sgd", 0.1, 0, "ddp")
    first = read_spec(spec(tmp_path)).config_sha256
    assert first == read_spec(spec(tmp_path)).config_sha256
    assert first != read_spec(spec(tmp_path, optimizer={"lr": 0.5})).config_sha256


@pytest.mark.parametrize(
    "draw",
    [
        "torch.randperm(40).tolist()",
        "random.sample(range(40), 40)",
        "numpy.random.permutation(40).tolist()",
        "OWN.permutation(40).tolist()",
        "torch.randperm(40, generator=MADE[0]).tolist()",
    ],
)
def test_random_partition_is_the_same_for_each_split(tmp_path: Path, draw: str) -> None:
    """A partition that `dataset` draws belongs to the seed, whatever is drawn between its calls."""
    text = f"""
import random, numpy, torch
OWN, MADE = numpy.random.default_rng(), [torch.Generator()]
AT_IMPORT = torch.rand(3).tolist()
def model(params): pass
def loss(model, batch): pass
def dataset(params, split):
    order = {draw}
    return order[:30] if split == "train" else order[30:]
"""
    tasks = [load_task(write(tmp_path, text, f"{name}_split.py"), seed=3) for name in ("one", "two")]
    train = tasks[0].make_dataset({}, "train", 3)
    torch.rand(5)
    random.random()
    for task in reversed(tasks):  # another process, too
        assert sorted(train + task.make_dataset({}, "eval", 3)) == list(range(40))
    assert train != tasks[0].make_dataset({}, "train", 4)
    assert sys.modules["one_split"].AT_IMPORT == sys.modules["two_split"].AT_IMPORT
