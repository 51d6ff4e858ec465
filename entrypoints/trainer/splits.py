"""What a look at the splits shows before the first step: samples in two splits, and items that no seed repeats."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Subset

from ..errors import FormError
from . import data
from .job import TrainingJob

_MOST, _LOOK_S = 2048, 0.5  # samples of a split that are read, and the time for them
_VERIFIED = 32  # common indices of two datasets whose items are compared
_NOTABLE = 0.01  # the share of a split that is worth a line
_FEW = 0.25  # of the samples: fewer in an epoch of the task's order are worth a line

_UNSTEADY = """warning: the first item of the split {!r} differs when it is read again under the same seed. It draws \
from a generator of its own: after a resume its random numbers differ, and ranks or loaders may draw the same ones. \
Use torch.rand, random or numpy.random in __getitem__, or seed the generator there from torch.initial_seed()"""
_GOES_ON = """the training stream, a {}, goes on where it was: iter() of it does not start again from the beginning, \
without which no resume could be exact; start in __iter__, or give it state_dict() and load_state_dict(state)"""
_REPEATS = """warning: sampler gives {} of the {} samples in epoch 0, many times each. Whole numbers are indices: give \
weights as floats"""
_SHARED = """warning: {} of the split {!r} are also in the training split, so its figures are too good. Split by fixed \
indices, or by a generator that `dataset` makes with a fixed seed in each call"""


def say_faults(job: TrainingJob, test: Any | None) -> None:
    """Print, on rank 0, a line for each fault of the splits; `test` is the split of the job's test.

    Raises FormError, on all ranks, if a stream goes on where it was.
    """
    wanted, order = job.spec.evaluate, job.order
    if order.sampler is not None and job.place.is_head:
        used = int(data.permutation(order, 0).bincount().count_nonzero())
        if used < _FEW * min(order.length, order.items):
            print(_REPEATS.format(used, order.items), flush=True)
    held = {"eval": job.eval_data, **({wanted.split: test} if wanted else {})}
    for fault in faults(job.train_data, held, job.spec.training.seed, compares=job.place.is_head):
        if job.place.is_head:
            print(fault, flush=True)


def faults(train: Any, held: Mapping[str, Any], seed: int, *, compares: bool = True) -> Iterator[str]:
    """Yield the faults of the splits in words; a split in `held` may be None. `compares`: its samples with `train`.

    Raises FormError if a stream goes on where it was.
    """
    for name, split in {"train": train, **held}.items():
        if split is None:
            continue
        if data.is_unsteady(split, seed):
            if isinstance(split, data.Stream) and split.goes_on():
                raise FormError(_GOES_ON.format(type(split.source).__name__))
            yield _UNSTEADY.format(name)
        if compares and name != "train" and (found := overlap(train, split, seed)):
            yield _SHARED.format(found, name)


def overlap(train: Any, held: Any, seed: int) -> str:
    """Return in words how many samples of `held` are also in `train`; "" if none are, or if that cannot be said.

    Indices of the same dataset are compared exactly. Otherwise contents are, of at most 2048 samples of each split that
    are read in half a second; not if items are random, or repeat as much within the training split. Of a stream nothing
    is said.
    """
    if isinstance(train, data.Stream):
        return ""
    try:
        count, looked, known = _by_index(train, held, seed) or _by_content(train, held)
    except Exception:  # an item that cannot be read: the training will meet it, or need not read it
        return ""
    if not count:
        return ""
    if (known, looked) == (len(train), len(held)):
        return f"{count} of the {looked} samples"
    return f"at least {count} of {looked} samples that were compared with {known} of the training split,"


def _by_index(train: Any, held: Any, seed: int) -> tuple[int, int, int] | None:
    """Return the common indices and the lengths of both, None if these are no parts of the same dataset."""
    (mine, all_mine), (other, all_other) = _unwrapped(train), _unwrapped(held)
    common = sorted(set(all_mine) & set(all_other))
    if mine is not other:  # made twice, or different
        if len(mine) != len(other) or (mine is train and other is held):
            return None
        some = random.Random(0).sample(common, min(_VERIFIED, len(common)))
        ours, theirs = ([data.item_hash(each, seed, index) for index in some] for each in (mine, other))
        if not ours or ours != theirs or len(set(ours)) < len(ours):
            return None
    return len(common), len(held), len(train)


def _unwrapped(split: Any) -> tuple[Any, Sequence[int]]:
    indices: Sequence[int] = range(len(split))
    while isinstance(split, Subset):
        split, indices = split.dataset, [int(split.indices[index]) for index in indices]
    return split, indices


def _by_content(train: Any, held: Any) -> tuple[int, int, int]:
    """Return the samples of `held` whose content is in `train`, and the samples looked at of both."""
    mine, other = (data.content_hashes(split, _MOST, _LOOK_S) for split in (train, held))
    known, total, looked = Counter(mine), len(mine), len(other)
    count = sum(each in known for each in other)
    # Data that repeat themselves do so within the training split as well.
    repeated, coverage = sum(n for n in known.values() if n > 1), total / len(train)
    is_notable = count >= (3 if coverage < 1 else 1) and count > (2 * repeated / total + _NOTABLE * coverage) * looked
    return count if is_notable else 0, looked, total
