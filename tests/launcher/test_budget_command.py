"""`cloudtrain budget`, and the budget messages of submit, resume and list, with the real command."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeProject
from doubles.waiting import until


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vision"], "the amount is missing: cloudtrain budget set vision 500USD"),
        (["EUR"], "an amount in US dollars"),
        (["vision", "-5"], "No such option"),
        (["--", "-5USD"], "an amount in US dollars"),
        (["vision", "1e99"], "an amount in US dollars"),
        (["9999999999USD"], "at most a billion"),
        (["vision", "0.0000001USD"], "an amount"),
        (["vision", "speech", "5USD"], "more than a project and a limit"),
        (["../../etc", "5USD"], "cannot name a project"),
        (["Vision", "5USD"], "cannot name a project"),
        (["a\nb", "5USD"], "cannot name a project"),
        (["x" * 64, "5USD"], "cannot name a project"),
        (["5USD", "--overcommit", "nan"], "from 1 to 10"),
        (["5USD", "--overcommit", "0.5"], "from 1 to 10"),
        (["5USD", "--overcommit", "much"], "from 1 to 10"),
        (["5USD", "--ledger", "ftp://x/y"], "invalid address of a ledger"),
        (["5USD", "--ledger", "https://example.org/x"], "invalid address of a ledger"),
    ],
)
def test_set_refuses_invalid_arguments(cli: Any, words: list[str], said: str) -> None:
    """Invalid sums, names and places exit with code 2 and a message, and no budget is set."""
    done = cli("budget", "set", *words)
    assert (done.code, said in done.stderr, "itself failed" in done.stderr) == (2, True, False), done.stderr
    assert not [row for row in cli("budget", "show", "--json").json["budgets"] if row["limit_usd"] is not None]


def test_set_show_and_remove(cli: Any) -> None:
    """Budgets are sorted by project and period, in 80 columns without colour; a removed budget is gone."""
    for words in (["vision", "100USD"], ["vision", "30", "--month", "--overcommit", "120%"], ["5000 USD", "--month"]):
        assert cli("budget", "set", *words).code == 0
    shown = cli("budget", "show", "--json").json
    limits = [(row["project"], row["period"], row["limit_usd"], row["overcommit"]) for row in shown["budgets"]]
    assert limits == [(None, "month", 5000, 1), ("vision", "all", 100, 1), ("vision", "month", 30, 1.2)]
    text = cli("budget").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert ("30.00 x1.2" in text, "\x1b" in text, "vision " in text) == (True, False, True)
    assert "worst cases of 36.00 may still be promised" in text
    assert cli("budget", "remove", "vision", "--month").code == 0
    assert cli("budget", "remove", "vision", "--month").code == 2
    assert len(cli("budget", "show", "vision", "--json").json["budgets"]) == 1
    assert cli("budget", "remove", "vision").code == 0
    name = "a-project-of-a-name-that-is-as-long-as-a-name-may-be-and-no-lon"
    assert cli("budget", "set", name, "1000000000").code == 0
    assert cli("budget", "set", name, "999999.99", "--month", "--overcommit", "9.99").code == 0
    assert max(map(len, cli("budget").stdout.splitlines())) <= 80
    assert cli("budget", "show", "--json").json["budgets"][-1]["project"] == name


def test_set_and_remove_name_the_other_budgets(cli: Any) -> None:
    """After `set --month` a plain `remove` finds no budget; each names the project's other budgets and commands."""
    assert cli("budget", "set", "vision", "30USD", "--month").code == 0
    assert cli("budget", "set", "9USD").code == 0
    done = cli("budget", "remove", "vision")
    assert (done.code, done.stderr.endswith("cloudtrain budget remove vision --month\n")) == (2, True), done.stderr
    assert cli("budget", "remove").code == 0
    assert cli("budget", "unset", "vision", "--month").code == 0
    assert cli("budget", "set", "30USD").code == 0
    done = cli("budget", "remove", "--month")
    assert (done.code, done.stderr.splitlines()[-1].endswith("cloudtrain budget remove")) == (2, True), done.stderr
    assert cli("budget", "remove").code == 0
    assert "also applies" not in cli("budget", "set", "vision", "100USD").stderr
    done = cli("budget", "set", "vision", "30USD", "--month")
    assert "set the budget of project vision to 30 USD in each month (UTC)" in done.stderr
    assert "the budget of 100 USD for ever of project vision also applies" in done.stderr
    done = cli("budget", "remove")
    assert done.stderr.splitlines()[-1] == (
        "  hint: the budget of 100 USD for ever: cloudtrain budget remove vision;"
        " the budget of 30 USD in each month (UTC): cloudtrain budget remove vision --month"
    )
    assert done.code == 2
    done = cli("budget", "remove", "vision", "--month")
    assert done.stderr.splitlines()[-1] == "the budget of 100 USD for ever of project vision also applies"
    assert "also applies" not in cli("budget", "remove", "vision").stderr


def test_shared_ledger_is_created_only_at_a_named_place(cli: Any, tmp_path: Path) -> None:
    """Neither a submit nor a `set` creates a ledger in a wrong place, and a damaged ledger is reported."""
    place = tmp_path / "disk"
    place.mkdir()
    assert cli("budget", "set", "vision", "10", "--ledger", place).code == 0
    assert cli("budget", "set", "vision", "20").code == 0  # the machine has stored the place
    row = cli("budget", "show", "--json").json["budgets"][-1]
    assert (row["limit_usd"], row["ledger"]) == (20, f"file://{place}/ledger.json")
    (place / "ledger.json").unlink()
    gone = cli("budget", "set", "vision", "30")
    assert (gone.code, "there is no ledger" in gone.stderr) == (3, True)
    (place / "ledger.json").write_text("{")
    shown = cli("budget", "show", "--json")
    assert (shown.code, "damaged" in shown.json["failures"][0]) == (0, True)


def test_show_of_an_unknown_project_is_refused(cli: Any) -> None:
    """A line of zeros would look like a project with money to spend."""
    said = cli("budget", "set", "vision", "10").stderr
    assert said.startswith("set the budget of project vision to 10 USD for ever: spent 0"), said
    for name, hint in (("visoin", "did you mean `vision`?"), ("zzz", "known: vision")):
        shown = cli("budget", "show", name)
        assert (shown.code, shown.stdout, hint in shown.stderr) == (2, "", True), shown.stderr


def test_set_warns_if_no_job_and_no_config_has_the_project(cli: Any, registry: Registry, tmp_path: Path) -> None:
    """The warning names the config key, and the job or the config whose name was taken for the project."""
    begin = "warning: no job or config here has `project: mine`"
    said = cli("budget", "set", "mine", "10").stderr.splitlines()
    assert said[-2].startswith(begin), said
    assert said[-1] == "  to count a job, write `project: mine` in its config"
    (tmp_path / "cloudtrain.yaml").write_text("name: mine\ntask: task.py\n")
    said = cli("budget", "set", "mine", "10").stderr
    assert (begin in said, "cloudtrain.yaml has `name: mine`" in said) == (True, True), said
    registry.add("mine", make_job, exclusive=True, key=None)
    said = cli("budget", "set", "mine", "10").stderr
    assert "  1 job is named mine; to count it, write `project: mine` in the config" in said, said
    config = {"name": "theirs", "project": {"name": "vision"}}
    registry.add("theirs", partial(make_job, config=config), exclusive=True, key=None)
    assert "warning" not in cli("budget", "set", "vision", "10").stderr
    for form in ("mine", "{name: mine}"):
        (tmp_path / "cloudtrain.yaml").write_text(f"name: any\nproject: {form}\nbroken: 1\n")
        assert "warning" not in cli("budget", "set", "mine", "10").stderr
    assert "the key `project:`" in " ".join(cli("budget", "set", "--help").stdout.split())


# -- with jobs ------------------------------------------------------------------------------------------------------


def paid(idle_python: Path, more: str = "") -> str:
    """Return the config of an hour at 10 USD, for an interpreter that only sleeps."""
    return f"local: {{python: {idle_python}, price_per_hour: 10 USD}}\nlimits: {{max_duration: 1h}}\n{more}"


def reserved(cli: Any, project: str = "vision") -> tuple[float, list[str]]:
    """Return the reserved sum of the project's last budget, and the jobs with reservations."""
    shown = cli("budget", "show", project, "--json").json
    return round(shown["budgets"][-1]["reserved_usd"]), sorted({each["job"] for each in shown["reservations"]})


@pytest.mark.slow
def test_submit_reserves_is_refused_and_frees_at_the_end(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """The messages, exit code 6, and the sum left after the stop agree."""
    folder = project(paid(idle_python, "project: vision\n"))
    assert cli("budget", "set", "vision", "15 USD").code == 0
    first = cli.ok("submit", "-d", "-y", "--name", "one", cwd=folder)
    assert "USD of project vision's 15 USD (4." in first.stderr
    second = cli("submit", "-d", "-y", "--name", "two", cwd=folder)
    assert second.code == 6
    for part in ("project vision's 15 USD does not hold", "by one", "left 4."):
        assert part in second.stderr, second.stderr
    assert reserved(cli) == (10, ["one"])
    assert cli("stop", "one", "--now", "-y").code == 0
    assert reserved(cli) == (0, [])
    assert [job["job"] for job in cli("list", "--json").json["jobs"]] == ["one"]


@pytest.mark.slow
def test_submit_polls_jobs_that_fill_the_budget(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """A job has ended without a poll: the submit polls and finds room. A resume reserves for itself."""
    script = idle_python.with_name("brief-python")
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    folder = project(paid(script, "project: vision\n"))
    assert cli("budget", "set", "vision", "15").code == 0
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    node = cli.home / "local/one/attempt-1/node-0"
    until(lambda: (node / "exit.json").exists() and node_folder.agent_pid(node) is None)
    (folder / "cloudtrain.yaml").write_text((folder / "cloudtrain.yaml").read_text().replace("brief", "idle"))
    cli.ok("submit", "-d", "-y", "--name", "two", cwd=folder)
    refused = cli("resume", "one", "-d", "-y")
    assert (refused.code, "by two" in refused.stderr) == (6, True), refused.stderr
    assert cli("stop", "two", "--now", "-y").code == 0
    again = cli("resume", "one", "-d", "-y")
    assert (again.code, "reserved 10" in again.stderr) == (0, True), again.stderr
    assert cli("wait", "one").code == 1
    assert reserved(cli) == (0, [])


@pytest.mark.slow
def test_two_machines_share_a_budget(cli: Any, project: MakeProject, idle_python: Path, tmp_path: Path) -> None:
    """The second machine names the holder of the money; an unreachable ledger refuses, and gets the end later."""
    other = replace(cli, home=tmp_path / "other")
    disk = tmp_path / "disk"
    disk.mkdir()
    folder = project(paid(idle_python, f"project: {{name: vision, ledger: {disk}}}\n"))
    assert cli("submit", "-d", "-y", cwd=folder).code == 3  # no ledger exists yet
    assert cli("budget", "set", "vision", "15", "--ledger", disk).code == 0
    assert cli("submit", "-d", "-y", "--name", "one", cwd=folder).code == 0
    refused = other("submit", "-d", "-y", "--name", "two", cwd=folder)
    assert (refused.code, "by one of " in refused.stderr) == (6, True), refused.stderr
    assert reserved(other) == (10, ["one"])
    disk.rename(tmp_path / "away")
    assert cli("stop", "one", "--now", "-y").code == 0
    away = other("submit", "-d", "-y", "--name", "three", cwd=folder)
    assert (away.code, "no folder" in away.stderr) == (7, True), away.stderr
    assert "no folder" in cli("budget", "show", "--json").json["failures"][0]
    (tmp_path / "away").rename(disk)
    assert cli("budget", "show", "--json").json["failures"] == []
    accepted = other("submit", "-d", "-y", "--name", "four", cwd=folder)
    assert accepted.code == 0, accepted.stderr
    assert other("stop", "four", "--now", "-y").code == 0
    assert json.loads((disk / "ledger.json").read_text())["held"] == {}
