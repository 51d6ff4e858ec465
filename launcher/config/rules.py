"""Rules that span several keys of the config; each fault points at all the keys of the broken rule.

The rules read the tree of the file, not the finished Config: only the tree distinguishes a written value from a
default. A value of the wrong type breaks no rule, because the validation of the schema reports the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from cloudtrain.entrypoints.rank import variables
from cloudtrain.launcher.backend_table import BUILT_IN, plugins, similar, traits
from cloudtrain.launcher.config import foreign_keys, rules_sweep, schema
from cloudtrain.launcher.config.schemafaults import dotted, named, quoted
from cloudtrain.launcher.config.yamlfile import KeyPath, YamlNode, find, key_place
from cloudtrain.launcher.errors import Fault, Place
from cloudtrain.launcher.job import CHANNEL_KINDS

__all__ = ["STORES", "faults_of", "given"]

# The trainer copies checkpoints to a path or to these schemes, defined in entrypoints/stores/store.py.
STORES = ("file", "s3", "gs", "https", "abfss", "wasbs")
_SERVICE = {"https": "blob", "abfss": "dfs", "wasbs": "blob"}
_AZURE = "https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX"
_RUNNABLES = ("task", "script", "module")
_SPARSE = ("threshold", "topk")  # kinds of `compression` that send some entries of the gradient
_OF_SCRIPTS = ("resume_args", "keep", "progress", "on_stop")
_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner",
)
# torchrun and boot set these variables for every rank, so a value in the config would have no effect.
_SET_BY_TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def given(root: YamlNode, *path: str | int) -> YamlNode | None:
    """Return the node at the path; None if the key is missing or has no value."""
    node = find(root, path)
    return node if node is not None and (node.value is not None or node.broken) else None


def faults_of(root: YamlNode) -> list[Fault]:
    """Return a fault for every broken rule."""
    return [
        *_one_to_run(root),
        *_only_where_they_count(root),
        *_exclusive(root),
        *_numbers(root),
        *_spreading(root),
        *_local(root),
        *_sparse(root),
        *_strict(root),
        *_parallel(root),
        *_asynchronous(root),
        *_optimizing(root),
        *_mirror(root),
        *_notify(root),
        *_launchers(root),
        *_environment(root),
        *_references(root),
        *_backend(root),
        *rules_sweep.faults_of(root),
    ]


def _one_to_run(root: YamlNode) -> Iterator[Fault]:
    present = [name for name in _RUNNABLES if given(root, name)]
    if len(present) > 1:
        hint = "keep one: a `task` is run by the shared trainer, a `script` or `module` by torchrun as it is"
        yield _between(root, f"{_both(present)} exclude each other", hint, *((name,) for name in present))
    elif not present and not foreign_keys.RUNNABLE & root.value.keys():
        hint = "add `task: task.py` (the shared trainer), `script: train.py` or `module: pkg.train`"
        yield Fault("nothing to run: no `task`, `script` or `module`", place=root.place, hint=hint)


def _only_where_they_count(root: YamlNode) -> Iterator[Fault]:
    own = next((name for name in ("script", "module") if given(root, name)), "")
    if given(root, "task") and not own and given(root, "args"):
        hint = "a task takes its settings from `params`"
        yield _between(root, "`args` goes with `script` or `module`, not with `task`", hint, ("args",), ("task",))
    for name in _OF_SCRIPTS if given(root, "task") and not own else ():
        if given(root, name):
            hint = "the shared trainer does so by itself: leave the key out"
            yield _between(root, f"`{name}` goes with `script` or `module`, not with `task`", hint, (name,), ("task",))
    if own and not given(root, "task"):
        for name, hint in (
            ("params", "give them as `args`"),
            ("training", f"the {own} trains by itself: give settings as `args`, ranks under `distributed`"),
        ):
            if given(root, name):
                yield _between(root, f"`{name}` goes with `task`, not with `{own}`", hint, (name,), (own,))


def _exclusive(root: YamlNode) -> Iterator[Fault]:
    blocks = schema.blocks_of(root.value)
    for section, first, second, hint in (
        ("training", "max_steps", "epochs", "keep one of the two"),
        ("resources", "accelerators", "instance_type", "an instance type says its accelerators already: keep one"),
        *((name, *pair, "keep one of the two") for name in blocks for pair in traits(name).exclusive),
    ):
        nodes = {name: node for name in (first, second) if (node := given(root, section, name))}
        if len(nodes) == 2:
            written = [name for name, node in nodes.items() if not node.place.file.startswith("--set ")]
            if len(written) == 1:  # the command line has the other
                hint = f"--set {section}.{written[0]}=null takes the file's away"
            message = f"`{first}` and `{second}` exclude each other"
            yield _between(root, message, hint, (section, second), (section, first))


def _launchers(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault if `module` is a launcher: each rank would start more ranks."""
    module = _text(root, "module")
    if module not in _LAUNCHERS:
        return
    node = given(root, "args")
    words = [each.text or str(each.value) for each in node.value] if node and isinstance(node.value, tuple) else []
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    hint = "name the program that it would start as `script: train.py` or `module: pkg.train`, its arguments as `args`"
    if at is not None:
        rest = f" and `args: [{', '.join(words[at + 1 :])}]`" if words[at + 1 :] else ""
        hint = f"write `script: {words[at]}`{rest} in its place"
    message = f"`{module}` starts ranks of its own, and cloudtrain starts one for each GPU already"
    yield _between(root, message, hint, ("module",))


def _numbers(root: YamlNode) -> Iterator[Fault]:
    whole = _whole(root, "training", "global_batch_size")
    micro = _whole(root, "training", "micro_batch_size")
    if whole and micro and whole % micro:
        lower, upper = whole // micro * micro, (whole // micro + 1) * micro
        yield _between(
            root,
            f"`global_batch_size` {whole} is not a multiple of `micro_batch_size` {micro}",
            f"write {f'{lower} or ' if lower else ''}{upper}",
            ("training", "global_batch_size"),
            ("training", "micro_batch_size"),
        )
    fewest = _whole(root, "resources", "min_instances")
    written = given(root, "resources", "instances")
    instances = _whole(root, "resources", "instances") if written else 1
    if fewest and instances and fewest > instances:
        paths: list[KeyPath] = [("resources", "min_instances")]
        if written:
            paths.append(("resources", "instances"))
        message = f"`min_instances` {fewest} is more than `instances` {instances}"
        yield _between(root, message, "a restart continues with fewer machines, never with more", *paths)


def _spreading(root: YamlNode) -> Iterator[Fault]:
    """Yield the faults that the trainer's strategies would find on the nodes (entrypoints/strategies)."""
    strategy = _text(root, "training", "strategy") or "ddp"
    is_ddp, is_whole = strategy == "ddp", strategy in ("ddp", "local")
    offload = given(root, "training", "cpu_offload")
    compresses = _text(root, "training", "compression") not in ("", "none")
    shard = _text(root, "training", "shard")
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
    if _text(root, "training", "strategy") != "local":
        return
    period = _whole(root, "training", "local", "period") or 16
    here: KeyPath = ("local", "period")
    if period == 1:
        message = "`period: 1` averages after each step, which is ddp"
        yield _in_training(root, message, "write `strategy: ddp`, or 2 or more", here, ("strategy",))
    group = _whole(root, "training", "local", "group_period")
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
        steps = _whole(root, section, *path)
        if period > 1 and steps % period:
            near = [str(n) for n in (steps // period * period, -(-steps // period) * period) if n]
            message = f"`{path[-1]}` {steps} is no multiple of `local.period` {period}, and the ranks differ then"
            keys = [(section, *path), *([("training", *here)] if given(root, "training", *here) else [])]
            yield _between(root, message, f"write {' or '.join(near)}", *keys)
    if _text(root, "training", "reproducible") == "strict":
        message = "`reproducible: strict` has the same bits on any number of ranks, and `local` has not"
        yield _in_training(root, message, "write `standard`, or `strategy: ddp`", ("reproducible",), ("strategy",))
    split = any((_whole(root, "training", "parallel", name) or 1) > 1 for name in ("tensor", "pipeline"))
    if split:
        message = "under `strategy: local` each rank has a copy of the model, and `parallel` spreads a copy"
        yield _in_training(
            root, message, "write `strategy: ddp`, or leave `parallel` out", ("parallel",), ("strategy",)
        )


def _sparse(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with `compression: threshold` or `topk`, or that only these have."""
    kind = _text(root, "training", "compression") or "none"
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
    if _text(root, "training", "shard") == "optimizer":
        message = f"`shard: optimizer` does not go with `compression: {kind}`"
        yield _in_training(root, message, "leave one of them out", ("shard",), here)


def _parallel(root: YamlNode) -> Iterator[Fault]:
    """Yield the settings that do not go with `parallel` (entrypoints/trainer/strategies)."""
    sizes = {name: _whole(root, "training", "parallel", name) or 1 for name in ("tensor", "pipeline")}
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
    schedule = _text(root, "training", "parallel", "schedule") or "1f1b"
    here: KeyPath = ("parallel", "schedule")
    chunks = _whole(root, "training", "parallel", "chunks") or 1
    if (chunks > 1) != (schedule == "interleaved"):
        message = f"`schedule: {schedule}` and `chunks: {chunks}` do not go together"
        hint = "write `schedule: interleaved` and `chunks: 2` or more, or leave both out"
        yield _in_training(root, message, hint, ("parallel", "chunks"), here)
    weights = _text(root, "training", "parallel", "weights")
    if weights and schedule != "async":
        message, hint = "`weights` goes with `schedule: async`", "leave it out, or write `schedule: async`"
        yield _in_training(root, message, hint, ("parallel", "weights"), here)
    if schedule != "async":
        return
    is_split = (_whole(root, "training", "parallel", "tensor") or 1) > 1
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
    strategy = _text(root, "training", "strategy") or "ddp"
    if strategy != "async":
        if given(root, "training", "server") is not None:
            message = f"`server` goes with `strategy: async`, not with `{strategy}`"
            yield _in_training(root, message, "leave it out, or write `strategy: async`", ("server",), ("strategy",))
        return
    sizes = [name for name in ("tensor", "pipeline") if _whole(root, "training", "parallel", name) > 1]
    is_ordered = _text(root, "training", "server", "order") == "tickets"
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
        (("num_workers",), None if _whole(root, "training", "num_workers") else (), "a worker loads its own samples"),
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
    if _text(root, "training", "reproducible") != "strict":
        return
    strategy = _text(root, "training", "strategy") or "ddp"
    optimizer = _text(root, "training", "optimizer", "name")
    here: KeyPath = ("reproducible",)
    if _text(root, "training", "compression") not in ("", "none"):
        message = "`reproducible: strict` sums exactly, and `compression` rounds"
        yield _in_training(root, message, "leave one of them out", ("compression",), here)
    shards = _text(root, "training", "shard") == "optimizer"
    if optimizer in ("lars", "lamb") and (strategy != "ddp" or shards):
        under = "shard: optimizer" if shards else strategy
        message = f"`{optimizer}` is not strict under `{under}`: its norms depend on the shards"
        paths: tuple[KeyPath, ...] = (("optimizer", "name"), here, ("shard",) if shards else ("strategy",))
        yield _in_training(
            root, message, f"{'leave `shard` out' if shards else 'write `strategy: ddp`'}, or `adamw`", *paths
        )
    whole, micro = _whole(root, "training", "global_batch_size"), _whole(root, "training", "micro_batch_size")
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
    name = _text(root, "training", "optimizer", "name") or "adamw"
    known = {one for optimizers in _HEEDED_BY.values() for one in optimizers}  # an unknown name is already a fault
    for setting, optimizers in _HEEDED_BY.items():
        if given(root, "training", "optimizer", setting) and name in known - set(optimizers):
            message = f"`{setting}` goes with {' or '.join(f'`{one}`' for one in optimizers)}, not `{name}`"
            paths: tuple[KeyPath, ...] = (("optimizer", setting), ("optimizer", "name"))
            yield _in_training(root, message, "leave it out, or choose another optimizer", *paths)
    warmup, steps = _whole(root, "training", "schedule", "warmup_steps"), _whole(root, "training", "max_steps")
    if steps and warmup > steps:
        message = f"`warmup_steps` {warmup} is more than `max_steps` {steps}: the rate would never be reached"
        yield _in_training(root, message, "warm up for fewer steps", ("schedule", "warmup_steps"), ("max_steps",))


def _in_training(root: YamlNode, message: str, hint: str, *keys: KeyPath) -> Fault:
    written = [("training", *key) for key in keys if given(root, "training", *key)]
    return _between(root, message, hint, *written)


def _mirror(root: YamlNode) -> Iterator[Fault]:
    """Yield the fault that the trainer would find in `checkpoint.mirror` on a node (entrypoints/stores/store.py)."""
    node = given(root, "checkpoint", "mirror")
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*):", _text(root, "checkpoint", "mirror"))
    if node is None or scheme is None:
        return
    store, rest = scheme[1].lower(), scheme.string[scheme.end() :]
    message, hint = "", ""
    if store not in STORES:
        close = get_close_matches(store, STORES, 1, 0.75)
        message = f"the trainer knows no `{scheme[1]}:` store to copy checkpoints to"
        hint = "a folder such as /mnt/nas/ckpt, file:///mnt/nas/ckpt, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or "
        hint += _AZURE
        hint = f"did you mean `{close[0]}://`?" if close else hint
    elif store == "s3" and not re.match(r"//[A-Za-z0-9._-]{3,255}(/|$)", rest):
        message, hint = f"`{named(node)}` names no bucket", "as in s3://BUCKET/PREFIX"
    elif store == "gs" and not re.match(r"//[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/|$)", rest):
        message, hint = f"`{named(node)}` names no bucket", "as in gs://BUCKET/PREFIX"
    elif store in _SERVICE:
        message, hint = _at_azure(store, rest)
    if message:
        yield Fault(message, "checkpoint.mirror", node.place, hint)


def _at_azure(store: str, rest: str) -> tuple[str, str]:
    """Return a message and a hint about a faulty address of Azure Blob Storage; empty texts if the address is right."""
    if "?" in rest:  # do not print the query: the query may hold a signature
        return "the address continues after a `?`", "leave that out; give a SAS as AZURE_STORAGE_SAS_TOKEN in `secrets`"
    first, _, path = rest.removeprefix("//").partition("/")
    container, at, host = (path.partition("/")[0], "@", first) if store == "https" else first.partition("@")
    form = _AZURE if store == "https" else f"{store}://CONTAINER@ACCOUNT.{_SERVICE[store]}.core.windows.net/PREFIX"
    services = "blob" if store == "https" else "blob|dfs"
    label = r"[a-z0-9-]+"
    if not rest.startswith("//") or not at:
        return "this is not an address of Azure's blob storage", f"as in {form}"
    if not re.fullmatch(rf"{label}(\.{label})*\.({services})(\.{label})+", host, re.IGNORECASE):
        message = f"`{host}` is not a host of Azure's blob storage"
        if bucket := re.fullmatch(r"(.+)\.s3[.-].*amazonaws\.com", host):
            return message, f"did you mean `s3://{bucket[1]}/{path}`?"
        if re.fullmatch(r"storage\.(googleapis|cloud\.google)\.com", host):
            return message, f"did you mean `gs://{path}`?"
        near = re.fullmatch(rf"({label})\.{label}\.(core(\.{label})+)", host, re.IGNORECASE)
        return message, f"did you mean `{near[1]}.{_SERVICE[store]}.{near[2]}`?" if near else f"as in {form}"
    if not re.fullmatch(r"[a-z0-9](-?[a-z0-9]){2,62}", container) or len(container) > 63:
        message = f"`{container}` is not a valid container name" if container else "the address names no container"
        return message, f"3 to 63 of a-z, 0-9 and -, as in {form}"
    return "", ""


def _notify(root: YamlNode) -> Iterator[Fault]:
    entries = given(root, "notify")
    for index in range(len(entries.value) if entries and isinstance(entries.value, tuple) else 0):
        entry = find(root, ("notify", index))
        if entry is None or not isinstance(entry.value, dict):
            continue
        kinds = [name for name in CHANNEL_KINDS if given(root, "notify", index, name)]
        if not kinds:
            hint = "as in `{slack: env:SLACK_URL}`"
            message = "no receiver: no `webhook`, `slack`, `email` or `apprise`"
            yield Fault(message, f"notify.{index}", entry.place, hint)
        elif len(kinds) > 1:
            message = f"{_both(kinds)} exclude each other"
            yield _between(root, message, "write an entry for each", *(("notify", index, kind) for kind in kinds))
        else:
            yield from _entry(root, index, kinds[0])


def _entry(root: YamlNode, index: int, kind: str) -> Iterator[Fault]:
    """Yield a fault for each key that does not fit the channel (`kind`) of an entry of `notify`."""
    place = ("notify", index)
    for key in ("smtp", "sender"):
        if kind != "email" and given(root, *place, key):
            yield _between(root, f"`{key}` goes with `email`", "leave it out", (*place, key), (*place, kind))
    from_job = given(root, *place, "from_job")
    if from_job is None or from_job.value is not True:
        return
    address = "smtp" if kind == "email" else kind
    if kind == "apprise":
        hint = "a job tells by `webhook`, `slack` or `email`"
        message = "on the nodes there is no Apprise: `from_job` does not go with it"
        yield _between(root, message, hint, (*place, "from_job"), (*place, kind))
    elif (node := given(root, *place, address)) and not str(node.value).startswith("env:"):
        hint = f"put the address into a variable and write `{address}: env:NAME`"
        message = f"with `from_job` the address travels as a secret, and `{address}` has it in clear"
        yield _between(root, message, hint, (*place, address), (*place, "from_job"))


def _environment(root: YamlNode) -> Iterator[Fault]:
    env, secrets = given(root, "env"), given(root, "secrets")
    names = env.value if env and isinstance(env.value, dict) else {}
    for name in names:
        if name in _SET_BY_TORCHRUN or name.startswith("CLOUDTRAIN_"):
            message = f"`{name}` is set on every rank by cloudtrain and torchrun"
            yield Fault(message, f"env.{name}", key_place(root, ("env", name)), "remove it")
    for index, item in enumerate(secrets.value if secrets and isinstance(secrets.value, tuple) else ()):
        if item.value in names if isinstance(item.value, str) else False:
            hint = "under `env` its value would be sent in clear: remove it there"
            message = f"`{item.value}` is in both `env` and `secrets`"
            yield _between(root, message, hint, ("env", item.value), ("secrets", index))


def _references(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for each reference to a variable of the job that no node sets."""
    inputs = given(root, "inputs")
    names = inputs.value if inputs and isinstance(inputs.value, dict) else {}
    known = [*variables.NAMES, *(f"{variables.PREFIX}INPUT_{str(name).upper()}" for name in names)]
    for key in ("args", "resume_args", "env"):
        for path, node in _scalars(given(root, key), key):
            for name in variables.references(node.text) if not node.broken else ():
                if name not in known:
                    close = get_close_matches(name, known, 1, 0.8)
                    start = next((each for each in known if name.startswith(each)), None)
                    hint = f"`$${name}` keeps the text as it is" if not close else f"did you mean `${close[0]}`?"
                    if start is not None:
                        hint = f"write `${{{start}}}` where a letter, digit or `_` follows"
                    yield Fault(f"no node sets the variable `{name}`", path, node.place, hint)


def _scalars(node: YamlNode | None, path: str) -> Iterator[tuple[str, YamlNode]]:
    """Yield each scalar below a node, with the dotted key of the scalar."""
    if node is None:
        return
    if isinstance(node.value, dict):
        for name, member in node.value.items():
            yield from _scalars(member.node, f"{path}.{name}")
    elif isinstance(node.value, tuple):
        for index, item in enumerate(node.value):
            yield from _scalars(item, f"{path}.{index}")
    else:
        yield path, node


def _backend(root: YamlNode) -> Iterator[Fault]:
    """Yield a fault for an unknown backend."""
    node = given(root, "backend")
    if node is None or not isinstance(node.value, str) or node.value in BUILT_IN:
        return
    if node.value not in plugins():
        yield Fault(f"unknown backend `{named(node)}`", "backend", node.place, similar(node.value))


def _both(names: list[str]) -> str:
    """Return "`task` and `script`"."""
    return f"{quoted(names[:-1])} and `{names[-1]}`"


def _text(root: YamlNode, *path: str) -> str:
    node = given(root, *path)
    return node.value if node and isinstance(node.value, str) else ""


def _whole(root: YamlNode, *path: str) -> int:
    node = given(root, *path)
    return node.value if node and isinstance(node.value, int) and not isinstance(node.value, bool) else 0


def _between(root: YamlNode, message: str, hint: str, *paths: KeyPath) -> Fault:
    """Return a fault at the first path; the fault also points at the remaining paths."""
    places: list[Place] = [place for path in paths if (place := key_place(root, path))]
    return Fault(message, dotted(paths[0]), places[0], hint, tuple(places[1:]))
