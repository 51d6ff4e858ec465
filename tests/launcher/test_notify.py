"""`notify` from the config to the receiver: refused entries, trial messages, followers, hidden addresses."""

import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError
from doubles import receivers
from doubles.signatures import MakeProject
from doubles.waiting import until

HEAD = "name: x\nscript: loop.py\n"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{slack: env:A, apprise: env:B}", "`slack` and `apprise` exclude each other"),
        ("{on: [failed]}", "no receiver"),
        ("{slack: env:A, smtp: env:B}", "`smtp` goes with `email`"),
        ("{webhook: env:A, sender: a@b.c}", "`sender` goes with `email`"),
        ("{slack: 'https://hooks/x', from_job: true}", "travels as a secret"),
        ("{email: a@b.c, smtp: 'smtp://h', from_job: true}", "travels as a secret"),
        ("{apprise: env:A, from_job: true}", "there is no Apprise"),
        ("{email: 'a@b.c\\nBcc: x@y.z'}", "a mail address"),
        ("{email: nobody}", "a mail address"),
        ("{slack: 'https://h/x y'}", "`env:NAME`"),
        ("{email: a@b.c, smtp: 'http://h'}", "smtp://USER:PASSWORD@HOST"),
    ],
)
def test_invalid_notify_entry_is_refused(project: MakeProject, entry: str, words: str) -> None:
    """The error has the place in the file."""
    where = project(f"notify: [{entry}]\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(where / "cloudtrain.yaml")
    assert words in str(caught.value)
    assert "cloudtrain.yaml:3" in str(caught.value)


def test_addresses_for_the_job_travel_as_secrets(project: MakeProject) -> None:
    """Each variable's name appears once, also after the config was stored and read back."""
    more = """\
secrets: [TOKEN]
notify:
- {slack: env:TOKEN, from_job: true}
- {webhook: env:HOOK, from_job: true}
- {email: a@b.c, from_job: true}
- {email: a@b.c, smtp: env:POST, from_job: true}
- {webhook: env:NOT_CARRIED}
"""
    config = configs.load(project(more) / "cloudtrain.yaml")
    assert config.secrets == ("TOKEN", "HOOK", "CLOUDTRAIN_SMTP", "POST")
    assert configs.stored(config.model_dump(mode="json")).secrets == config.secrets


def test_dry_run_shows_no_address(cli: Any, project: MakeProject) -> None:
    """The job's spec has only the name of the variable."""
    where = project(
        "notify: [{slack: env:HOOK, from_job: true}]\nbudget: {limit: 1 USD}\nlocal: {price_per_hour: 1 USD}\n"
    )
    done = cli("submit", "--dry-run", "--json", cwd=where, env={"HOOK": "https://hooks/secret-part"})
    told = done.json["request"]["spec"]["notices"]
    assert (told["channels"][0]["secret"], told["limit_micro"], told["rate"]["price_micro"]) == ("HOOK", 10**6, 10**6)
    assert "secret-part" not in done.stdout + done.stderr


def test_address_in_clear_has_a_warning(cli: Any, project: MakeProject) -> None:
    """The file travels with the code; a mail server without a login, or a variable, is harmless."""
    where = project("""\
notify:
- {webhook: 'https://hooks.example/secret-part'}
- {email: a@b.c, smtp: 'smtp://me:secret-part@post.example'}
- {email: a@b.c, smtp: 'smtp://localhost:25'}
- {slack: env:HOOK}
""")
    done = cli("plan", cwd=where, env={"HOOK": "x"})
    said = [line for line in (done.stdout + done.stderr).splitlines() if "travels with the code" in line]
    assert [line.split("travels")[0].strip() for line in said] == [
        "notify: the address of webhook https://hooks.example/...",
        "notify: the address of smtp://post.example/...",
    ]
    assert "secret-part" not in done.stdout + done.stderr


def test_missing_address_refuses_only_the_first_attempt(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """The first submit is refused in front of a person; a resume is sent, and sends fewer notices from the job."""
    where = project(f"notify: [{{webhook: env:HOOK, from_job: true}}]\nlocal: {{python: {idle_python}}}\n")
    refused = cli("submit", "-d", "-y", cwd=where)
    assert (refused.code, "`HOOK` is not set" in refused.stderr) == (3, True)
    assert cli("submit", "-d", "-y", "--name", "one", cwd=where, env={"HOOK": "http://127.0.0.1:1/"}).code == 0
    cli("stop", "one", "--now", "-y")
    further = cli("resume", "one", "-d", "-y")
    cli("stop", "one", "--now", "-y")
    assert further.code == 0, further.stderr
    assert "HOOK is not set here, so this attempt does not tell by itself" in further.stderr


def test_notify_tries_every_channel(cli: Any, project: MakeProject) -> None:
    """The variable names the address that fails; a config without channels is no failure."""
    where = project("notify: [{slack: env:GOOD}, {webhook: env:BAD}, {webhook: env:UNSET}]\n")
    with receivers.hooks() as told:
        bad = f"http://127.0.0.1:{receivers.free_port()}/secret-part"
        done = cli("notify", cwd=where, env={"GOOD": told.url, "BAD": bad})
    assert done.code == 1
    assert done.stdout.splitlines()[0] == "ok    slack env:GOOD"
    assert "fail  webhook env:BAD" in done.stdout
    assert "export UNSET=..." in done.stdout
    assert "secret-part" not in done.stdout + done.stderr
    assert "a trial message" in told.got[0]["text"]
    done = cli("notify", cwd=project())
    assert (done.code, "no alerts are sent" in done.stderr) == (0, True)


STEPS = """\
import pathlib, time
from cloudtrain.entrypoints import events
step = 0
while not pathlib.Path({end!r}).exists():
    time.sleep(0.05)
    step += 1
    events.emit("step", f"step {{step}}", step=step)
"""


@pytest.mark.slow
def test_followers_of_a_real_job_send_each_notice_once(cli: Any, project: MakeProject, tmp_path: Path) -> None:
    """Three processes follow the job, and a process is killed: hook and mail get the threshold and the end once.

    The job ends after both surviving followers have shown the alert, because a busy machine starts them late.
    """
    end = tmp_path / "end"
    with receivers.hooks([503, 503]) as told, receivers.letters() as post:
        more = """\
local: {price_per_hour: 36 USD}
budget: {limit: 3 USD, on_limit: alert, alert_at: [3%]}
notify: [{slack: env:HOOK}, {email: team@example.org, smtp: env:POST}]
"""
        env = {"HOOK": told.url, "POST": f"smtp://127.0.0.1:{post.port}"}
        where = project(more, text=STEPS.format(end=str(end)))
        cli.ok("submit", "-d", "-y", "--name", "told", cwd=where, env=env)
        crowd = [cli.start("logs", "-f", "told", cwd=where, env=env) for _ in range(2)]
        victim = cli.start("wait", "told", cwd=where, env=env)
        until(lambda: told.asked, 60.0)
        alert = "[alert] told: 3 % of the budget is spent"
        assert all(any(alert in line for line in one.stderr) for one in crowd)
        victim.kill()
        end.touch()
        said = [one.communicate(timeout=60)[1] for one in crowd]
        victim.communicate()
        # The claim of the killed follower has to expire, or the follower died before the mark of a delivered notice.
        while len(told.got) < 2 or len(post.got) < 2:
            assert cli("watch", "--once", "told", cwd=where, env=env).code == 0
            time.sleep(0.5)
    texts = sorted({each["text"].partition(" is spent")[0] for each in told.got})
    assert texts == ["told: 3 % of the budget", "told: succeeded"]
    assert (len(told.got) <= 3, len(post.got) <= 3) == (True, True)
    assert all(alert not in words for words in said)  # each follower shows the alert once
    assert all("itself failed" not in words for words in said)


@pytest.mark.slow
def test_hanging_receiver_does_not_delay_a_followed_job(cli: Any, project: MakeProject) -> None:
    """The lines arrive as usual, and the command ends at most three seconds after the job."""
    with receivers.hooks([receivers.HANG] * 20) as stuck:
        where = project("notify: [{slack: env:HOOK, on: [started, succeeded]}]\n", text="print('done')\n")
        process = cli.start("submit", "-y", cwd=where, env={"HOOK": stuck.url})
        said, over_s = [], 0.0
        for line in process.stderr:
            said.append(line)
            over_s = time.monotonic() if "  succeeded" in line else over_s
        printed, code = process.stdout.read(), process.wait()
        held_s = time.monotonic() - over_s
        process.stdout.close()
        process.stderr.close()
    assert (code, "done" in printed) == (0, True), said
    assert "alerts not delivered yet: slack env:HOOK" in said[-1]
    assert 2.0 < held_s < 8.0  # a part of the time is the end of the command on a busy machine
