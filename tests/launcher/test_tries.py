"""The tries of a job with several candidates: the same table on all screens, the next try, and the alert of a move."""

import html
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.job import Job, State, no_machines
from cloudtrain.launcher.jobs import failover, listing, overview
from cloudtrain.launcher.jobs.view import JobView, read_view, view_of
from cloudtrain.launcher.live import jobview
from cloudtrain.launcher.live.model import TailShot, WatchedJob
from cloudtrain.launcher.live.view_state import ViewState
from cloudtrain.launcher.money import bill
from cloudtrain.launcher.notices import notifier
from cloudtrain.launcher.notices.notifier import Notifier
from cloudtrain.launcher.report.page import report_html
from cloudtrain.launcher.store import tries
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.charts import UNICODE
from cloudtrain.launcher.ui import pages, site
from doubles.plans import make_job, plan_of

NOW_S = 1_796_000_000.0  # 2026-11-30 00:53:20 UTC
PLACES = [
    [0, "sagemaker", "a", "us-east-1", "ml.p5.48xlarge", False],
    [1, "sagemaker", "a", "us-east-1", "ml.p5.48xlarge", True],
    [2, "sagemaker", "a", "us-west-2", "ml.p5.48xlarge", False],
]
CONFIG = {"capacity": {"try": [{}, {}, {}], "limits": {"rounds": 2}}, "retry": {"on": ["preempted"]}}
COURSE = {"places": PLACES, "machines": ["ml.p5.48xlarge"] * 3, "late_micro": 0, "round": 1}
QUOTA = "the quota is used up"
EMPTY = "Unable to provision requested ML compute capacity"
ROWS = [
    r"0 +1 +sagemaker us-east-1 ml\.p5\.48xlarge +2026-11-30 00:53:20 +no machines: the quota is used up",
    r"1 +1 +sagemaker us-east-1 ml\.p5\.48xlarge spot +2026-11-30 00:53:20 +no machines: Unable to provision",
    r"2 +1 +sagemaker us-west-2 ml\.p5\.48xlarge +2026-11-30 00:53:20 +next",
]


@pytest.fixture
def moved(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job whose first candidate was refused, whose second got no machines, and whose third is in line."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)

    def make(job_id: str, number: int) -> Job:
        plan = plan_of(hourly_usd=30.0, worst_case_usd=33.0)
        return make_job(job_id, number, config=CONFIG, plan=plan, submitter={**COURSE, "candidate": 0})

    job, _ = registry.add("job", make, exclusive=True, key=None)
    failover.refused(registry, job, job.attempt, failover.CapacityError(QUOTA))
    second = registry.find("job")
    registry.mark_sent(second.attempt, {"folder": "/x"})
    end(registry, no_machines(EMPTY, ended_s=NOW_S))
    return registry.find("job")


def end(registry: Registry, state: State) -> None:
    """Store the end of the job's newest attempt, as a poll does."""
    with registry.database.transaction():
        job = registry.find("job")
        registry.set_state(job.attempt, state, {})
        failover.ended(registry, job, replace(job.attempt, state=state))


def plain(text: str) -> str:
    """Return a page's text without its tags."""
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def live(view: JobView) -> str:
    """Return the screen of `watch`."""
    rows = jobview.view(WatchedJob(view), TailShot(), ViewState(opened="job"), (160, 60), UNICODE, NOW_S)[0]
    return "\n".join(row.plain for row in rows)


def test_each_screen_has_the_table_of_tries(registry: Registry, moved: Job) -> None:
    """`status`, `watch`, the page and the report name place, time and result of each try, and the next try."""
    view = read_view(registry, moved)
    status = "\n".join(overview.as_lines(view))
    parts = pages.job_parts(site.Pages(site.assets(), csrf="", is_read_only=True), registry, "job", "").parts
    report = plain(report_html(registry, moved, NOW_S))
    for row in ROWS:
        assert re.search(row, status), status
        assert re.search(row, report), report
    for each in view.tries:
        assert f"{each.candidate}. {each.place}: {each.result}" in live(view)
        assert f"{each.place} " in plain(parts["tries"])
        assert each.result in plain(parts["tries"])


def test_narrow_screen_has_the_whole_result_under_each_try(registry: Registry, moved: Job) -> None:
    """80 columns hold the place and the time; the platform's answer is the reason to look, and is never cut."""
    lines = overview.as_lines(read_view(registry, moved), size=(80, None))
    assert max(map(len, lines)) <= 80
    (row,) = (at for at, line in enumerate(lines) if "us-east-1 ml.p5.48xlarge spot" in line)
    assert lines[row + 1].strip() == f"no machines: {EMPTY}"


@pytest.mark.parametrize(("wait", "shortest"), [("20m", "20m"), ("3h", "2h")])
def test_wait_of_a_candidate_ends_at_the_shorter_limit(wait: str, shortest: str) -> None:
    """`status` names the limit that is reached first, of the candidate's wait and the job's."""
    config = {"limits": {"max_wait": "2h"}, "capacity": {"try": [{}], "wait": wait}}
    job = make_job("job", phase="sent", config=config, state=State("pending"), submitter={**COURSE, "candidate": 0})
    (line,) = (line for line in overview.as_lines(view_of(job, [job.attempt])) if line.startswith("  waiting"))
    assert line.endswith(f"given up after {shortest}")


def test_message_of_a_move_has_one_end(registry: Registry, moved: Job) -> None:
    """The platform's answer may end with a full stop; the words on the next candidate go on after it."""
    job = registry.find("job")
    failover.refused(registry, job, job.attempt, failover.CapacityError("The limit is 0."))
    assert "The limit is 0; next: " in str(registry.find("job").attempt.state.queue)


def test_next_try_is_named_in_list_status_and_watch(registry: Registry, moved: Job) -> None:
    """A job in line for its next candidate names the candidate and the time of the try."""
    words = "candidate 2 (us-west-2, ml.p5.48xlarge), next try 00:53 UTC"
    (line,) = listing.chosen(registry, listing.JobFilter()).lines
    assert (line.outcome, line.progress) == ("queued", words)
    view = read_view(registry, moved)
    assert f"queued, {words}" in overview.as_line(view)
    assert f"{EMPTY}; next: candidate 2 (us-west-2, ml.p5.48xlarge)" in "\n".join(overview.as_lines(view))


def test_json_has_the_tries(registry: Registry, moved: Job) -> None:
    """The tries are in the JSON with stable names, the next one last."""
    told = json.loads(json.dumps(read_view(registry, moved).as_json()))["tries"]
    assert [(each["attempt"], each["candidate"], each["state"], each["reason"]) for each in told] == [
        (1, 0, "refused", "no_machines"),
        (1, 1, "failed", "no_machines"),
        (2, 2, "next", None),
    ]
    assert told[0] == {
        "attempt": 1,
        "candidate": 0,
        "round": 1,
        "backend": "sagemaker",
        "region": "us-east-1",
        "machine": "ml.p5.48xlarge",
        "spot": False,
        "state": "refused",
        "reason": "no_machines",
        "detail": QUOTA,
        "at_s": NOW_S,
    }


def test_attempt_without_machines_is_in_the_table_of_tries_alone(registry: Registry, moved: Job) -> None:
    """Neither the bill, nor the attempts of status, page and report, nor `before` of watch have the attempt."""
    registry.mark_sent(moved.attempt, {"folder": "/x"})
    registry.set_state(moved.attempt, State("running", started_s=NOW_S), {})
    view = read_view(registry, registry.find("job"))
    assert [each.number for each in view.runs] == [2]
    assert "ATTEMPT" not in "\n".join(overview.as_lines(view))
    assert "before" not in live(view)
    assert {line.leg.attempt for line in bill.bill(view.money, view.runs, NOW_S).lines} == {2}
    values = pages.job_values(registry, "job")
    assert [each["number"] for each, _, _ in values["attempts"]] == [2]
    assert EMPTY not in report_html(registry, view.job, NOW_S).partition("<h2>Tries</h2>")[0].partition("<body")[2]


def test_machines_that_came_too_late_stay_on_the_bill(registry: Registry, moved: Job) -> None:
    """An attempt that was given up, and began after all, has cost money: the bill and the attempts have the attempt."""
    late = no_machines(EMPTY, started_s=NOW_S - 90, ended_s=NOW_S)
    attempts = registry.attempts(moved)
    view = replace(read_view(registry, moved), attempts=[replace(attempts[0], state=late), attempts[1]])
    assert [each.number for each in view.runs] == [1, 2]


def test_job_without_candidates_keeps_all_attempts(registry: Registry) -> None:
    """The attempts of a job without `capacity` are shown as ever, without a table of tries."""
    job, _ = registry.add("job", lambda job_id, number: make_job(job_id, number), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.set_state(job.attempt, no_machines(EMPTY, ended_s=NOW_S), {})
    registry.add_attempt(replace(job.attempt, number=2), {}, {})
    view = read_view(registry, registry.find("job"))
    assert (len(view.runs), view.tries) == (2, ())
    assert "CANDIDATE" not in "\n".join(overview.as_lines(view))


def told(registry: Registry, monkeypatch: pytest.MonkeyPatch, job: Job) -> list[tuple[str, str]]:
    """Return key and title of each notice that a follower of the job offers to a channel with all events."""
    offered: list[Any] = []
    monkeypatch.setattr(notifier, "DeliveryThread", lambda *args: type("Thread", (), {"offer": offered.extend})())
    config = job.config | {"notify": [{"webhook": "https://example.org/hook", "on": ["moved", "failed", "restarted"]}]}
    Notifier(registry).look(replace(job, config=config))
    return [(each.notice.key, "\n".join((each.notice.title, *each.notice.lines))) for each in offered]


def test_move_is_an_alert_and_no_failure(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, moved: Job, home: Path
) -> None:
    """A follower that has just read the end of the attempt tells of the move, not of a failure; each move once."""
    ended = replace(moved, attempt=registry.attempt(moved, 1))
    assert ended.attempt.state.reason == "no_machines"
    ((key, text),) = told(registry, monkeypatch, ended)
    assert key == "moved:2:1002"
    assert f"candidate 1 (us-east-1, ml.p5.48xlarge, spot): no machines: {EMPTY}" in text
    assert "next: candidate 2 (us-west-2, ml.p5.48xlarge) at 2026-11-30 00:53:20 UTC" in text


def test_alert_of_the_second_refusal_has_its_own_key(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal moves the same attempt: the key has the round and the candidate."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)
    submitter = {**COURSE, "candidate": 0}
    job, _ = registry.add(
        "job", lambda name, number: make_job(name, number, config=CONFIG, submitter=submitter), exclusive=True, key=None
    )
    keys = []
    for _ in range(2):
        failover.refused(registry, job, registry.attempt(job, 1), failover.CapacityError(QUOTA))
        keys += [key for key, _ in told(registry, monkeypatch, registry.find("job"))]
    assert keys == ["moved:1:1001", "moved:1:1002"]
    before = tries.moved(registry.attempts(job))
    assert registry.claim(registry.attempt(job, 1))  # a try to send the same candidate is no further move
    assert tries.moved(registry.attempts(job)) == before


def test_move_after_a_resume_with_other_candidates_names_both_places(registry: Registry, moved: Job) -> None:
    """Each attempt has its own candidates: a resume may have changed them."""
    later = replace(
        moved.attempt, number=3, submitter={**moved.attempt.submitter, "places": PLACES[:1], "candidate": 0}
    )
    words = tries.moved([*registry.attempts(moved), replace(later, state=State("pending"))])[1]
    assert words.startswith("candidate 2 (us-west-2, ml.p5.48xlarge): ")
    assert "next: candidate 0 (us-east-1, ml.p5.48xlarge)" in words
