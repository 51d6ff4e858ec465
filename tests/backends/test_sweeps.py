"""Sweeps on this machine: each segment is sent once, the budget holds, and the best trial is found."""

import functools
import json
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from uiserver import serving

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
sweep: {space: {args.lr: [1, 2, 3, 4, 5]}, algorithm: grid, parallel: 2, place: jobs}
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
LONG_ASHA = """\
name: search
task: task.py
training:
  {max_steps: 4, global_batch_size: 8, optimizer: {name: sgd, lr: 0.1}}
sweep:
  {space: {training.optimizer.lr: {log: [0.0001, 0.05]}}, trials: 9, parallel: 3, first_rung: 1, factor: 2, place: jobs}
"""
ASHA = """\
name: search
task: task.py
training:
  {max_steps: 6, global_batch_size: 8, optimizer: {name: sgd, lr: 0.1}, schedule: {name: cosine}}
sweep: {space: {training.optimizer.lr: [0.0001, 0.001, 0.05]}, trials: 3, parallel: 3, first_rung: 2, place: jobs}
"""
# A driver that gets a signal before statement AT of the registry; the first has number 1. For -1: after the journal has
# the intent to send a trial.
# A suspended driver holds no lock of the registry.
SIGNALLED = """\
import os, signal
from cloudtrain.launcher.store.database import Database

AT = int(os.environ["AT"])
left, sign, execute = AT, int(os.environ["SIGNAL"]), Database.execute

def counted(self, sql, values=()):
    global left
    left -= 1
    if left == 0 and sign == signal.SIGSTOP and self._db.in_transaction:
        left = 1
    if AT == -1 and sql.startswith("INSERT INTO attempts"):
        left = 1
    if left == 0:
        os.kill(os.getpid(), sign)
    return execute(self, sql, values)

Database.execute = counted
from cloudtrain.launcher.cli import main
main()
"""


@pytest.fixture
def signalled(cli: Any, tmp_path: Path) -> Any:
    """Return the command line as SIGNALLED."""
    program = tmp_path / "signalled.py"
    program.write_text(f"#!{sys.executable}\n{SIGNALLED}")
    program.chmod(0o755)
    return replace(cli, command=(str(program),))


def sweep_of(home: Path) -> tuple[Registry, Any]:
    """Return the open registry and its only sweep."""
    registry = Registry(home)
    (found,) = sweeps.sweeps(registry.database)
    return registry, found


@pytest.mark.soak  # a driver that dies at each statement: the test below
@pytest.mark.parametrize(("drivers", "trials", "deaths"), [(6, 5, 3), (20, 60, 50)])
def test_drivers_that_die_send_each_trial_once(
    cli: Any, signalled: Any, project: Any, home: Path, wait_until: Any, drivers: int, trials: int, deaths: int
) -> None:
    """Several drivers at once; most die at a random statement: one attempt for each trial, and the best is found."""
    folder = project(RANDOM.replace("[1, 2, 3, 4, 5]", str(list(range(1, trials + 1)))), text=SCRIPT)
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    draw, died = random.Random(1), 0

    def is_over() -> bool:
        nonlocal died
        ends = [draw.randint(1, 60) if died < deaths else 0 for _ in range(drivers)]
        signs = [{"AT": str(at), "SIGNAL": str(int(signal.SIGKILL))} for at in ends]
        for driver in [signalled.start("advance", sweep.id, env=sign) for sign in signs]:
            _, said = driver.communicate(timeout=60)
            assert "Traceback" not in said
            died += driver.returncode == -signal.SIGKILL
        registry.database.execute("UPDATE sweeps SET lease_s = 0")  # in place of 30 s after the death of a driver
        return sweeps.find(registry.database, sweep.id).state == "ended"

    wait_until(is_over, 400, 0.1)
    assert died >= deaths
    require_sent_once(registry, sweep, trials)
    best = cli("best", sweep.id, "--json").json
    assert (best["trial"], best["value"], best["values"]) == (2, 0.0, {"args.lr": 3})
    assert cli("status", f"{sweep.id}.2", "--json").json["job"] == f"{sweep.id}-2"


@pytest.mark.parametrize(("trials", "step", "deaths"), [(6, 9, 8), pytest.param(40, 1, 100, marks=pytest.mark.soak)])
def test_driver_that_dies_at_a_statement_loses_no_trial(
    cli: Any, signalled: Any, project: Any, home: Path, wait_until: Any, trials: int, step: int, deaths: int
) -> None:
    """A driver dies at a statement, every time at a later statement: each trial is sent once, and has a result."""
    folder = project(RANDOM.replace("[1, 2, 3, 4, 5]", str(list(range(1, trials + 1)))), text=SCRIPT)
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    died, at, survived = 0, 1, 0

    def is_over() -> bool:
        nonlocal died, at, survived
        sign = {"AT": str(at if died < deaths else 0), "SIGNAL": str(int(signal.SIGKILL))}
        done = signalled("advance", sweep.id, env=sign)
        assert done.code in (0, -signal.SIGKILL), done.stderr
        died, at, survived = (died + 1, at + step, 0) if done.code else (died, at, survived + 1)
        at = 1 if survived > 3 else at  # a driver has fewer statements
        registry.database.execute("UPDATE sweeps SET lease_s = 0")  # in place of 30 s after the death of a driver
        return sweeps.find(registry.database, sweep.id).state == "ended"

    wait_until(is_over, 400, 0.0)
    assert died >= deaths
    require_sent_once(registry, sweep, trials)
    assert {each.state for each in sweeps.segments(registry.database, sweep.id)} == {"done"}


@pytest.mark.soak
def test_driver_that_was_suspended_sends_no_segment_twice(
    cli: Any, signalled: Any, project: Any, home: Path, wait_until: Any
) -> None:
    """A driver sleeps beyond the lease, at any statement; meanwhile a different driver takes and sends."""
    folder = project("", script="task.py", text=TASK)
    (folder / "cloudtrain.yaml").write_text(LONG_ASHA)
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)

    def known() -> Any:
        return sweeps.segments(registry.database, sweep.id)

    def ended() -> int:
        return [each.state for each in known()].count("done")

    def is_over() -> bool:
        registry.database.execute("UPDATE sweeps SET lease_s = 0")  # in place of 30 s
        cli("advance", sweep.id)
        return sweeps.find(registry.database, sweep.id).state == "ended"

    def has_moved(before: int) -> bool:
        return is_over() or ended() >= before + 3

    for at in range(10, 61, 6):
        driver = suspended(signalled, sweep.id, at, wait_until)
        if driver.poll() is None:
            wait_until(functools.partial(has_moved, ended()), 60, 0.2)
            driver.send_signal(signal.SIGCONT)
        assert "Traceback" not in driver.communicate(timeout=60)[1]
    wait_until(is_over, 240, 0.2)
    assert {each.state for each in known()} == {"done"}
    require_sent_once(registry, sweep, 9)


def suspended(signalled: Any, sweep_id: str, at: int, wait_until: Any) -> Any:
    """Return a driver, suspended at statement `at`, or ended before."""
    driver = signalled.start("advance", sweep_id, env={"AT": str(at), "SIGNAL": str(int(signal.SIGSTOP))})
    status = Path(f"/proc/{driver.pid}/stat")
    wait_until(lambda: driver.poll() is not None or status.read_text().rpartition(")")[2].split()[0] == "T", 60)
    return driver


def require_sent_once(registry: Registry, sweep: Any, trials: int) -> None:
    """Check that each segment has an attempt, that no further attempt exists, and that the budget holds."""
    jobs, segments = registry.jobs(), sweeps.segments(registry.database, sweep.id)
    assert {job.id for job in jobs} == {f"{sweep.id}-{trial}" for trial in range(trials)}
    sent = [(job.id, attempt.number) for job in jobs for attempt in registry.attempts(job) if attempt.phase == "sent"]
    assert sorted(sent) == sorted((each.job_id, each.attempt) for each in segments)
    assert sum(sweeps.spent_and_held(registry.database, sweep.id)) <= 3_000_000


def test_asha_pauses_and_promotes(cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None) -> None:
    """Three trials pause at the first rung; the best of them goes on to the end, and its config can be submitted."""
    folder = project("", script="task.py", text=TASK)
    (folder / "cloudtrain.yaml").write_text(ASHA)
    cli.ok("submit", "-y", cwd=folder, timeout_s=240)
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
    second = sorted(first, key=lambda trial: first[trial])[1]
    assert cli("rm", "-y", f"{sweep.id}.{second}").code == 0
    more = ("--trials", "6", "--set", "x=1")
    assert cli("resume", sweep.id, "-y", *more).code == 2  # a sweep of jobs keeps its config
    assert cli("resume", sweep.id, "-y", *more[:2], timeout_s=240).code == 0
    states = {(each.trial, each.rung): each.state for each in sweeps.segments(registry.database, sweep.id)}
    assert sum(rung == 0 for _, rung in states) == 6
    assert states.get((second, 1), "failed") == "failed"  # a removed trial cannot continue
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
    assert [(each["running"], each["failed"], each["stopped"]) for each in shown["rungs"]] == [(0, 0, 1)]
    assert [(job.id, job.attempt.state.reason) for job in registry.jobs()] == [(f"{sweep.id}-0", "user")]
    assert cli("best", sweep.id).code == 1


@pytest.mark.soak
def test_stop_reaches_a_trial_that_a_driver_is_sending(
    cli: Any, signalled: Any, project: Callable[..., Path], home: Path, wait_until: Any
) -> None:
    """A driver that is suspended in the middle of a send asks the trial to stop, if the sweep was stopped meanwhile."""
    folder = project(RANDOM, text=SCRIPT + "import time\nif lr > 1: time.sleep(600)\n")
    assert cli("submit", "-d", "-y", cwd=folder).code == 0
    registry, sweep = sweep_of(home)
    wait_until(lambda: cli("status", f"{sweep.id}.0", "--json").json["state"] == "succeeded")
    driver = suspended(signalled, sweep.id, -1, wait_until)
    assert [job.attempt.phase for job in registry.jobs()] == ["intent", "sent"]
    assert cli("stop", "-d", sweep.id).code == 0
    driver.send_signal(signal.SIGCONT)
    assert "Traceback" not in driver.communicate(timeout=60)[1]
    wait_until(lambda: not registry.jobs(active=True) or cli("advance", sweep.id) is None, 60)
    assert [each.id for each in registry.jobs()] == [f"{sweep.id}-1", f"{sweep.id}-0"]


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


@pytest.mark.soak
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
    grown = cli.ok("resume", sweep.id, "--trials", "+1", "--budget", "+1USD", "-d", "-y")
    assert f"goes on: {sweep.id}, 3 trials" in grown.stderr
    assert cli("wait", sweep.id, "--timeout", "1s").code in (0, 124)
    assert cli("wait", sweep.id, timeout_s=240).code == 0
    after = cli("status", sweep.id, "--json").json
    assert (after["state"], after["trials"], after["limit_usd"]) == ("ended", 3, 3.0)
    first = {each.trial: each.value for each in sweeps.segments(registry.database, sweep.id)}
    assert len(first) == 3


def test_open_page_drives_a_sweep(
    cli: Any, project: Callable[..., Path], home: Path, warm_nodes: None, wait_until: Any
) -> None:
    """`ui` sends the due trials, as `watch` does, and the sweep's page shows the end."""
    text = RANDOM.replace("[1, 2, 3, 4, 5]", "[1, 3]").replace("parallel: 2", "parallel: 1")
    assert cli("submit", "-d", "-y", cwd=project(text, text=SCRIPT)).code == 0
    _, sweep = sweep_of(home)
    with serving(home) as served:
        served.enter()
        wait_until(lambda: 'badge ended"' in served.get(f"/sweeps/{sweep.id}").text, timeout_s=240)
        assert "2 of 2 began" in served.get(f"/sweeps/{sweep.id}").text


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
