"""A job that ended at its budget: the error names a sum to continue, and the sum is enough."""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.terms import worst_case_micro
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.jobs import retry
from cloudtrain.launcher.jobs.view import unattended
from cloudtrain.launcher.metering.meter import spent_at_worst_micro
from cloudtrain.launcher.money.forecast import limit_micro
from cloudtrain.launcher.planning.job_spec import resume_terms
from cloudtrain.launcher.store.registry import Registry
from doubles.killed import KILLED
from doubles.plans import make_job, plan_of
from doubles.signatures import MakeProject

MONEY = "budget: {limit: 85 USD}\nlocal: {price_per_hour: 3600 USD, python: %s}\n"
ENDLESS = "import os, time\nprint('deadline', os.environ.get('CLOUDTRAIN_DEADLINE'), flush=True)\ntime.sleep(100)\n"
LINGERS = "import time\nclass Slow:\n    def __del__(self, sleep=time.sleep):\n        sleep(100)\nslow = Slow()\n"
PLAN = {"instances": 2, "ranks": 2, "hourly_usd": 7200.0, "price_micro": 3_600_000_000, "uncertainty": 1.1,
        "terms": {"unit_s": 30, "tail_s": 20}, "cap_s": 65}  # fmt: skip


@pytest.fixture
def ended(cli: Any, project: MakeProject, idle_python: Path) -> Iterator[str]:
    """Return a job that was stopped by its budget after 51 of 85 USD."""
    folder = project(MONEY % idle_python)
    assert cli("submit", "-d", "--name", "one", cwd=folder).code == 0
    cli("stop", "--now", "-y", "one")
    registry = Registry()
    now_s = time.time()
    state = State("stopped", "budget", resumable=True, started_s=now_s - 100, ended_s=now_s - 49)
    registry.set_state(registry.find("one").attempt, state, {})
    registry.close()
    yield "one"
    cli("stop", "--now", "-y", "one")


def test_resume_without_money_names_a_command_that_works(registry: Registry, cli: Any, ended: str) -> None:
    """85 - 51 USD buy 34 s, less 20 s of stopping; a useful run needs 60 s. A micro-dollar below the sum is refused."""
    refused = cli("resume", "-d", ended)
    assert (refused.code, "the 34 USD left of 85 USD buy 14s" in refused.stderr) == (6, True), refused.stderr
    command = re.search(r"cloudtrain (resume one --budget .*)", refused.stderr)
    assert command
    assert command[1] == "resume one --budget +46USD"
    assert cli("resume", "-d", "--budget", "+45.999999USD", ended).code == 6
    assert cli("resume", "-d", "--budget", "130.999999", ended).code == 6
    assert cli(*shlex.split(command[1]), "-d").code == 0
    job = registry.find(ended)
    assert (job.attempt.number, job.config["budget"]["limit"]) == (2, "131 USD")
    assert (job.attempt.plan.cap_s, job.attempt.plan.spent_micro) == (60, 51_000_000)


def test_named_command_repeats_all_options(cli: Any, ended: str) -> None:
    """The command repeats all options, because the sum is enough only for the same job."""
    typed = ("--instances", "3", "--set", "args=[a b]", "--price-per-hour", "7200 USD", "--update-code")
    refused = cli("resume", "-d", *typed, ended)
    command = re.search(r"cloudtrain (resume one --budget (\S+) .*)", refused.stderr)
    assert (refused.code, bool(command)) == (6, True), refused.stderr
    assert command
    assert shlex.split(command[1])[4:] == [
        *("--instances", "3", "--set", "args=[a b]", "--price-per-hour", "7200USD", "--update-code")
    ]
    assert cli(*shlex.split(command[1]), "-d").code == 0


def test_budget_of_a_resume_that_was_never_sent_is_added_once(registry: Registry, cli: Any, ended: str) -> None:
    """After a kill before the send, the same command finds the budget as it was before."""
    command = ("resume", "-d", "-y", "--budget", "+50USD", ended)
    dying = [sys.executable, "-c", KILLED, "cloudtrain.backends.local.backend:LocalBackend.send", "before", *command]
    done = subprocess.run(dying, cwd=cli.cwd, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    cli.ok(*command)
    job = registry.find(ended)
    assert (job.attempt.number, job.config["budget"]["limit"]) == (3, "135 USD")


def test_status_names_a_resume_with_money(cli: Any, ended: str) -> None:
    """The `next` line has the command with the sum."""
    assert re.search(r"next +cloudtrain resume one --budget \+[0-9.]+USD\n", cli("status", ended).stdout)


@pytest.mark.parametrize(("limit", "is_short"), [("52USD", True), ("300USD", False)])
def test_status_names_a_budget_that_refuses_the_resume(cli: Any, ended: str, limit: str, *, is_short: bool) -> None:
    """The named command gives the budget enough room for the advised resume, by the same sum as the refusal's."""
    assert cli("budget", "set", limit, "--month").code == 0
    shown = cli("status", ended).stdout
    advised = re.search(r"next +cloudtrain (resume one .*)\n", shown)
    raised = re.search(
        r"the overall monthly 52 USD has \S+ USD left: cloudtrain (budget set .* --month) first\n", shown
    )
    assert (bool(advised), bool(raised)) == (True, is_short), shown
    assert advised
    if raised:
        refused = cli(*shlex.split(advised[1]), "-d")
        assert (refused.code, f"raise the budget: cloudtrain {raised[1]}\n" in refused.stderr) == (6, True), refused
        assert cli(*shlex.split(raised[1])).code == 0
    assert cli(*shlex.split(advised[1]), "-d").code == 0


def test_resume_warns_last_of_code_that_changed_since_the_submit(registry: Registry, cli: Any, ended: str) -> None:
    """The attempt runs the submitted code, except with `--update-code`; only changed lines of the plan are printed."""
    folder = Path(registry.find(ended).config_file).parent
    (folder / "fixed.py").write_text("")
    warning = (
        "warning: fixed.py changed since the submit; this attempt runs the submitted code: --update-code takes the "
        "new code"
    )
    shown = cli("resume", "-d", "--budget", "+46USD", ended).stderr.splitlines()
    plan = shown[: shown.index("sent: one, attempt 2")]
    begins = ["local: at most", "3600.00 USD an", "budget 131 USD", "  alerts at 65"]
    assert ([line[:14] for line in plan[:4]], plan[-1]) == (begins, warning), plan
    cli("stop", "--now", "-y", ended)
    updated = cli("resume", "-d", "--budget", "+200USD", "--update-code", ended).stderr
    assert ("changed since" in updated, "\ncode: " in updated) == (False, True), updated


def test_resume_repeats_the_cost_alone_of_an_unchanged_plan(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """The submit has printed all lines, and the notes on the config."""
    folder = project(f"local: {{python: {idle_python}}}\nresources: {{spot: true}}\n")
    note = "ignored on local: resources.spot\n"
    assert note in cli("submit", "-d", "--name", "one", cwd=folder).stderr
    assert cli("stop", "--now", "-y", "one").code == 0
    dry = cli("resume", "--dry-run", "one")
    assert (dry.code, '"name": "one-2"' in dry.stdout, "dry run: nothing was sent" in dry.stderr) == (0, True, True), (
        dry
    )
    assert cli("resume", "--dry-run", "one", "--json").json["attempt"] == 2
    again = cli("resume", "-d", "one").stderr
    plan = [line for line in again.partition("sent: ")[0].splitlines() if not line.startswith("warning: ")]
    assert plan == ["no checkpoint of this job yet: starting from the beginning", plan[1]]
    assert plan[1].startswith("local: no cost: ")
    assert cli("stop", "--now", "-y", "one").code == 0
    assert note in cli("resume", "-d", "one", "--set", "resources.spot=true").stderr
    cli("stop", "--now", "-y", "one")


@pytest.mark.slow
def test_stop_at_the_limit_is_no_fault(cli: Any, content_cli: Any, project: MakeProject) -> None:
    """`on_limit: stop`: no deadline is set, the end comes at the cap, and no missed save is reported.

    The script of the second job has ended with success, and its process takes longer to end than the budget lasts.
    """
    money = "budget: {limit: 40 USD, on_limit: stop}\nlocal: {price_per_hour: 3600 USD}\n"
    content_cli.ok("submit", "-d", "-y", "--name", "two", cwd=project(money, text=LINGERS, folder="lingers"))
    done = content_cli("submit", "--name", "one", cwd=project(money, text=ENDLESS))
    assert (done.code, "deadline None" in done.stdout) == (6, True), done.stderr
    status = cli("status", "one", "--json").json
    assert (status["reason"], status["error"], 20 <= status["spend_usd"] <= 40) == ("budget", None, True)
    assert cli("wait", "two").code == 0
    status = cli("status", "two", "--json").json
    assert (status["state"], status["reason"], status["resumable"]) == ("succeeded", None, False)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        *(("+50USD", "135 USD"), ("+0.5", "85.50 USD"), ("200USD", "200 USD"), ("$200", "200 USD")),
        *(("much", None), ("+", None), ("-5", None), ("", None)),
    ],
)
def test_budget_option_adds_or_sets(given: str, found: str | None) -> None:
    """A plus sign adds to the budget; an invalid sum is a usage error."""
    job = make_job("one", config={"budget": {"limit": "85 USD"}})
    if found is not None:
        assert retry.budget_setting(job, given) == f"budget.limit={found}"
        return
    with pytest.raises(UsageError, match="amount in US dollars"):
        retry.budget_setting(job, given)


def test_budget_that_does_not_apply_is_raised_but_not_shown() -> None:
    """An own machine without a price has no limit, and the config keeps the sum; a missing budget can be set only."""
    config = {"budget": {"limit": "100 USD"}}
    made, job = make_job("j", config=config), make_job("j", config=config, plan=plan_of(unpriced_budget_micro=10**8))
    assert retry.budget_setting(job, "+50USD") == "budget.limit=150 USD"
    assert (limit_micro(made), limit_micro(job)) == (100_000_000, None)
    assert not any("budget" in line for line in unattended(job))
    with pytest.raises(UsageError, match="no budget to add to"):
        retry.budget_setting(make_job("one"), "+5USD")
    assert retry.budget_setting(make_job("one"), "5USD") == "budget.limit=5 USD"


def attempt(job: Job, number: int, seconds: float, **plan: Any) -> Any:
    """Return an attempt with the given running time."""
    state = State("stopped", "budget", started_s=1000.0, ended_s=1000.0 + seconds)
    return replace(job.attempt, number=number, phase="sent", plan=plan_of(**{**PLAN, **plan}), state=state)


def test_earlier_attempts_count_at_worst() -> None:
    """Times count as billed, at the price's uncertainty."""
    job = make_job("j-1")
    one = attempt(job, 1, 31.0)
    assert spent_at_worst_micro([one], 2000.0) == 2 * 60 * 1_100_000
    idle = replace(one, state=replace(one.state, idle_s=29.5))
    assert spent_at_worst_micro([idle], 2000.0) == 2 * 90 * 1_100_000
    unknown = attempt(job, 2, 31.0, price_micro=None, hourly_usd=None)
    assert spent_at_worst_micro([one, unknown], 2000.0) is None
    assert spent_at_worst_micro([one, unknown], 2000.0, 3_600_000_000) == 2 * 2 * 60 * 1_100_000
    assert spent_at_worst_micro([replace(one, phase="never_sent")], 2000.0) == 0
    spent = spent_at_worst_micro([attempt(job, 1, 31.0)], 2000.0) or 0
    needed = spent + 2 * 90 * 1_100_000  # 60 s and 20 s of stopping, in units of 30 s
    plan = plan_of(**{**PLAN, "cap_s": 600})
    assert plan.rate is not None
    assert worst_case_micro(60, plan.rate, resume_terms(plan)) == needed - spent
