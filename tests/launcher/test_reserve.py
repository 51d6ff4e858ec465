"""Forty simultaneous submits, on two machines with a shared ledger, killed at any step: no overspending, no leak.

The platform is a folder of the test: a job exists from its send on, has a random cost, and ends on request. The
platform audits by itself: each send adds up all known costs. Processes, SQLite and the ledgers are real.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A round forks the submits, waits for all, reconciles from both home folders, and prints the result. The forks need no
# imports. A child dies by SIGKILL at a random step.
ROUND = """\
import fcntl, json, os, random, signal, sys, time, traceback, types
from pathlib import Path

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.registry import Registry, this_process

top, seed, crash, shared = Path(sys.argv[1]), *map(int, sys.argv[2:])
USD, LIMIT, WORST = 1_000_000, 100, 10
platform = top / "platform"
platform.mkdir(parents=True)
place = located(str(top)) if shared else None
homes = [top / "a", top / "b"] if shared else [top / "a"]
PLAN = {"instances": 1, "nproc_per_node": 1, "ranks": 1, "price_micro": 10 * USD, "hourly_usd": 10.0,
        "worst_case_micro": WORST * USD, "cap_s": 3600}
STEPS = ["journalled", "team written", "held", "sent", "marked", "ended", "told", "closed"]

# -- the platform

def jobs():
    return {path.stem: path.read_text() for path in platform.glob("*.job")}

def send(name):
    with (platform / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (platform / f"{name}.job").write_text("runs")
        total = sum(WORST if cost == "runs" else float(cost) for cost in jobs().values())
        if total > LIMIT + 1e-6: (platform / f"{name}.fault").write_text(f"{total} USD")

def end(name, cost_usd):
    partial = platform / f"{name}.tmp"
    partial.write_text(repr(cost_usd))
    partial.replace(platform / f"{name}.job")

def state(ref):
    if (told := jobs()[ref["name"]]) == "runs": return State("running", started_s=1000.0)
    seconds = float(round(float(told) * 360))
    return State("succeeded", started_s=1000.0, ended_s=1000.0 + seconds, billed_s=seconds)

paper = types.SimpleNamespace(
    find=lambda request, home: {"name": request.name} if request.name in jobs() else None,
    state=state,
    pace=lambda ref: backends.Pace(0.01, 0.01),
    logs=lambda ref, cursor, ranks=None, now=False: backends.LogPage([], {"at": 1}),
)
backends.load = lambda name: paper

# -- a submit

def submit(number):
    rng = random.Random(seed * 1000 + number)
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
    registry, job = Registry(homes[number % len(homes)]), None
    try:
        job, _ = registry.add("paper", make, exclusive=False, key=None)
        step("journalled")
        shared_ledger_sync.hold(registry.database, job.id, 1, time.time())
    except BudgetError:
        if job is not None: registry.mark_never_sent(job.attempt, State("failed", "error"))
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

def reconcile(number):
    failures = reserve.reconcile(Registry(homes[number]))
    assert not failures, failures
    return 0

def forked(work, count):
    def child(number):
        try:
            os._exit(work(number))
        except BaseException:
            (platform / f"{os.getpid()}.fault").write_text(traceback.format_exc())
            os._exit(99)

    pids = [os.fork() or child(number) for number in range(count)]
    return [os.waitpid(pid, 0)[1] for pid in pids]

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

def settle_all():
    forked(reconcile, len(homes))
    sums = shared_ledger.accounts(shared_ledger.read(ConditionalObject(place))) if shared else None
    sums = sums or ledger.accounts(Registry(homes[0]).database, time.time())
    there = {name.removesuffix("-1"): told for name, told in jobs().items()}
    return {"held": sorted(each.job_id for each in sums.held),
            "runs": sorted(name for name, told in there.items() if told == "runs"),
            "spent_usd": sum(sum(each.values()) for each in sums.months.values()) / USD,
            "cost_usd": sum(float(told) for told in there.values() if told != "runs")}

found = {"codes": forked(submit, 40), "first": settle_all()}
for name in found["first"]["runs"]: end(f"{name}-1", 1.5)
found |= {"last": settle_all(), "faults": [path.read_text() for path in platform.glob("*.fault")]}
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("seed", "crash_percent", "shared"),
    [
        *(pytest.param(1, 90, shared, marks=pytest.mark.slow) for shared in (False, True)),
        *(pytest.param(1, 0, shared, marks=pytest.mark.soak) for shared in (False, True)),
        *(pytest.param(seed, 50, True, marks=pytest.mark.soak) for seed in range(3, 23)),
    ],
)
def test_forty_submits_at_once_never_exceed_the_budget(
    tmp_path: Path, seed: int, crash_percent: int, shared: bool
) -> None:
    """Forty submits want 10 of 100 USD each, and some end early: all but the refused and the killed ones succeed.

    A killed submit dies by `kill -9` at a random step. After the next command the held jobs are the running jobs, and
    the spent sum is the real cost.
    """
    command = [sys.executable, "-c", ROUND, str(tmp_path / "round"), *map(str, (seed, crash_percent, int(shared)))]
    environment = {**os.environ, "CLOUDTRAIN_HOME": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == [], found
    for seen in (found["first"], found["last"]):
        assert seen["held"] == seen["runs"], seen
        assert abs(seen["spent_usd"] - seen["cost_usd"]) < 0.001, seen
    assert found["last"]["held"] == []
    sent, refused = found["codes"].count(0), found["codes"].count(6 << 8)
    assert 9 in found["codes"] if crash_percent else (sent + refused == 40 and sent >= 10), found["codes"]
