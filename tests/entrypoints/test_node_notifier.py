"""The job sends its own notifications: thresholds, deadline and end, from node 0's agent, despite the receiver."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.contract import AgentSpec, ExitReport
from cloudtrain.entrypoints.notices import node_notifier
from cloudtrain.entrypoints.notices.node_notifier import NodeNotifier, of_agent
from doubles import receivers
from doubles.signatures import MakeProject
from doubles.waiting import until

ORDER = {
    "backend": "local",
    "limit_micro": 1_000_000,
    "alert_at": [50, 80, 100],
    "on_limit": "checkpoint-and-stop",
    "rate": {"instances": 1, "price_micro": 3_600_000},  # a thousandth of a dollar a second
    "spent_micro": 200_000,
}
ALL = ["budget", "succeeded", "failed", "stopped"]


def agent_spec(root: Path, url: str, *, attempt: int = 1, settings: Any = None, **more: Any) -> AgentSpec:
    """Return the spec of node 0's agent."""
    channel = {"id": "webhook-1", "kind": "webhook", "secret": "HOOK", "to": "", "sender": "", "on": ALL}
    (root / "log").mkdir(parents=True, exist_ok=True)
    (root / "checkpoints").mkdir(exist_ok=True)
    job = {"job": "j-x1", "attempt": attempt, "notices": {**ORDER, "channels": [channel], **(settings or {})}}
    spec = {
        "node": 0,
        **dict.fromkeys(("address", "bundle", "sha256", "python", "workdir"), ""),
        "grace_s": 10,
        "root": str(root),
        "max_duration_s": 1000,
        "deadline_s": 900,
        "limit_reason": "budget",
        "secrets": {"HOOK": url},
        "environment": {"CLOUDTRAIN_CHECKPOINT_DIR": str(root / "checkpoints")},
        "spec": job,
        **more,
    }
    return AgentSpec.load(spec)


def notifier(spec: AgentSpec, started_s: float) -> NodeNotifier:
    """Return the notifier of an agent that sends notices."""
    found = of_agent(spec, started_s)
    assert found is not None
    return found


def run(tmp_path: Path, age_s: float, **more: Any) -> tuple[NodeNotifier, list[str]]:
    """Return the notifier of a job of the given age, and the keys of the notices due now."""
    found = notifier(agent_spec(tmp_path, "http://127.0.0.1:1/", **more), time.time() - age_s)
    return found, [each.key for each in found.due({}, time.time())]


def ended(found: NodeNotifier, verdict: ExitReport) -> None:
    """Start the notifier, and end it with the job."""
    found.start()
    found.end(verdict)
    found.finish()


def logged(root: Path) -> list[str]:
    """Return the keys of the notices in rank 0's log."""
    lines = (root / "log" / "rank-0.log").read_text().splitlines()
    found = [event for line in lines if (event := events.parse(line)[1]) is not None]
    return [event["key"] for event in found if event["e"] == "notice"]


@pytest.mark.parametrize(
    ("age_s", "keys"),
    [
        *((299, []), (301, ["budget:50@1000000"]), (601, ["budget:80@1000000"])),
        (811, ["budget:100@1000000", "deadline:1"]),
    ],
)
def test_due_notices_follow_from_the_held_time(tmp_path: Path, age_s: float, keys: list[str]) -> None:
    """The costs of earlier attempts count; only the highest threshold is due."""
    assert run(tmp_path, age_s)[1] == keys


def test_time_on_earlier_machines_counts(tmp_path: Path) -> None:
    """After a start by the platform, the limit is the rest of the job's limit."""
    spec = agent_spec(tmp_path, "http://127.0.0.1:1/", max_duration_s=700, used_s=300)
    found = notifier(spec, time.time() - 1)
    assert [each.key for each in found.due({}, time.time())] == ["budget:50@1000000"]


def test_time_before_a_requeue_counts(tmp_path: Path) -> None:
    """After a requeue on Slurm or in a queue, the deadline comes earlier by the time of the earlier runs."""
    found = notifier(agent_spec(tmp_path, "http://127.0.0.1:1/"), time.time() - 6)
    found.count_earlier(895)
    assert [each.key for each in found.due({}, time.time())] == ["budget:100@1000000", "deadline:1"]


def test_unknown_price_is_no_threshold(tmp_path: Path) -> None:
    """Without a price, only the deadline and the end give notices."""
    spec = agent_spec(tmp_path, "http://127.0.0.1:1/", settings={"rate": None})
    found = notifier(spec, time.time() - 850)
    told = found.due({}, time.time())
    assert [each.key for each in told] == ["deadline:1"]
    assert "unknown" in told[0].text


def test_job_that_ends_before_its_deadline_has_no_deadline_notice(tmp_path: Path) -> None:
    """The remaining time is the job's own last figure."""
    found, _ = run(tmp_path, 850)
    assert [each.event for each in found.due({"eta_s": 5.0}, time.time())] == ["budget"]


def test_deadline_of_the_budget_states_the_reserve(tmp_path: Path) -> None:
    """The job stops at 900 s, after 0.90 USD of 1.00 USD."""
    spec = agent_spec(tmp_path, "http://127.0.0.1:1/", settings={"spent_micro": 0})
    found = notifier(spec, 0.0)
    notice = found.due({"step": 9, "max_steps": 10, "eta_s": 100.0}, 850.0)[-1]
    assert "because of its budget of 1.00 USD, of which 0.10 USD is the reserve for the save" in notice.title
    assert "for 0.95 USD in all" in notice.text


def test_other_nodes_and_jobs_without_notices_send_nothing(tmp_path: Path) -> None:
    """Only node 0 sends notices."""
    assert of_agent(agent_spec(tmp_path, "x", node=1), 0.0) is None
    assert of_agent(agent_spec(tmp_path, "x", spec={}), 0.0) is None


def test_clock_that_is_set_makes_no_notice_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jump of the wall clock by a day uses up neither money nor time of the job."""
    wall_s = time.time()
    found = notifier(agent_spec(tmp_path, "http://127.0.0.1:1/"), wall_s)
    monkeypatch.setattr(time, "time", lambda: wall_s + 86_400)
    assert found.due({}, found._now_s()) == []


def test_threshold_and_end_are_sent_and_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice has the last step and checkpoint, survives two failures, and is recorded in rank 0's log."""
    monkeypatch.setattr(node_notifier, "EVERY_S", 0.05)
    with receivers.hooks([503]) as told:
        found = notifier(agent_spec(tmp_path, told.url), time.time() - 310)
        with (tmp_path / "log" / "rank-0.log").open("w") as log:
            log.write(events.format_line("checkpoint", "saved", {"step": 80, "path": "x"}) + "\n")
            log.write(events.format_line("step", "s", {"step": 90, "max_steps": 200, "eta_s": 900.0}) + "\n")
        found.start()
        first = told.wait(1)[0]
        assert (first["key"], first["from"], first["checkpoint_step"]) == ("budget:50@1000000", "job", 80)
        (tmp_path / "checkpoints" / "step-80").mkdir()
        (tmp_path / "checkpoints" / "step-80" / "manifest.json").touch()
        found.end(ExitReport("stopped", "budget"))
        found.finish()
        later = {each["key"]: each for each in told.got[1:]}
    last = later.pop("stopped:1")
    assert (list(later), last["reason"]) == (["budget:100@1000000"], "budget")
    assert last["resume"].startswith("cloudtrain resume j-x1 --budget +")
    assert sorted(logged(tmp_path)) == ["budget:100@1000000", "budget:50@1000000", "stopped:1"]


def test_stop_after_the_last_step_names_no_resume(tmp_path: Path) -> None:
    """A resume would pay for no step."""
    with receivers.hooks([]) as told:
        found = notifier(agent_spec(tmp_path, told.url), time.time() - 900)
        (tmp_path / "checkpoints" / "ckpt.pt").write_text("weights")
        line = events.format_line("step", "s", {"step": 200, "max_steps": 200, "eta_s": 0.0})
        (tmp_path / "log" / "rank-0.log").write_text(f"{line}\n")
        ended(found, ExitReport("stopped", "budget"))
        last = next(each for each in told.got if each["key"] == "stopped:1")
    assert (last["step"], last["resume"]) == (200, None)


def test_kept_file_of_an_earlier_attempt_is_a_known_checkpoint(tmp_path: Path) -> None:
    """The log of this attempt reports no save, but the folder of checkpoints has a file of `keep`."""
    with receivers.hooks([]) as told:
        found = notifier(agent_spec(tmp_path, told.url), time.time())
        (tmp_path / "checkpoints" / "ckpt.pt").write_text("weights")
        ended(found, ExitReport("failed", "error"))
        assert "  checkpoint  saved, step not reported" in told.wait(1)[0]["text"]


def test_end_waits_only_for_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that hangs costs no machine time."""
    monkeypatch.setattr(node_notifier, "EXIT_S", 0.4)
    with receivers.hooks([receivers.HANG] * 9) as stuck:
        found = notifier(agent_spec(tmp_path, stuck.url), time.time())
        found.start()
        begin_s = time.monotonic()
        found.end(ExitReport("succeeded", None))
        found.finish()
        assert time.monotonic() - begin_s < 5.0
    assert not (tmp_path / "log" / "rank-0.log").exists()


def test_next_machines_do_not_repeat_notices(tmp_path: Path) -> None:
    """Sent notices are recorded next to the checkpoints; every attempt has its own end."""
    with receivers.hooks() as told:
        for attempt in (1, 2):
            found = notifier(agent_spec(tmp_path, told.url, attempt=attempt), time.time() - 310)
            ended(found, ExitReport("failed", "error", {"message": "boom"}))
    assert sorted(each["key"] for each in told.got) == ["budget:50@1000000", "failed:1", "failed:2"]


def test_fault_is_reported_without_the_address(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The agent's own log reports the fault once."""
    with receivers.hooks([404, 404]) as told:
        found = notifier(agent_spec(tmp_path, told.url), time.time())
        ended(found, ExitReport("succeeded", None))
    said = capfd.readouterr().out
    assert said.count("refuses it: HTTP 404") == 1
    assert "secret-part" not in said


LOOP = """\
import time
from cloudtrain.entrypoints import events
for step in range(1, 1000):
    time.sleep(0.05)
    events.emit("step", f"step {step}", step=step)
"""


@pytest.mark.slow
def test_real_job_sends_notices_without_a_follower(cli: Any, project: MakeProject, home: Path) -> None:
    """The agent sends the threshold and the end; the launcher, which polls later, repeats neither."""
    with receivers.hooks([503, 503]) as told:
        more = """\
local: {price_per_hour: 36 USD}
budget: {limit: 0.06 USD, on_limit: alert, alert_at: [50%]}
notify: [{webhook: env:HOOK, from_job: true, on: [budget, stopped]}]
"""
        where = project(more, text=LOOP)
        cli.ok("submit", "-d", "-y", "--name", "tells", cwd=where, env={"HOOK": told.url})
        assert told.wait(1, 60.0)[0]["from"] == "job"
        # A known race: the record must be in the log before the launcher polls.
        log = home / "local/tells/attempt-1/node-0/log/rank-0.log"
        until(lambda: log.exists() and "budget:50@60000" in log.read_text())
        cli.ok("stop", "-y", "tells", cwd=where, env={"HOOK": told.url})
        cli("watch", "--once", "tells", cwd=where, env={"HOOK": told.url})
        assert [(each["key"], each["from"]) for each in told.got] == [("budget:50@60000", "job"), ("stopped:1", "job")]
    kept = [path for path in home.rglob("*") if path.is_file() and b"secret-part" in path.read_bytes()]
    assert kept == []
    assert json.loads((home / "local/tells/checkpoints/.told.json").read_text())["told"]
