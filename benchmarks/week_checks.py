"""What must hold after a week of a job on ssh hosts (soak_week.py): its losses, its money, and nothing left."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import restart
from sandbox import Sandbox
from week_faults import HOUR_S

from doubles.faulttable.training import ours
from doubles.sshhosts.cluster import Cluster

WATCHED_S = 1.5  # for each life of an agent, between our looks and the product's count
SCRATCH, TEMPORARY = ("tmp", "shm"), re.compile(r"^\.?tmp|^full-|\.(tmp|part|partial)$")


def losses(box: Sandbox, cluster: Cluster, config: Callable[[int], str]) -> list[str]:
    """Compare each loss of each attempt with the undisturbed run's at the same step."""
    logs = [log for host in cluster.hosts for log in host.path("/data/ct/jobs").glob("*/*/node-*/log/rank-0.log")]
    seen = [event for log in logs for event in _steps(log.read_text(errors="replace"))]
    last = max(event["step"] for event in seen)
    box.write(config(last), task=restart.TASK.replace("time.sleep(0.03)", ""))
    box.call("submit", "-d", "-y")
    box.start("wait", "last").communicate()  # minutes
    true = restart._losses(box)
    wrong = Counter(event["step"] for event in seen if event["loss"] != true.get(event["step"]))
    unseen = set(range(1, last + 1)) - {event["step"] for event in seen}
    told = f"{len(seen)} of {last} steps, {len(wrong)} other than undisturbed, {len(unseen)} steps without a line"
    return [f"ok, {told}" if not wrong and len(true) == last else f"{told}: {sorted(wrong)[:9]}"]


def money(box: Sandbox, seen: Iterable[tuple[float, float]]) -> list[str]:
    """Compare the ledger with seconds times price, rounded up to a micro-dollar, and with `seen`, looks at agents."""
    cost = json.loads(box.call("cost", "last", "--json"))
    legs, wrong = cost["legs"], []
    spent = round(sum(leg["cost_usd"] for leg in legs), 6)
    if spent != round(cost["spend_usd"], 6):
        wrong.append(f"legs sum up to {spent} USD, not {cost['spend_usd']}")
    for leg in legs:  # seconds are rounded to a thousandth
        micro = leg["seconds"] * leg["instances"] * leg["price_usd_per_hour"] / HOUR_S * 1e6
        if abs(micro - leg["cost_usd"] * 1e6) > 1 + leg["instances"]:
            wrong.append(f"attempt {leg['attempt']}: {leg['cost_usd']} USD for {leg['seconds']} s")
    lives = [end_s - begin_s for begin_s, end_s in seen if end_s > begin_s + 1]
    watched = sum(lives)
    told = f"{spent:.6f} USD in {len(legs)} legs, {spent * 1000:.1f} host-seconds; {watched:.1f} s of agents were seen"
    if abs(spent * 1000 - watched) > WATCHED_S * len(lives):
        wrong.append(told)
    return wrong or [f"ok, {told} in {len(lives)} lives"]


def left(box: Sandbox, cluster: Cluster) -> list[str]:
    """Name processes, held hosts and temporary files."""
    found = [f"{host.name}: {process.line[:120]}" for host in cluster.hosts for process in ours(host)]
    hosts = json.loads(box.call("hosts", "--json"))["hosts"]
    found += [f"{host['host']} is {host['use']}" for host in hosts if host["use"] != "free"]
    for host in cluster.hosts:
        places = (host.path("/data"), host.path("/dev/shm"), host.path("/run/lock"), host.folder / "tmp", host.home)
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        found += [f"{host.name}: {path}" for path in files if path.parts[-2] in SCRATCH or TEMPORARY.search(path.name)]
    found += [str(path) for path in box.home.rglob("*") if TEMPORARY.search(path.name)]
    return found or ["ok, no process, lock or temporary file"]


def _steps(text: str) -> list[dict[str, Any]]:
    lines = (line.rpartition("  ::ct ")[2] for line in text.splitlines() if "::ct {" in line and line.endswith("}"))
    return [event for event in map(json.loads, lines) if event["e"] == "step"]
