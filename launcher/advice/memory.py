"""The memory line of a plan: whether a rank's part of the model fits on its GPU, before anything is paid for.

Where torch is installed beside cloudtrain, entrypoints/trainer/memory.py runs a step of the task on tensors without
data, in a separate process. Elsewhere the number of parameters from the job's last run gives a lower bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib.util import find_spec
from typing import Any

from cloudtrain.entrypoints import atomic_json

from ..errors import CloudtrainError, ConfigError, Fault
from ..planning.job_spec import job_spec
from ..planning.prepare import Prepared
from ..prices import catalog
from ..store import home
from ..store.database import Database
from ..text.units import size
from . import taskcode

Lines = list[dict[str, Any]]

KEPT, MOST_KEPT = "memory.json", 50  # in the home folder: the newest results
FITS = 0.9  # of a GPU's memory: the rest is for its context, NCCL and the allocator's fragments, never measured here
BYTES_A_PARAMETER = 16  # weights, gradients and the two states of AdamW in fp32


def of_plan(prepared: Prepared, *, measures: bool = True) -> dict[str, Any] | None:
    """Return the estimate as JSON, or None. Without `measures`, only a kept estimate. Raises ConfigError.

    `layouts`: the job's layout first, then better layouts, each with the changed keys of `training`. `why`: the reason
    for a missing estimate, or for a lower bound. `gpu_bytes`: a GPU's memory, None if unknown. `is_cut`: the time did
    not suffice for all layouts. `notes`: faults of the splits, in words.
    """
    capacity = gpu_bytes(prepared)
    estimate: dict[str, Any] = {"gpu_bytes": capacity, "layouts": [], "why": None, "is_cut": False, "notes": []}
    estimate["bubble"] = prepared.plan.batch.bubble if prepared.plan.batch else 0.0
    if prepared.config.task and find_spec("torch") is not None:
        ask = asked(prepared)
        key = key_of(prepared, ask, capacity)
        known = kept().get(key)
        if known is None and not measures:
            return None
        most = str(int(FITS * (capacity or 0)))
        lines, estimate["is_cut"] = (known, False) if known else taskcode.run(prepared, "memory", ask, most)
        for refused in (line for line in lines if line.get("is_refused")):
            raise ConfigError([Fault(refused["why"], key="task")])
        estimate["layouts"] = [line for line in lines if "bytes" in line]
        estimate["notes"] = [line["note"] for line in lines if "note" in line]
        estimate["why"] = next((line["why"] for line in lines if line.get("why")), None)
        # Data outside the folder, which the notes are about, may change.
        if not (known or estimate["why"] or estimate["is_cut"] or estimate["notes"]):
            keep(key, lines)
    elif (parameters := _parameters(prepared.config.name)) is not None:
        estimate["layouts"] = [{"changes": {}, "bytes": BYTES_A_PARAMETER * parameters, "parameters": parameters}]
        estimate["why"] = "by the parameters of the last run, whole on each rank"
    return estimate if estimate["layouts"] or estimate["why"] else None


def line(estimate: dict[str, Any]) -> str:
    """Return the estimate for people, `memory: fits, about 31.0 of 80.0 GiB per GPU`."""
    if not estimate["layouts"]:
        return f"memory: not estimated: {estimate['why']}"
    own, *others = estimate["layouts"]
    capacity, place = estimate["gpu_bytes"], "GPU" if estimate["gpu_bytes"] else "rank"
    amount = f"{size(own['bytes'])}{f' of {size(capacity)}' if capacity else ''} per {place}"
    amount += f" (stage {own['stage']})" if own.get("stage") else ""
    assumed = "; the optimizer's state counts as 8 bytes a parameter" if own.get("is_assumed") else ""
    if capacity and own["bytes"] > capacity:
        return f"memory: does not fit, about {amount}{assumed}{_remedy(estimate)}"
    if estimate["why"]:
        return f"memory: at least {amount}, without activations: {estimate['why']}{assumed}"
    if capacity and own["bytes"] > FITS * capacity:
        return f"memory: may not fit, about {amount}, and CUDA and NCCL need some more{assumed}{_remedy(estimate)}"
    unneeded = "".join(f"; without {_left_out(other, estimate)}" for other in others)
    return f"memory: {'fits, ' if capacity else ''}about {amount}{assumed}{unneeded}"


def gpu_bytes(prepared: Prepared) -> int | None:
    """Return the memory of each of the plan's GPUs by the price tables; None without GPUs, or if unknown."""
    plan, wanted = prepared.plan, (prepared.config.resources.accelerators or "").partition(":")[0]
    if not plan.gpus_per_instance:
        return None
    own = [row for row in catalog.rows(prepared.config.backend) if row["instance_type"] == plan.machine]
    known = (row for backend in catalog.backends() for row in catalog.rows(backend))
    named = [row for row in known if catalog.is_named(wanted, row["accelerator"], row["accelerator_memory_gib"])]
    for rows in (own, named):
        if len(sizes := {row["accelerator_memory_gib"] for row in rows} - {""}) == 1:
            return int(float(sizes.pop()) * 2**30)
    return None


def _remedy(estimate: dict[str, Any]) -> str:
    others: Lines = estimate["layouts"][1:]
    if others:
        keys = ", ".join(f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in others[0]["changes"].items())
        return f"; try {keys} ({size(others[0]['bytes'])})"
    if estimate["why"]:
        return f", without activations: {estimate['why']}"
    within = f" in {taskcode.LIMIT_S:.0f} s" if estimate["is_cut"] else ""
    return f"; no other layout of these ranks was found to fit{within}"


def _left_out(other: dict[str, Any], estimate: dict[str, Any]) -> str:
    key = next(iter(other["changes"]))
    bubble = estimate.get("bubble") or 0.0
    cost = f"{100 * bubble:.0f} %" if key == "parallel.pipeline" and bubble else "time"
    return f"{key} {size(other['bytes'])}: leave it out, it costs {cost}"


def asked(prepared: Prepared) -> dict[str, Any]:
    """Return the parts of the job's spec that decide on memory; for a sweep, those of a trial."""
    spec = job_spec(prepared.plan, prepared.config, prepared.config.name, 1).dump()
    if spec.get("sweep"):
        run, ranks = {**spec["run"], "kind": "task"}, prepared.plan.slot_ranks
        spec |= {"nodes": 1, "nproc_per_node": ranks, "run": run, "sweep": None}
    return {**spec, "notices": None, "checkpoint": {}}


def _parameters(name: str) -> int | None:
    """Return the number of parameters that the newest run of this name has reported, None if unknown."""
    with contextlib.suppress(CloudtrainError, OSError, RuntimeError, ValueError):
        if not (home.where() / "registry.sqlite").exists():
            return None
        database = Database(home.where())
        sql = "SELECT fields FROM points JOIN jobs ON jobs.id = points.job_id WHERE jobs.name = ? AND kind = 'start'"
        rows = database.execute(f"{sql} ORDER BY jobs.seq DESC, attempt DESC, points.seq DESC LIMIT 1", (name,))
        parameters = json.loads(rows[0][0]).get("parameters") if rows else None
        return parameters if isinstance(parameters, int) else None
    return None


def key_of(prepared: Prepared, *about: Any) -> str:
    """Return the key of a kept result: of the code folder, and of all else that decides on the result."""
    return hashlib.sha256(json.dumps([*about, prepared.bundle.code_sha256]).encode()).hexdigest()


def kept() -> dict[str, Lines]:
    """Return the kept results by their keys."""
    with contextlib.suppress(CloudtrainError, OSError, RuntimeError):
        results = atomic_json.read_json(home.where() / KEPT)
        return results if isinstance(results, dict) else {}
    return {}


def keep(key: str, lines: Lines) -> None:
    """Keep the result for later commands, if possible."""
    with contextlib.suppress(CloudtrainError, OSError):  # a plan works without it
        atomic_json.write_json(home.home() / KEPT, dict(list({**kept(), key: lines}.items())[-MOST_KEPT:]), 0o600)
