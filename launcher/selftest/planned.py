"""The two jobs of a selftest: the task and config of the templates, with the backend's block of the user's file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.format import dollars, up

from .. import config as configs
from ..advice.preparing import prepare
from ..backend_table import traits
from ..config import yamlfile
from ..errors import BudgetError
from ..planning.prepare import Prepared, refused
from ..text.units import format_money, parse_duration

TEMPLATES = files("cloudtrain.templates") / "selftest"
TAKEN = ("image", "project")  # of the user's file, besides the backend's block
RUNS = 2  # attempts of the first job: until the stop, and the resume


def block_of(file: Path | None, backend: str) -> dict[str, Any]:
    """Return the keys of the user's file that the jobs take. Raises ConfigError for an unreadable file."""
    found = {key: configs.written(file, (key,)) for key in (backend, *TAKEN)} if file else {}
    own = found.get(backend)
    if file and traits(backend).runs_here and isinstance(own, dict) and os.sep in str(own.get("python")):
        own["python"] = str(file.absolute().parent / Path(own["python"]).expanduser())
    return {key: value for key, value in found.items() if value is not None}


def jobs_of(
    block: Mapping[str, Any], backend: str, folder: Path, cache: Path, most_micro: int
) -> tuple[list[Prepared], int]:
    """Return both jobs, each with its worst case as its budget, and the whole worst case; `folder` gets the code.

    Raises BudgetError if the selftest may cost more than `most_micro`, or if the price is not known; ConfigError.
    """
    (folder / "task.py").write_text((TEMPLATES / "task.py").read_text(encoding="utf-8"), encoding="utf-8")
    file, kinds = folder / "cloudtrain.yaml", _kinds(block, backend)
    plans = [_prepared(each, file, cache, dry=True).plan for each in kinds]
    worst = [
        None if (known := plan.worst_case_micro) is None else known * runs
        for plan, runs in zip(plans, (RUNS, 1), strict=True)
    ]
    if None in worst:
        hint = f"cloudtrain prices refresh, or set {backend}.price_per_hour: one instance's, for an hour"
        raise BudgetError(f"what the selftest may cost is not known: no price of {plans[0].machine}", hint=hint)
    total_micro = sum(each or 0 for each in worst)
    if total_micro > most_micro:
        message = f"the selftest may cost up to {dollars(up(total_micro))}, above {format_money(most_micro)}"
        raise BudgetError(
            message, where="--budget", hint=f"cloudtrain selftest --budget {format_money(up(total_micro))}"
        )
    limited = [
        each | {"budget": {"limit": f"{micro / 1e6:.6f} USD"}} if micro else each
        for each, micro in zip(kinds, worst, strict=True)
    ]
    return [_prepared(each, file, cache, dry=False) for each in limited], total_micro


def _kinds(block: Mapping[str, Any], backend: str) -> list[dict[str, Any]]:
    """Return the data of both configs: one with a kill and a stop, one that reaches its time limit."""
    base, table = (_read(name) for name in ("cloudtrain.yaml", "backends.yaml"))
    own = dict(table.get(backend, {}))
    limit = own.pop("limit", "60s")
    merged = base | {key: base.get(key, {}) | value for key, value in own.items()} | block | {"backend": backend}
    pace_s = 2.0 * parse_duration(limit) / merged["training"]["max_steps"]  # the last step is out of its reach
    second = {"params": {"kill_at": -1, "pace_s": pace_s}, "limits": merged["limits"] | {"max_duration": limit}}
    return [merged, merged | second]


def _read(name: str) -> dict[str, Any]:
    root = yamlfile.parse((TEMPLATES / name).read_text(encoding="utf-8"), name, {}).root
    assert root is not None
    return dict(root.data())


def _prepared(data: dict[str, Any], file: Path, cache: Path, *, dry: bool) -> Prepared:
    config = configs.from_data(data, file, backend=data["backend"], further=refused)
    return prepare(config, file, cache, dry=dry)
