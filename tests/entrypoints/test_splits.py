"""What the trainer notices in the splits: generators of the dataset's own, and samples in two splits."""

import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split
from trainerruns import TASK, joined, parameters, run, whole_run

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data, splits
from cloudtrain.entrypoints.trainer.generators import own_generators
from cloudtrain.entrypoints.trainer.job import order_of
from cloudtrain.entrypoints.trainer.settings import TrainingSettings
from cloudtrain.entrypoints.trainer.task import Task

GLOBAL = np.random.default_rng()


class Augmented(Dataset[Any]):
    """Eight numbers, each changed by a function."""

    def __init__(self, change: Callable[[float], Any], count: int = 8) -> None:
        self.change, self.count = change, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), float(self.change(index))])


class OfClass(Augmented):
    """Has a generator among the attributes of its class."""

    rng = np.random.RandomState(5)

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random()


class Transform:
    """A transform with a generator of torch's in a list."""

    def __init__(self) -> None:
        self.held = [torch.Generator()]

    def __call__(self, value: float) -> float:
        """Return the value with noise."""
        return value + torch.rand((), generator=self.held[0]).item()


def closure() -> Callable[[float], float]:
    """Return a function that draws from a generator of its own."""
    own = random.Random()
    return lambda value: value + own.random()


class Late(Augmented):
    """Makes a generator at the read of a later item, or for each epoch."""

    rng: Any = None

    def __getitem__(self, index: int) -> Any:
        if index == 2 and self.rng is None:
            self.rng = random.Random(0)
        return index, self.rng.random() if self.rng else 0.5

    def set_epoch(self, epoch: int) -> None:
        """Make another generator, if the items do not."""
        if self.count > 8:
            self.rng = random.Random(epoch)


def many() -> Callable[[float], float]:
    """Return a function that draws from the last of many generators."""
    own = [random.Random() for _ in range(400)]
    return lambda index: own[int(index) + 390].random()


OWN: dict[str, Callable[[], Any]] = {
    "global": lambda: Augmented(lambda value: GLOBAL.random()),
    "closure": lambda: Augmented(closure()),
    "attribute": lambda: Augmented(Transform()),
    "class": lambda: OfClass(abs),
    "method": lambda: Augmented(functools.partial(random.Random().uniform, 0)),
    "chain": lambda: Subset(ConcatDataset([Augmented(abs), Augmented(Transform())]), [0, 9, 3, 12]),
    "many": lambda: Augmented(many()),
    "late": lambda: Late(abs),
    "epoch": lambda: Late(abs, 9),
    "comprehension": lambda: Augmented(lambda value: sum(GLOBAL.normal() for _ in range(3))),
}


def read(source: Any, keys: list[list[data.Key]], num_workers: int = 0) -> list[Any]:
    """Return the batches as lists."""
    found = data.load(source, iter(keys), seed=7, collate=None, num_workers=num_workers)
    try:
        return [torch.stack(b, 1).tolist() if isinstance(b, list) else b.tolist() for b in found]
    finally:
        found.close()


@pytest.mark.parametrize("place", OWN)
def test_generator_of_the_datasets_own_is_seeded_by_sample(place: str) -> None:
    """A sample's numbers depend on seed, epoch and index, also in a process that has not read the samples before it."""
    first, second = OWN[place](), OWN[place]()
    assert data.fingerprint(first, 1) == data.fingerprint(second, 1)
    assert not data.is_unsteady(first, 1)
    keys = [[(0, 1)], [(0, 3), (0, 2)], [(1, 3)]]
    whole = read(first, keys)
    assert read(second, keys[1:]) == whole[1:]
    assert whole[1][0] != whole[2][0] or place == "late"
    assert read(second, [keys[2]], num_workers=1) == whole[2:]


def test_generator_that_collate_makes_is_seeded() -> None:
    """At its first call, in an attribute or in a global."""

    class Noisy:
        rng = None

        def __call__(self, samples: list[Any]) -> Any:
            self.rng = self.rng or np.random.default_rng()
            return torch.tensor([samples[0][0][0], self.rng.random(), next(late)])

    def draws() -> Iterator[float]:
        own = random.Random()
        while True:
            yield own.random()

    found = []
    for keys in ([[(0, 1)], [(0, 2)]], [[(0, 2)]]):
        late = draws()
        own = data.load(full(), iter(keys), seed=7, collate=Noisy())
        found.append([batch.tolist() for batch in own])
    assert found[0][1:] == found[1]


def test_generators_of_libraries_are_left_alone() -> None:
    """The global generators are seeded anyway; code of the standard library and of torch holds generators, too."""

    def change(value: float) -> float:
        random.shuffle([1, 2])
        return value + random.random() + np.random.random() + torch.rand(()).item() + time.time() + len(os.listdir())

    assert own_generators(Augmented(change)) == ()
    assert own_generators(Augmented(random.SystemRandom().uniform)) == ()


class Lazy(Augmented):
    """Opens its file at the first read, and then has other items."""

    opened = False

    def __getitem__(self, index: int) -> Any:
        self.opened, was = True, self.opened
        return was, index + torch.rand(())


def test_item_that_no_seed_repeats_is_noticed() -> None:
    """Numbers of the system count, also if they seldom change an item; a change at the first read does not."""
    lazy, flips = Lazy(abs), random.SystemRandom()
    data.fingerprint(lazy, 1)
    assert not data.is_unsteady(lazy, 1)
    assert data.is_unsteady(Augmented(lambda value: os.urandom(1)[0]), 1)
    assert any(data.is_unsteady(Augmented(lambda value: flips.random() < 0.5), 1) for _ in range(3))


def full(count: int = 200) -> TensorDataset:
    """Return samples of random numbers, the same in each call."""
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=numbers), torch.arange(count) % 2)


def halves(source: Any, seed: int) -> list[Any]:
    """Return a random partition."""
    return list(random_split(source, [0.5, 0.5], torch.Generator().manual_seed(seed)))


NOISY = Augmented(lambda index: torch.rand(()).item(), 100)
COINS = TensorDataset(torch.randint(0, 2, (900, 3), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("train", "held", "said"),
    [
        (halves(full(), 1)[0], halves(full(), 2)[1], r"^(4|5|6)\d of the 100 samples$"),
        (halves(full(), 1)[0], halves(full(), 1)[1], "^$"),
        (list(Subset(full(), range(150))), list(Subset(full(), range(149, 200))), "^1 of the 51 samples$"),
        (
            full(20_000),
            list(Subset(full(20_000), range(3000))),
            r"^at least \d+ of \d+ samples .* compared with \d+ of",
        ),
        (full(), full(), "^200 of the 200 samples$"),
        (Subset(NOISY, range(80)), Subset(NOISY, range(70, 100)), "^10 of the 30 samples$"),
        (Subset(NOISY, range(80)), Subset(Augmented(NOISY.change, 100), range(70, 100)), "^10 of the 30 samples$"),
        (NOISY, Augmented(NOISY.change, 20), "^$"),  # random items: nothing can be said
        (COINS, TensorDataset(COINS.tensors[0][:300]), "^$"),
        (Subset(COINS, range(300)), Subset(TensorDataset(*COINS.tensors), range(300, 900)), "^$"),
        (TensorDataset(torch.zeros(50, 2)), TensorDataset(torch.zeros(20, 2)), "^$"),
        (range(100), range(10), "^$"),  # perhaps indices, with samples read in `collate`
    ],
)
def test_samples_in_two_splits_are_counted(train: Any, held: Any, said: str) -> None:
    """Common indices and equal contents count; data that repeat themselves do not."""
    assert re.search(said, splits.overlap(train, held, 1)), splits.overlap(train, held, 1)


OWN_TASK = TASK.replace("self.count = count", "self.count, self.rng = count, numpy.random.default_rng()").replace(
    "0.1 * random.random()", "0.3 * self.rng.random()"
)


WEIGHTED = (
    TASK
    + """
def sampler(params):
    return torch.utils.data.WeightedRandomSampler([1.0 + i % 3 for i in range(37)], 23)
"""
)
STREAM = (
    TASK.replace("Points(37 if", "Shuffled(37 if")
    + """
class Shuffled(torch.utils.data.IterableDataset):
    def __init__(self, count): self.points, self.rng = Points(count), random.Random()
    def __iter__(self):
        kept = []
        for index in range(self.points.count):
            kept.append(self.points[index])
            if len(kept) > 9: yield kept.pop(self.rng.randrange(10))
        yield from kept
"""
)

GROWS = """
class Grows:
    def set_epoch(self, epoch): self.count = 10 + 5 * max(0, epoch - 1)
    def __iter__(self): return iter(range(self.count))
def sampler(params): return Grows()
"""
GOES_ON = """
class GoesOn(torch.utils.data.IterableDataset):
    def __init__(self, count): self.numbers = iter(range(1000))
    def __iter__(self): return ((torch.full((6,), n / 100), n % 3) for n in self.numbers)
"""


@pytest.mark.parametrize(("text", "shuffle"), [(OWN_TASK, True), (TASK, False), (WEIGHTED, True), (STREAM, True)])
def test_killed_run_resumes_bit_for_bit(text: str, shuffle: bool, tmp_path: Path) -> None:
    """SIGKILL of one of two ranks inside an epoch; the dataset's generator has no seed of its own."""
    whole = whole_run(tmp_path / "whole", text=text, shuffle=shuffle)
    killed = run(tmp_path / "parts", do="kill:1:26", text=text, shuffle=shuffle)
    again = whole_run(tmp_path / "parts", text=text, shuffle=shuffle)
    assert (again.only("restart")["step"], again.only("restart")["changed"]) == (10, [])
    assert joined(killed, again) == whole.values("step", "loss")
    assert parameters(again) == parameters(whole)


def test_killed_run_on_a_stream_resumes_on_one_rank(tmp_path: Path) -> None:
    """The result is that of two ranks, of which each reads the whole stream, to rounding; loaders change nothing."""
    whole = whole_run(tmp_path / "whole", ranks=1, text=STREAM, num_workers=2)
    assert run(tmp_path / "parts", ranks=1, do="kill:0:50", text=STREAM).code != 0
    again = whole_run(tmp_path / "parts", ranks=1, text=STREAM)
    assert parameters(again) == parameters(whole)
    two = whole_run(tmp_path / "two", text=STREAM).values("step", "loss")
    assert two == pytest.approx(whole.values("step", "loss"), rel=1e-3)


class Numbers(IterableDataset[Any]):
    """Noisy numbers in their order; `once`: of the first pass only; `raw`: numbers that no seed repeats."""

    def __init__(self, once: bool = False, count: int = 5, raw: bool = False) -> None:
        self.left, self.count, self.rng = [1] if once else None, count, np.random.default_rng()
        self.draw = random.SystemRandom().random if raw else random.random

    def __iter__(self) -> Iterator[Any]:
        if self.left is None or (self.left and self.left.pop()):
            yield from (torch.tensor([n, self.rng.random(), self.draw()]) for n in range(self.count))


def test_item_of_a_stream_depends_on_its_position() -> None:
    """Skipped, read again, or read by loaders: an item is the same, and each pass has random numbers of its own."""
    keys = [[(0, 2 * n), (0, 2 * n + 1)] for n in range(6)]
    whole = read(data.Stream(Numbers(), 7), keys)
    assert [int(row[0]) for batch in whole for row in batch] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert whole[0][1] != whole[3][0]
    stream = data.Stream(Numbers(), 7)
    assert read(stream, keys[4:]) + read(stream, keys[1:3]) == whole[4:] + whole[1:3]
    assert read(data.Stream(Numbers(), 7), keys[1:], num_workers=3) == whole[1:]


class GoesOn(IterableDataset[Any]):
    """Numbers that continue where the last iterator ended; `held`: also a generator, which no copy can hold."""

    def __init__(self, held: Any = None) -> None:
        self.at, self.held = 0, held

    def __iter__(self) -> Iterator[Any]:
        while self.at < 12:
            self.at += 1
            yield torch.tensor([self.at, 0])
        self.at = 0


class Stateful(GoesOn):
    """The same with the methods of the stateful loader."""

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position."""
        self.at = state["at"]


def test_stream_that_goes_on_starts_from_its_state_or_is_noticed() -> None:
    """The looks at the start take no sample from a stream with a state; without a state the stream is told apart."""
    stream = data.Stream(Stateful(), 7)
    data.fingerprint(stream, 7)
    assert not data.is_unsteady(stream, 7)
    found = read(stream, [[(0, n)] for n in range(14)], num_workers=1)
    assert [row[0] for batch in found for row in batch] == [*range(1, 13), 1, 2]
    for source in (GoesOn(), GoesOn(iter([])), GoesOn(n for n in ())):
        stream = data.Stream(source, 7)
        assert data.is_unsteady(stream, 7)
        assert stream.goes_on()
    assert not data.Stream(Numbers(raw=True), 7).goes_on()


def test_stream_without_an_end_or_a_second_pass_is_refused() -> None:
    """A held split must end; a training stream must begin again, and has no epochs and no indices."""
    task = Task(len, lambda params, split: Numbers(count=params["count"]), len, "", sampler=len)
    assert len(task.make_dataset({"count": 7}, "eval", 1)) == 7
    assert len(task.make_dataset({"count": 10**9}, "eval", 1, most=3)) == 3
    with pytest.raises(TaskError, match=r"more than 100,000 samples.* or set training.eval_batches"):
        task.make_dataset({"count": 200_000}, "eval", 1)
    stream = task.make_dataset({"count": 7}, "train", 1)
    for changes, said in (({"epochs": 1}, "set training.max_steps"), ({"max_steps": 1}, "sampler gives indices")):
        with pytest.raises(TaskError, match=said):
            order_of(SimpleNamespace(training=TrainingSettings(8, **changes)), task, stream)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"gave no item in pass 0.* start again"):
        data.fingerprint(data.Stream(Numbers(once=True), 1), 1)


def test_order_of_a_ranks_share_is_refused(tmp_path: Path) -> None:
    """The trainer cuts the order of all ranks into micro-batches; a second order beside `sampler` is a mistake."""
    text = TASK + "\ndef sampler(dataset, params): return torch.utils.data.DistributedSampler(dataset)\n"
    assert "give the samples of all ranks together, as DistributedSampler" in run(tmp_path / "share", text=text).errors
    text = STREAM.replace("in range(self.points.count)", "in range(RANK, self.points.count, 2)")
    assert "return the same stream on all ranks, not a rank's share" in run(tmp_path / "stream", text=text).errors
    text = STREAM.replace("self.points[index])", "self.points[index + RANK * (index > 26)])")  # unlike from item 18 on
    late = run(tmp_path / "late", text=text, num_workers=1)
    assert "read different streams, as their items up to step" in late.errors
    text = TASK.replace("arange(6.0).mul(index)", "arange(6.0).mul(index + RANK * (0 < index < 36))")
    assert "is a list of files not sorted" in run(tmp_path / "files", text=text).errors
    text = TASK.replace("Points(37 if", "GoesOn(37 if") + GOES_ON
    assert "GoesOn, goes on where it was" in run(tmp_path / "goes", text=text).errors
    assert "in epoch 2 it gave 15 items" in run(tmp_path / "grows", ranks=1, text=TASK + GROWS).errors
    assert "leave `shuffle: false` out" in run(tmp_path / "two", ranks=1, text=WEIGHTED, shuffle=False).errors


def test_faults_of_the_splits_are_said_at_the_start(tmp_path: Path) -> None:
    """One line each, on rank 0 only, with the count and the cure."""
    few: dict[str, Any] = {"max_steps": 1, "schedule": {}}
    text = TASK.replace("0.1 * torch.rand(6)", "os.urandom(1)[0]") + "\ndef sampler(params): return [1, 5] * 18 + [1]\n"
    done = whole_run(tmp_path / "unsteady", ranks=1, text=text, **few)
    for split in ("train", "eval"):
        assert done.output.count(f"warning: the first item of the split '{split}' differs") == 1
    assert done.output.count("warning: sampler gives 2 of the 37 samples in epoch 0, many times each") == 1
    fixed = TASK.replace(" + 0.1 * torch.rand(6)", "").replace(
        "return x + 0.1 * random.random() + 0.1 * numpy.random.random(), index % 3", "return x, index % 3"
    )
    done = whole_run(tmp_path / "shared", text=fixed, **few)
    assert done.output.count("warning: 11 of the 11 samples of the split 'eval' are also in the training split") == 1
