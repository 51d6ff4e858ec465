"""Sweeps on this machine: each segment is sent once, the budget holds, and the best trial is found."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.launcher.store import series, sweeps
from cloudtrain.launcher.store.registry import Registry

pytestmark = pytest.mark.slow

SCRIPT = """\
import json, os, sys
lr = float(sys.argv[sys.argv.index("--lr") + 1])
print("eval ::ct " + json.dumps({"e": "eval", "step": 1, "metrics": {"loss": (lr - 3) ** 2}}), flush=True)
"""
RANDOM = """\
args: {lr: 1}
distributed: {allow_alone: true}
sweep: {space: {args.lr: [1, 2, 3, 4, 5]}, algorithm: grid, parallel: 2}
local: {price_per_hour: 1}
budget: {limit: 3 USD}
"""
TASK = """\
import torch

def model(params):
    return torch.nn.Linear(4, 1)

def dataset(params, split):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""
ASHA = """\
name: search
task: task.py
training:
  {max_steps: 6, global_batch_size: 8, optimizer: {name: sgd, lr: 0.1}, schedule: {name: cosine}}
sweep: {space: {training.optimizer.lr: [0.0001, 0.001, 0.05]}, trials: 3, parallel: 3, first_rung: 2, place: jobs}
"""
# A driver that dies at a statement of the registry: before the first for 1, after the first for 2, and so on.
DYING = """\
import os, signal
from cloudtrain.launcher.store.database import Database

left, execute = int(os.environ["DIES_AT"]), Database.execute

def counted(self, sql, values=()):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(self, sql, values)

Database.execute = counted
from cloudtrain.launcher.cli import main
main()
"""


def sweep_of(home: Path) -> tuple[Registry, Any]:
    """Return the open registry and its only sweep."""
    registry = Registry(home)
    (found,) = sweeps.sweeps(registry.database)
    return registry, found


def test_drivers_that_die_send_each_trial_once(
    cli: Any, project: Callable[..., Path], home: Path, wait_until: Any, warm_nodes: None
) -> None:
    """Six drivers at a time, half of them killed at a random moment: one attempt a trial, and the best one is found."""
    folder, draw = project(RANDOM, text=SCRIPT), random.Random(1)
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)

    def is_over() -> bool:
        drivers = [cli.start("advance", sweep.id) for _ in range(6)]
        for driver in drivers[:3]:
            time.sleep(draw.uniform(0.05, 0.4))
            driver.send_signal(signal.SIGKILL)
        for driver in drivers:
            _, said = driver.communicate(timeout=60)
            assert "Traceback" not in said
        registry.database.execute("UPDATE sweeps SET lease_s = 0")  # in place of 30 s after the death of a driver
        return sweeps.find(registry.database, sweep.id).state == "ended"

    wait_until(is_over, 240, 0.1)
    jobs = registry.jobs()
    sent = [attempt for job in jobs for attempt in registry.attempts(job) if attempt.phase == "sent"]
    assert len(sent) == 5
    assert {job.id for job in jobs} == {f"{sweep.id}-{trial}" for trial in range(5)}
    assert sum(sweeps.spent_and_held(registry.database, sweep.id)) <= 3_000_000
    best = cli("best", sweep.id, "--json").json
    assert (best["trial"], best["value"], best["values"]) == (2, 0.0, {"args.lr": 3})
    assert cli("status", f"{sweep.id}.2", "--json").json["job"] == f"{sweep.id}-2"


@pytest.mark.parametrize(("trials", "step", "deaths"), [(6, 9, 8), pytest.param(40, 1, 100, marks=pytest.mark.soak)])
def test_driver_that_dies_at_a_statement_loses_no_trial(
    cli: Any,
    project: Callable[..., Path],
    home: Path,
    wait_until: Any,
    tmp_path: Path,
    trials: int,
    step: int,
    deaths: int,
) -> None:
    """A driver dies at each of its statements, every time at a later one: each trial is sent once, and has a result."""
    folder = project(RANDOM.replace("[1, 2, 3, 4, 5]", str(list(range(1, trials + 1)))), text=SCRIPT)
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    program = tmp_path / "dying.py"
    program.write_text(f"#!{sys.executable}\n{DYING}")
    program.chmod(0o755)
    dying, died, at, survived = replace(cli, command=(str(program),)), 0, 1, 0

    def is_over() -> bool:
        nonlocal died, at, survived
        done = dying("advance", sweep.id, env={"DIES_AT": str(at if died < deaths else 0)})
        assert done.code in (0, -signal.SIGKILL), done.stderr
        print("DEAD", at, done.code, done.stdout)
        died, at, survived = (died + 1, at + step, 0) if done.code else (died, at, survived + 1)
        at = 1 if survived > 3 else at  # no driver has so many statements
        registry.database.execute("UPDATE sweeps SET lease_s = 0")  # in place of 30 s after the death of a driver
        return sweeps.find(registry.database, sweep.id).state == "ended"

    wait_until(is_over, 400, 0.0)
    assert died >= deaths
    require_sent_once(registry, sweep, trials)


def require_sent_once(registry: Registry, sweep: Any, trials: int) -> None:
    """Check that each trial has a result of a single attempt, and that the budget holds."""
    jobs = registry.jobs()
    assert {job.id for job in jobs} == {f"{sweep.id}-{trial}" for trial in range(trials)}
    assert len([attempt for job in jobs for attempt in registry.attempts(job) if attempt.phase == "sent"]) == trials
    assert {each.state for each in sweeps.segments(registry.database, sweep.id)} == {"done"}
    assert sum(sweeps.spent_and_held(registry.database, sweep.id)) <= 3_000_000


def test_asha_pauses_and_promotes(cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None) -> None:
    """Three trials pause at the first rung; the best of them goes on to the end, and its config can be submitted."""
    folder = project("", script="task.py", text=TASK)
    (folder / "cloudtrain.yaml").write_text(ASHA)
    result = cli("submit", "-y", cwd=folder, timeout_s=240)
    assert result.code == 0, result.stderr
    registry, sweep = sweep_of(home)
    shown = cli("status", sweep.id, "--json").json
    assert [(each["step"], each["done"]) for each in shown["rungs"]] == [(2, 3), (6, 1)]
    assert shown["is_finished"]
    winner = shown["best"][0]
    first = {each.trial: each.value for each in sweeps.segments(registry.database, sweep.id) if each.rung == 0}
    assert winner["trial"] == min(first, key=lambda trial: first[trial])
    states = {job.id: (job.attempt.state.state, job.attempt.state.reason) for job in registry.jobs()}
    assert states.pop(f"{sweep.id}-{winner['trial']}") == ("succeeded", None)
    assert set(states.values()) == {("stopped", "paused")}
    assert cli("best", "last", "-o", "best.yaml", cwd=folder).code == 0
    written = yaml.safe_load((folder / "best.yaml").read_text())
    assert written["training"]["optimizer"]["lr"] == winner["values"]["training.optimizer.lr"]
    assert "sweep" not in written
    assert cli("validate", "-f", "best.yaml", cwd=folder).code == 0


def test_stop_ends_the_running_trial_and_sends_no_other(
    cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None
) -> None:
    """The running trial stops, and a later driver only takes its result."""
    folder = project(RANDOM, text="import time\ntime.sleep(600)\n")
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    assert cli("stop", sweep.id).code == 0
    assert cli("advance", sweep.id).code == 0
    shown = cli("status", sweep.id, "--json").json
    assert (shown["state"], shown["trials"], shown["held_usd"]) == ("stopped", 1, 0)
    assert [(each["running"], each["failed"]) for each in shown["rungs"]] == [(0, 1)]
    assert [(job.id, job.attempt.state.reason) for job in registry.jobs()] == [(f"{sweep.id}-0", "user")]
    assert cli("best", sweep.id).code == 1


def test_budget_stops_a_sweep_before_it_overspends(
    cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None
) -> None:
    """A trial whose worst case does not fit is not sent, and the sweep ends with the trials that were sent."""
    folder = project(
        RANDOM.replace("3 USD", "1.40 USD").replace("price_per_hour: 1", "price_per_hour: 36"), text=SCRIPT
    )
    result = cli("submit", "-y", cwd=folder, timeout_s=240)
    registry, sweep = sweep_of(home)
    spent, held = sweeps.spent_and_held(registry.database, sweep.id)
    assert held == 0
    assert 0 < spent <= 1_400_000
    shown = cli("status", sweep.id, "--json").json
    assert shown["state"] == "ended", json.dumps(shown)
    assert 1 <= shown["trials"] < 5
    assert result.code == 0, result.stderr


def test_ended_sweep_gets_more_trials_and_money(
    cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None
) -> None:
    """A random search of two trials ends, and gets a third trial and another dollar; `wait` drives the sweep."""
    text = RANDOM.replace("algorithm: grid", "algorithm: random, trials: 2").replace("3 USD", "2 USD")
    folder = project(text, text=SCRIPT)
    assert cli("submit", "-y", cwd=folder, timeout_s=240).code == 0
    registry, sweep = sweep_of(home)
    before = cli("status", sweep.id, "--json").json
    assert (before["state"], before["trials"]) == ("ended", 2)
    refused = cli("resume", sweep.id)
    assert (refused.code, "has ended" in refused.stderr) == (2, True)
    grown = cli("resume", sweep.id, "--trials", "+1", "--budget", "+1USD", "-d", "-y")
    assert grown.code == 0, grown.stderr
    assert f"goes on: {sweep.id}, 3 trials" in grown.stderr
    assert cli("wait", sweep.id, "--timeout", "1s").code in (0, 124)
    assert cli("wait", sweep.id, timeout_s=240).code == 0
    after = cli("status", sweep.id, "--json").json
    assert (after["state"], after["trials"], after["limit_usd"]) == ("ended", 3, 3.0)
    first = {each.trial: each.value for each in sweeps.segments(registry.database, sweep.id)}
    assert len(first) == 3


def test_stopped_trial_goes_on_from_its_checkpoint(
    cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None, wait_until: Any
) -> None:
    """A stop saves the running trials; `resume` sends their next attempts, which begin at the saved step."""
    folder = project(
        "", script="task.py", text=TASK.replace("    return ((", "    import time; time.sleep(0.1)\n    return ((")
    )
    asha = ASHA.replace("max_steps: 6", "max_steps: 60").replace("first_rung: 2", "first_rung: 40")
    (folder / "cloudtrain.yaml").write_text(asha.replace("trials: 3, parallel: 3", "trials: 1, parallel: 1"))
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    trial = f"{sweep.id}-0"
    wait_until(lambda: (cli("status", trial, "--json").json["step"] or 0) > 3, 120, 0.1)
    assert cli("stop", sweep.id).code == 0
    assert cli("wait", sweep.id, timeout_s=120).code == 9
    assert cli("resume", sweep.id, "-y", timeout_s=240).code == 0
    job = registry.find(trial)
    assert [each.state.reason for each in registry.attempts(job)] == ["user", "paused", None]
    began = [each.step for each in series.read(registry.database, trial).points if each.kind == "restart"]
    assert 3 < began[0] < 40
    assert began[1:] == [40]
