"""The owner's limit on all jobs of a user: the word, the ledger of all homes, requests, prices, and what is closed."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.errors import BudgetError, ConfigError
from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs import reserve
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject
from cloudtrain.launcher.store import agent_limit
from cloudtrain.launcher.store.budgets import End, Held, by_month, month_of
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job, plan_of
from doubles.signatures import MakeProject
from doubles.terminals import Terminal

USD = 1_000_000
WORD, SALT = "sesame-open-1", "00"
PROGRAM = """\
#!{python}
from pathlib import Path
from types import SimpleNamespace
from cloudtrain.launcher.store import agent_limit
agent = SimpleNamespace(pw_name="agent", pw_dir={user!r})
agent_limit.pwd = SimpleNamespace(getpwuid=lambda uid: agent, getpwnam=lambda name: agent)
agent_limit.OWNERS = Path({owners!r})
from cloudtrain.launcher.cli import main
main()
"""
# Root without the right to write everywhere, as an ordinary user.
DROPS = "import ctypes\nctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())\n"
JOB = "local: {{price_per_hour: 10 USD, python: {python}}}\nlimits: {{max_duration: 30m}}\n"  # 5.06 USD at worst


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home folder of the user, in this process by the password database."""
    entry = SimpleNamespace(pw_name="agent", pw_dir=str(tmp_path / "user"))
    monkeypatch.setattr(agent_limit, "pwd", SimpleNamespace(getpwuid=lambda uid: entry, getpwnam=lambda name: entry))
    monkeypatch.setattr(agent_limit, "OWNERS", tmp_path / "owners")
    return tmp_path / "user"


@pytest.fixture
def agent(cli: Any, user: Path, tmp_path: Path) -> Any:
    """Return the command line of that user."""
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM.format(python=sys.executable, user=str(user), owners=str(tmp_path / "owners")))
    program.chmod(0o755)
    return replace(cli, command=(str(program),))


@pytest.fixture
def typed(agent: Any, home: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that types a command and words at a terminal; it returns the exit code and the output."""

    def run(*args: str, words: tuple[str, ...]) -> tuple[int, str]:
        terminal, at = Terminal(home, [*agent.command, *args]), 0
        for word in words:
            at = terminal.see(": ", at)
            terminal.press(f"{word}\n")
        code = terminal.end()
        terminal.close()
        return code, terminal.output.decode()

    return run


def limit(usd: float, above: float | None = None, monthly: bool = True) -> Path:
    """Set the owner's limit; return the owner's file."""
    period, above_micro = ("month" if monthly else "all"), None if above is None else int(above * USD)
    key = agent_limit._hashed(WORD, SALT)
    found = agent_limit.AgentLimit(int(usd * USD), period, above_micro, SALT, key)  # type: ignore[arg-type]
    file = agent_limit.folder() / "limit.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found.dump()))
    (file.parent / "ledger").mkdir(exist_ok=True)
    shared_ledger.change(ConditionalObject(agent_limit.place()), lambda book: None, may_make=True)
    return file


def book() -> shared_ledger.Book:
    """Return the content of the ledger."""
    found = shared_ledger.read(ConditionalObject(agent_limit.place()))
    assert found is not None
    return found


def test_owner_sets_changes_and_removes_the_limit_by_a_word(typed: Any, agent: Any, user: Path) -> None:
    """The word is asked for at a terminal only; three wrong words change nothing, and only its hash is stored."""
    done = agent("budget", "set", "agent", "8USD", "--month")
    assert (done.code, "not a terminal" in done.stderr) == (4, True), done.stderr
    code, said = typed("budget", "set", "agent", "8USD", "--month", "--ask-above", "2USD", words=(WORD, WORD))
    assert (code, "8 USD in each month" in said and "above 2 USD" in said, WORD in said) == (0, True, False), said
    before = (user / ".config/cloudtrain/agent/limit.json").read_text()
    assert WORD not in before
    for words in (("budget", "set", "agent", "80USD"), ("budget", "remove", "agent")):
        code, said = typed(*words, words=("wrong-1", "wrong-2", "wrong-3"))
        assert (code, "the word is wrong" in said) == (4, True), said
        assert agent(*words, stdin=f"{WORD}\n").code == 4
    assert (user / ".config/cloudtrain/agent/limit.json").read_text() == before
    assert typed("budget", "set", "agent", "9USD", words=(WORD,))[0] == 0
    assert agent.ok("budget", "show", "agent", "--json").json["budgets"][0]["limit_usd"] == 9
    assert typed("budget", "remove", "agent", words=(WORD,))[0] == 0
    assert agent.ok("budget", "show", "--json").json["budgets"][-1]["project"] is None


def test_limit_counts_the_jobs_of_all_homes_and_of_removed_homes(
    agent: Any, project: MakeProject, idle_python: Path, tmp_path: Path
) -> None:
    """A second home, HOME and XDG variables change nothing, and the removal of a home frees no money."""
    limit(8)
    where = project(JOB.format(python=idle_python))
    said = agent.ok("submit", "--dry-run", cwd=where).stderr
    assert "counts against the agent's monthly 8 USD (8 left)" in said
    agent.ok("submit", "-y", "-d", "--name", "one", cwd=where)
    try:
        others = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "x"), "CLOUDTRAIN_HOME": str(tmp_path / "h2")}
        for words in (("-y", "--json"), ("-y", "--set", "budget.limit=7USD", "--set", "budget.on_limit=alert")):
            done = agent("submit", "-d", *words, cwd=where, env=others)
            assert (done.code, "only the owner can raise" in done.stderr) == (6, True), done.stderr
        assert "would be refused" in agent.ok("submit", "--dry-run", cwd=where, env=others).stderr
    finally:
        agent("stop", "--now", "-y", "one")
    assert [key.split("/")[1] for key in book().closed] == ["one"]
    before = sum(sum(end.months.values()) for end in book().closed.values())
    shutil.rmtree(agent.home)
    agent("budget")
    assert sum(sum(end.months.values()) for end in book().closed.values()) == before > 0


def test_request_is_approved_for_one_job(typed: Any, agent: Any, project: MakeProject, idle_python: Path) -> None:
    """A dear job ends with 6 and a request; once approved, one of two equal submits is sent, and no other job."""
    limit(100, above=2)
    where = project(JOB.format(python=idle_python))
    assert "needs the owner's approval" in agent.ok("submit", "--dry-run", cwd=where).stderr
    refusals = [agent("submit", "-y", "-d", "--json", cwd=where) for _ in range(2)]
    (asked,) = agent.ok("budget", "show", "--json").json["requests"]
    request = asked["command"].split()[-1]
    for done in refusals:
        assert (done.code, asked["command"] in done.json["error"]["hint"]) == (6, True), done.stdout
    assert agent("budget", "approve", request).code == 4
    code, said = typed("budget", "approve", request, words=(WORD,))
    assert (code, "5.06 USD" in said) == (0, True), said
    other = agent("submit", "-y", "-d", "--set", "limits.max_duration=29m", cwd=where)
    assert other.code == 6, other.stderr
    (agent.home / "local").write_text("in the way")
    assert agent("submit", "-y", "-d", cwd=where).code == 3  # not sent: the approval stays
    (agent.home / "local").unlink()
    both = [agent.start("submit", "-y", "-d", cwd=where) for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert sorted(each.returncode for each in both) == [0, 6], said
    (job,) = agent.ok("list", "--json").json["jobs"]
    assert agent("stop", "--now", "-y", job["job"]).code == 0
    assert agent("submit", "-y", "-d", cwd=where).code == 6


def test_no_command_loosens_the_limit(agent: Any, user: Path, tmp_path: Path) -> None:
    """Budgets at the ledger's place, `close` and links to the place are refused; file and ledger stay as they were."""
    file = limit(8)
    shared_ledger.change(
        ConditionalObject(agent_limit.place()),
        lambda book: shared_ledger.hold(book, "other/lost/1/1", Held("lost", 1, "", USD, 1.0), time.time()),
    )
    (tmp_path / "link").symlink_to(file.parent)
    before = file.read_text(), book().held
    for place in (
        str(file.parent / "ledger"),
        f"file://{file.parent}/ledger/ledger.json",
        str(tmp_path / "link" / "ledger"),
    ):
        done = agent("budget", "set", "99USD", "--ledger", place)
        assert (done.code, "the owner's limit alone" in done.stderr) == (2, True), done.stderr
    for words, code in (
        (("set", "agent", "99USD", "--ledger", str(tmp_path)), 2),
        (("set", "agent", "99USD", "--here"), 2),
        (("set", "agent", "99USD", "--overcommit", "2"), 2),
        (("close", "lost", "0USD", "-y"), 4),
        (("remove", "agent"), 4),
    ):
        done = agent("budget", *words)
        assert done.code == code, (words, done.stderr)
    assert (file.read_text(), book().held) == before
    done = agent("budget", "close", "elsewhere", "0USD", "-y")  # of a team's ledger, which the owner does not guard
    assert (done.code, "no shared ledger" in done.stderr) == (2, True), done.stderr
    assert agent("submit", "--dry-run", "--set", "project=agent").code == 3


def test_forget_keeps_the_money_without_the_word(agent: Any, registry: Any) -> None:
    """`stop --forget` of a job that may cost money needs the owner's word."""
    limit(8)
    plan = plan_of(hourly_usd=1.0, price_micro=USD, worst_case_micro=USD)
    job, _ = registry.add("gone", lambda job_id, number: make_job(job_id, number, plan=plan), exclusive=True, key=None)
    registry.mark_sent(job.attempt, {"folder": "/nonexistent"})
    registry.set_unreachable(job.attempt)
    registry.database.execute("UPDATE jobs SET backend = 'missing-plugin'")
    registry.database.execute("UPDATE attempts SET submitter = '{}'")
    done = agent("stop", "--forget", "-y", "gone")
    assert (done.code, "the input is not a terminal" in done.stderr) == (4, True), done.stderr


@pytest.mark.parametrize("part", ["limit.json", "ledger/ledger.json"])
def test_missing_part_sends_nothing(agent: Any, project: MakeProject, part: str) -> None:
    """Without the owner's file, or without the ledger, nothing is sent, and the error names the part."""
    file = limit(8)
    (file.parent / part).unlink()
    done = agent("submit", "-y", "-d", cwd=project("local: {price_per_hour: 1 USD}\n"))
    assert (done.code, part in done.stderr, "the owner sets it again" in done.stderr) == (3, True, True), done.stderr
    (file.parent / part).write_text("{")
    done = agent("submit", "-y", "-d", cwd=project("local: {price_per_hour: 1 USD}\n"))
    mended = f"rm {file.parent / part} && cloudtrain budget set agent" in done.stderr
    assert (done.code, mended) == (3, True), done.stderr


def test_owner_repairs_what_is_damaged(typed: Any, agent: Any) -> None:
    """A damaged ledger changes no limit; removed parts are set again, and the sums are told."""
    file, set_ = limit(8), ("budget", "set", "agent", "9USD")
    ledger, before = file.parent / "ledger" / "ledger.json", file.read_text()
    ledger.write_text("{")
    code, said = typed(*set_, words=(WORD,))
    assert (code, "is damaged" in said, file.read_text()) == (3, True, before), said
    ledger.unlink()
    code, said = typed(*set_, words=(WORD,))
    assert (code, "reserved 0 USD" in said, "left 9 USD" in said) == (0, True, True), said
    file.unlink()
    assert typed(*set_, words=("another-word", "another-word"))[0] == 0
    for damage in ("{", '[{"id": 3}]', "3"):
        (file.parent / "ledger" / "requests.json").write_text(damage)
        done = agent("budget", "show")
        assert (done.code, "hint: rm " in done.stderr) == (3, True), done.stderr


def test_limit_that_cannot_be_seen_or_written_sends_nothing(agent: Any, user: Path) -> None:
    """A folder without rights is not taken for no limit; a request that cannot be written says where."""
    file = limit(8, above=1)
    owned = agent_limit.OWNERS / "agent"
    file.parent.rename(owned.mkdir(parents=True) or owned)
    job = make_job("loop", plan=plan_of(hourly_usd=2.0, worst_case_micro=2 * USD))
    (owned / "ledger" / "requests.lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write the file"):
        agent_limit.require_approved(job)
    (owned / "limit.json").rename(user / "limit.json")
    with pytest.raises(ConfigError, match="missing"):
        agent_limit.limits()
    owned.chmod(0)
    program = PROGRAM.format(python=sys.executable, user=str(user), owners=str(agent_limit.OWNERS))
    done = subprocess.run(
        [sys.executable, "-c", DROPS + program.replace("main()", "agent_limit.limits()")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "cannot be read (Permission denied)" in done.stderr, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sets another user's limit")
def test_root_follows_no_link_of_the_user(user: Path, home: Path) -> None:
    """Root writes the ledger with the rights of the user, who can put links into the folder."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        ledger, victim = Path(top) / "64999" / "ledger", Path(top) / "victim"
        program = PROGRAM.format(python=sys.executable, user=str(user), owners=top).split("agent = ")
        program[1] = f"agent_limit.OWNERS = Path({top!r})\nfrom cloudtrain.launcher.cli import main\nmain()\n"
        for is_linked in (False, True):
            if is_linked:
                (ledger / "ledger.json.lock").unlink()
                (ledger / "ledger.json.lock").symlink_to(victim)
            words = ("budget", "set", "agent", "9USD", "--user", "64999")
            terminal, at = Terminal(home, [sys.executable, "-c", "".join(program), *words]), 0
            for _ in range(1 if is_linked else 2):
                at = terminal.see(": ", at)
                terminal.press(f"{WORD}\n")
            code = terminal.end()
            terminal.close()
            assert (code, victim.exists()) == (4 if is_linked else 0, False), terminal.output
            assert {each.stat().st_uid for each in (ledger, ledger / "ledger.json")} == {64999}
            assert (ledger.parent / "limit.json").stat().st_uid == 0


def test_place_has_several_names(tmp_path: Path) -> None:
    """The ledger is known by links, and on a disk that takes small letters for capital ones."""
    folder = limit(8).parent / "ledger"
    (tmp_path / "link").symlink_to(folder)
    for uri in (
        f"file://{tmp_path}/link/ledger.json",
        f"file://{folder}/LEDGER.json",
        f"file://{folder}/./ledger.json",
    ):
        assert agent_limit.is_place(uri), uri
    assert not agent_limit.is_place(f"file://{tmp_path}/ledger.json")


def test_time_zone_moves_no_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The month is the same under a time zone's file that counts 40 days of leap seconds."""
    long = struct.pack(">qi", 1, -40 * 86_400) + b"\nUTC0\n"
    parts = [b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 1, 0, 1, 4) + bytes(6) + b"UTC\0"] * 2
    (tmp_path / "zone").write_bytes(parts[0] + struct.pack(">ii", 1, -40 * 86_400) + parts[1] + long)
    monkeypatch.setenv("TZ", f":{tmp_path}/zone")
    time.tzset()
    try:
        assert time.gmtime(1_764_547_205)[:3] == (2026, 1, 10), "the file is not read"
        assert month_of(1_764_547_205) == "2025-12"
        assert by_month(100, 1_764_547_100, 1_764_547_300) == {"2025-11": 50, "2025-12": 50}
    finally:
        monkeypatch.undo()
        time.tzset()


def test_root_keeps_the_file_where_the_user_cannot_write(
    agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file below OWNERS wins over the user's own, and the command to approve is root's."""
    limit(50)
    owned = tmp_path / "owners" / "agent"
    monkeypatch.setattr(agent_limit, "user", "agent")  # as by --user
    assert limit(8, above=1).parent == owned
    monkeypatch.setattr(agent_limit, "user", "")
    assert agent.ok("budget", "show", "agent", "--json").json["budgets"][0]["limit_usd"] == 8
    assert agent_limit.command("approve", "x") == "sudo cloudtrain budget approve x --user agent"
    with pytest.raises(BudgetError, match="approval") as caught:
        agent_limit.require_approved(make_job("loop", plan=plan_of(hourly_usd=2.0, worst_case_micro=2 * USD)))
    assert "sudo cloudtrain budget approve" in caught.value.hint
    owned.chmod(0o555)
    command = "agent_limit.ask_owner('approve it')"
    program = (
        (tmp_path / "agent.py").read_text().replace("main()", command).replace("from cloudtrain.launcher.cli", "# ")
    )
    done = subprocess.run([sys.executable, "-c", DROPS + program], capture_output=True, text=True, check=False)
    assert "cannot approve it: you cannot write there" in done.stderr, done.stderr
    assert "sudo cloudtrain budget ... --user agent" in done.stderr
    shutil.rmtree(owned / "ledger")
    with pytest.raises(ConfigError, match="missing"):
        agent_limit.known()


CLOUD = {
    "name": "loop",
    "script": "loop.py",
    "backend": "sagemaker",
    "sagemaker": {"region": "us-east-1", "role": "arn:aws:iam::123456789012:role/r", "bucket": "bucket"},
    "resources": {"instance_type": "ml.g5.12xlarge"},
    "distributed": {"nproc_per_node": 4},
}


@pytest.mark.parametrize("price", [0.01, 5000.0])
def test_given_price_counts_from_the_table_up(project: MakeProject, price: float) -> None:
    """Under a limit the plan has the table's price, or a higher one that is given; without a limit the given one."""
    file = project() / "cloudtrain.yaml"

    def planned(**block: Any) -> Any:
        data = CLOUD | {"sagemaker": {**CLOUD["sagemaker"], **block}}  # type: ignore[dict-item]
        return prepare(configs.load(file, data=data), file, Path(), dry=True).plan

    listed, given = planned().hourly_usd, planned(price_per_hour=f"{price}USD").hourly_usd
    assert given == price
    limit(8)
    found = planned(price_per_hour=f"{price}USD")
    assert (found.hourly_usd, found.is_unlisted) == (max(listed, price), False)


def test_price_of_an_unlisted_machine_needs_an_approval(
    project: MakeProject, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """The config's word alone, and a line in the home's price file, are no price of a machine that is not listed."""
    limit(8)
    file = project() / "cloudtrain.yaml"
    data = CLOUD | {"resources": {"instance_type": "ml.g99.xlarge"}}
    data["sagemaker"] = {**data["sagemaker"], "price_per_hour": "0.01USD"}  # type: ignore[dict-item]
    plan = prepare(configs.load(file, data=data), file, Path(), dry=True).plan
    assert plan.is_unlisted
    (registry := Registry()).add(
        "loop",
        lambda job_id, number: make_job(job_id, number, plan=plan, backend="sagemaker"),
        exclusive=True,
        key=None,
    )
    with pytest.raises(BudgetError, match=r"by the config's price alone \(ml.g99.xlarge at 0.01 USD"):
        agent_limit.require_approved(registry.find("loop"))


def test_own_price_file_counts_from_the_table_up(home: Path) -> None:
    """A cheaper line of the home's price file is passed over under a limit."""
    from cloudtrain.launcher.metering.rate import today
    from cloudtrain.launcher.prices import catalog, own

    listed = catalog.rates("sagemaker", "ml.g5.12xlarge", "us-east-1")["on_demand"].usd
    home.mkdir(exist_ok=True)
    line = f"sagemaker,ml.g5.12xlarge,us-east-1,on_demand,0.01,no,1,{today()},typed\n"
    line += f"sagemaker,ml.g99.xlarge,us-east-1,on_demand,0.01,no,1,{today()},typed\n"
    (home / "prices.csv").write_text(",".join(own.COLUMNS) + "\n" + line)
    assert catalog.rates("sagemaker", "ml.g5.12xlarge", "us-east-1")["on_demand"].usd == 0.01
    limit(8)
    assert catalog.rates("sagemaker", "ml.g5.12xlarge", "us-east-1")["on_demand"].usd == listed
    assert catalog.rates("sagemaker", "ml.g99.xlarge", "us-east-1") == {}


def test_month_is_the_present_one_and_a_clock_put_back_frees_nothing() -> None:
    """Ended jobs count in their month and in the months before; running jobs count in each month."""
    limit(8)
    (found,), now_s, month_s = agent_limit.limits(), 1_900_000_000.0, 31 * 86_400
    ledger = shared_ledger.Book(held={"a/b/1/1": Held("b", 1, "", USD, now_s)})
    ledger.closed["a/c/1/1"] = End("vision", 2 * USD, now_s, {month_of(now_s): 2 * USD})
    sums = [
        (standing.money.spent_micro, standing.money.held_micro)
        for at_s in (now_s - month_s, now_s, now_s + month_s)
        for standing in [shared_ledger.accounts(ledger).standing(found, at_s)]
    ]
    assert sums == [(2 * USD, USD), (2 * USD, USD), (0, USD)]


def test_jobs_from_before_the_limit_count_too(registry: Registry) -> None:
    """A job that runs already joins at the next send; a job in line since before the limit needs room."""
    plan = plan_of(hourly_usd=1.0, price_micro=USD, worst_case_micro=5 * USD)

    def journal(name: str) -> Job:
        def make(job_id: str, number: int) -> Job:
            job = make_job(job_id, number, plan=plan)
            reserve.reserve(registry, job.attempt, job.config)
            return job

        return registry.add(name, make, exclusive=True, key=None)[0]

    registry.mark_sent(journal("runs").attempt, {"x": 1})
    waiting = journal("waits")
    limit(12)
    shared_ledger_sync.hold(registry.database, waiting.id, 1, time.time())
    assert sorted(each.job_id for each in book().held.values()) == ["runs", "waits"]
    with pytest.raises(BudgetError, match="the agent's monthly 12 USD"):
        shared_ledger_sync.hold(registry.database, journal("third").id, 1, time.time())


def test_request_and_approval_end_after_a_week() -> None:
    """An approval that was not used for a week is none, and its request is away."""
    file = limit(50, above=1)
    job = make_job("a", plan=plan_of(hourly_usd=2.0, worst_case_micro=2 * USD), submitter={"digest": "d"})
    with pytest.raises(BudgetError):
        agent_limit.require_approved(job)
    (asked,) = agent_limit.requests()
    old = replace(asked, created_s=asked.created_s - agent_limit.OPEN_S - 1)
    (file.parent / "ledger" / "requests.json").write_text(json.dumps([old.dump()]))
    file.write_text(json.dumps(replace(agent_limit.known(), approved=(old,)).dump()))
    with pytest.raises(BudgetError, match="needs the owner's approval"):
        agent_limit.require_approved(job)
    assert asked.id not in [each.id for each in agent_limit.requests()]


def test_approval_is_for_one_job_with_its_later_attempts() -> None:
    """An approval covers one job up to its sum; a job that was not sent gives the approval back."""
    file = limit(50, above=1)

    def job(name: str, spent: int = 0, digest: str = "d") -> Job:
        plan = plan_of(hourly_usd=2.0, worst_case_micro=2 * USD, spent_micro=spent * USD)
        return make_job(name, plan=plan, submitter={"digest": digest}, created_s=1.0)

    def refusal(of: Job) -> str:
        with pytest.raises(BudgetError, match="needs the owner's approval") as caught:
            agent_limit.require_approved(of)
        return caught.value.hint.split()[6].rstrip("`;")

    request = refusal(job("a"))
    assert refusal(job("a")) == request
    found = agent_limit.known()
    file.write_text(json.dumps(replace(found, approved=tuple(agent_limit.requests())).dump()))
    assert refusal(job("a", digest="other")) != request
    agent_limit.require_approved(job("a"))
    assert refusal(job("b")) != request
    agent_limit.require_approved(job("a", digest="of a later attempt"))
    assert refusal(job("a", spent=1)) != request
    agent_limit.give_back(job("a"))
    agent_limit.require_approved(job("b"))
    assert refusal(job("a")) != request
    dear = job("b")
    unlisted = replace(dear.attempt.plan, is_unlisted=True, machine="ml.g99.xlarge", worst_case_micro=0)
    assert refusal(replace(dear, attempt=replace(dear.attempt, plan=unlisted))) != request
