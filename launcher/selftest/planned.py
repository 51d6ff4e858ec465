"""The two jobs of a selftest: the task and config of the templates, with the backend's block of the user's file."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from cloudtrain.entrypoints.format import most, up

from .. import config as configs
from ..advice.preparing import prepare
from ..backend_table import traits
from ..errors import BudgetError
from ..planning.prepare import Prepared, refused
from ..prices import refreshing
from ..text.terminal import say
from ..text.units import format_money, parse_duration

TEMPLATES = files("cloudtrain.templates") / "selftest"
TAKEN = ("image", "project")  # of the user's file, besides the backend's block


def read(name: str) -> dict[str, Any]:
    """Return the data of a YAML file of the templates."""
    return dict(yaml.safe_load((TEMPLATES / name).read_text(encoding="utf-8")))


def block_of(file: Path | None, backend: str) -> dict[str, Any]:
    """Return the keys of the user's file that the jobs take. Raises ConfigError for an unreadable file."""
    block = {key: configs.written(file, (key,)) for key in (backend, *TAKEN)} if file else {}
    own = block.get(backend)
    if file and traits(backend).runs_here and isinstance(own, dict) and os.sep in str(own.get("python")):
        own["python"] = str(file.absolute().parent / Path(own["python"]).expanduser())
    return {key: value for key, value in block.items() if value is not None}


def jobs_of(
    block: dict[str, Any], backend: str, folder: Path, cache: Path, most_micro: int
) -> tuple[list[Prepared], int]:
    """Return both jobs, each with its worst case as its budget, and the sum; `folder` gets the code.

    The first runs twice, with a kill, a stop and a resume; the second reaches its time limit. Raises ConfigError, and
    BudgetError if the sum is above `most_micro`, or not known.
    """
    (folder / "task.py").write_bytes((TEMPLATES / "task.py").read_bytes())
    file, own = folder / "cloudtrain.yaml", dict(read("backends.yaml").get(backend, {"limit": "60s"}))
    base, limit = read("cloudtrain.yaml"), own.pop("limit")
    first = base | {key: base.get(key, {}) | value for key, value in own.items()} | block | {"backend": backend}
    pace_s = 2 * parse_duration(limit) / first["training"]["max_steps"]  # the last step is out of reach
    slow = first["env"] | {"KILL_AT": "-1", "PACE_S": str(pace_s)}
    second = first | {"env": slow, "limits": first["limits"] | {"max_duration": limit}}

    def made(*, dry: bool = True) -> list[Prepared]:
        loaded = [configs.load(file, data=data, backend=backend, further=refused) for data in (first, second)]
        return [prepare(config, file, cache, dry=dry) for config in loaded]

    why, jobs = "", made()
    if jobs[0].plan.worst_case_micro is None:
        why, jobs = _read_price(jobs[0]), made()
    if jobs[0].plan.worst_case_micro is None:
        machine = jobs[0].plan.machine
        hint = f"cloudtrain prices refresh --backend {backend} --type {machine}, or set {backend}.price_per_hour"
        raise BudgetError(f"what the selftest may cost is not known: no price of {machine}; {why}", hint=hint)
    worst = [runs * (job.plan.worst_case_micro or 0) for runs, job in zip((2, 1), jobs, strict=True)]
    if sum(worst) > most_micro:
        enough = format_money(up(sum(worst))).replace(" ", "")
        hint = f"cloudtrain selftest {backend} --budget {enough}"
        message = f"the selftest may cost up to {most(sum(worst))}, above {format_money(most_micro)}"
        raise BudgetError(message, where="--budget", hint=hint)
    for data, micro in zip((first, second), worst, strict=True):
        data |= {"budget": {"limit": f"{micro / 1e6:.6f} USD"}} if micro else {}
    return made(dry=False), sum(worst)


def _read_price(prepared: Prepared) -> str:
    """Store the vendor's price of the machine, as `prices refresh` does, and return what was found."""
    vendor, config = refreshing.priced(prepared.config.backend), prepared.config
    if vendor is None or (region := vendor.price_region(config)) is None:
        return f"its price list cannot be read without {config.backend}.region" if vendor else "it has no price list"
    machine = (prepared.plan.machine,)
    check = refreshing.compared(lambda: vendor.quotes(config, region, machine), {})
    say(f"price: {check.found}")
    return check.found if check.verdict == "ok" else f"{check.found}; {check.cure}"
