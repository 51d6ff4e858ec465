"""The plan of a job before anything is sent: ranks, batch split, limit and worst-case bill."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil, lcm
from typing import TYPE_CHECKING

from cloudtrain.entrypoints.format import counted, down, span, up
from cloudtrain.entrypoints.sweep.space import dimensions
from cloudtrain.entrypoints.terms import CostRate, worst_case_micro

from ..errors import BudgetError, ConfigError, Fault
from ..metering import limit as caps
from ..plan import Batch, Plan
from ..text.units import format_money
from . import search_spec

if TYPE_CHECKING:
    from ..backend import Capacity
    from ..config.schema import Budget, JobConfig
    from ..config.schema_training import Sweep

LAST = 1 - 1e-9  # the share of a range just before its end

STOP_TAIL_S = caps.STOP_MARGIN_S


def make(config: JobConfig, capacity: Capacity, spent_micro: int = 0, late_micro: int = 0) -> Plan:
    """Return the plan of the next attempt, after earlier attempts have cost `spent_micro` at worst.

    `late_micro` of the budget is kept for the late start of an earlier candidate.

    Raises ConfigError if the batch cannot be split over the ranks or a budget has no price; BudgetError if the
    remaining money buys no useful run.
    """
    instances, terms = config.resources.instances, capacity.terms
    wanted = config.distributed.nproc_per_node
    nproc = max(1, capacity.gpus) if wanted == "auto" else int(wanted)
    if capacity.gpus and nproc > capacity.gpus:
        message = f"{nproc} ranks on an instance with {capacity.gpus} GPUs: each needs one of its own"
        raise ConfigError([Fault(message, key="distributed.nproc_per_node", hint="leave it at `auto`")])
    sweep, slots, slot_ranks = config.sweep, 0, 0
    if sweep is not None:
        slots, slot_ranks = _slots(config, sweep, nproc, capacity)
    batch_ranks = (instances, nproc) if sweep is None else (sweep.instances, slot_ranks)
    nproc = nproc if sweep is None else 1
    price_micro = None if capacity.hourly_usd is None else ceil(round(capacity.hourly_usd * 1e6, 3))
    rate = None if price_micro is None else CostRate(instances, price_micro, capacity.uncertainty)
    is_unpriced = capacity.is_own and not capacity.hourly_usd
    budget = None if is_unpriced else config.budget
    cap = _cap(config, budget, capacity, rate, spent_micro, late_micro)
    is_hard = cap.reason == "budget" and budget is not None and budget.on_limit == "stop"
    own_limit_s = cap.cap_s if is_hard else caps.own_limit_s(cap.cap_s, terms)
    worst_micro = None if rate is None else cap.worst_case_micro
    return Plan(
        instances=instances,
        nproc_per_node=nproc,
        ranks=instances * nproc,
        gpus_per_instance=capacity.gpus,
        hourly_usd=None if price_micro is None else price_micro * instances / 1e6,
        price_source=capacity.price_source,
        cap_s=cap.cap_s,
        cap_reason=cap.reason,
        deadline_s=own_limit_s if is_hard else caps.deadline_s(own_limit_s),
        worst_case_usd=None if worst_micro is None else worst_micro / 1e6,
        batch=_split(config, *batch_ranks) if config.task else None,
        machine=capacity.machine,
        price_micro=price_micro,
        uncertainty=capacity.uncertainty,
        price_as_of=capacity.price_as_of,
        own_limit_s=own_limit_s,
        terms=terms,
        worst_case_micro=worst_micro,
        budget_micro=budget.limit if budget else None,
        spent_micro=spent_micro,
        on_limit=budget.on_limit if budget else None,
        alert_micro=tuple(sorted({-(-budget.limit * share // 100) for share in budget.alert_at})) if budget else (),
        unpriced_budget_micro=config.budget.limit if config.budget and is_unpriced else None,
        saves=config.task is not None or config.on_stop == "save",
        stop_signal=config.distributed.stop_signal,
        keeps=any(not name.startswith("!") for name in config.keep),
        is_spot_price=capacity.is_spot_price,
        slots=slots,
        slot_ranks=slot_ranks,
        slot_instances=1 if sweep is None else sweep.instances,
    )


def copies(config: JobConfig, ranks: int) -> int:
    """Return how many copies of the model so many ranks train; 0 if the ranks do not fill the copies evenly."""
    assert config.training is not None
    spread = config.training.parallel.tensor * config.training.parallel.pipeline
    return 0 if ranks % (spread * (config.training.shard_size or 1)) else ranks // spread


def value_faults(config: JobConfig, plan: Plan) -> list[Fault]:
    """Return a fault for each value of the space, of a range its ends, that makes no valid config or no plan."""
    from .. import config as configs

    assert config.sweep is not None
    stored, found = config.model_dump(mode="json"), []
    stored |= {"sweep": None, "budget": None}  # a copy of the list of choices for each choice would be quadratic
    for each in dimensions(config.sweep.space):
        values, is_argument = each.choices or (each.at(0.0), each.at(LAST)), each.key.startswith("args.")
        for value in values[:1] if is_argument else values:  # a script's own arguments have no rules
            setting = "args=[]" if is_argument else f"{each.key}={json.dumps(value)}"
            try:
                trial = configs.stored(stored, overrides=[setting])
                if trial.task:
                    _split(trial, plan.slot_instances, plan.slot_ranks)
            except ConfigError as error:
                message = f"`{each.key}` with the value {json.dumps(value)}: {error.faults[0].message}"
                found.append(Fault(message, "sweep.space", hint=error.faults[0].hint))
    return found


def _slots(config: JobConfig, sweep: Sweep, nproc: int, capacity: Capacity) -> tuple[int, int]:
    """Return the trials at once on a node of a sweep, and the ranks of a trial on a node. Raises ConfigError.

    A node without GPUs has as many slots as trials run at once; its cores may allow fewer. A trial of several machines
    takes them whole.
    """
    instances, ranks, width = config.resources.instances, sweep.slots, sweep.instances
    if instances % width:
        fits = ", ".join(str(number) for number in range(1, instances + 1) if instances % number == 0)
        message = f"trials of {counted(width, 'instance')} do not divide {counted(instances, 'instance')}"
        raise ConfigError(message, key="sweep.instances", hint=f"use one of {fits}")
    teams = instances // width
    parts = config.model_dump(mode="json", include={"task", "training", "sweep"})
    if sweep.parallel is not None and sweep.parallel < min(teams, search_spec.search_of(parts).trials):
        message = f"`parallel: {sweep.parallel}` leaves some of the {counted(instances, 'instance')} without work"
        hint = f"`parallel: {teams}`, or `--instances {sweep.parallel * width}`"
        raise ConfigError(message, key="sweep.parallel", hint=hint)
    if width > 1:
        if "slots" in sweep.model_fields_set and ranks not in (1, nproc):
            message = f"a trial of {width} instances has all {counted(nproc, 'rank')} of each"
            raise ConfigError(message, key="sweep.slots", hint="leave `slots` out")
        return 1, nproc
    if not capacity.gpus:
        at_once = -(-(sweep.parallel or search_spec.PARALLEL * instances) // instances)
        return max(1, at_once if config.distributed.nproc_per_node == "auto" else nproc // ranks), ranks
    if nproc % ranks:
        fits = ", ".join(str(number) for number in range(1, nproc + 1) if nproc % number == 0)
        larger = "; `sweep.instances` gives a trial several instances" if ranks > nproc else ""
        message = f"{counted(ranks, 'GPU')} of a trial do not divide the {counted(nproc, 'GPU')} of an instance"
        raise ConfigError(message, key="sweep.slots", hint=f"use one of {fits}{larger}")
    return nproc // ranks, ranks


def _cap(
    config: JobConfig,
    budget: Budget | None,
    capacity: Capacity,
    rate: CostRate | None,
    spent_micro: int,
    late_micro: int,
) -> caps.Cap:
    """Return the seconds that the job may run, and whether the time limit or the budget sets them."""
    longest_s = config.limits.max_duration
    if budget is not None:
        _require_price(config, capacity)
    if rate is None or budget is None or budget.on_limit == "alert":
        worst_micro = 0 if rate is None else worst_case_micro(longest_s, rate, capacity.terms)
        return caps.Cap(longest_s, "time_limit", worst_micro)
    found = caps.choose(budget.limit, spent_micro + late_micro, rate, capacity.terms, longest_s)
    if isinstance(found, caps.Cap):
        return found
    raise _refused(found, budget.limit, rate, capacity, late_micro)


def _require_price(config: JobConfig, capacity: Capacity) -> None:
    """Raise ConfigError if the budget has no price above 0: an unknown price is not 0."""
    if capacity.hourly_usd is not None and capacity.hourly_usd > 0:
        return
    key = f"{config.backend}.price_per_hour"
    if capacity.hourly_usd == 0:
        message, hint = "a budget cannot limit what costs nothing", f"set {key} to what an hour costs, or leave it out"
    else:
        what, refreshes, _ = capacity.price_source.partition(": cloudtrain prices refresh")
        message = f"a budget needs a price: {what}"
        region = what.partition("unknown region (")[2].partition(")")[0]
        first = f"set {region}, " if region else "cloudtrain prices refresh, " if refreshes else ""
        hint = f"{first}set {key}, or add --price-per-hour USD: one instance's, for an hour"
    unknown = [replace(capacity.unknown_region, is_warning=False)] if capacity.unknown_region else []
    raise ConfigError([*unknown, Fault(message, key="budget.limit", hint=hint)])


def late_start_micro(plan: Plan) -> int:
    """Return the cost of a start that comes after the job has moved on, and that ends before its ranks start."""
    return worst_case_micro(plan.terms.lead_s, plan.rate, replace(plan.terms, starts=1)) if plan.rate else 0


def _refused(
    found: caps.LimitRefusal, limit_micro: int, rate: CostRate, capacity: Capacity, late_micro: int
) -> BudgetError:
    gone_micro = limit_micro - found.left_micro
    spent_micro = gone_micro - late_micro
    left = f"the {format_money(down(max(found.left_micro, 0)))} left of {format_money(limit_micro)}"
    hourly = f"{rate.instances * rate.price_micro / 1e6:.2f} USD an hour"
    if capacity.uncertainty > 1:
        hourly += f" and up to {capacity.uncertainty:g} times that"
    what = left if gone_micro else f"the budget of {format_money(limit_micro)}"
    buys = f"{'buy' if gone_micro else 'buys'} {span(found.affordable_s) if found.affordable_s else 'no run'}"
    tail = f" and {span(capacity.terms.tail_s)} of stopping" if capacity.terms.tail_s else ""
    needs = f"{span(found.least_s)}{tail} need a budget of {format_money(up(found.enough_micro))}"
    billed = f"; {format_money(up(spent_micro))} may have been billed so far, at worst" if spent_micro else ""
    billed += f"; {format_money(up(late_micro))} are kept for a late start" if late_micro else ""
    hint = f"{needs}; or take fewer or cheaper instances"
    error = BudgetError(f"{what} {buys} at {hourly}{billed}", where="budget.limit", hint=hint)
    error.enough_micro = found.enough_micro
    return error


def _split(config: JobConfig, instances: int, nproc: int) -> Batch | None:
    training = config.training
    if training is None:
        return None
    tensor, stages = training.parallel.tensor, training.parallel.pipeline
    if nproc % tensor:
        fits = ", ".join(str(number) for number in range(1, nproc + 1) if nproc % number == 0)
        message = f"`parallel.tensor` {tensor} does not divide the {nproc} ranks of an instance"
        raise ConfigError(message, key="training.parallel.tensor", hint=f"use one of {fits}")
    if instances * nproc % (tensor * stages):
        whole = instances * nproc // tensor
        fits = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        shared = f" / {tensor} ranks" * (tensor > 1)
        message = f"`parallel.pipeline` {stages} does not divide the {whole} ranks{shared}"
        raise ConfigError(message, key="training.parallel.pipeline", hint=f"use one of {fits}")
    ranks = instances * nproc // (tensor * stages)
    size, is_test = training.global_batch_size, config.evaluate is not None and config.evaluate.only
    micro = training.micro_batch_size or _micro_size(config, instances, nproc)
    if is_test:  # without a global batch: any number of ranks, and for each stage of a pipeline a micro-batch
        size = micro * ranks * stages
    if size % (micro * ranks):
        step = micro * ranks
        below, above = size // step * step, (size // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        who = "ranks" if tensor * stages == 1 else f"groups of {tensor * stages} ranks"
        message = f"a global batch of {size} cannot be split over {ranks} {who} in micro-batches of {micro}"
        hint = f"use {near}, or another micro_batch_size: global = micro x ranks x accumulation"
        raise ConfigError(message, key="training.global_batch_size", hint=hint)
    from cloudtrain.entrypoints.trainer import contradictions  # not for a script

    # The ranks of a test have no parameter servers, and no step.
    if refused := list(contradictions.of_ranks(training, ranks, size // (micro * ranks))) * (not is_test):
        raise ConfigError([Fault(refusal.message, refusal.keys[0], hint=refusal.cure) for refusal in refused])
    batch, parallel = Batch(size, micro, size // (micro * ranks), tensor, stages), training.parallel
    if parallel.schedule == "async":
        return batch
    # The bubble is (p - 1) / (v m + p - 1) for p stages of v chunks and m micro-batches a step.
    # Source: Huang et al. 2019 (GPipe), section 2.3; Narayanan et al. 2021, section 2.2.
    return replace(batch, bubble=(stages - 1) / (parallel.chunks * batch.accumulation + stages - 1))


def _micro_size(config: JobConfig, instances: int, nproc: int) -> int:
    """Return the default micro-batch: the largest that all numbers of instances from `min_instances` on can share.

    A number whose ranks cannot share the global batch at all does not count, and with `reproducible: strict` only
    powers of two do.
    """
    assert config.training is not None
    size, fewest = config.training.global_batch_size, config.resources.min_instances or instances
    found = [copies(config, count * nproc) for count in range(fewest, instances)]
    if config.training.reproducible == "strict":
        found = [count for count in found if not count & (count - 1)]
    whole = instances * nproc // (config.training.parallel.tensor * config.training.parallel.pipeline)
    return max(1, size // lcm(whole, *(count for count in found if count and size % lcm(count, whole) == 0)))
