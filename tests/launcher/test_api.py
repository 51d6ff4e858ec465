"""The Python interface: the command line's functions with types, without output, with the same faults."""

import asyncio
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from cloudtrain.entrypoints.notices.message import Notice
from cloudtrain.launcher import api, errors
from cloudtrain.launcher.job import State
from cloudtrain.launcher.jobs import stopping
from cloudtrain.launcher.notices import notifier
from cloudtrain.launcher.store import series
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.store.series import Point
from cloudtrain.launcher.text import terminal
from doubles import swept
from doubles.signatures import MakeJob, MakeProject

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = Path(__file__).with_name("pipeline.py")
BACKENDS: dict[str, dict[str, Any]] = {
    "local": {},
    "ssh": {"ssh": {"hosts": ["gpu1"]}},
    "sagemaker": {
        "resources": {"instance_type": "ml.m5.xlarge"},
        "sagemaker": {"region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/x"},
    },
    "azureml": {
        "resources": {"instance_type": "Standard_D4s_v5"},
        "azureml": {"subscription": "00000000-0000-0000-0000-000000000000", "resource_group": "g", "workspace": "w"},
    },
    "vertex": {
        "resources": {"instance_type": "n1-standard-8"},
        "vertex": {"project": "a-project", "location": "us-central1", "staging_bucket": "gs://bucket"},
    },
}


def keys(folder: Path, **more: Any) -> api.Config:
    """Return a config of keywords for the project in the folder."""
    return api.Config(name="loop", script="loop.py", folder=folder, **more)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dry_run_equals_the_command_line(
    backend: str, cli: Cli, project: MakeProject, capfd: pytest.CaptureFixture[str], home: Path
) -> None:
    """On every backend a file with keywords, a mapping, and plain keywords give the request of the command line."""
    folder, more = project(), BACKENDS[backend]
    found = [
        api.submit(api.Config(folder / "cloudtrain.yaml", backend=backend, **more), dry_run=True),
        api.submit(
            api.Config({"name": "loop", "script": "loop.py", **more}, backend=backend, folder=folder), dry_run=True
        ),
        api.submit(keys(folder, backend=backend, **more), dry_run=True),
    ]
    assert capfd.readouterr() == ("", "")
    settings = [f"--set={each}" for each in api._settings(more)]
    said = cli("submit", "--dry-run", "--json", "--backend", backend, *settings, cwd=folder).json
    assert said["request"] == found[0].request
    assert said["plan"] == json.loads(json.dumps(found[0].plan))
    assert {dry.backend for dry in found} == {backend}
    assert [dry.plan for dry in found[1:]] == [found[0].plan] * 2
    assert not (home / "registry.sqlite").exists()


def test_faults_are_the_same_for_files_mappings_and_keywords(project: MakeProject) -> None:
    """Each way raises a ConfigError with all faults at once, with key and hint; only a file gives lines."""
    more = {"resources": {"instances": "many"}, "scrip": "x"}
    folder = project("resources: {instances: many}\nscrip: x\n")
    found = []
    for make in (
        lambda: api.Config(folder / "cloudtrain.yaml"),
        lambda: api.Config({"name": "loop", "script": "loop.py", **more}, folder=folder),
        lambda: keys(folder, **more),
    ):
        with pytest.raises(errors.ConfigError) as caught:
            make()
        found.append(caught.value.faults)
    told = [{(fault.message, fault.key, fault.hint) for fault in faults} for faults in found]
    assert told[0] == told[1] == told[2]
    assert (len(told[0]), str(found[0][0].place)) == (2, f"{folder / 'cloudtrain.yaml'}:3:24")


def test_keywords_win_over_the_file_key_by_key(project: MakeProject) -> None:
    """A nested keyword changes only the named key; text with `${` stays text, and numbers of `env` become text."""
    folder = project("env: {A: one, B: two}\nlimits: {max_duration: 1h}\n")
    config = api.Config(folder / "cloudtrain.yaml", env={"A": 1, "C": "${HOME}"}, overrides=["limits.max_duration=2h"])
    assert config.values.env == {"A": "1", "B": "two", "C": "${HOME}"}
    assert config.values.limits.max_duration == 7200
    assert keys(folder, env={"A": 1, "B": True, "C": "${HOME}"}).values.env == {"A": "1", "B": "true", "C": "${HOME}"}


@pytest.mark.slow
def test_pipeline_runs_a_real_job_and_prints_only_its_own_lines(cli: Cli, project: MakeProject) -> None:
    """The pipeline submits, follows and waits on local; the same idempotency key sends no second job."""
    text = 'import os\n\nfor step in range(int(os.environ["STEPS"])):\n    print("step", step, flush=True)\n'
    folder = project(text=text)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, PIPELINE, folder / "cloudtrain.yaml"], capture_output=True, text=True, check=True
        )
        assert done.stdout == "local: 1 ranks, 0.0 USD at most\n[0] step 0\n[0] step 1\n[0] step 2\n0.0\n"
        assert done.stderr == ""
    assert len(cli("list", "--json", "--all").stdout.splitlines()) == 1


@pytest.mark.slow
def test_notebook_can_submit_watch_and_stop_jobs(
    project: MakeProject, idle_python: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The calls run in an event loop and in threads: submit, status, a wait that is too short, stop, logs, resume."""
    folder = project()
    caplog.set_level(logging.INFO, "cloudtrain")

    async def one(name: str) -> api.JobStatus:
        config = keys(folder, local={"python": idle_python, "price_per_hour": "1 USD"}, project="vision")
        job = await asyncio.to_thread(api.submit, config, name=name)
        assert (job.id, job.active, api.status(job).id) == (name, True, name)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(api.wait, job, timeout_s=0.1)
        with pytest.raises(errors.UsageError, match="has not ended"):
            api.resume(name)
        api.stop(name, now=True)
        return await asyncio.to_thread(api.wait, name)

    async def cells() -> list[api.JobStatus]:
        return await asyncio.gather(*map(one, ("first", "second", "third")))

    ended = asyncio.run(cells())
    assert [(job.state, job.reason, job.exit_code) for job in ended] == [("stopped", "user", 9)] * 3
    assert all(job.cost_usd is not None and job.details["job"] == job.id for job in ended)
    with ThreadPoolExecutor() as pool:
        assert [list(lines) for lines in pool.map(api.logs, ended)] == [[]] * 3  # the node prints no line
    again = api.resume("first", env={"AGAIN": 1})
    assert (again.id, again.attempt) == ("first", 2)
    assert api.status(ended[0]).details["attempts"][0]["state"] == "stopped"
    api.stop(again, now=True)
    assert api.wait(again).state == "stopped"
    assert capfd.readouterr() == ("", "")
    assert "stopping first at once, without saving" in caplog.messages


@pytest.mark.slow
def test_interrupt_ends_the_wait_and_leaves_the_job(cli: Cli, project: MakeProject, idle_python: Path) -> None:
    """Ctrl-C raises KeyboardInterrupt in `wait` and `logs`, as in a notebook's cell; the job runs on.

    The modules are imported first: Python 3.11 turns an interrupt of a dataclass's definition into a RuntimeError.
    """
    program = """
import sys
import cloudtrain.launcher.jobs.follow, cloudtrain.launcher.logs.stream
from cloudtrain.launcher.api import *
job = submit(Config(sys.argv[1], local={"python": sys.argv[2]}), name="kept")
for act in (lambda: wait(job), lambda: list(logs(job, follow=True))):
    try:
        print("waiting", flush=True)
        act()
    except KeyboardInterrupt:
        print(status(job).active, flush=True)
"""
    args = [sys.executable, "-c", program, str(project() / "cloudtrain.yaml"), str(idle_python)]
    process = subprocess.Popen(
        args,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for _ in range(2):
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "True\n"
    process.stdout.close()
    assert process.wait() == 0
    assert cli("stop", "--now", "-y", "kept").code == 0


def test_errors_equal_the_command_line(home: Path, project: MakeProject) -> None:
    """Unknown jobs, invalid names and a too small budget raise the documented exceptions."""
    folder = project()
    with pytest.raises(errors.NoSuchJobError):
        api.status("nope")
    with pytest.raises(errors.NoSuchJobError):
        api.logs("nope")
    for name in ("last", "No such name"):
        with pytest.raises(errors.UsageError, match="cannot name a job"):
            api.submit(keys(folder), name=name)
    config = keys(folder, local={"price_per_hour": "100 USD"}, budget={"limit": "0.001 USD"})
    with pytest.raises(errors.BudgetError):
        api.submit(config)
    with pytest.raises(errors.ConfigError, match="SOME_TOKEN"):
        api.submit(keys(folder, secrets=["SOME_TOKEN"]))


def test_stop_and_resume_refuse_like_the_command_line(
    tmp_path: Path, seed: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job during its submit cannot be stopped; damaged checkpoints need `start_over`; doubt is an error."""
    job = seed("new")
    with pytest.raises(errors.UsageError, match="just being submitted"):
        api.stop("new")
    error = {"type": "AllDamagedError", "rank": 0, "message": "x"}
    seed("damaged", State("failed", "error", error=error, ended_s=time.time()))
    with closing(Registry()) as registry:
        registry.database.execute("UPDATE jobs SET config_file = ?", (str(tmp_path / "cloudtrain.yaml"),))
    with pytest.raises(errors.UsageError, match="all checkpoints were damaged"):
        api.resume("damaged")
    monkeypatch.setattr(stopping, "ask", lambda *args, **more: stopping.StopResult(job, "doubtful"))
    with pytest.raises(errors.UnreachableError, match="may exist there as new-1"):
        api.stop("new")


def test_messages_are_passed_on_instead_of_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Inside `reporting`, messages, asides and alerts reach the function; after the block they are printed again."""
    found: list[str] = []
    with terminal.reporting(found.append):
        terminal.say("\none")
        terminal.aside("two")
        notifier.show(Notice("1", "key", "budget", "three", ("four",)))
    assert found == ["one", "two", "three\nfour"]
    assert capfd.readouterr().err == ""
    terminal.say("five")
    assert capfd.readouterr().err == "five\n"


def test_jobs_are_those_of_list(cli: Cli, seed: MakeJob) -> None:
    """`jobs`, and `list` as the same function, return the newest first with the filters and the facts of `list`."""
    seed("first", State("succeeded", ended_s=time.time()))
    seed("second", State("failed", "error", detail="see cloudtrain logs -f second", ended_s=time.time()))
    assert api.list is api.jobs
    assert [job.details for job in api.jobs()] == cli("list", "--json").json["jobs"]
    assert [job.id for job in api.jobs(states=["failed"], since="1h", backends=["local"])] == ["second"]
    assert api.jobs(tags={"team": None}) == api.jobs(active=True) == api.sweeps() == []
    assert repr(api.jobs(limit=1)[0]) == "<JobStatus second on local: failed (error), 0.00 USD>"
    assert api.jobs()[0].error == 'see logs("second", follow=True)'
    with pytest.raises(errors.UsageError, match='since="soon": expected a duration'):
        api.jobs(since="soon")


def test_costs_are_those_of_the_command(cli: Cli, seed: MakeJob) -> None:
    """The details of a job's cost, and of a span's, are the JSON of `cloudtrain cost`."""
    seed("first", State("succeeded", started_s=time.time() - 60, ended_s=time.time()))
    assert api.cost("first").details == cli("cost", "first", "--json").json
    said = cli("cost", "--json", "--by", "backend").json
    found = api.cost(by="backend")
    assert {**found.details, "by": "backend"} == {key: said[key] for key in said if key not in ("from_s", "to_s")}
    assert [row["key"] for row in found.rows] == ["local"]
    with pytest.raises(errors.UsageError, match='by="state": expected'):
        api.cost(by="state")


def test_curves_are_columns_of_equal_length(seed: MakeJob) -> None:
    """Steps have the loss, evaluations their metrics, in the order of time; `inf` is a number."""
    seed("first", State("succeeded", ended_s=time.time()))
    assert api.curves("first") == {}
    told = [
        ("step", {"loss": "inf"}),
        ("step", {"loss": 0.25}),
        ("eval", {"metrics": {"accuracy": 0.75}}),
        ("done", {}),
    ]
    with closing(Registry()) as registry:
        points = [Point(1, kind, 10.0 + at, min(at + 1, 2), fields, at) for at, (kind, fields) in enumerate(told)]
        series.append(registry.database, "first", points)
    found = api.curves("first")
    assert (found["step"], found["time_s"]) == ([1, 2, 2], [10.0, 11.0, 12.0])
    assert (found["loss"], found["accuracy"]) == ([math.inf, 0.25, None], [None, None, 0.75])
    with pytest.raises(errors.UsageError, match="is no sweep"):
        api.trials("first")


def test_trials_are_those_of_the_sweep(cli: Cli, home: Path) -> None:
    """The best of all trials is first, and a failed trial has no value; the sweep is among `sweeps`, its cost whole."""
    with closing(Registry()) as registry:
        job = swept.put(registry, 9)
    found, told = api.trials(job.id), api.status(job.id).details["sweep"]
    assert (len(found), found[0]["trial"]) == (9, told["best"][0]["trial"])
    assert (found[0]["value"], found[0]["values"]) == (told["best"][0]["value"], told["best"][0]["values"])
    assert [(each["trial"], each["state"]) for each in found if each["value"] is None] == [(1, "failed")]
    assert sum(each["usd"] or 0 for each in found) <= (api.cost(job.id).cost_usd or 0)
    assert api.cost(job.id).details == cli("cost", job.id, "--json").json
