"""The sample stream, the batch arithmetic and the seeds."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import data


class Noisy:
    """Items of random numbers only, drawn from all three generators."""

    def __init__(self, from_index: int = 0) -> None:
        self.from_index = from_index
        self.reads = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads += 1
        if index < self.from_index:
            return index, 0.0
        return index, float(torch.rand(())) + random.random() + np.random.random()


def batches(source: object, keys: list[list[data.Key]], num_workers: int = 0) -> list[list[float]]:
    """Return the second part of every sample."""
    found = data.load(source, iter(keys), seed=7, collate=None, num_workers=num_workers)
    try:
        return [batch[1].tolist() for batch in found]
    finally:
        found.close()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_together_see_the_global_order(ranks: int) -> None:
    """Joined by rank within each step, the micro-batches are the stream itself, for any number of ranks."""
    split = data.split_batch(16, 2, ranks)
    each = [list(data.train_keys(data.SampleOrder(3, 37), split, rank, 5, steps=6)) for rank in range(ranks)]
    a = split.accumulation
    joined = [
        key
        for step in range(6)
        for rank in range(ranks)
        for keys in each[rank][step * a : (step + 1) * a]
        for key in keys
    ]
    assert joined == data.stream(data.SampleOrder(3, 37), 5, 6 * 16)


def test_stream_holds_each_sample_once_an_epoch() -> None:
    """Cut into batches that do not divide the epoch, three epochs hold each index exactly three times."""
    order = data.SampleOrder(1, 37)
    keys = list(itertools.chain.from_iterable(data.stream(order, start, 4) for start in range(0, 148, 4)))[: 3 * 37]
    for epoch in range(3):
        assert sorted(index for e, index in keys if e == epoch) == list(range(37))


def test_stream_orders_epochs_differently_and_by_seed() -> None:
    """Each epoch and seed has its own order; the same pair always gives the same order."""
    first, again = data.stream(data.SampleOrder(1, 37), 0, 37), data.stream(data.SampleOrder(1, 37), 0, 37)
    assert first == again
    assert [i for _, i in first] != [i for _, i in data.stream(data.SampleOrder(1, 37), 37, 37)]
    assert [i for _, i in first] != [i for _, i in data.stream(data.SampleOrder(2, 37), 0, 37)]


def test_split_batch_error_gives_the_arithmetic() -> None:
    """The error gives the product, the remainder and the nearest sizes that fit."""
    with pytest.raises(
        TaskError, match=r"100 is no multiple of micro_batch_size 16 x 2 ranks = 32 .*96 or 128.* to 10"
    ):
        data.split_batch(100, 16, 2)


def test_split_batch_without_micro_takes_no_accumulation() -> None:
    """micro_batch_size null is the rank's whole share; a rank without a sample is an error that names a size."""
    assert data.split_batch(64, None, 4) == data.Split(64, 16, 4, 1)
    with pytest.raises(TaskError, match="set global_batch_size to 4"):
        data.split_batch(2, None, 4)


def test_sample_randomness_belongs_to_the_sample() -> None:
    """A sample's random numbers depend on seed, epoch and index: not on neighbours or the process's state."""
    alone = batches(Noisy(), [[(0, 3)], [(1, 3)]])
    random.seed(99)
    together = batches(Noisy(), [[(0, 1), (0, 3)], [(1, 3), (1, 1)]])
    assert alone[0][0] == together[0][1]
    assert alone[1][0] == together[1][0]
    assert alone[0] != alone[1]


def test_late_randomness_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset whose random draws begin late gives the same samples as a dataset seeded from the start."""
    monkeypatch.setattr(data, "_AHEAD_S", float("inf"))  # the number of batches read ahead depends on the time else
    keys = [[(0, 0), (0, 1)], [(0, 2), (0, 8)], [(0, 9), (0, 1)]]
    source = Noisy(from_index=5)
    found = batches(source, keys)
    assert found[1][1] == batches(Noisy(), [[(0, 8)]])[0][0]
    assert found[2][0] == batches(Noisy(), [[(0, 9)]])[0][0]
    assert source.reads == 10  # samples read ahead of the first draw were read twice


def test_workers_give_the_same_batches() -> None:
    """num_workers changes neither order nor random numbers."""
    keys = [[(0, i), (0, i + 1)] for i in range(6)]
    assert batches(Noisy(), keys, num_workers=2) == batches(Noisy(), keys)


def test_mix_depends_on_order_and_length() -> None:
    """Arguments in a different order or number give different seeds."""
    assert len({data.mix(1, 2), data.mix(2, 1), data.mix(1, 2, 0), data.mix(0, 1, 2), data.mix(-1, 2)}) == 5


def test_fingerprint_sees_a_changed_item() -> None:
    """The last item's content and the length both count."""
    rows = [torch.full((3,), float(i)) for i in range(5)]
    changed = [*rows[:4], torch.full((3,), 9.0)]
    found = {data.fingerprint(rows, 1), data.fingerprint(changed, 1), data.fingerprint(rows[:4], 1)}
    assert len(found) == 3
    assert data.fingerprint(list(rows), 1) in found


def test_order_without_shuffle_is_the_datasets_own() -> None:
    """Each epoch holds the samples from the first to the last."""
    found = data.stream(data.SampleOrder(1, 5, "the dataset's own"), 3, 9)
    assert [index for _, index in found] == [3, 4, 0, 1, 2, 3, 4, 0, 1]


class Curriculum:
    """A sampler of the task's: more samples from epoch to epoch, in a random order of its own generator."""

    def __init__(self) -> None:
        self.epoch, self.generator = 0, torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter((torch.randperm(5, generator=self.generator) + min(self.epoch, 5)).tolist())


@pytest.mark.parametrize(
    ("sampler", "allowed"),
    [
        ([0.0, 1.0, *[0.0] * 7, 2.0], {1, 9}),
        (np.array([3, 1, 1, 2]), {1, 2, 3}),
        (torch.utils.data.WeightedRandomSampler([0.0] * 8 + [1.0, 3.0], 30), {8, 9}),
        (torch.utils.data.SubsetRandomSampler(range(4, 8)), set(range(4, 8))),
        (Curriculum(), set(range(7))),
    ],
)
def test_sampler_gives_each_epochs_indices(sampler: Any, allowed: set[int]) -> None:
    """Indices, or weights, belong to seed and epoch: an epoch is the same whatever was read before it."""
    length = len(data.drawn(sampler, 3, 0, 10))
    whole = data.stream(data.SampleOrder(3, length, "the sampler's", sampler, 10), 0, 3 * length)
    assert {index for _, index in whole} == allowed
    again = data.SampleOrder(3, length, "the sampler's", sampler, 10)
    assert data.stream(again, 2 * length, length) == whole[2 * length :]
    assert data.stream(again, 3, 7) == whole[3:10]


@pytest.mark.parametrize(
    "sampler", [[0, 10], [-1], [], [[0, 1], [2]], [[0, 1], [2, 3]], ["a"], [0.5, 0.5], [-1.0] * 10]
)
def test_sampler_with_other_values_is_refused(sampler: Any) -> None:
    """Batches, names, and indices that the dataset does not have end with the fault."""
    with pytest.raises(TaskError, match=r"indices below 10, .* or a weight for each of the 10 samples; in epoch 0"):
        data.drawn(sampler, 1, 0, 10)


def test_sampler_without_an_end_is_refused() -> None:
    """An order for a loop without epochs has no epoch; a stated length, however large, is believed."""
    with pytest.raises(TaskError, match=r"gave more than 1,048,576 indices; give the indices of one epoch"):
        data.drawn(itertools.cycle(range(10)), 1, 0, 10)
    assert len(data.drawn(torch.utils.data.RandomSampler(range(3), True, 1 << 21), 1, 0, 3)) == 1 << 21


def test_sampler_must_keep_its_length() -> None:
    """A position in the stream names a sample only if epochs are equally long."""
    order = data.SampleOrder(1, 4, "the sampler's", iter(range(4)), 10)
    data.stream(order, 0, 4)
    with pytest.raises(TaskError, match=r"the same number in each epoch.* in epoch 1 it gave 0"):
        data.stream(order, 4, 1)
