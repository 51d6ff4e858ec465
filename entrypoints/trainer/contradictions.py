"""Training settings that exclude or need each other: one table, read by the launcher and by the ranks, without torch.

The launcher refuses them at their places in the file (launcher/config/rules.py). A rank refuses them again,
with the same words (strategies/wrap.py), because a trial of a sweep joins values that were checked one at a time.
Ranges and choices of single values are in the launcher's schema only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from typing import Any

from .optimizer_facts import BY_LAYER, OPTIMIZERS, heeded_by
from .optimizer_facts import SCHEDULES as RATES
from .settings import LocalSettings, TrainingSettings
from .strategies.facts import FACTS
from .strategies.schedules import SCHEDULES

SPARSE = ("threshold", "topk")  # the kinds of `compression` that send some entries of the gradient
_COMPRESSED = ("fp16", "bf16", "powersgd", *SPARSE)

Given = Mapping[str, Any]  # the config as nested mappings: the keys that were given, with their values


@dataclass(frozen=True)
class Contradiction:
    """A refusal, which holds if any of its keys changes."""

    message: str
    cure: str
    keys: tuple[str, ...]
    """The keys that contradict each other, dotted from the top of the config."""


GIVEN = None
Wanted = tuple[Any, ...] | range | None  # some values; whole numbers from the start of a range on; any value, if given


@dataclass(frozen=True)
class Other:
    """The values of a second key that a row excludes, or needs. A missing key counts with its default."""

    key: str
    values: Wanted
    is_needed: bool = False


@dataclass(frozen=True)
class Row:
    """`key` with a value of `values` excludes or needs `other`. Keys are dotted, below `training`."""

    key: str
    values: Wanted
    other: Other
    cure: str
    because: str = ""
    under: tuple[str, str] | None = None
    """A third key with its value: the row holds only then."""


_SHARDED = tuple(name for name, facts in FACTS.items() if not facts.is_whole)
_MANY = range(2, sys.maxsize)

_WITH_DDP = Other("strategy", tuple(name for name, facts in FACTS.items() if facts.averages_gradients), True)
_WITH_SHARDS = Other("strategy", _SHARDED, True)
_WITH_HSDP = Other("strategy", ("hsdp",), True)
_LOCAL = Other("strategy", tuple(name for name, facts in FACTS.items() if facts.averages_weights))
_ASYNC = Other("strategy", tuple(name for name, facts in FACTS.items() if facts.has_servers))
_WITH_SPARSE = Other("compression", SPARSE, True)
_SPLITS = (Other("parallel.tensor", _MANY), Other("parallel.pipeline", _MANY))
_WITH_TENSOR, _WITH_PIPELINE = (replace(split, is_needed=True) for split in _SPLITS)
_UNWAITING = Other("parallel.schedule", ("async",))
_STRICT = ("reproducible", "strict")

_STRICT_BITS = "strict gives the same bits on any number of ranks, and the averages of `local` do not"
_ONE_COPY = "each rank has a copy of the model, and `parallel` spreads a copy"
_NO_GRADIENTS = "the ranks of the other strategies send shards or weights"
_NORMS = "its norms depend on the shards, and `reproducible: strict` needs norms that do not"
_SIGNS = "threshold sends signs and means, so density 1 is not dense"
_COPIES = "low precision computes with copies of the weights"
_ROUNDS = "strict sums exactly, and `compression` rounds"
_BY_TICKETS = "write `standard`; `server.order: tickets` repeats a run to the bit on the same ranks"
_LESS_DENSE = "write a density below 1, for example 0.01, or `compression: topk`"
_TICKET = "a worker loads the samples of its own ticket"
_IN_ORDER = "with tickets no rank gets ahead"
_OR_WAITING = "leave it out, or write `schedule: 1f1b`"
_OR_STASH = "write `weights: stash`, or `schedule: 1f1b`"
_OR_INTERLEAVED = "write `schedule: interleaved`, or leave `chunks` out"
_OR_CHUNKS = "write `chunks: 2` or more, or leave `schedule` out"
_OR_ADAMW = "write `strategy: ddp`, or `adamw`"
_ONE_OF_TWO = "leave one of them out"
_INTERLEAVED = ("interleaved",)
_NAMES_OF = {"milestones": ("step",), "gamma": ("step", "plateau"), "patience": ("plateau",)}  # by a schedule's key

ROWS = (
    Row("compression", _COMPRESSED, _WITH_DDP, "leave it out, or write `precision: bf16`", _NO_GRADIENTS),
    Row("cpu_offload", (True,), _WITH_SHARDS, "write `strategy: fsdp`", "without shards there is nothing to offload"),
    Row("shard", ("optimizer",), _WITH_DDP, "write `strategy: ddp`"),
    Row("shard", ("gradients", "parameters"), _WITH_SHARDS, "write `strategy: fsdp`"),
    Row("shard_size", GIVEN, _WITH_HSDP, "leave it out, or write `strategy: hsdp`"),
    Row("wrap_min_params", GIVEN, _WITH_SHARDS, "leave it out, or write `strategy: fsdp`"),
    Row("local", GIVEN, replace(_LOCAL, is_needed=True), "leave it out, or write `strategy: local`"),
    Row("server", GIVEN, replace(_ASYNC, is_needed=True), "leave it out, or write `strategy: async`"),
    Row("reproducible", ("strict",), _LOCAL, "write `standard`, or `strategy: ddp`", _STRICT_BITS),
    Row("parallel.tensor", _MANY, _LOCAL, "write `strategy: ddp`, or leave `parallel` out", _ONE_COPY),
    Row("parallel.pipeline", _MANY, _LOCAL, "write `strategy: ddp`, or leave `parallel` out", _ONE_COPY),
    Row("parallel.tensor", _MANY, _ASYNC, "leave it out"),
    Row("parallel.pipeline", _MANY, _ASYNC, "leave it out"),
    Row("precision", ("fp16",), _ASYNC, "write `precision: bf16`"),
    Row("optimizer.name", BY_LAYER, _ASYNC, "write `adamw` or `sgd`", "servers hold parts of layers"),
    Row("reproducible", ("strict",), _ASYNC, _BY_TICKETS),
    Row("num_workers", range(1, sys.maxsize), _ASYNC, "leave it out", _TICKET),
    Row("server.max_lead", GIVEN, Other("server.order", ("tickets",)), "leave it out", _IN_ORDER),
    Row("compression_density", GIVEN, _WITH_SPARSE, "leave it out, or write `compression: threshold`"),
    Row("compression_warmup_steps", GIVEN, _WITH_SPARSE, "leave it out, or write `compression: threshold`"),
    Row("compression_density", (1,), Other("compression", ("threshold",)), _LESS_DENSE, _SIGNS),
    Row("shard", ("optimizer",), Other("compression", SPARSE), _ONE_OF_TWO),
    Row("parallel.sequence", (True,), _WITH_TENSOR, "write `tensor: 2` or more"),
    *(
        Row(f"parallel.{key}", GIVEN, _WITH_PIPELINE, "write `pipeline: 2` or more, or leave it out")
        for key in ("schedule", "cut", "chunks", "weights")
    ),
    *(
        Row(key, values, split, cure)
        for split in _SPLITS
        for key, values, cure in (
            ("reproducible", ("strict",), "write `reproducible: standard`"),
            ("compile", (True,), _ONE_OF_TWO),
            ("compression", _COMPRESSED, "leave `compression` out"),
            ("precision", ("fp16",), "write `precision: bf16`"),
            ("cpu_offload", (True,), _ONE_OF_TWO),
            ("shard", ("optimizer",), "write `strategy: fsdp` and `shard: gradients`"),
        )
    ),
    Row("parallel.chunks", _MANY, Other("parallel.schedule", _INTERLEAVED, True), _OR_INTERLEAVED),
    Row("parallel.schedule", _INTERLEAVED, Other("parallel.chunks", _MANY, True), _OR_CHUNKS),
    Row("parallel.weights", GIVEN, replace(_UNWAITING, is_needed=True), "leave it out, or write `schedule: async`"),
    Row("strategy", _SHARDED, _UNWAITING, "write `strategy: ddp`, or `schedule: 1f1b`"),
    Row("parallel.tensor", _MANY, _UNWAITING, _OR_WAITING),
    Row("clip_norm", GIVEN, _UNWAITING, _OR_WAITING, "the norm needs all stages at once"),
    Row("on_nan", ("skip",), _UNWAITING, "write `on_nan: stop`, or `schedule: 1f1b`"),
    Row("activation_checkpointing", (True,), _UNWAITING, _OR_WAITING),
    Row("activation_offload", (True,), _UNWAITING, _OR_WAITING),
    Row("precision", ("bf16", "fp16"), Other("parallel.weights", ("latest",)), _OR_STASH, _COPIES),
    Row("compression", _COMPRESSED, Other("reproducible", ("strict",)), _ONE_OF_TWO, _ROUNDS),
    Row("optimizer.name", BY_LAYER, Other("strategy", _SHARDED), _OR_ADAMW, _NORMS, _STRICT),
    Row("optimizer.name", BY_LAYER, Other("shard", ("optimizer",)), "leave `shard` out, or `adamw`", _NORMS, _STRICT),
    Row("schedule.name", ("plateau",), _ASYNC, "write another schedule", "the servers see no evaluation"),
    *(
        Row(f"schedule.{key}", GIVEN, Other("schedule.name", names, True), f"leave it out, or write `name: {names[0]}`")
        for key, names in _NAMES_OF.items()
    ),
    *(  # the optimizer would ignore the setting
        Row(
            f"optimizer.{key}", GIVEN, Other("optimizer.name", names, True), "leave it out, or choose another optimizer"
        )
        for key, names in heeded_by().items()
    ),
)


def of(given: Given) -> Iterator[Contradiction]:
    """Yield the contradictions among the given keys. A value of the wrong type contradicts nothing."""
    for row in ROWS:
        key, is_needed = row.other.key, row.other.is_needed
        own, other = _at(given, row.key), _at(given, key)
        other = _default(key) if other is None else other
        if not _is(own, row.values) or (row.under and _at(given, row.under[0]) != row.under[1]):
            continue
        if _is(other, row.other.values) != is_needed and (not is_needed or _is_known(key, other)):
            yield _refusal(_in_words(row, own, other), row.cure, row.key, key, *(row.under or ())[:1])
    for rule in (_averages, _power_of_two, _schedule, _pauses):
        yield from rule(given)


def of_ranks(settings: Any, ranks: int, micro_batches: int) -> Iterator[Contradiction]:
    """Yield the contradictions of the settings, the ranks, and the micro-batches that each rank computes in a step.

    `settings` are the trainer's or the schema's, which have the same names. `ranks` share the data.
    """
    server, stages = settings.server, settings.parallel.pipeline
    for key, most in (("softsync", server.softsync), ("shards", server.shards or 1)):
        if most > ranks:
            message = f"`server.{key}` {most} is more than the {ranks} ranks"
            yield _refusal(message, f"use at most {ranks}", f"server.{key}")
    if settings.parallel.schedule == "interleaved" and micro_batches % stages:
        needs = f"`schedule: interleaved` needs a multiple of {stages} micro-batches a step"
        cure = "use another global_batch_size or micro_batch_size, or `schedule: 1f1b`"
        yield _refusal(f"{needs}, and there are {micro_batches}", cure, "parallel.schedule")


def differing(settings: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as the keys that were given."""
    default = TrainingSettings(1) if isinstance(settings, TrainingSettings) else type(settings)()
    return {
        name: differing(value) if is_dataclass(value) else value
        for name, value in vars(settings).items()
        if value != getattr(default, name)
    }


def _refusal(message: str, cure: str, *keys: str) -> Contradiction:
    return Contradiction(message, cure, tuple(map(_whole, keys)))


def _whole(key: str) -> str:
    """Return the key from the top of the config: below `training`, except for keys of `checkpoint`."""
    return key if key.startswith("checkpoint.") else f"training.{key}"


def _at(given: Given, key: str) -> Any:
    """Return the value at the dotted key; None if the key was not given."""
    value: Any = given
    for name in _whole(key).split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@cache
def _default(key: str) -> Any:
    value: Any = TrainingSettings(1)
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _number(given: Given, key: str) -> int:
    """Return the whole number at the key; 0 if the key was not given, or has another type."""
    value = _at(given, key)
    return value if _is(value, range(sys.maxsize)) else 0


def _is(value: Any, wanted: Wanted) -> bool:
    if wanted is GIVEN:
        return value is not None
    if isinstance(wanted, range):
        return type(value) is int and value in wanted
    return value in wanted


def _is_known(key: str, value: Any) -> bool:
    """Return whether the key may have the value; an unknown name is already a fault of the schema."""
    known = {"strategy": tuple(FACTS), "optimizer.name": tuple(OPTIMIZERS), "compression": ("none", *_COMPRESSED)}
    known |= {"parallel.schedule": SCHEDULES, "schedule.name": RATES}
    return value in known[key] if key in known else isinstance(value, int)


def _averages(given: Given) -> Iterator[Contradiction]:
    """Yield the contradictions of averages that are rare (strategies/local.py)."""
    if not _is(_at(given, "strategy"), _LOCAL.values):
        return
    period, group = _number(given, "local.period") or LocalSettings.period, _number(given, "local.group_period")
    if period == 1:
        message = "`local.period: 1` averages after each step, which is ddp"
        yield _refusal(message, "write `strategy: ddp`, or 2 or more", "local.period", "strategy")
    if group and period % group:
        fits = ", ".join(str(n) for n in range(1, period) if period % n == 0)
        message = f"`local.group_period` {group} does not divide `local.period` {period}"
        yield _refusal(message, f"write one of {fits}", "local.group_period", "local.period")
    for key in ("local.sync_steps", "eval_every", "pause_at", "checkpoint.every_steps"):
        if period > 1 and (steps := _number(given, key)) % period:
            near = " or ".join(str(n) for n in (steps // period * period, -(-steps // period) * period) if n)
            message = f"`{key}` {steps} is no multiple of `local.period` {period}, and the ranks differ then"
            yield _refusal(message, f"write {near}", key, "local.period")


def _power_of_two(given: Given) -> Iterator[Contradiction]:
    """Yield the contradiction of a binary tree of sums and the number of micro-batches (strategies/summation.py)."""
    whole, micro = _number(given, "global_batch_size"), _number(given, "micro_batch_size")
    count = whole // micro if whole and micro and whole % micro == 0 else 1
    if _at(given, "reproducible") == "strict" and count & (count - 1):
        message = f"`reproducible: strict` needs a power of two of micro-batches, and {whole} / {micro} is {count}"
        yield _refusal(message, "change one of the sizes", "global_batch_size", "micro_batch_size", "reproducible")


def _schedule(given: Given) -> Iterator[Contradiction]:
    warmup, steps = _number(given, "schedule.warmup_steps"), _number(given, "max_steps")
    if steps and warmup > steps:
        message = f"`schedule.warmup_steps` {warmup} is more than `max_steps` {steps}: the rate would never be reached"
        yield _refusal(message, "warm up for fewer steps", "schedule.warmup_steps", "max_steps")
    name, listed = _at(given, "schedule.name"), _at(given, "schedule.milestones")
    milestones = [step for step in listed if isinstance(step, int)] if isinstance(listed, list | tuple) else []
    if name == "step" and not milestones:
        message = "`schedule.name: step` needs the steps at which the rate falls"
        yield _refusal(message, "write `milestones: [1000, 2000]`", "schedule.name", "schedule.milestones")
    if steps and milestones and max(milestones) >= steps:
        message = f"`schedule.milestones` {max(milestones)} is not before `max_steps` {steps}: the rate would not fall"
        yield _refusal(message, "write earlier steps", "schedule.milestones", "max_steps")
    if name == "plateau" and not _at(given, "eval_every"):
        message = "`schedule.name: plateau` follows the evaluations, and the only one is after the last step"
        yield _refusal(message, "write `eval_every: 500`", "schedule.name", "eval_every")


def _pauses(given: Given) -> Iterator[Contradiction]:
    """Yield the contradictions of pauses at steps from which a resume is not exact."""
    is_piped = _number(given, "parallel.pipeline") > 1 and _at(given, "parallel.schedule") == "async"
    period = _number(given, "local.period") or LocalSettings.period
    averages_late = _is(_at(given, "strategy"), _LOCAL.values) and period > 1
    if _at(given, "pause_epochs") and (is_piped or averages_late):
        message = "rungs in epochs end between two saves of this strategy"
        cure = "give `max_steps` in place of `epochs`"
        yield _refusal(message, cure, "pause_epochs", "strategy", "parallel.schedule")
    pause_at, saves = _number(given, "pause_at"), ("checkpoint.every_steps", "eval_every")
    if pause_at and is_piped and not any((steps := _number(given, key)) and pause_at % steps == 0 for key in saves):
        message = (
            f"`pause_at` {pause_at} is no multiple of `checkpoint.every_steps` or `eval_every`, and with "
            "`schedule: async` only these steps leave no micro-batch in flight"
        )
        yield _refusal(message, "write a multiple", "pause_at", "parallel.schedule", *saves)


def _in_words(row: Row, own: Any, other: Any) -> str:
    shown, key, values = f"`{row.key}: {_text(own)}`", row.other.key, row.other.values
    shown = f"`{row.key}`" if row.values is GIVEN else shown
    words = f"{shown} does not go with `{key}: {_text(other)}`"
    if isinstance(values, range) and row.other.is_needed:
        words = f"{shown} goes with `{key}` {values.start} or more, not with `{_text(other)}`"
    elif isinstance(values, tuple) and row.other.is_needed:
        fits = " or ".join(f"`{value}`" for value in (f"{key}: {values[0]}", *values[1:]))
        words = f"{shown} goes with {fits}, not with `{_text(other)}`"
    return f"{words}: {row.because}" if row.because else words


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
