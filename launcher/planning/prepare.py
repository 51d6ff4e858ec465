"""Prepares a submit from a config: plan, pack, render, check. Changes nothing outside the local machine."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import counted, first_of
from cloudtrain.entrypoints.sweep.space import SpaceError, dimensions

from .. import backend as backends
from .. import channels
from ..backend_table import traits
from ..errors import BudgetError, CloudtrainError, ConfigError, Fault, refuse, require_all
from ..metering.rate import stale
from ..plan import UNKNOWN_MICRO
from . import bundle as bundles
from . import candidates, images, local_data, secret_files
from . import planner as plans
from . import shipped as shipped_code
from .job_spec import node_counts
from .prepared import Prepared as Prepared  # for callers of `prepare`
from .request_rules import own_places

if TYPE_CHECKING:
    from ..config.schema import JobConfig, Resources
    from ..plan import Plan

MOST_NAMED = 3  # changed files, in a warning
LONG_MOMENTUM, MANY_AVERAGES = 0.9, 100  # see `few_averages`
MOST_LOOKS = 12  # for further faults of a config
DRY_SUFFIX = "00000"  # in place of the random part of a submit's id
MIN_INSTANCES = "resources.min_instances"
_MACHINE = ("resources", "resources.accelerators", "resources.instance_type")
_ABILITIES = (backends.Backend, backends.HasCheckpoints, backends.Machines, backends.ReceivesModels, backends.Priced)


def prepare(
    config: JobConfig,
    config_file: Path,
    cache: Path,
    *,
    dry: bool,
    shipped: backends.Bundle | None = None,
    spent_micro: int = 0,
    parent: Sequence[str] = (),
    job_id: str = "",
) -> Prepared:
    """Plan, pack, render and check. Raises ConfigError with all faults for which the backend would refuse the job.

    A dry run writes no archive. `shipped` is an archive to send instead of the folder's present code. `spent_micro` is
    the worst-case cost of earlier attempts, in micro-dollars, which the budget covers too. `parent`: notes on the
    parent, whose place is an input of the config already. `job_id`: of a further attempt, whose places have the id, and
    which leaves out candidates that the rest of the money cannot pay. All candidates are prepared, with one archive.
    """
    try:
        tried, late_micro = _in_order(config)
        late_micro = max(0, late_micro - spent_micro)  # a late start is a part of what was spent
        configs = [each for _, each in tried]
        pack = functools.cache(lambda: _packed(configs, config_file, cache, shipped, job_id, dry=dry))

        def one(numbered: tuple[int, JobConfig]) -> Prepared:
            made = _prepared(numbered[1], config_file, pack, shipped, spent_micro, late_micro, parent)
            return replace(made, candidate=numbered[0])

        found = candidates.of_all(config, [(each[0], each) for each in tried], one, needs_all=not job_id)
    except (ConfigError, BudgetError) as error:
        first = error.faults if isinstance(error, ConfigError) else ()
        if shipped is not None or (first and error.where):
            raise
        if faults := dict.fromkeys([*first, *refused(config, config_file)]):  # of the remaining checks, too
            raise ConfigError(list(faults)) from error
        raise
    if config.capacity is None:
        return found[0]
    worst = [UNKNOWN_MICRO if (known := each.plan.worst_case_micro) is None else known for each in found]
    hold_micro = UNKNOWN_MICRO if UNKNOWN_MICRO in worst else max(worst) + late_micro
    found = [replace(each, plan=replace(each.plan, hold_micro=hold_micro)) for each in found]
    return replace(found[0], candidates=tuple(found))


def _in_order(config: JobConfig) -> tuple[list[tuple[int, JobConfig]], int]:
    """Return the entry's number and the config of each request in the order of trying, and the cost of a late start.

    Raises ConfigError with the faults of all machines, and for candidates that would train another batch.
    """
    if config.capacity is None:
        return [(0, config)], 0
    known = candidates.candidates(config)

    unlimited = {"budget": None}  # a budget would make all worst cases alike
    found = candidates.of_all(config, enumerate(known), lambda each: _planned(each.model_copy(update=unlimited))[2])
    refuse(_other_ranks(config, found))
    order, worst = [*range(len(found))], [each.worst_case_micro for each in found]
    if config.capacity.order == "price":
        order.sort(key=lambda index: (worst[index] is None, worst[index] or 0))
    requests = candidates.joined([known[at] for at in order], [found[at].gpus_per_instance for at in order])
    return [(order[at], each) for at, each in requests], max(map(plans.late_start_micro, found))


def _other_ranks(config: JobConfig, found: Sequence[Plan]) -> Iterator[Fault]:
    """Yield a fault for each candidate that would train another batch, or other trials at once, than the first."""
    from ..config.entries import name_of

    first, has_trials = found[0], config.sweep is not None
    for index, each in enumerate(found if config.task is None or has_trials else ()):
        if (each.ranks, each.instances, each.slots) != (first.ranks, first.instances, first.slots):
            what = "the trials at once" if has_trials else "the batch of a script"
            message = f"{each.ranks} ranks in place of the first candidate's {first.ranks} change {what}"
            hint = f"take {counted(first.instances, 'machine')} with {counted(first.devices_per_node, 'GPU')}"
            if not has_trials:
                hint += "; a `task` has a fixed `training.global_batch_size`, and may change its ranks"
            yield Fault(message, name_of(index), hint=hint)


def _packed(
    configs: list[JobConfig], config_file: Path, cache: Path, shipped: backends.Bundle | None, job_id: str, *, dry: bool
) -> tuple[backends.Bundle, tuple[str, ...]]:
    """Return the archive of the code of all candidates, and a warning about changed files if it is an earlier one's."""
    from ..config.codefiles import needed

    config, base = configs[0], config_file.parent
    code, most = base / config.code.dir, config.code.max_size_mb * shipped_code.MB
    outside = dict.fromkeys(line for each in configs for line in local_data.outside_code(each, base, job_id))
    exclude = (*config.code.exclude, *outside)
    if shipped is not None:
        names = bundles.changed(shipped, code, exclude, config_file)
        old = "changed since the submit; this attempt runs the submitted code: --update-code takes the new code"
        return shipped, (f"warning: {first_of(names, MOST_NAMED)} {old}",) if names else ()
    files = dict.fromkeys(pair for each in configs for pair in needed(each, code))
    return bundles.pack(code, exclude, most, cache, scratch=dry, config_file=config_file, needed=files), ()


def _planned(
    config: JobConfig, spent_micro: int = 0, late_micro: int = 0
) -> tuple[backends.Backend, backends.Capacity, Plan]:
    """Return the backend, its capacity for the config, and the plan. Raises as `planner.make`."""
    backend = backends.load(config.backend)
    capacity, is_unlisted, facts = backend.capacity(config), False, traits(config.backend)
    if not facts.own_machines and not facts.runs_here:
        from ..prices import catalog

        capacity, is_unlisted = catalog.under_limit(backend, config, capacity)
    plan = plans.make(config, capacity, spent_micro, late_micro)
    return backend, capacity, replace(plan, is_unlisted=is_unlisted)


def _rendered(
    config: JobConfig, backend: backends.Backend, plan: Plan, sha256: str, folder: Path | None
) -> tuple[backends.Request, list[Fault]]:
    """Return the request of a dry run, and the warnings of the backend and of the runtime.

    Raises ConfigError with the faults of both, and the fault of a `min_instances` without effect.
    """
    request = backend.request(plan, config, f"{config.name}-{DRY_SUFFIX}", 1, sha256)
    unfit = images.faults(config, request.runtime, plan.gpus_per_instance, folder)
    found = [*backend.check(request), *unfit, *_without_effect(config, plan, request)]
    refuse(fault for fault in found if not fault.is_warning)
    return request, found


def _prepared(
    config: JobConfig,
    config_file: Path,
    pack: Callable[[], tuple[backends.Bundle, tuple[str, ...]]],
    shipped: backends.Bundle | None,
    spent_micro: int,
    late_micro: int,
    parent: Sequence[str],
) -> Prepared:
    """Return the prepared submit of a candidate. Raises ConfigError with the faults of the first check that fails."""
    from ..config.codenotes import notes_of

    require_whole(config.backend)
    config, along = local_data.pinned(config, config_file.parent)
    backend, capacity, plan = _planned(config, spent_micro, late_micro)
    if config.sweep is not None and shipped is None:
        refuse(plans.value_faults(config, plan))
    code = config_file.parent / config.code.dir
    bundle, old = pack()
    request, checked = _rendered(config, backend, plan, bundle.sha256, None if shipped else code)
    dry_id = f"{config.name}-{DRY_SUFFIX}"
    if (own_config := own_places(config, dry_id)) != config:  # faults name the places as written
        request = backend.request(plan, own_config, dry_id, 1, bundle.sha256)
    knows = request.runtime is not None and bool(request.runtime.torch)
    doubts = [f"warning: {fault.message} ({fault.key})" for fault in checked]
    of_code = notes_of(config, code, plan.ranks, knows_torch=knows)
    own = () if shipped else (*secret_files.notes_of(config, config_file), *of_code)
    warned = (*_old_price(backend, config, plan, config_file), *_warnings(config, request, plan))
    notes = (*request.notes, *parent, *along, *warned)
    warnings, doubt = (*doubts, *own, *(() if shipped else bundle.notes)), capacity.unknown_region
    return Prepared(config, config_file, backend, plan, bundle, request, notes, warnings, old, unknown_region=doubt)


def require_whole(name: str) -> None:
    """Raise ConfigError for a plug-in that lacks a method of every backend, or has an ability in part.

    An ability in part would count as no ability at all, and its commands would leave the backend out in silence.
    """
    lacks = []
    for protocol in _ABILITIES if name not in backends.BUILT_IN else ():
        methods = [method for method in vars(protocol) if not method.startswith("_")]
        missing = [method for method in methods if not hasattr(backends.load(name), method)]
        if missing and (protocol is backends.Backend or len(missing) < len(methods)):
            lacks.append(f"{', '.join(missing)} of {protocol.__name__}")
    if lacks:
        cure = "update the package of the backend, or use the cloudtrain that it was written for"
        raise ConfigError([Fault(f"the backend `{name}` lacks {'; '.join(lacks)}", "backend", hint=cure)])


def require_a_plan(config: JobConfig, config_file: Path) -> None:
    """Raise ConfigError with all faults for which a plan and a dry run would refuse the config or the code folder."""
    from ..config.codefiles import needed

    folder, max_bytes = config_file.parent / config.code.dir, config.code.max_size_mb * shipped_code.MB
    known = candidates.candidates(config)
    files = dict.fromkeys(pair for each in known for pair in needed(each, folder))
    outside = [line for each in known for line in local_data.outside_code(each, config_file.parent)]
    exclude = (*config.code.exclude, *dict.fromkeys(outside))

    def ask(each: JobConfig) -> None:
        require_all(
            lambda: _require_request(each, folder), lambda: local_data.pinned(each, config_file.parent, hashes=False)
        )

    def of_all() -> None:
        candidates.of_all(config, enumerate(known), lambda each: _require_all_of(each, ask))
        tried, late_micro = _in_order(config)
        candidates.of_all(config, tried, lambda each: _planned(each, late_micro=late_micro))

    require_all(lambda: shipped_code.check(folder, exclude, max_bytes, files), of_all)


def _require_all_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> None:
    """Raise ConfigError with all faults for which `ask` refuses the config; BudgetError if money alone is short.

    Each faulty key gets a sound value, and `ask` looks again. In place of a faulty machine the config gets two others
    in turn, and only faults with both count: the faults that have nothing to do with the machine.
    """
    from .. import config as configs

    try:
        ask(config)
        return
    except BudgetError as error:
        first, faults, poor = error, list[Fault](), [Fault(error.message, error.where, hint=error.hint)]
    except ConfigError as error:
        if error.where:
            raise
        first, faults, poor = error, list(error.faults), []  # type: ignore[assignment]
    count = len(faults)
    looks, left = [config.model_copy(update={"budget": None})], faults  # the prices of other machines say nothing
    for _ in range(MOST_LOOKS):
        looks = [sound for each in looks if (sound := configs.cured(each, left)) is not None]
        if looks and any(fault.key in _MACHINE for fault in left):
            looks = [looks[0].model_copy(update={"resources": each}) for each in _machines(config)] or looks
        seen = [_faults_of(each, ask) for each in looks]
        left = [fault for fault in (seen or [()])[0] if all(fault in each for each in seen)]
        faults = [*faults, *(fault for fault in left if not _follows(fault, faults))]
        if not left:
            break
    raise ConfigError([*faults, *poor]) if len(faults) > count else first


def _faults_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> Sequence[Fault]:
    with contextlib.suppress(BudgetError):
        try:
            ask(config)
        except ConfigError as error:
            return error.faults
    return ()


def _machines(config: JobConfig) -> list[Resources]:
    """Return the config's resources with two machines of the backend's table, the first with the wanted GPUs."""
    from ..prices import catalog

    wanted = (config.resources.accelerators or "").rpartition(":")[2]
    counts = [int(wanted) if wanted.isdigit() else 1, 8, 4, 1]
    names = dict.fromkeys(name for count in counts for name in catalog.types(config.backend, count=count)[:1])
    changes = [{"instance_type": name, "accelerators": None} for name in list(names)[:2]]
    return [config.resources.model_copy(update=each) for each in changes]


def _follows(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Return whether an earlier fault of the same key, or of the machine, explains the fault."""
    keys = [each.key for each in faults]
    is_below = any(f"{fault.key}.".startswith(f"{key}.") for key in keys)
    return is_below or not fault.key or (fault.key in _MACHINE and not set(keys).isdisjoint(_MACHINE))


def _require_request(config: JobConfig, folder: Path) -> None:
    if config.sweep is not None:
        try:
            dimensions(config.sweep.space)
        except SpaceError as error:  # the rule of the key reports the fault too
            raise ConfigError([Fault(f"`{error.key}`: {error.message}", "sweep.space", hint=error.hint)]) from error
    require_whole(config.backend)
    backend, _, plan = _planned(config)
    if config.sweep is not None:
        refuse(plans.value_faults(config, plan))
    _rendered(config, backend, plan, "0" * 64, folder)


def doubts_of_runtime(config: JobConfig) -> Iterator[backends.Check]:
    """Yield doctor's checks of the image or interpreter, by the job's request; none where no request can be made."""
    if traits(config.backend).runs_here:  # the backend's own checks look at the interpreter
        return
    try:
        backend, _, plan = _planned(config)
        request = backend.request(plan, config, f"{config.name}-{DRY_SUFFIX}", 1, "0" * 64)
    except CloudtrainError:
        return
    key = request.runtime.key if request.runtime else ""
    unfit = images.faults(config, request.runtime, plan.gpus_per_instance, None)
    for each in (*(fault for fault in backend.check(request) if fault.key in ("image", key)), *unfit):
        found = each.message.removesuffix(f": {each.hint}")  # of a warning
        yield backends.Check(key, "warn" if each.is_warning else "fail", found, each.hint)


def refused(config: JobConfig, config_file: Path) -> Sequence[Fault]:
    """Return the faults of the code folder and of the backend's checks, for a config that already has faults."""
    try:
        require_a_plan(config, config_file)
    except ConfigError as error:
        return error.faults
    except BudgetError:  # the user learns about money after the faults are fixed
        pass
    return ()


def few_averages(config: JobConfig) -> Iterator[str]:
    """Yield a warning if the outer momentum of `strategy: local` remembers a large part of a short job.

    Momentum 0.9 remembers about 10 averages. With 28, 14 and 7 averages a small CNN lost 4, 1.4 and 1.5 points of
    accuracy with 0.7/0.9, and no point with 0.7/0.6 (measured 2026); Douillard et al. 2023 had 128.
    """
    training = config.training
    local, steps = training.local, training.max_steps
    if local is None or steps is None or local.outer.momentum < LONG_MOMENTUM:
        return
    averages = -(-max(0, steps - local.sync_steps) // local.period)
    if averages < MANY_AVERAGES:
        needs = f"{MANY_AVERAGES} averages or more, and this job has {averages}: 0.6 loses less accuracy"
        yield f"training.local.outer.momentum {local.outer.momentum:g} needs {needs}"


def refresh_words(config_file: Path, *options: str) -> str:
    """Return the command that reads the prices of the file's machines again, for a shell."""
    from ..config import DEFAULT_FILE  # `--help` reads no config

    file = [] if str(config_file) == DEFAULT_FILE else ["-f", str(config_file)]
    return shlex.join(["cloudtrain", "prices", "refresh", *file, *options])


def _old_price(backend: backends.Backend, config: JobConfig, plan: Plan, config_file: Path) -> Iterator[str]:
    if plan.price_micro and (old := stale(plan.price_as_of)):
        region = backend.price_region(config) if isinstance(backend, backends.Priced) else None
        where = ["--region", region] if region else []  # it may come from an option or the environment
        yield f"{old}: {refresh_words(config_file, '--backend', config.backend, *where)}"


def _warnings(config: JobConfig, request: backends.Request, plan: Plan) -> Iterator[str]:
    """Yield the config keys that the backend ignores, and further facts to know before a submit."""
    facts = traits(config.backend)
    runs_here, max_wait = facts.runs_here, config.limits.max_wait
    asked = {
        MIN_INSTANCES: config.resources.min_instances not in (None, config.resources.instances),
        "limits.max_wait": max_wait is not None and not config.queue.wait and not facts.queues,
        "resources.spot": config.resources.spot,
        "image": config.image is not None and runs_here,
        "resources.disk_gb": config.resources.disk_gb is not None and not runs_here,
    }
    only, install = "only while a cloudtrain command follows the job", "cloudtrain watch --install"
    if config.retry.max_attempts > 1 and "retry" not in request.carried:
        which = "retries without a waiting spare host" if "spares" in request.carried else "retries"
        yield f"{which} happen {only}; to have them always: {install}"
    if max_wait is not None and facts.queues and "limits.max_wait" not in request.carried:
        yield f"limits.max_wait ends the wait {only} ({config.backend} has no such limit); to have it always: {install}"
    if config.requirements:
        stays = "torch stays as it is there"
        yield f"{config.requirements}: installed on each node before the ranks start; {stays}"
    if config.setup:
        yield f"setup: {counted(len(config.setup), 'command')} on each node before the ranks start"
    if config.notify:
        yield from channels.doubts(config.model_dump(mode="json", include={"notify"}))
    wanted = config.resources.accelerators if runs_here else None
    if wanted and int(wanted.rpartition(":")[2]) != plan.gpus_per_instance:
        there = plan.gpus_per_instance
        gpus = counted(there, "GPU") if there else "no GPU"
        ignored = f"ignored on {config.backend}: resources.accelerators ({wanted})"
        yield f"{ignored}; this machine has {gpus} for each instance"
    yield from few_averages(config)
    if config.resources.accelerators:
        from ..prices import catalog

        if not catalog.rows(config.backend):  # a backend with a price table checks its own types
            yield from filter(None, [catalog.unknown(config.resources.accelerators)])
    if names := [name for name, is_set in asked.items() if is_set and name not in request.carried]:
        yield f"ignored on {config.backend}: {', '.join(names)}"


def _without_effect(config: JobConfig, plan: Plan, request: backends.Request) -> Iterator[Fault]:
    """Yield the fault of a `min_instances` with which no fewer machines could share the batch."""
    fewest, most, batch, known = config.resources.min_instances, plan.instances, plan.batch, request.carried
    if fewest is None or fewest == most or batch is None or MIN_INSTANCES not in known or _fewer(config, plan):
        return
    whole, micro = batch.global_size, batch.micro_size
    found = [plans.copies(config, count * plan.nproc_per_node) for count in range(fewest, most)]
    units = [lcm(count, batch.data_ranks(plan.ranks)) for count in found if count]
    hint = "leave it out"
    if sizes := sorted({whole // unit for unit in units if whole % unit == 0}):
        hint = f"leave `micro_batch_size` out, or write {' or '.join(map(str, sizes))}"
    elif units:
        unit = min(units)
        near = " or ".join(str(size) for size in (whole // unit * unit, (whole // unit + 1) * unit) if size)
        hint = f"write `global_batch_size` {near}, without `micro_batch_size`"
    fewer = f"{fewest}" if fewest == most - 1 else f"{fewest} to {most - 1}"
    message = f"`min_instances` {fewest} has no effect: {fewer} instances cannot share a global batch of {whole}"
    message += f" in micro-batches of {micro}"
    yield Fault(message, MIN_INSTANCES, hint=hint)


def after_loss(prepared: Prepared) -> str:
    """Return in a line what follows if a machine dies; empty if the nodes are processes of this machine."""
    config, plan = prepared.config, prepared.plan
    if traits(config.backend).runs_here:
        return ""
    is_elastic = MIN_INSTANCES in prepared.request.carried and plan.instances > 1
    parts, fewer = [], _fewer(config, plan) if is_elastic and config.distributed.max_restarts else []
    if fewer:
        counts = " or ".join(map(str, reversed(fewer)))
        parts.append(f"the job goes on with {counts} of {plan.instances} (min_instances)")
    if retries := config.retry.max_attempts - 1 if "node_failure" in config.retry.on else 0:
        spare = len(getattr(getattr(config, config.backend, None), "hosts", ())) - plan.instances
        waits = "spares" in prepared.request.carried
        by_itself = ", which the job takes by itself" if waits else ""
        hosts = f" ({counted(spare, 'spare host')}{by_itself})" if spare > 0 else ""
        parts.insert(0 if waits else 1, f"at most {retries} retr{'y' if retries == 1 else 'ies'}{hosts}")
    if plan.terms.starts > 1 and not retries:
        parts.append("the platform starts the job again")
    if "requeue" in prepared.request.carried:
        parts.insert(bool(fewer), f"Slurm starts it again, at most {counted(config.distributed.max_restarts, 'time')}")
    retry = "`node_failure` in `retry.on`" if config.retry.max_attempts > 1 else "`retry`"
    keys = f"{retry}, no `min_instances`" if is_elastic else retry
    which, what = "a" if plan.instances > 1 else "the", ", else ".join(parts) or f"the job fails (no {keys})"
    return f"if {which} machine dies: {what}; {_copies(config, plan)}"


def _fewer(config: JobConfig, plan: Plan) -> list[int]:
    """Return the smaller numbers of machines with which a restart may go on."""
    fewest = config.resources.min_instances or plan.instances
    return [count for count in node_counts(plan, config) if fewest <= count < plan.instances]


def _copies(config: JobConfig, plan: Plan) -> str:
    """Return where the checkpoints are after the loss of a machine."""
    if not (plan.saves or plan.keeps):
        return "no file is kept (`keep`)"
    if config.checkpoint.mirror:
        return f"checkpoints have copies in {config.checkpoint.mirror}"
    if config.checkpoint.uri or not traits(config.backend).keeps_on_nodes:
        return "checkpoints are not on the machines"
    return "checkpoints are copied to the next machine" if plan.instances > 1 else "checkpoints are lost (no mirror)"
