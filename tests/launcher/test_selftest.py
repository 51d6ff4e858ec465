"""Parts of a selftest: the verdict on made-up observations, the report, the comparison, the refusal, Ctrl-C."""

import getpass
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from cloudtrain.entrypoints import processes
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.selftest import life, planned, report
from cloudtrain.launcher.selftest.report import TaskLine
from doubles.waiting import until

TABLE = planned.read("steps.yaml")
STEPS = TABLE["steps"]


def lines(**changes: Any) -> list[TaskLine]:
    """Return the lines of both ranks: 20 steps, a kill, a restart from step 15, and a resume from step 25 to 29."""
    runs = [(1, "a", 0, 20), (1, "b", 15, 25), (2, "c", 25, 30)]
    found = [
        TaskLine(attempt, rank, rank, f"{life}{rank}", step, step / 7, 0.2)
        for attempt, life, begin, end in runs
        for step in range(begin, end)
        for rank in (0, 1)
    ]
    return [line._replace(**changes) for line in found]


def verdict(step: str, came: dict[str, Any]) -> list[str]:
    """Return the names that differ from what the table of steps expects."""
    return [name for name, value in STEPS[step]["expected"].items() if not report.is_met(value, came.get(name))]


def test_lines_of_a_kill_and_a_resume_are_as_expected() -> None:
    """Repeated steps after a kill are no faults; rank 0 may have printed no line of the step of the kill."""
    whole = lines()
    assert verdict("log lines", report.of_lines(whole, 30, 0.0)) == []
    behind = [line for line in whole if (line.life, line.step) != ("a0", 19)]
    assert verdict("log lines", report.of_lines(behind, 30, 0.0)) == []
    assert verdict("losses", report.of_losses([*whole, *lines()])) == []


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (lines()[:6] + lines()[7:], "lost"),
        (lines()[:-1], "lost"),
        ([line for line in lines() if line.life != "b1"], "lost"),
        (lines()[:6] + lines()[4:], "twice"),
        (lines()[:4] + lines()[8:10] + lines()[4:8] + lines()[10:], "disordered"),
        (lines()[:-2], "missing"),
        (lines(late_s=20.0), "late_s"),
        ([*lines()[:-1], lines()[-1]._replace(late_s=-3600.0)], "ahead_s"),
        ([line._replace(rank=1 - (line.rank or 0)) for line in lines()], "misplaced"),
        (lines(rank=None), "ranks"),
        ([], "ranks"),
    ],
)
def test_faulty_lines_are_named(seen: list[TaskLine], name: str) -> None:
    """A lost line, also a rank's last line or a whole start, a repeated, a disordered and a late line are faults."""
    assert name in verdict("log lines", report.of_lines(seen, 30, 0.0))


def test_loss_that_differs_in_its_last_bit_is_named() -> None:
    """The loss of a repeated step counts to the bit; without repeated steps nothing is proven."""
    seen = lines()
    seen[-1] = seen[-1]._replace(step=16, loss=16 / 7 + 4e-16)
    assert verdict("losses", report.of_losses(seen)) == ["unlike"]
    assert verdict("losses", report.of_losses(seen[:20])) == ["compared"]


@pytest.mark.parametrize(
    ("step", "came", "unlike"),
    [
        ("states", {"states_1": ["running", "pending", "stopped"]}, "states_1"),
        ("states", {"states_1": ["pending", "running", "stopping"]}, "states_1"),
        ("states", {"states_1": ["pending", "running", "failed"]}, "states_1"),
        ("states", {"states_2": []}, "states_2"),
        ("bill", {"unwatched": 0, "apart_s": 31.0, "over_micro": 0}, "apart_s"),
        ("bill", {"unwatched": 0, "apart_s": 0.0, "over_micro": 5}, "over_micro"),
        ("bill", {"unwatched": 1, "apart_s": 0.0, "over_micro": 0}, "unwatched"),
        ("cleaning", {"active": 0, "left": 1}, "left"),
        ("cleaning", {"active": 1, "left": 0}, "active"),
        ("exit codes", {"exit_1": 9, "exit_2": 0, "exit_3": 0}, "exit_3"),
        ("kill of a rank", {"starts": 1, "attempt": 1, "resumed_step": None}, "resumed_step"),
        ("stop with save", {"state": "stopped", "reason": "user", "resumable": True, "undone": 5}, "undone"),
        ("time limit", {"state": "stopped", "reason": "time_limit", "saved_step": 4, "over_s": 2.0}, "over_s"),
    ],
)
def test_unexpected_facts_differ(step: str, came: dict[str, Any], unlike: str) -> None:
    """Each kind of fact that is not as the table expects is named."""
    assert unlike in verdict(step, came)


@pytest.mark.parametrize("seen", [["running", "stopped"], ["running", "stopping", "stopped"]])
def test_state_that_no_poll_has_seen_is_no_difference(seen: list[str]) -> None:
    """A poll may miss a short state, but no end."""
    assert "states_1" not in verdict("states", {"states_1": seen})


def written(path: Path, block: dict[str, Any], came: dict[str, Any], **head: str) -> report.ProofReport:
    """Return a report with one step, for a user's block."""
    head = {"backend": "ssh", "machine": "your hosts", **head}
    found = report.ProofReport(path, head, TABLE, report.private_texts(block, head))
    found.add("status", 1.0, came)
    return found


def test_report_keeps_only_known_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fact outside the table, such as an error's text, does not reach the file, and words are only for the screen."""
    found = report.ProofReport(tmp_path / "r.json", {"backend": "ssh", "machine": "m"}, TABLE, re.compile("(?!)"))
    found.add(
        "submit", 1.0, {"error": "UnreachableError", "code": "503", "text": "alice@h0"}, ["no answer of alice@h0"]
    )
    text = (tmp_path / "r.json").read_text()
    assert ("alice" in text, "503" in text, found.data["steps"][0]["verdict"]) == (False, True, "differs")
    assert "    no answer of alice@h0" in capsys.readouterr().err


def test_value_named_cloudtrain_hides_none_of_our_own_names(tmp_path: Path) -> None:
    """A role or a group of the name `cloudtrain` tells nothing, and our own variables and tags begin like it."""
    came = {"failed": 1, "error": "properties.environmentVariables.CLOUDTRAIN_ORDER, Tags.cloudtrain:job"}
    written(tmp_path / "r.json", {"resource_group": "cloudtrain"}, came)
    assert "CLOUDTRAIN_ORDER" in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(
    "value",
    [
        "h0.lab.example",
        "arn:aws:iam::111122223333:role/train",
        "cluster-7",
        getpass.getuser(),
        socket.gethostname(),
        "ok1",
    ],
)
def test_report_with_a_value_of_the_user_is_refused(value: str, tmp_path: Path) -> None:
    """A value of the block, in a list or a mapping, the user's and the host's name end the selftest unwritten."""
    block = {"ssh": {"hosts": [value], "x": {"y": value}}, "image": "registry/own:1"}
    for came in ({"state": value}, {"state": [f"a/{value}:b"] if len(value) > 3 else value}):
        with pytest.raises(ConfigError, match="at the step `status` it would hold a value of yours"):
            written(tmp_path / "r.json", block, came)
        assert not (tmp_path / "r.json").exists()


def test_user_with_the_words_of_the_report_gets_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host `ok`, a user `a` and a partition `running` are told by no word of ours, and hide no region."""
    monkeypatch.setattr(processes, "user_name", lambda uid: "a")
    block = {"slurm": {"hosts": ["ok", "state"], "partition": "running", "region": "eu-west-1", "mem": "a"}}
    found = written(tmp_path / "r.json", block, {"state": "running", "step": 3, "code": "a_b"}, region="eu-west-1")
    assert json.loads((tmp_path / "r.json").read_text()) == found.data
    with pytest.raises(ConfigError, match="a value of yours: a"):
        written(tmp_path / "other.json", block, {"code": "a"})


def test_comparison_names_verdicts_states_codes_and_times(tmp_path: Path, cli: Cli) -> None:
    """Counts, small differences of time and a state that no poll has seen do not differ; a missing step does."""
    row = {"step": "states", "verdict": "ok", "seconds": 4.0, "expected": {}}
    old = {"selftest": 1, "head": {}, "steps": [{**row, "came": {"states_1": ["running", "stopped"], "late_s": 1.0}}]}
    same = {**row, "seconds": 8.9, "came": {"states_1": ["running", "stopped"], "late_s": 2.5}}
    other = {**row, "verdict": "differs", "seconds": 40.0, "came": {"states_1": ["stopped"], "late_s": 9.0}}
    assert report.compared({"steps": [same]}, old) == []
    assert report.compared({"steps": [other]}, old) == [
        "states, late_s: 9.0, before 1.0",
        "states, seconds: 40.0, before 4.0",
        "states, states_1: stopped, before running, stopped",
        "states, verdict: differs, before ok",
    ]
    bill = {**same, "step": "bill", "came": {"micro": 5}}
    assert report.compared({"steps": [bill]}, old) == [
        "bill, verdict: ok, before nothing",
        "states, verdict: nothing, before ok",
    ]
    assert report.compared({"steps": [{**same, "came": {"states_1": ["stopped"], "late_s": 1.0}}]}, old) == []
    unchecked = {**row, "verdict": "not checked", "seconds": 0.0, "came": {"why": "resume"}}
    assert report.compared({"steps": [unchecked]}, old) == [
        "states, verdict: not checked, before ok",
        "states, why: resume, before nothing",
    ]
    for name, data in (("old", old), ("new", {**old, "steps": [other]}), ("odd", {"selftest": 1, "steps": [[]]})):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert cli("selftest", "--from", "old.json", "--against", "old.json").code == 0
    found = cli("selftest", "--from", "new.json", "--against", "old.json")
    assert (found.code, len(found.stdout.splitlines())) == (1, 4)
    assert cli("selftest", "--from", "odd.json", "--against", "old.json").code == 3
    assert cli("selftest", "--from", "old.json").code == 2


def test_error_tells_the_code_of_the_platform() -> None:
    """The code of a vendor's error is told, and no text; without a code, the kind of the error."""
    error = UnreachableError("no answer of arn:aws:iam::111122223333:role/x")
    assert life._code_of(error) == "UnreachableError"
    error.__cause__ = Exception()
    error.__cause__.response = {"Error": {"Code": "AccessDeniedException"}}  # type: ignore[attr-defined]
    assert life._code_of(error) == "AccessDeniedException"
    error.__cause__ = Exception()
    error.__cause__.code = "a text with /home/alice"  # type: ignore[attr-defined]
    assert life._code_of(error) == "UnreachableError"


def test_selftest_above_the_budget_sends_nothing(cli: Cli, tmp_path: Path, home: Path) -> None:
    """Exit code 6 with the sum that is enough; without an answer to the question, nothing is sent either."""
    (tmp_path / "cloudtrain.yaml").write_text("backend: local\nlocal: {price_per_hour: 5 USD}\n")
    refused = cli("selftest")
    assert refused.code == 6
    assert "the selftest may cost up to 3.62 USD, above 2 USD\n  at --budget" in refused.stderr
    assert "hint: cloudtrain selftest local --budget 3.62USD" in refused.stderr
    unasked = cli("selftest", "--budget", "4USD")
    assert (unasked.code, "add -y to answer with yes: The selftest may cost up to 3.62 USD" in unasked.stderr) == (
        2,
        True,
    )
    cli.ok("budget", "set", "1USD")
    assert cli("selftest", "--budget", "4USD", "-y").code == 6
    assert not list(home.glob("local/*"))
    assert not list(tmp_path.glob("*.json"))


def test_jobs_take_the_block_and_nothing_else_of_the_file(tmp_path: Path, home: Path) -> None:
    """The interpreter counts from the file's folder."""
    file = tmp_path / "cloudtrain.yaml"
    file.write_text(
        "name: own\ntask: none.py\nproject: vision\nresources: {instances: 9}\nlocal: {python: env/python}\n"
    )
    block = planned.block_of(file, "local")
    assert block == {"local": {"python": str(tmp_path / "env/python")}, "project": "vision"}
    jobs, worst_micro = planned.jobs_of(block, "local", tmp_path, home, 0)
    seconds = [job.config.limits.max_duration for job in jobs]
    assert (worst_micro, [job.plan.instances for job in jobs], seconds[0] > seconds[1]) == (0, [2, 2], True)
    assert {job.config.project.name for job in jobs if job.config.project} == {"vision"}


@pytest.mark.slow
def test_failed_job_leaves_the_later_steps_unchecked(cli: Cli, tmp_path: Path, home: Path) -> None:
    """The steps behind a job that failed are not checked, the failure is shown, and the exit code is 1."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "torch.py").write_text("raise RuntimeError('no torch here')\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "bad"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "cloudtrain.yaml").write_text("local: {python: ./python}\n")
    done = cli("selftest", "--json")
    rows = {row["step"]: (row["verdict"], row["came"].get("why")) for row in done.json["steps"]}
    assert (done.code, rows["status"][0], "no torch here" in done.stderr) == (1, "differs", True)
    needed = {step: why for step, (verdict, why) in rows.items() if verdict == "not checked" and why in rows}
    assert needed == {
        "kill of a rank": "status",
        "stop with save": "kill of a rank",
        "resume": "stop with save",
        "artifacts": "resume",
        "time limit": "status",
        "states": "resume",
        "log lines": "resume",
        "losses": "resume",
        "exit codes": "resume",
    }
    assert (rows["cleaning"][0], cli.ok("list", "--all", "--json").json["jobs"]) == ("ok", [])


@pytest.mark.slow
def test_interrupt_stops_and_removes_the_jobs(cli: Cli, tmp_path: Path, home: Path) -> None:
    """Ctrl-C ends the running job, writes the steps so far, and removes all; the exit code is 130."""
    process = cli.start("selftest", "local")
    until(lambda: any("selftest" in path.read_text() for path in home.glob("local/*/attempt-1/node-1/**/rank-1.log")))
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    steps = json.loads((tmp_path / "selftest-local.json").read_text())["steps"]
    assert [row["step"] for row in steps] == ["doctor", "dry run", "submit", "cleaning"]
    assert steps[-1]["came"] == {"active": 0, "left": 0}
    assert cli.ok("list", "--all", "--json").json["jobs"] == []
