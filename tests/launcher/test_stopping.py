"""Stop requests to a job, as the command line, the live view and the page send them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.commands.stop import command
from cloudtrain.launcher.errors import NoSuchJobError, UnreachableError, UsageError
from cloudtrain.launcher.job import State, exit_code
from cloudtrain.launcher.jobs import remove, stopping
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of
from doubles.signatures import MakeJob


class Platform:
    """A backend that accepts any job, and records stop requests."""

    def __init__(self, state: State, *, can_kill: bool) -> None:
        self.told, self.can_kill, self.stops = state, can_kill, list[bool]()

    def pace(self, ref: dict[str, Any]) -> backends.Pace:
        """Return the pace."""
        return backends.Pace(can_kill=self.can_kill)

    def state(self, ref: dict[str, Any]) -> State:
        """Return the configured state."""
        return self.told

    def logs(self, ref: dict[str, Any], cursor: Any, ranks: Any) -> backends.LogPage:
        """Return no lines."""
        return backends.LogPage([], cursor or {})

    def stop(self, ref: dict[str, Any], *, now: bool) -> None:
        """Record the stop request."""
        self.stops.append(now)


def test_stop_of_a_script_promises_no_save() -> None:
    """Only the script itself can save after SIGTERM; a kill prevents any save."""

    def words(*flags: bool, number: int = 1, **attempt: Any) -> str:
        return stopping.StopResult(
            make_job("j", number, **{"plan": plan_of(saves=False), **attempt}), "asked", *flags
        ).words

    keeps, kept = plan_of(saves=False, keeps=True), "stopping j with SIGTERM (the files of `keep` are saved"
    saves = "only files in CLOUDTRAIN_CHECKPOINT_DIR are saved"
    assert words() == f"stopping j with SIGTERM ({saves})"
    usr1 = plan_of(saves=False, stop_signal="SIGUSR1")
    assert words(plan=usr1) == f"stopping j with SIGUSR1 ({saves})"
    assert words(state=State("pending", detail="waits for free nodes")) == "stopping j before its start"
    assert words(progress={"unkept": ["model.pt"]}) == (
        f"stopping j with SIGTERM ({saves}; not kept: model.pt; to keep: `keep: [model.pt]` in the config)"
    )
    assert words(plan=keeps) == f"{kept}; none was seen so far)"
    assert words(plan=keeps, number=2) == words(plan=keeps, progress={"checkpoint": "model.pt"}) == f"{kept})"
    assert words(True, True) == "stopping j at once, without saving"


@pytest.mark.parametrize(
    ("now", "can_kill", "words"),
    [
        (False, True, "stopping j after saving"),
        (True, True, "stopping j at once, without saving"),
        (True, False, "stopping j after saving: local always lets a job leave by itself first"),
    ],
)
def test_stop_reports_the_kind_of_its_request(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, now: bool, can_kill: bool, words: str
) -> None:
    """For a platform that lets every job save, the text mentions no kill; a refused question sends no request."""
    platform = Platform(State("running", started_s=1.0), can_kill=can_kill)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    job, _ = registry.add("j", make_job, exclusive=True, key=None)
    assert (stopping.ask(registry, "j", now=now).verdict, platform.stops) == ("unsent", [])
    registry.mark_sent(job.attempt, {"folder": "/x"})
    kept = stopping.ask(registry, "j", now=now, agrees=lambda asked: words.startswith(f"never {asked.how}"))
    assert (kept.words, platform.stops) == ("not stopped", [])
    asked = stopping.ask(registry, "j", now=now)
    assert (asked.words, platform.stops) == (words, [now])
    registry.set_state(job.attempt, State("succeeded", started_s=1.0, ended_s=2.0), {})
    assert stopping.ask(registry, "j", now=now).words == (
        "j ended at 1970-01-01 00:00:02 UTC with state succeeded; there is nothing to stop"
    )
    assert platform.stops == [now, now]  # a second request, in case killed agents left processes


@pytest.mark.parametrize(
    ("backend", "state", "wait", "is_over"),
    [
        ("slurm", State("pending"), 0.0, True),
        ("slurm", State("pending"), 3600.0, False),
        ("slurm", State("pending"), None, False),
        ("slurm", State("pending", started_s=1.0), 0.0, False),  # the machines are being prepared
        ("slurm", State("pending", restarts=1), 0.0, False),  # requeued
        ("slurm", State("running"), 0.0, False),
        ("ssh", State("pending"), 0.0, False),  # the hosts are the job's from the send on
    ],
)
def test_follower_ends_a_wait_once(
    backend: str,
    state: State,
    wait: float | None,
    is_over: bool,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only a job without its first machines is stopped; the next poll asks again, and says nothing more."""
    platform = Platform(state, can_kill=False)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    config = {"limits": {"max_wait": wait}}
    job, _ = registry.add("j", lambda *name: make_job(*name, backend=backend, config=config), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    job = stopping.followed(registry, registry.find("j"))
    stopping.followed(registry, job)
    assert platform.stops == [False, False] * is_over
    assert capsys.readouterr().err.count("no machines within limits.max_wait") == is_over


@pytest.mark.parametrize(
    ("marks", "end", "told"),
    [
        ({"gave_up_s": 1.0}, State("stopped", "user"), ("failed", "no_machines", 5)),
        ({"gave_up_s": 1.0}, State("stopped", "user", started_s=2.0), ("stopped", "time_limit", 1)),
        ({"gave_up_s": 1.0}, State("failed", "error", started_s=2.0), ("failed", "error", 1)),
        ({"gave_up_s": 1.0}, State("succeeded", started_s=2.0), ("succeeded", None, 0)),
        ({"gave_up_s": None}, State("stopped", "user"), ("stopped", "user", 9)),
        ({}, State("stopped", "user"), ("stopped", "user", 9)),
    ],
)
def test_end_after_a_given_up_wait_has_its_reason(
    marks: dict[str, Any],
    end: State,
    told: tuple[str, str | None, int],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our stop is no user's; machines that came all the same are no lack of machines, and their time is billed."""
    monkeypatch.setattr(backends, "load", lambda name: Platform(replace(end, ended_s=9.0), can_kill=False))
    job, _ = registry.add("j", make_job, exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    registry.mark(job.attempt, **marks)
    refresh(registry, registry.find("j"))
    state = registry.find("j").attempt.state
    assert ((state.state, state.reason, exit_code(state)), state.started_s) == (told, end.started_s)


def test_stop_without_a_job_asks_about_the_newest(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named job stops without a question, the newest job only after a question."""
    platform = Platform(State("running", started_s=1.0), can_kill=True)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    job, _ = registry.add("j", make_job, exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/x"})
    for words in (["-d"], ["-d", "last"], ["-d", "-"]):
        with pytest.raises(UsageError, match=r"answer with yes: Stop j \(j, submitted \ds ago\) after saving\?"):
            command.main(words, standalone_mode=False)
    assert platform.stops == []
    command.main(["-d", "-y"], standalone_mode=False)
    command.main(["-d", "j"], standalone_mode=False)
    assert platform.stops == [False, False]


def test_stop_takes_several_jobs(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each job is stopped once; an unknown name stops no job, and a fault of one job does not end the command."""
    platform = Platform(State("running", started_s=1.0), can_kill=True)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    monkeypatch.setattr(stopping, "submitter_lives", lambda attempt: False)
    for job_id in ("unsure", "one", "two"):
        job, _ = registry.add(job_id, make_job, exclusive=True, key=None)
        if job_id != "unsure":
            registry.mark_sent(job.attempt, {"folder": "/x"})
    with pytest.raises(NoSuchJobError):
        command.main(["-d", "one", "nobody"], standalone_mode=False)
    assert platform.stops == []
    with pytest.raises(UnreachableError, match="unsure may exist there"):
        command.main(["-dy", "unsure", "one", "two", "one", "--json"], standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert (platform.stops, [json.loads(line)["job"] for line in shown]) == ([False, False], ["one", "two"])


def test_name_of_several_jobs_is_refused(cli: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rm NAME` is refused if several jobs have the name, `stop NAME` if several of them are active; an id is exact."""
    platform = Platform(State("running", started_s=1.0), can_kill=True)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    for job_id in ("twin-aaaaa", "twin-bbbbb"):
        job, _ = registry.add(job_id, make_job, exclusive=True, key=None)
        registry.mark_sent(job.attempt, {"folder": "/x"})
    with pytest.raises(UsageError, match="`twin` is the name of 2 jobs: twin-bbbbb, twin-aaaaa"):
        stopping.ask(registry, "twin")
    registry.set_state(job.attempt, State("succeeded", started_s=1.0, ended_s=2.0), {})
    assert stopping.ask(registry, "twin").words.startswith("twin-bbbbb ended at 1970-01-01 00:00:02 UTC")
    assert platform.stops == [False]
    done = cli("rm", "-y", "twin")
    assert done.stderr == (
        "error: `twin` is the name of 2 jobs: twin-bbbbb, twin-aaaaa\n  hint: `rm` and `stop` take ids here\n"
    )
    assert done.code == 2
    assert cli("rm", "-y", "twin-bbbbb").code == 0
    assert [job.id for job in registry.jobs()] == ["twin-aaaaa"]


def test_stop_of_an_ended_job_prints_a_line(cli: Any, seed: MakeJob) -> None:
    """The line has the end and the state; `--json` prints the job like `status`."""
    seed("done", State("succeeded", started_s=1.0, ended_s=2.0))
    done = cli("stop", "done")
    said = "done ended at 1970-01-01 00:00:02 UTC with state succeeded; there is nothing to stop\n"
    assert (done.code, done.stdout, done.stderr) == (0, "", said)
    assert cli("stop", "done", "--json").json["job"] == "done"


def test_removal_of_an_active_job_is_refused_by_its_state() -> None:
    """Only a job that was seen running is called running."""
    made, state = make_job("j"), State("running")
    runs, lost = make_job("j", state=state), make_job("j", state=state, unreachable_since_s=1.0)
    for job, words in ((runs, "j is running"), (lost, "j may still be running"), (made, "j may still be running")):
        with pytest.raises(UsageError, match=words) as refused:
            remove.require_over([job])
        assert ("stop --forget j" in str(refused.value.hint)) == (job is lost)


def test_stop_that_finds_nobody_names_the_way_out(seed: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is off for ever must not hold the money: the hint has both ways."""
    platform = Platform(State("running"), can_kill=True)
    seed("j-1", State("running"))

    def silent(ref: dict[str, Any], *, now: bool) -> None:
        raise UnreachableError("h1 does not answer", hint="is it up?")

    monkeypatch.setattr(platform, "stop", silent)
    monkeypatch.setattr(backends, "load", lambda name: platform)
    with pytest.raises(UnreachableError) as caught:
        stopping.ask(Registry(), "j-1")
    assert caught.value.hint == "is it up?; if local will never answer for it: cloudtrain stop --forget j-1"
