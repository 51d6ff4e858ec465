"""The samples and random numbers of each step: pure functions of (seed, step, virtual rank).

A global batch of G samples is V = G / m micro-batches of m; micro-batch v belongs to *virtual rank* v, independent of
the physical rank that computes it. The samples form one infinite stream, each epoch a separate permutation, cut into
steps regardless of the ends of epochs: no sample is dropped, padded or repeated, and a position in the stream is the
complete state.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import hashlib
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ..errors import FormError, TaskError
from .generators import draw, forget, own_generators, reseed

Key = tuple[int, int]  # (epoch, index in the dataset): one sample in one epoch
Batches = Generator[Any, None, None]
Collate = Callable[[list[Any]], Any] | None

# The first word of every seed, so that no two uses of the job's seed share a stream.
INIT, ORDER, SAMPLE, COLLATE, FORWARD, EVAL, OPTIMIZER, AFTER_STEP = range(8)

CPU = torch.device("cpu")
AS_IT_IS = "the dataset's own"  # the kind of an order without shuffling
_MOST_DRAWN = 1 << 20  # indices of an epoch, for a sampler without a length
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Split:
    """How a global batch is cut: global = micro x ranks x accumulation, virtual = ranks x accumulation."""

    global_batch: int
    micro: int
    ranks: int
    accumulation: int
    is_strided: bool = False

    @property
    def virtual(self) -> int:
        """The number of virtual ranks: micro-batches an optimizer step."""
        return self.ranks * self.accumulation

    def owned(self, rank: int) -> range:
        """Return the virtual ranks of a physical rank, in order: consecutive, or with stride `ranks`."""
        if self.is_strided:
            return range(rank, self.virtual, self.ranks)
        return range(rank * self.accumulation, (rank + 1) * self.accumulation)


def split_batch(global_batch: int, micro: int | None, ranks: int) -> Split:
    """Return how G samples are divided among the ranks. Raises TaskError with the arithmetic if uneven."""
    size = micro or max(1, global_batch // ranks)
    accumulation, rest = divmod(global_batch, size * ranks)
    if accumulation and not rest:
        return Split(global_batch, size, ranks, accumulation)
    unit = size * ranks
    low, high = global_batch // unit * unit, (global_batch // unit + 1) * unit
    near = f"{low} or {high}" if low else f"{high}"
    fits = [m for m in range(1, global_batch // ranks + 1) if global_batch % (m * ranks) == 0]
    closest = min(fits, key=lambda m: (abs(m - size), m), default=None)
    mend = f"set global_batch_size to {near}" + (f", or micro_batch_size to {closest}" if closest else "")
    raise TaskError(
        f"global_batch_size {global_batch} is no multiple of micro_batch_size {size} x {ranks} ranks = {unit} "
        f"({global_batch} = {accumulation} x {unit} + {rest}); {mend}"
    )


def mix(*words: int) -> int:
    """Return 64 well-mixed bits of the words' sequence. Source: splitmix64's finalizer, Steele et al. 2014."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(value: int, own: Iterable[Any] = ()) -> None:
    """Seed torch's default generators, `random`, numpy's global generator if numpy is loaded, and the task's `own`.

    `torch.manual_seed` does the same for every known device and takes 60 to 90 us; `seed_all` takes 15.
    """
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)
    for generator in own:
        reseed(generator, value)


def _begin(root: Any, epoch: int, value: int) -> None:
    """Seed the generators for an epoch, also those that `set_epoch` makes, if there is one."""
    seed_all(value, own := own_generators(root))
    if hasattr(root, "set_epoch"):
        root.set_epoch(epoch)
        forget(root)
        if own_generators(root) != own:
            seed_all(value, own_generators(root))


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The samples of each epoch in their order: shuffled, the dataset's own, or those of the task's sampler."""

    seed: int
    length: int  # of an epoch
    kind: str = "shuffled"
    sampler: Any = None
    items: int = 0  # of the dataset


@functools.lru_cache(maxsize=2)  # a step may straddle two epochs
def permutation(order: SampleOrder, epoch: int) -> torch.Tensor:
    """Return the order of one epoch: int64, shape (length,)."""
    if order.sampler is not None:
        return drawn(order.sampler, order.seed, epoch, order.items, order.length)
    generator = torch.Generator().manual_seed(mix(order.seed, ORDER, epoch))
    return torch.randperm(order.length, generator=generator)


def drawn(sampler: Any, seed: int, epoch: int, items: int, length: int | None = None) -> torch.Tensor:
    """Return the indices of an epoch that a sampler gives, below `items`: int64. Raises FormError."""
    _begin(sampler, epoch, mix(seed, ORDER, epoch))
    most = max(10 * items, _MOST_DRAWN)
    with contextlib.suppress(TypeError, NotImplementedError):
        most = max(most, len(sampler))
    given = sampler if isinstance(sampler, torch.Tensor) else list(itertools.islice(sampler, most + 1))
    if len(given) > most:
        raise FormError(f"sampler does not end: it gave more than {most:,} indices; give the indices of one epoch")
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # batches, or names
        found = torch.as_tensor(given)
        if found.is_floating_point() and len(found) == items:
            found = torch.multinomial(found.double(), items, replacement=True)
        is_whole = found.dim() == 1 and not found.is_floating_point() and len(found) == (length or len(found))
        if is_whole and int(found.min()) >= 0 and int(found.max()) < items:
            return found.long()
    raise FormError(
        f"sampler must give indices below {items}, the same number in each epoch, or a weight for each of the {items} "
        f"samples; in epoch {epoch} it gave {len(given)} items: {given[:3]}"
    )


def stream(order: SampleOrder, start: int, count: int) -> list[Key]:
    """Return the samples at positions start .. start + count of the infinite stream."""
    keys: list[Key] = []
    while len(keys) < count:
        epoch, offset = divmod(start + len(keys), order.length)
        end = offset + count - len(keys)
        wanted: Iterable[int]
        if order.kind == AS_IT_IS:
            wanted = range(offset, min(end, order.length))
        else:
            wanted = permutation(order, epoch)[offset:end].tolist()
        keys += [(epoch, index) for index in wanted]
    return keys


def train_keys(order: SampleOrder, split: Split, rank: int, position: int, steps: int) -> Iterator[list[Key]]:
    """Yield the rank's micro-batches for `steps` optimizer steps from a stream position, in the order of use."""
    for step in range(steps):
        for virtual in split.owned(rank):
            start = position + step * split.global_batch + virtual * split.micro
            yield stream(order, start, split.micro)


class Stream:
    """A stream as a dataset by index: an index is a position in the endless repetition of the stream.

    Each item is read under a seed of its own, skipped items too, so an item depends on seed and position alone. A
    position before the last one starts the stream again, from its first state if it has `state_dict` and
    `load_state_dict`. The length is that of the head, by which ranks are compared.
    """

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self.source, self._seed, self._start = source, seed, None
        if hasattr(source, "load_state_dict"):
            with contextlib.suppress(Exception):  # without an iterator, or with arguments of its own
                self._start = copy.deepcopy(source.state_dict())  # type: ignore[attr-defined]
        # Hashes of the items at positions of three binary digits and zeros, also of those that a loader's process read.
        self.marks = torch.zeros(256, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._items, self._next = self._endless(), 0

    def __len__(self) -> int:
        return 16

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.source, self._seed), {"_start": self._start, "marks": self.marks}

    def __getitem__(self, position: int) -> Any:
        if position < self._next:
            self._items, self._next = self._endless(), 0
        item = None
        while self._next <= position:
            item = next(self._items)
            zeros = max(self._next.bit_length() - 3, 0)
            if self._next >> zeros << zeros == self._next:
                self.marks[4 * zeros + (self._next >> zeros)] = int(_digest(item)[:14], 16)
            self._next += 1
        return item

    def items(self, epoch: int) -> Iterator[Any]:
        """Yield the items of one pass."""
        _begin(self.source, epoch, mix(self._seed, SAMPLE, epoch, -1))
        items, end = iter(self.source), object()
        for number in itertools.count():
            seed_all(mix(self._seed, SAMPLE, epoch, number), own_generators(self.source))
            if (item := next(items, end)) is end:
                return
            yield item

    def goes_on(self) -> bool:
        """Return whether a stream of unsteady items goes on where it was: copies of a random one begin differently."""
        try:
            return len({item_hash(Stream(copy.deepcopy(self.source), self._seed), self._seed, 0) for _ in "ab"}) == 1
        except Exception as error:  # no item is left, or no copy of an open file or a generator can be made
            parts = getattr(self.source, "__dict__", {}).values()
            return isinstance(error, TaskError) or any(hasattr(part, "__next__") for part in parts)

    def _endless(self) -> Iterator[Any]:
        if self._start is not None:
            self.source.load_state_dict(copy.deepcopy(self._start))  # type: ignore[attr-defined]
        for epoch in itertools.count():
            before = self._next
            yield from self.items(epoch)
            if self._next == before:
                kind = FormError if self.marks.any() else TaskError  # no file may be on this machine
                raise kind(
                    f"the training stream, a {type(self.source).__name__}, gave no item in pass {epoch}: it is empty, "
                    "or iter() of it does not start again from the beginning, without which no resume could be exact"
                )


def load(
    data: Any, keys: Iterator[list[Key]], seed: int, collate: Collate, num_workers: int = 0, device: torch.device = CPU
) -> Batches:
    """Yield collated batches on the device, loaded in this process or by workers, which `close` ends.

    Order and content depend on the keys alone, never on `num_workers`.
    """
    if num_workers and isinstance(data, Stream):  # each loader would read the whole stream
        data, num_workers = copy.copy(data), 1
    source = _BatchSource(data, seed, collate)
    if num_workers == 0:
        yield from (to_device(batch, device) for batch in source.batches(keys))
        return
    loader: DataLoader[Any] = DataLoader(
        source,  # type: ignore[arg-type]  # it has __getitems__, all that a batch sampler needs
        batch_sampler=keys,  # consumed once
        collate_fn=_as_it_is,
        num_workers=num_workers,
        worker_init_fn=_ignore_signals,
        pin_memory=device.type == "cuda",
    )
    batches: Any = iter(loader)
    try:
        yield from (to_device(batch, device) for batch in batches)
    finally:
        batches._shutdown_workers()  # they ignore SIGTERM, so at exit torch would wait 30 s for them


class _BatchSource:
    """Turns lists of keys into collated batches, each sample with separate random numbers.

    Seeding three generators takes 7 us, as long as many a sample takes. So the first batch tests whether reading a
    sample draws random numbers. If not, batches are read without seeding, a few small batches at a time, and checked
    afterwards; batches that did draw are read again, sample by sample. The result is always the same. Generators of
    the dataset's or of `collate`'s own, as far as a search finds them, are seeded and tested like the global ones.
    """

    def __init__(self, data: Any, seed: int, collate: Collate) -> None:
        self._data = data
        self._source = data.source if isinstance(data, Stream) else data  # a stream's iterator has its own course
        self._seed = seed
        self._collate = collate
        self._random: bool | None = None
        self._is_told, self._epoch = hasattr(data, "set_epoch"), -1

    def __getitems__(self, keys: list[Key]) -> Any:
        (samples,) = self._read([keys])
        return self._collated(keys, samples)

    def batches(self, keys: Iterator[list[Key]]) -> Iterator[Any]:
        """Yield the batches, read ahead for about a millisecond."""
        ahead = 1
        while block := list(itertools.islice(keys, ahead)):
            begin_s = time.perf_counter()
            read = self._read(block)
            ahead = min(2 * ahead, _AHEAD) if time.perf_counter() - begin_s < _AHEAD_S else max(1, ahead // 2)
            for one, samples in zip(block, read, strict=True):
                yield self._collated(one, samples)

    def _collated(self, keys: list[Key], samples: list[Any]) -> Any:
        if self._collate is None:
            return default_collate(samples)
        value, own = mix(self._seed, COLLATE, *keys[0]), own_generators(self._collate)
        seed_all(value, own)
        batch = self._collate(samples)
        if own_generators(self._collate, is_used=True) == own:
            return batch
        seed_all(value, own_generators(self._collate))  # the call made a generator
        return self._collate(self._read([keys])[0])

    def _read(self, block: list[list[Key]]) -> list[list[Any]]:
        if self._random is False and not self._is_told:
            own = own_generators(self._source)
            seed_all(_PROBE, own)
            read = [[self._data[index] for _, index in keys] for keys in block]
            if _draw(own) == _untouched(_PROBE, own) and own_generators(self._source) == own:
                return read
            self._random = True
        return [self._read_seeded(keys) for keys in block]

    def _read_seeded(self, keys: list[Key]) -> list[Any]:
        samples, own = [], own_generators(self._source)
        for epoch, index in keys:
            if self._is_told and epoch not in (self._epoch, -1):  # -1: of an evaluation
                _begin(self._data, epoch, mix(self._seed, SAMPLE, epoch, -1))
                self._epoch, own = epoch, own_generators(self._source)
            value = mix(self._seed, SAMPLE, epoch, index)
            seed_all(value, own)
            samples.append(self._data[index])
            if not self._random:
                self._random = _draw(own) != _untouched(value, own)
        is_whole = own_generators(self._source, is_used=True) == own  # else a read made a generator
        return samples if is_whole else self._read_seeded(keys)


_AHEAD, _AHEAD_S = 16, 1e-3  # batches, at most
_PROBE = 1
_TRIAL_S = 0.1  # of repeated reads of one item


def _draw(own: Iterable[Any]) -> tuple[float, ...]:
    numpy = sys.modules.get("numpy")
    shared = (torch.rand((), dtype=torch.float64).item(), random.random(), numpy.random.random() if numpy else 0.0)
    return (*shared, *map(draw, own))


@functools.lru_cache(maxsize=2)
def _untouched(value: int, own: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the result of `_draw` right after `seed_all`; leaves the generators in a different state."""
    seed_all(value, own)
    return _draw(own)


def _as_it_is(batch: Any) -> Any:
    return batch


def _ignore_signals(_worker: int) -> None:
    # A platform that signals the whole process group would kill the loaders first, and with the loaders the save.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device; containers keep their type."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def fingerprint(data: Any, seed: int) -> str:
    """Return a hash of the dataset's length and of its first and last item, as hex."""
    seed_all(mix(seed, SAMPLE, -1, 0))
    data[0]  # a first read may open files, fill a cache, or draw from a generator that later reads do not use
    digest = hashlib.sha256(str(len(data)).encode())
    for index in (0, len(data) - 1):
        _feed(digest, _read_alike(data, seed, index))
    return digest.hexdigest()


def is_unsteady(data: Any, seed: int) -> bool:
    """Return whether the first item differs from read to read under one seed, after `fingerprint` has read it.

    Of an item flipped by chance two reads are equal one time in two, so a quick item is read eight times.
    """
    first = item_hash(data, seed, 0)
    return any(item_hash(data, seed, 0) != first for _ in _some(7, 7, _TRIAL_S))


def item_hash(data: Any, seed: int, index: int) -> str:
    """Return the hash of an item's content, read under the index's own seed."""
    return _digest(_read_alike(data, seed, index))


def some_hashes(data: Any, seed: int) -> list[str]:
    """Return the hashes of at most 16 items, the same on all ranks: as many as time allows, and none of a stream."""
    found = list[str]()
    with contextlib.suppress(Exception):  # the training will meet such an item, or need not read it
        for index in () if isinstance(data, Stream) else _some(len(data), 16, _TRIAL_S):
            found.append(item_hash(data, seed, index))
    return found


def content_hashes(data: Any, most: int, limit_s: float) -> list[str]:
    """Return the contents' hashes of `most` items, or as many as time allows; [] if items are random, or numbers."""
    own, found = own_generators(data), list[str]()
    seed_all(_PROBE, own)
    for index in _some(len(data), most, limit_s):
        if isinstance(item := data[index], int):  # perhaps an index, which says nothing about the sample
            return []
        found.append(_digest(item))
    return found if _draw(own) == _untouched(_PROBE, own) else []


def _some(length: int, most: int, limit_s: float) -> Iterator[int]:
    """Yield indices below `length`, the same in each call: at most `most`, and until the time is over."""
    end_s = time.perf_counter() + limit_s
    for index in random.Random(0).sample(range(length), min(most, length)):
        yield index
        if time.perf_counter() > end_s:
            return


def _read_alike(data: Any, seed: int, index: int) -> Any:
    seed_all(mix(seed, SAMPLE, -1, index), () if isinstance(data, Stream) else own_generators(data))
    return data[index]


def _digest(item: Any) -> str:
    _feed(digest := hashlib.sha256(), item)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, value: Any) -> None:
    """Hash the content of a sample; for an object of an unknown kind, only its type."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().contiguous()
        digest.update(ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b"")
    elif isinstance(value, Mapping):
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            _feed(digest, part)
    elif hasattr(value, "tobytes"):  # numpy arrays and scalars, images
        digest.update(value.tobytes())
    elif isinstance(value, (int, float, complex, str, bytes, type(None))):
        digest.update(repr(value).encode())
