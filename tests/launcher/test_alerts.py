"""Alerts that are due: budget thresholds, near limits, no progress, ends; each alert once."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.contract import AgentSpec, JobSpec, NoticeSettings
from cloudtrain.entrypoints.notices import rules
from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.entrypoints.notices.node_notifier import NodeNotifier
from cloudtrain.entrypoints.notices.rules import unsent, wanted
from cloudtrain.entrypoints.terms import CostRate
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.jobs.view import view_of
from cloudtrain.launcher.money.forecast import Forecast, forecast
from cloudtrain.launcher.money.job_facts import job_facts
from doubles.plans import plan_of

NOW = 1_000_000.0
PLAN = {"instances": 1, "hourly_usd": 36.0, "cap_s": 10_000, "deadline_s": 9_000, "own_limit_s": 9_500}
PROGRESS = {"step": 100, "max_steps": 200, "eta_s": 1000.0, "checkpoint_step": 80}
LOOK = Forecast(
    spent_micro=10_000_000,
    held_micro=0,
    worst_micro=10_000_000,
    burn_micro_h=36_000_000,
    limit_micro=100_000_000,
    cap_at_s=NOW + 9_000,
    deadline_at_s=NOW + 8_000,
    finish_at_s=NOW + 1_000,
    projected_micro=20_000_000,
    hits_limit=False,
    stalled_s=1.0,
    checkpoint_step=80,
)


def job(
    state: State | None = None,
    config: dict[str, Any] | None = None,
    number: int = 1,
    plan: dict[str, Any] | None = None,
    **progress: Any,
) -> Job:
    """Return a job that, by default, has run for 1000 s."""
    progress, state = {**PROGRESS, **progress}, state or State("running", started_s=NOW - 1000)
    planned = plan_of(**{**PLAN, **(plan or {})})
    attempt = Attempt("j-x1", number, "sent", planned, {}, 0.0, {}, {"x": 1}, state, progress)
    asked = {"budget": {"limit": "100 USD", "alert_at": ["50%", "80%", "100%"], "on_limit": "checkpoint-and-stop"}}
    return Job("j-x1", "j", "local", 0.0, {**asked, **(config or {})}, "/x", {}, attempt)


def standing(a_job: Job, look: Forecast, now_s: float) -> list[Notice]:
    """Return all notices that hold for the job, including notices already sent."""
    return rules.standing(job_facts(a_job, look, [a_job.attempt]), now_s)


def due(a_job: Job, look: Forecast, told: Collection[str], now_s: float) -> list[Notice]:
    """Return the notices to send now, without the keys in `told`."""
    return unsent(standing(a_job, look, now_s), told)


def keys(a_job: Job, look: Forecast, *told: str) -> list[str]:
    """Return the due keys apart from the start of the job."""
    return [each.key for each in due(a_job, look, {"started:1", *told}, NOW)]


def spent(usd: int) -> Forecast:
    """Return the forecast of a job that has spent the amount."""
    return replace(LOOK, spent_micro=usd * 1_000_000)


@pytest.mark.parametrize(
    ("usd", "told", "wanted_keys"),
    [
        (49, [], []),
        (50, [], [50]),
        (79, [50], []),
        (80, [50], [80]),
        (100, [], [100]),  # two thresholds crossed together: only the highest
        (130, [100], []),
        (60, [80], []),  # the platform has corrected its bill
    ],
)
def test_highest_threshold_is_due_once(usd: int, told: list[int], wanted_keys: list[int]) -> None:
    """The lower thresholds count as sent together with the highest."""
    found = keys(job(), spent(usd), *(f"budget:{each}@100000000" for each in told))
    assert found == [f"budget:{each}@100000000" for each in wanted_keys]


@pytest.mark.parametrize(
    ("alert_at", "usd", "wanted_keys"),
    [
        *((["50%", "100%"], 90, [100]), (["50%", "150%"], 40, [50]), (["150%"], 90, [])),
        *(([], 90, []), (["100%"], 101, [100])),
    ],
)
def test_end_at_the_budget_sends_the_last_threshold(alert_at: list[str], usd: int, wanted_keys: list[int]) -> None:
    """A cap stops the job below 100 %, because the cap holds a reserve back; the end still sends the last threshold."""
    asked = {"budget": {"limit": "100 USD", "alert_at": alert_at, "on_limit": "checkpoint-and-stop"}}
    ended = job(State("stopped", "budget", resumable=True, started_s=NOW - 9000, ended_s=NOW), config=asked)
    found = [each for each in standing(ended, spent(usd), NOW) if each.event == "budget"]
    assert [each.key for each in found] == [f"budget:{each}@100000000" for each in wanted_keys]
    assert all(f"{usd}.00 USD of 100.00 USD" in each.title for each in found)
    by_hand = replace(ended, attempt=replace(ended.attempt, state=replace(ended.attempt.state, reason="user")))
    assert usd > 100 or not [each for each in standing(by_hand, spent(usd), NOW) if each.key.startswith("budget:100")]


def test_alerts_follow_the_limit_and_the_price() -> None:
    """A raised budget has new thresholds, shares of unknown amounts are unknown, and a reached limit is no forecast."""
    look = replace(spent(80), limit_micro=160_000_000)
    assert keys(job(), look, "budget:80@100000000") == ["budget:50@160000000"]
    assert keys(job(), replace(LOOK, limit_micro=None)) == []
    assert keys(job(), replace(spent(90), spent_micro=None)) == []
    look = replace(spent(126), hits_limit=True, projected_micro=150_000_000, finish_at_s=NOW + 14_000)
    assert keys(job(), look) == ["budget:100@100000000"]


def test_projected_alert_names_the_missing_money() -> None:
    """The alert has the exact command with money for the remaining steps; 14 USD in reserve explain 90 of 100."""
    look = replace(spent(6), hits_limit=True, projected_micro=150_000_000, finish_at_s=NOW + 14_000)
    notice = due(job(eta_s=14_000.0), look, {"started:1"}, NOW)[0]
    assert notice.key == "projected:1@100000000"
    assert (
        "will not finish within its budget of 100.00 USD, of which 14.00 USD is the reserve for the save and for the "
        "highest possible bills: done in 3h 53m, for 150.00 USD in all" in notice.text
    )
    assert "cloudtrain resume j-x1 --budget +" in notice.text
    plan = {"cap_reason": "budget"}
    look = replace(spent(6), hits_limit=True, projected_micro=90_000_000, finish_at_s=NOW + 8_400)
    notice = due(job(plan=plan), look, {"started:1"}, NOW)[0]
    assert "will not finish within its budget of 100.00 USD, of which 14.00 USD is the reserve" in notice.title
    assert notice.title.endswith("done in 2h 20m, for 90.00 USD in all")


def test_newer_estimate_corrects_a_reported_forecast_once() -> None:
    """The first steps were slow; a channel that received no forecast receives no correction."""
    sent = "projected:1@100000000"
    assert keys(job(), LOOK) == []
    assert keys(job(), LOOK, sent) == ["within:1@100000000"]
    assert keys(job(), LOOK, sent, "within:1@100000000") == []
    assert keys(job(), replace(LOOK, finish_at_s=NOW + 7_900), sent) == []


def test_time_limit_before_the_finish_is_not_about_money() -> None:
    """A retry has the same time again, and requests more time if the limit is too short."""
    look = replace(LOOK, limit_micro=None, hits_limit=True, finish_at_s=NOW + 14_000)
    notice = due(job(), look, {"started:1"}, NOW)[0]
    assert "will reach its time limit" in notice.title
    assert notice.fields["resume"] == "cloudtrain resume j-x1"
    notice = due(job(config={"limits": {"max_duration": "10m"}}, eta_s=14_000.0), look, {"started:1"}, NOW)[0]
    # 6000 s are left at the stop; plus 10 %, the start, the save, and 500 s before the job's own clock begins.
    assert notice.fields["resume"] == "cloudtrain resume j-x1 --set limits.max_duration=121m"


def test_resume_advice_of_a_running_job_waits_for_its_end() -> None:
    """The notice gives the command to stop first, and the resume for later."""
    look = replace(spent(60), hits_limit=True, projected_micro=150_000_000, finish_at_s=NOW + 14_000)
    lines = "\n".join(due(job(eta_s=14_000.0), look, {"started:1"}, NOW)[0].lines)
    assert "stop it     cloudtrain stop j-x1\n" in lines
    assert "resume      after it has stopped: cloudtrain resume j-x1 --budget +" in lines


@pytest.mark.parametrize(
    ("config", "look"),
    [
        ({}, spent(60)),  # the job will finish in time
        (
            {"budget": {"limit": "100 USD", "alert_at": ["50%"], "on_limit": "alert"}},
            replace(spent(60), hits_limit=True),
        ),
    ],
)
def test_job_that_will_finish_gets_no_resume_advice(config: dict[str, Any], look: Forecast) -> None:
    """The job runs on to its end."""
    notice = due(job(config=config), look, {"started:1"}, NOW)[0]
    assert notice.fields["resume"] is None
    assert "resume" not in notice.text


def test_end_names_a_command_that_is_accepted() -> None:
    """Without more money the resume would be refused; without a checkpoint, or after a success, no command is named."""
    ended = job(State("failed", "error", resumable=True, started_s=NOW - 9000, ended_s=NOW))
    notice = standing(ended, replace(spent(99), hits_limit=None), NOW)[-1]
    assert notice.fields["resume"] == "cloudtrain resume j-x1 --budget +19USD"
    assert standing(ended, spent(10), NOW)[-1].fields["resume"] == "cloudtrain resume j-x1"
    assert standing(job(State("failed", "error", ended_s=NOW)), LOOK, NOW)[-1].fields["resume"] is None
    assert standing(job(State("succeeded", ended_s=NOW)), LOOK, NOW)[-1].fields["resume"] is None


def test_checkpoint_of_an_earlier_attempt_counts() -> None:
    """A resumed job has a checkpoint before its own first save."""
    again = job(number=2)
    again.attempt.progress.pop("checkpoint_step")
    first = replace(again.attempt, number=1, progress={"checkpoint_step": 103})
    look = replace(forecast(again, [first, again.attempt], NOW), spent_micro=60_000_000)
    notice = due(again, look, {"started:2"}, NOW)[0]
    assert notice.fields["checkpoint_step"] == 103
    assert "checkpoint  step 103" in notice.lines
    again.attempt.progress.update(checkpoint_step=None, saved_s=NOW)  # a newer save, without a step
    look = forecast(again, [first, again.attempt], NOW)
    assert (look.checkpoint_step, look.saved_attempt, look.saved_s) == (None, 2, NOW)
    notice = due(again, replace(look, spent_micro=60_000_000), {"started:2"}, NOW)[0]
    assert "checkpoint  saved, step not reported" in notice.lines


@pytest.mark.parametrize(("left_s", "is_due"), [(1000, False), (890, True), (-5, True)])
def test_deadline_alert_is_due_a_quarter_of_an_hour_before(left_s: float, is_due: bool) -> None:
    """A job that finishes before the deadline needs no alert."""
    began = State("running", started_s=NOW - 20_000)
    look = replace(LOOK, deadline_at_s=NOW + left_s, cap_at_s=NOW + left_s + 120, finish_at_s=None, hits_limit=None)
    assert keys(job(began), look) == (["deadline:1"] if is_due else [])
    assert keys(job(began), replace(look, finish_at_s=NOW + left_s - 1)) == []


def test_deadline_alert_of_a_short_run_is_due_in_its_last_tenth() -> None:
    """A quarter of an hour would be the whole run; for a minute, or a twentieth, no forecast is sent."""
    look = replace(LOOK, deadline_at_s=NOW + 95, cap_at_s=NOW + 200, finish_at_s=None)
    began = State("running", started_s=NOW - 905)
    short = {"cap_s": 1105}  # from its begin to its cap
    notice = due(job(began, plan=short), look, {"started:1"}, NOW)[0]
    assert "saves and leaves in 1m 35s, because of its time limit" in notice.title
    assert keys(job(began, plan=short), replace(look, deadline_at_s=NOW + 105)) == []
    look = replace(spent(1), hits_limit=True, projected_micro=150_000_000, finish_at_s=NOW + 14_000)
    for limit_s, told in ((int(look.cap_at_s - NOW), []), (850, ["projected:1@100000000"])):
        begun = job(State("running", started_s=NOW - 50), plan={"cap_s": limit_s + 50})
        assert keys(begun, replace(look, cap_at_s=NOW + limit_s)) == told


def test_alert_of_a_script_or_a_hard_limit_promises_no_save() -> None:
    """A script gets SIGTERM at the deadline, and may save or not; `on_limit: stop` ends the job without a save."""
    look = replace(LOOK, deadline_at_s=NOW + 60, cap_at_s=NOW + 180, finish_at_s=None)
    script = job(State("running", started_s=NOW - 20_000), plan={"saves": False})
    notice = due(script, look, {"started:1"}, NOW)[0]
    assert "gets SIGTERM in 1m, because of its time limit" in notice.title
    assert "; it gets SIGTERM at " in notice.text
    assert "saves" not in notice.text
    hard = job(State("running", started_s=NOW - 20_000), plan={"deadline_s": 9_500, "cap_reason": "budget"})
    look = replace(LOOK, deadline_at_s=NOW + 60, finish_at_s=None)
    notice = due(hard, look, {"started:1"}, NOW)[0]
    assert "is stopped in 1m, because of its budget of 100.00 USD, of which 89.40 USD is the reserve" in notice.title
    assert "saves" not in notice.text


@pytest.mark.parametrize(
    ("config", "stalled_s", "is_due"),
    [
        ({}, 440, False),
        ({}, 451, True),  # half of 600 s and 300 s
        ({"distributed": {"hang_timeout": "20m"}}, 599, False),
        ({"distributed": {"hang_timeout": "20m"}}, 601, True),
        ({"distributed": {"hang_timeout": "1m"}}, 119, False),
        ({"distributed": {"hang_timeout": "1m"}}, 121, True),
        (60_000.0, 1000, False),  # each step takes ten minutes
    ],
)
def test_stalled_alert_is_due_without_progress(config: Any, stalled_s: float, is_due: bool) -> None:
    """The limit is half of the hang timeout, at least two minutes, and at least the time of ten steps."""
    slow = job(config=config) if isinstance(config, dict) else job(eta_s=config)
    found = keys(slow, replace(LOOK, stalled_s=stalled_s))
    assert found == (["stalled:1@100"] if is_due else [])


@pytest.mark.parametrize(
    ("state", "key", "on"),
    [
        (State("succeeded", ended_s=NOW), "succeeded:1", "succeeded"),
        (State("failed", "error", error={"message": "boom\nline two"}, ended_s=NOW), "failed:1", "failed"),
        (State("stopped", "budget", resumable=True, ended_s=NOW), "stopped:1", "budget"),
        (State("failed", "preempted", resumable=True, ended_s=NOW), "preempted:1", "preempted"),
    ],
)
def test_end_is_sent_to_subscribers_of_its_event(state: State, key: str, on: str) -> None:
    """A stop by the budget also reaches subscribers of `budget` alone."""
    found = [
        each for each in standing(job(state), replace(LOOK, hits_limit=None, cap_at_s=None), NOW) if each.key == key
    ]
    assert len(found) == 1
    assert wanted(found[0], [on])
    assert "\n" not in found[0].title


def test_end_by_a_fault_counts_the_attempts_with_faults() -> None:
    """An attempt that got no machines uses up none of `retry.max_attempts`, in the alert too."""
    a_job = job(State("failed", "preempted", ended_s=NOW), {"retry": {"max_attempts": 2, "on": ["preempted"]}}, 2)
    before = replace(a_job.attempt, number=1, state=State("failed", "no_machines"))
    notices = rules.standing(job_facts(a_job, LOOK, [before, a_job.attempt]), NOW)
    assert any("failed (preempted); attempt 2 of at most 3" in each.title for each in notices)


def test_end_at_the_budget_names_the_money_to_continue() -> None:
    """The exact command has enough money for the remaining steps."""
    ended = job(State("stopped", "budget", resumable=True, started_s=NOW - 9000, ended_s=NOW))
    notice = standing(ended, replace(spent(90), hits_limit=None), NOW)[-1]
    # 1000 s and 200 s again, 10 % more, 30 s of start, 120 s of save, and 500 s before the job's own clock begins.
    assert notice.fields["resume"] == "cloudtrain resume j-x1 --budget +9.70USD"
    assert notice.lines[-2:] == (
        "resume with cloudtrain resume j-x1 --budget +9.70USD",
        "            (12 to finish, 7.70 in reserve for start and end, less 10 left)",
    )


@pytest.mark.parametrize(
    ("state", "saved_step", "is_advised"),
    [("stopped", 200, False), ("stopped", None, False), ("stopped", 180, True), ("failed", 200, True)],
)
def test_stop_after_the_last_step_names_no_resume(state: Any, saved_step: int | None, is_advised: bool) -> None:
    """No step is left to pay for. After a failure the code can be repaired, and unsaved steps can be repeated."""
    told = State(state, "budget", resumable=True, started_s=NOW - 9000, ended_s=NOW)
    ended = job(told, step=200, max_steps=200, eta_s=0.0, checkpoint_step=saved_step)
    look = replace(spent(99), hits_limit=None, checkpoint_step=saved_step)
    notice = standing(ended, look, NOW)[-1]
    assert (notice.fields["resume"] is not None) == is_advised
    assert ("to finish" in notice.text) == is_advised
    assert any("cloudtrain resume" in each for each in view_of(ended, [ended.attempt]).next_steps) == is_advised


def test_events_have_their_keys_and_subscribers() -> None:
    """Restart, silence, a new attempt are events; `budget` includes thresholds and forecasts, each available alone."""
    again = job(State("running", started_s=NOW - 1000, restarts=2), number=2)
    again = replace(again, attempt=replace(again.attempt, unreachable_since_s=NOW - 700))
    events = {each.key: each for each in due(again, LOOK, (), NOW)}
    assert set(events) == {"started:2", "restarted:2:2", f"unreachable:2:{NOW - 700:.0f}"}
    assert wanted(events["started:2"], ["restarted"])
    look = replace(spent(60), hits_limit=True, projected_micro=150_000_000, finish_at_s=NOW + 14_000)
    found = {each.event: each for each in due(job(), look, {"started:1"}, NOW)}
    assert {name for name, each in found.items() if wanted(each, ["budget"])} == {"budget", "projected"}
    assert [name for name, each in found.items() if wanted(each, ["projected"])] == ["projected"]


def test_job_and_launcher_send_the_same_alert(tmp_path: Path) -> None:
    """Both decide by the same rules: the same key and the same title, for the threshold and for the deadline."""
    asked = {"budget": {"limit": "10 USD", "alert_at": ["50%", "80%"], "on_limit": "checkpoint-and-stop"}}
    plan = {"cap_s": 1_000, "deadline_s": 900, "own_limit_s": 1_000, "cap_reason": "budget", "price_micro": 36_000_000}
    seen = job(State("running", started_s=NOW - 850), asked, plan=plan)
    seen.attempt.progress.clear()
    ours = [each for each in standing(seen, forecast(seen, [seen.attempt], NOW), NOW) if each.event in rules.JOB_EVENTS]
    settings = NoticeSettings((), "local", 10_000_000, (50, 80), "checkpoint-and-stop", CostRate(1, 36_000_000))
    spec = AgentSpec(
        **dict.fromkeys(("address", "root", "bundle", "sha256", "python", "workdir"), ""),
        node=0,
        max_duration_s=1_000,
        deadline_s=900,
        limit_reason="budget",
        grace_s=10,
        environment={"CLOUDTRAIN_CHECKPOINT_DIR": str(tmp_path)},
        job=JobSpec("j-x1", notices=settings),
    )
    theirs = NodeNotifier(spec, settings, NOW - 850).due({}, NOW)
    assert [each.key for each in ours] == ["budget:80@10000000", "deadline:1"]
    assert [(each.id, each.key, each.title, each.lines) for each in ours] == [
        (each.id, each.key, each.title, each.lines) for each in theirs
    ]
