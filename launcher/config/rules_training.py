"""Rules across the keys of `training`: strategies, compression, parallelism, optimizers. See rules.py for the tree."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Fault
from .key_reading import between, given, text_at, whole_at
from .yamlfile import KeyPath, YamlNode

_SPARSE = ("threshold", "topk")  # kinds of `compression` that send some entries of the gradient


def faults_of(root: YamlNode) -> list[Fault]:
    """Return a fault for every broken rule."""
    return [
        *_spreading(root),
        *_local(root),
        *_sparse(root),
        *_strict(root),
        *_parallel(root),
        *_asynchronous(root),
        *_optimizing(root),
    ]


def _spreading(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults that the trainer's strategies would find on the nodes (entrypoints/strategies)."""
    strategy = text_at(root, "training", "strategy") or "ddp"
    is_ddp, is_whole = strategy == "ddp", strategy in ("ddp", "local")
    offload = given(root, "training", "cpu_offload")
    compresses = text_at(root, "training", "compression") not in ("", "none")
    shard = text_at(root, "training", "shard")
    sharing = {"optimizer": "ddp", "gradients": "fsdp", "parameters": "fsdp"}.get(shard, "")
    for key, is_wrong, message, hint in (
        (
            "compression",
            compresses and not is_ddp,
            f"`compression` goes with `strategy: ddp`, not with `{strategy}`",
            "leave it out, or write `precision: bf16`",
        ),
        (
            "cpu_offload",
            is_whole and offload is not None and offload.value is True,
            f"`cpu_offload` needs shards, and `{strategy}` has no shards",
            "write `strategy: fsdp`",
        ),
        (
            "shard",
            sharing != "" and (strategy == "local" or is_ddp != (sharing == "ddp")),
            f"`shard: {shard}` does not go with `strategy: {strategy}`",
            f"write `strategy: {sharing}`",
        ),
        (
            "shard_size",
            strategy != "hsdp" and given(root, "training", "shard_size") is not None,
            f"`shard_size` goes with `strategy: hsdp`, not with `{strategy}`",
            "leave it out, or write `strategy: hsdp`",
        ),
        (
            "wrap_min_params",
            is_whole and given(root, "training", "wrap_min_params") is not None,
            f"`wrap_min_params` goes with `fsdp` and `hsdp`, not with `{strategy}`",
            "leave it out, or write `strategy: fsdp`",
        ),
        (
            "local",
            strategy != "local" and given(root, "training", "local") is not None,
            f"`local` goes with `strategy: local`, not with `{strategy}`",
            "leave it out, or write `strategy: local`",
        ),
    ):
        if is_wrong:
            yield _in_training(root, message, hint, (key,), ("strategy",))


def _local(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults of averages that are rare, under `strategy: local` (entrypoints/trainer/strategies/local.py)."""
    if text_at(root, "training", "strategy") != "local":
        return
    period = whole_at(root, "training", "local", "period") or 16
    here: KeyPath = ("local", "period")
    if period == 1:
        message = "`period: 1` averages after each step, which is ddp"
        yield _in_training(root, message, "write `strategy: ddp`, or 2 or more", here, ("strategy",))
    group = whole_at(root, "training", "local", "group_period")
    if group and period % group:
        fits = ", ".join(str(n) for n in range(1, period) if period % n == 0)
        message = f"`group_period` {group} does not divide `period` {period}"
        yield _in_training(root, message, f"write one of {fits}", ("local", "group_period"), here)
    for section, *path in (
        ("training", "local", "sync_steps"),
        ("training", "eval_every"),
        ("training", "pause_at"),
        ("checkpoint", "every_steps"),
    ):
        steps = whole_at(root, section, *path)
        if period > 1 and steps % period:
            near = [str(n) for n in (steps // period * period, -(-steps // period) * period) if n]
            message = f"`{path[-1]}` {steps} is no multiple of `local.period` {period}, and the ranks differ then"
            keys = [(section, *path), *([("training", *here)] if given(root, "training", *here) else [])]
            yield between(root, message, f"write {' or '.join(near)}", *keys)
    if text_at(root, "training", "reproducible") == "strict":
        message = "`reproducible: strict` has the same bits on any number of ranks, and `local` has not"
        yield _in_training(root, message, "write `standard`, or `strategy: ddp`", ("reproducible",), ("strategy",))
    split = any((whole_at(root, "training", "parallel", name) or 1) > 1 for name in ("tensor", "pipeline"))
    if split:
        message = "under `strategy: local` each rank has a copy of the model, and `parallel` spreads a copy"
        yield _in_training(
            root, message, "write `strategy: ddp`, or leave `parallel` out", ("parallel",), ("strategy",)
        )


def _sparse(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with `compression: threshold` or `topk`, or that only these have."""
    kind = text_at(root, "training", "compression") or "none"
    here: KeyPath = ("compression",)
    if kind not in _SPARSE:
        for key in ("compression_density", "compression_warmup_steps"):
            if given(root, "training", key) is not None:
                message = f"`{key}` goes with `compression: threshold` or `topk`, not with `{kind}`"
                yield _in_training(root, message, "leave it out, or write `compression: threshold`", (key,), here)
        return
    density = given(root, "training", "compression_density")
    if kind == "threshold" and density is not None and density.value in (1, 1.0):
        message = "`compression: threshold` sends signs and means, so density 1 is not dense"
        hint = "write a density below 1, for example 0.01, or `compression: topk`"
        yield _in_training(root, message, hint, ("compression_density",), here)
    if text_at(root, "training", "shard") == "optimizer":
        message = f"`shard: optimizer` does not go with `compression: {kind}`"
        yield _in_training(root, message, "leave one of them out", ("shard",), here)


def _parallel(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with `parallel` (entrypoints/trainer/strategies)."""
    sizes = {name: whole_at(root, "training", "parallel", name) or 1 for name in ("tensor", "pipeline")}
    of_pipeline = (("schedule", "pipeline"), ("cut", "pipeline"), ("chunks", "pipeline"), ("weights", "pipeline"))
    for name, goes_with in (("sequence", "tensor"), *of_pipeline):
        node = given(root, "training", "parallel", name)
        if node is not None and node.value is not False and sizes[goes_with] < 2:
            message, hint = f"`{name}` goes with `{goes_with}`, which is 1", f"write `{goes_with}: 2` or more"
            yield _in_training(root, message, hint, ("parallel", name), ("parallel", goes_with))
    split = next((name for name, size in sizes.items() if size > 1), None)
    if split is None:
        return
    for key, wrong, hint in (
        ("reproducible", ("strict",), "write `reproducible: standard`"),
        ("compile", (True,), "leave one of them out"),
        ("compression", ("fp16", "bf16", "powersgd", *_SPARSE), "leave `compression` out"),
        ("precision", ("fp16",), "write `precision: bf16`"),
        ("cpu_offload", (True,), "leave one of them out"),
        ("shard", ("optimizer",), "write `strategy: fsdp` and `shard: gradients`"),
    ):
        node = given(root, "training", key)
        if node is not None and node.value in wrong:
            shown = f"`{key}: {str(node.value).lower()}`"
            yield _in_training(root, f"{shown} does not go with `parallel.{split}`", hint, (key,), ("parallel", split))
    if sizes["pipeline"] > 1:
        yield from _schedule(root)


def _schedule(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with the schedule of a pipeline."""
    schedule = text_at(root, "training", "parallel", "schedule") or "1f1b"
    here: KeyPath = ("parallel", "schedule")
    chunks = whole_at(root, "training", "parallel", "chunks") or 1
    if (chunks > 1) != (schedule == "interleaved"):
        message = f"`schedule: {schedule}` and `chunks: {chunks}` do not go together"
        hint = "write `schedule: interleaved` and `chunks: 2` or more, or leave both out"
        yield _in_training(root, message, hint, ("parallel", "chunks"), here)
    weights = text_at(root, "training", "parallel", "weights")
    if weights and schedule != "async":
        message, hint = "`weights` goes with `schedule: async`", "leave it out, or write `schedule: async`"
        yield _in_training(root, message, hint, ("parallel", "weights"), here)
    if schedule != "async":
        return
    is_split = (whole_at(root, "training", "parallel", "tensor") or 1) > 1
    refused: tuple[tuple[KeyPath, tuple[object, ...] | None, str], ...] = (
        (("strategy",), ("fsdp", "hsdp"), "write `strategy: ddp`"),
        (("parallel", "tensor"), None if is_split else (), "leave it out"),
        (("clip_norm",), None, "leave it out"),
        (("on_nan",), ("skip",), "write `on_nan: stop`"),
        (("activation_checkpointing",), (True,), "leave it out"),
        (("activation_offload",), (True,), "leave it out"),
        (("precision",), ("bf16",) if weights == "latest" else (), "write `weights: stash`"),
    )
    for path, wrong, hint in refused:
        node = given(root, "training", *path)
        if node is not None and (wrong is None or node.value in wrong):
            message = f"`{'.'.join(map(str, path))}` does not go with `schedule: async`"
            yield _in_training(root, message, f"{hint}, or write `schedule: 1f1b`", path, here)


def _asynchronous(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with `strategy: async`, and settings of its servers without it."""
    strategy = text_at(root, "training", "strategy") or "ddp"
    if strategy != "async":
        if given(root, "training", "server") is not None:
            message = f"`server` goes with `strategy: async`, not with `{strategy}`"
            yield _in_training(root, message, "leave it out, or write `strategy: async`", ("server",), ("strategy",))
        return
    sizes = [name for name in ("tensor", "pipeline") if whole_at(root, "training", "parallel", name) > 1]
    is_ordered = text_at(root, "training", "server", "order") == "tickets"
    refused: tuple[tuple[KeyPath, tuple[object, ...] | None, str], ...] = (
        (("precision",), ("fp16",), "write `precision: bf16`"),
        (("cpu_offload",), (True,), "leave it out"),
        (("wrap_min_params",), None, "leave it out"),
        (("optimizer", "name"), ("lars", "lamb"), "servers hold parts of layers; write `adamw` or `sgd`"),
        (
            ("reproducible",),
            ("strict",),
            "write `standard`; `server.order: tickets` repeats a run to the bit on the same ranks",
        ),
        (("num_workers",), None if whole_at(root, "training", "num_workers") else (), "a worker loads its own samples"),
        (("shard",), None, "leave it out"),
        *((("parallel", name), None, "leave it out") for name in sizes),
        (("server", "max_lead"), None if is_ordered else (), "with `order: tickets` no rank gets ahead: leave it out"),
    )
    for path, wrong, hint in refused:
        node = given(root, "training", *path)
        if node is not None and (wrong is None or node.value in wrong):
            against = ("server", "order") if path[0] == "server" else ("strategy",)
            shown = "order: tickets" if path[0] == "server" else "strategy: async"
            given_value = f": {str(node.value).lower()}" if wrong else ""
            message = f"`{'.'.join(map(str, path))}{given_value}` does not go with `{shown}`"
            yield _in_training(root, message, hint, path, against)


def _strict(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each setting whose results depend on the number of ranks under `reproducible: strict`."""
    if text_at(root, "training", "reproducible") != "strict":
        return
    strategy = text_at(root, "training", "strategy") or "ddp"
    optimizer = text_at(root, "training", "optimizer", "name")
    here: KeyPath = ("reproducible",)
    if text_at(root, "training", "compression") not in ("", "none"):
        message = "`reproducible: strict` sums exactly, and `compression` rounds"
        yield _in_training(root, message, "leave one of them out", ("compression",), here)
    shards = text_at(root, "training", "shard") == "optimizer"
    if optimizer in ("lars", "lamb") and (strategy != "ddp" or shards):
        under = "shard: optimizer" if shards else strategy
        message = f"`{optimizer}` is not strict under `{under}`: its norms depend on the shards"
        paths: tuple[KeyPath, ...] = (("optimizer", "name"), here, ("shard",) if shards else ("strategy",))
        yield _in_training(
            root, message, f"{'leave `shard` out' if shards else 'write `strategy: ddp`'}, or `adamw`", *paths
        )
    whole, micro = whole_at(root, "training", "global_batch_size"), whole_at(root, "training", "micro_batch_size")
    count = whole // micro if whole and micro and whole % micro == 0 else 1
    if count & (count - 1):
        message = f"`reproducible: strict` needs a power of two of micro-batches, and {whole} / {micro} is {count}"
        sizes: tuple[KeyPath, ...] = (("global_batch_size",), ("micro_batch_size",), here)
        yield _in_training(root, message, "change one of the sizes", *sizes)


# The optimizers that use a setting; the remaining optimizers would silently ignore the setting.
_HEEDED_BY = {
    "momentum": ("sgd", "lars"),
    "betas": ("adamw", "radam", "lamb"),
    "eps": ("adamw", "radam", "lamb"),
    "trust_coefficient": ("lars",),
}


def _optimizing(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each optimizer setting without effect, and for a warm-up longer than the training."""
    name = text_at(root, "training", "optimizer", "name") or "adamw"
    known = {one for optimizers in _HEEDED_BY.values() for one in optimizers}  # an unknown name is already a fault
    for setting, optimizers in _HEEDED_BY.items():
        if given(root, "training", "optimizer", setting) and name in known - set(optimizers):
            message = f"`{setting}` goes with {' or '.join(f'`{one}`' for one in optimizers)}, not `{name}`"
            paths: tuple[KeyPath, ...] = (("optimizer", setting), ("optimizer", "name"))
            yield _in_training(root, message, "leave it out, or choose another optimizer", *paths)
    warmup, steps = whole_at(root, "training", "schedule", "warmup_steps"), whole_at(root, "training", "max_steps")
    if steps and warmup > steps:
        message = f"`warmup_steps` {warmup} is more than `max_steps` {steps}: the rate would never be reached"
        yield _in_training(root, message, "warm up for fewer steps", ("schedule", "warmup_steps"), ("max_steps",))


def _in_training(root: YamlNode, message: str, hint: str, *keys: KeyPath) -> Fault:
    written = [("training", *key) for key in keys if given(root, "training", *key)]
    return between(root, message, hint, *written)
