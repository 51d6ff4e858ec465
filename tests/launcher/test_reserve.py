"""Forty simultaneous submits, on two machines with a shared ledger, killed at any step: no overspending, no leak.

The platform is a folder of the test: a job exists from its send on, has a random cost, and ends on request. The
platform audits by itself: each send adds up all known costs. Processes, SQLite and the ledgers are real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIMIT_USD, WORST_USD = 100, 10

# A round forks the submits, waits for all, reconciles from both home folders, and prints the result. The forks need no
# imports. A child dies by SIGKILL at a random step.
ROUND = """\
import fcntl, json, os, random, signal, sys, time, types
from dataclasses import replace
from pathlib import Path

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store.registry import Registry, this_process

top, seed, count, crash, shared = Path(sys.argv[1]), *map(int, sys.argv[2:6])
USD, LIMIT, WORST = 1_000_000, int(sys.argv[6]), int(sys.argv[7])
platform = top / "platform"
platform.mkdir(parents=True)
place = located(str(top)) if shared else None
homes = [top / "a", top / "b"] if shared else [top / "a"]
PLAN = {"instances": 1, "nproc_per_node": 1, "ranks": 1, "price_micro": 10 * USD, "hourly_usd": 10.0,
        "worst_case_micro": WORST * USD, "cap_s": 3600}
STEPS = ["journalled", "team written", "held", "sent", "marked", "ended", "told", "closed"]

# -- the platform

def audit():
    total = sum(WORST if (cost := path.read_text()) == "runs" else float(cost) for path in platform.glob("*.job"))
    if total > LIMIT + 1e-6: (platform / "over").write_text(f"{total}")

def send(name):
    with (platform / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (platform / f"{name}.job").write_text("runs")
        audit()

def end(name, cost_usd):
    partial = platform / f"{name}.tmp"
    partial.write_text(repr(cost_usd))
    partial.replace(platform / f"{name}.job")

def find(request, home):
    return {"name": request.name} if (platform / f"{request.name}.job").exists() else None

def state(ref):
    told = (platform / f"{ref['name']}.job").read_text()
    if told == "runs": return State("running", started_s=1000.0)
    seconds = float(round(float(told) * 360))
    return State("succeeded", started_s=1000.0, ended_s=1000.0 + seconds, billed_s=seconds)

paper = types.ModuleType("paper")
paper.find, paper.state = find, state
paper.pace = lambda ref: backends.Pace(0.01, 0.01)
paper.logs = lambda ref, cursor, ranks=None, now=False: backends.LogPage([], {"at": 1})
paper.Paper = lambda: paper
sys.modules["paper"] = paper
backends.BUILT_IN["paper"] = "paper:Paper"

# -- a submit

def submit(number):
    rng = random.Random(seed * 1000 + number)
    home = homes[number % len(homes)]
    fatal = rng.choice(STEPS) if rng.random() < crash / 100 else None

    def step(name):
        if name == fatal: os.kill(os.getpid(), signal.SIGKILL)

    def make(job_id, attempt_number):
        attempt = Attempt(job_id, attempt_number, "intent", Plan.load(PLAN), {}, time.time(), this_process())
        project = {"name": "vision", "ledger": place}
        job = Job(job_id, "paper", "paper", time.time(), {"project": project}, "f", {}, attempt)
        reserve.reserve(registry, attempt, job.config)
        return job

    real_held, real_closed = ledger.mark_held, ledger.mark_closed
    ledger.mark_held = lambda *given: (step("team written"), real_held(*given))
    ledger.mark_closed = lambda *given: (step("told"), real_closed(*given))
    registry = Registry(home)
    try:
        job, _ = registry.add("paper", make, exclusive=False, key=None)
    except BudgetError:
        return 6
    step("journalled")
    try:
        shared_ledger_sync.hold(registry.database, job.id, 1, time.time())
    except BudgetError as error:
        registry.mark_never_sent(job.attempt, State("failed", "error"))
        return 6
    step("held")
    send(job.attempt.name)
    step("sent")
    registry.mark_sent(job.attempt, {"name": job.attempt.name})
    step("marked")
    if rng.random() < 0.5:
        end(job.attempt.name, rng.randrange(1, WORST * 10) / 10)
        step("ended")
        refresh(registry, registry.find(job.id))
        step("closed")
    return 0

def forked(work):
    pid = os.fork()
    if pid: return pid
    code = 99
    try:
        code = work()
    except BaseException as error:
        import traceback
        (platform / f"failed-{os.getpid()}").write_text(traceback.format_exc())
    os._exit(code)

# -- the round

budget = LedgerBudget("vision", "all", LIMIT * USD)
for home in homes:
    home.mkdir()
    registry = Registry(home)
    if not shared: ledger.set_budget(registry.database, budget)
    registry.close()
if shared:
    cell = ConditionalObject(place)
    shared_ledger.change(cell, lambda book: book.budgets.update({("vision", "all"): budget}), may_make=True)

pids = [forked(lambda number=number: submit(number)) for number in range(count)]
codes = [os.waitpid(pid, 0)[1] for pid in pids]

def reconcile(number):
    registry = Registry(homes[number])
    failures = reserve.reconcile(registry)
    assert not failures, failures
    return 0

def books():
    held, spent = 0, 0
    if shared:
        book = shared_ledger.read(ConditionalObject(place))
        held = sorted(each.job_id for each in book.held.values())
        spent = shared_ledger.accounts(book).standings(time.time())[0].money.spent_micro
    else:
        registry = Registry(homes[0])
        held = sorted(each.job_id for each in ledger.held(registry.database))
        spent = sum(ledger.months(registry.database).get("vision", {}).values())
    return held, spent

def settle_all():
    for pid in [forked(lambda number=number: reconcile(number)) for number in range(len(homes))]: os.waitpid(pid, 0)
    held, spent = books()
    there = {path.stem.removesuffix("-1"): path.read_text() for path in platform.glob("*.job")}
    runs = sorted(name for name, told in there.items() if told == "runs")
    cost = sum(float(told) for told in there.values() if told != "runs")
    return {"held": held, "runs": runs, "spent_usd": spent / USD, "cost_usd": cost}

found = {"codes": codes, "first": settle_all()}
for path in platform.glob("*.job"):
    if path.read_text() == "runs": path.write_text("1.5")
found["last"] = settle_all()
found["over"] = (platform / "over").exists() and (platform / "over").read_text()
found["failed"] = [path.read_text() for path in platform.glob("failed-*")]
print(json.dumps(found))
"""


def play(top: Path, seed: int, *, count: int = 40, crash_percent: int = 50, shared: bool = True) -> dict[str, Any]:
    """Return the result of a round."""
    numbers = map(str, (seed, count, crash_percent, int(shared), LIMIT_USD, WORST_USD))
    command = [sys.executable, "-c", ROUND, str(top), *numbers]
    environment = {**os.environ, "CLOUDTRAIN_HOME": str(top / "none")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def require_sound(found: dict[str, Any]) -> None:
    """Assert no overspending, reservations for exactly the running jobs, and a spent sum equal to the real cost."""
    assert (found["over"], found["failed"]) == (False, []), found
    for moment in ("first", "last"):
        seen = found[moment]
        assert seen["held"] == seen["runs"], seen
        assert abs(seen["spent_usd"] - seen["cost_usd"]) < 0.001, seen
    assert found["last"]["held"] == []


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["one home", "two homes, one ledger"])
def test_forty_submits_at_once_never_exceed_the_budget(tmp_path: Path, home: Path, shared: bool) -> None:
    """Forty submits want 10 of 100 USD each: ten or more succeed, as some end early, and never hold above 100 USD."""
    found = play(tmp_path / "round", 1, crash_percent=0, shared=shared)
    require_sound(found)
    sent = found["codes"].count(0)
    assert sent >= 10
    assert found["codes"].count(6 << 8) == 40 - sent


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["one home", "two homes, one ledger"])
def test_submits_killed_at_any_step_leave_no_reservation(tmp_path: Path, home: Path, shared: bool) -> None:
    """Most submits die by `kill -9` at a random step: after the next command the held jobs are the running jobs."""
    found = play(tmp_path / "round", 2, crash_percent=90, shared=shared)
    require_sound(found)
    assert 9 in found["codes"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 23))
def test_twenty_rounds_of_forty_submits_with_crashes(tmp_path: Path, seed: int) -> None:
    """Each round has forty submits on two machines, half of them killed: no overspending, no leak."""
    require_sound(play(tmp_path / "round", seed))
