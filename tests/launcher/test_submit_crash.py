"""`kill -9` of the command line at every step of submit leaves at most one job, and the next command finds the job."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from doubles.signatures import MakeProject
from doubles.waiting import until

LOCAL = "cloudtrain.backends.local.backend"
NOTHING, NEVER_SENT, RUNS, EITHER = "nothing", "never sent", "runs", "either"
STEPS = {
    "before packing": ("cloudtrain.launcher.planning.bundle:pack", "before", NOTHING),
    "after packing": ("cloudtrain.launcher.planning.bundle:pack", "after", NOTHING),
    "before the journal": ("cloudtrain.launcher.store.registry:Registry.add", "before", NOTHING),
    "inside the journal": ("cloudtrain.launcher.store.registry:Registry._insert", "after", NOTHING),
    "after the journal": ("cloudtrain.launcher.store.registry:Registry.add", "after", NEVER_SENT),
    "before the send": (f"{LOCAL}:LocalBackend.send", "before", NEVER_SENT),
    "before the starter": (f"{LOCAL}:start_agents", "before", NEVER_SENT),
    "orders handed over": ("", "handed over", EITHER),
    "after the starter": (f"{LOCAL}:start_agents", "after", RUNS),
    "after the send": (f"{LOCAL}:LocalBackend.send", "after", RUNS),
    "before the mark": ("cloudtrain.launcher.store.registry:Registry.mark_sent", "before", RUNS),
    "after the mark": ("cloudtrain.launcher.store.registry:Registry.mark_sent", "after", RUNS),
}
AGAIN = [pytest.param(step, id=f"{step} {number}", marks=pytest.mark.soak) for number in range(1, 21) for step in STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("step", [*STEPS, *AGAIN])
def test_submit_killed_at_a_step_leaves_at_most_one_visible_job(
    cli: Any, project: MakeProject, idle_python: Path, killed_submit: Any, step: str
) -> None:
    """The result is no job, a running job that can be stopped, or a job in the state never sent."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    target, when, expected = STEPS[step]
    killed_submit(folder, target, when, "--instances", "2")
    jobs = cli("list", "--json").json["jobs"]
    assert len(jobs) == (expected != NOTHING)
    state = jobs[0]["state"] if jobs else None
    if expected == EITHER:
        expected = NEVER_SENT if state == "failed" else RUNS
    if expected == NEVER_SENT:
        assert (state, "nothing runs" in jobs[0]["detail"]) == ("failed", True)
    if expected == RUNS:
        assert state in ("pending", "running")
        assert cli("stop", "last", "--now", "-y", "--json").json["state"] == "stopped"
    assert cli("list", "--json", "--active").json["jobs"] == []
    # A late starter may still be about to exit.
    until(lambda: not processes.with_environment(CLOUDTRAIN_HOME=str(cli.home)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        "orders handed over",
        *(pytest.param(s, marks=pytest.mark.soak) for s in ("after packing", "before the starter", "after the send")),
    ],
)
def test_submit_works_after_a_killed_submit(
    cli: Any, project: MakeProject, idle_python: Path, killed_submit: Any, step: str
) -> None:
    """The next submit is a new job, and the rest of the killed submit is settled."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    killed_submit(folder, *STEPS[step][:2], "--instances", "2")
    submitted = cli.ok("submit", "-d", "--json", cwd=folder)
    jobs = cli("list", "--json").json["jobs"]
    assert jobs[0]["job"] == submitted.json["job"]
    assert len({job["job"] for job in jobs}) == len(jobs) <= 2
    for job in cli("list", "--json", "--active").json["jobs"]:
        assert cli("stop", job["job"], "--now", "-y").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "is_new"), [("after the send", False), pytest.param("before the starter", True, marks=pytest.mark.soak)]
)
def test_key_of_a_killed_submit_gives_one_job(
    cli: Any, project: MakeProject, idle_python: Path, killed_submit: Any, step: str, is_new: bool
) -> None:
    """A repeated submit with the key gets the running job, or a new job if nothing was sent, without a `list`."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    killed_submit(folder, *STEPS[step][:2], "--idempotency-key", "k", "--instances", "2")
    again = cli("submit", "-d", "--idempotency-key", "k", "--json", cwd=folder)
    assert (again.code, again.json["new"]) == (0, is_new)
    assert [job["job"] for job in cli("list", "--json", "--active").json["jobs"]] == [again.json["job"]]
    assert is_new or len(cli("list", "--json").json["jobs"]) == 1
    assert cli("stop", "last", "--now", "-y").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_simultaneous_submits_are_distinct_jobs(cli: Any, project: MakeProject, idle_python: Path, count: int) -> None:
    """Each of the processes with a single config gives a job in the list and an attempt on disk; all share a bundle."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    submits = [cli.start("submit", "-d", "--json", cwd=folder) for _ in range(count)]
    answers = [submit.communicate(timeout=300) for submit in submits]
    assert [submit.returncode for submit in submits] == [0] * count, answers
    listed = [job["job"] for job in cli("list", "--json").json["jobs"]]
    on_disk = Counter(path.parent.name for path in cli.home.glob("local/*/attempt-*"))
    assert (len(set(listed)), on_disk) == (count, Counter(listed))
    assert len(list((cli.home / "bundles").iterdir())) == 1
    stops = [cli.start("stop", job, "--now", "-y") for job in listed]
    assert [stop.wait(120) for stop in stops] == [0] * count
    for stop in stops:
        stop.communicate()
    until(lambda: not processes.with_environment(CLOUDTRAIN_HOME=str(cli.home)))


@pytest.mark.slow
def test_job_survives_its_command_line(cli: Any, project: MakeProject) -> None:
    """After `kill -9` of a following submit the ranks run on, and `stop` leaves no process."""
    following = cli.start("submit", cwd=project())
    until(lambda: following.poll() is None and list(cli.home.glob("local/*/attempt-1/node-0/log/rank-0.log")))
    following.kill()
    following.communicate()
    until(lambda: "looping" in cli("logs", "last").stdout, every_s=0.3)
    assert cli("status", "last", "--json").json["state"] == "running"
    stopped = cli("stop", "last", "-y", "--json").json
    assert (stopped["state"], stopped["reason"]) == ("stopped", "user")


@pytest.mark.slow
def test_ctrl_c_leaves_a_followed_job_running(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """The exit code is 130, and the output has the commands to follow and to stop."""
    following = cli.start("submit", cwd=project(f"local: {{python: {idle_python}}}\n"))
    said = following.stderr
    assert any(line.startswith("sent: ") for line in iter(said.readline, ""))
    until(lambda: cli("list", "--json", "--active").json["jobs"])
    following.send_signal(signal.SIGINT)
    _, rest = following.communicate(timeout=30)
    assert (following.returncode, "cloudtrain logs -f" in rest, "cloudtrain stop" in rest) == (130, True, True)
    assert cli("stop", "last", "--now", "-y", "--json").json["reason"] == "user"


@pytest.mark.slow
def test_secrets_are_stored_nowhere(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """A secret's value is in the ranks' environment, and in no file, no output and no command line."""
    folder = project(f"secrets: [TOKEN]\nlocal: {{python: {idle_python}}}\n")
    env = {"TOKEN": "hunter2-" + "x" * 20}
    submitted = cli.ok("submit", "-d", "--json", cwd=folder, env=env)
    running = processes.with_environment(CLOUDTRAIN_HOME=str(cli.home), **env)
    shown = cli("status", "last", "--json").stdout + cli("submit", "--dry-run", cwd=folder, env=env).stdout
    stored = [path for path in cli.home.rglob("*") if path.is_file() and env["TOKEN"].encode() in path.read_bytes()]
    command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running]
    assert cli("stop", "last", "--now", "-y").code == 0
    assert running
    assert (stored, env["TOKEN"] in shown + submitted.stdout + submitted.stderr) == ([], False)
    assert not [line for line in command_lines if env["TOKEN"].encode() in line]


@pytest.mark.slow
def test_submit_does_not_reuse_the_folder_of_an_older_job(cli: Any, project: MakeProject, idle_python: Path) -> None:
    """After a damaged registry is moved away, as its error recommends, a name may repeat although its folder exists."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    assert cli("submit", "-d", "--name", "again", cwd=folder).code == 0
    assert cli("stop", "again", "--now", "-y").code == 0
    for path in cli.home.glob("registry.sqlite*"):
        path.unlink()
    second = cli("submit", "-d", "--name", "again", cwd=folder)
    state = cli("status", "again", "--json").json["state"] if second.code == 0 else None
    if state in ("pending", "running"):
        cli("stop", "again", "--now", "-y")
    assert second.code != 0 or state in ("pending", "running"), f"shows the old job: {state}"


@pytest.mark.slow
def test_interpreter_that_cannot_be_started_is_named(cli: Any, project: MakeProject) -> None:
    """At submit or on the node, the reason names the interpreter instead of a lost agent."""
    folder = project("local: {python: ./py}\n")
    (folder / "py").write_text("#!/nonexistent/interpreter\n")
    (folder / "py").chmod(0o755)
    result = cli("submit", cwd=folder)
    said = result.stdout + result.stderr
    assert (result.code in (1, 3), "py" in said, "without a message" in said) == (True, True, False), said


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beside the config", "elsewhere"])
def test_relative_interpreter_path_counts_from_the_config_file(
    cli: Any, project: MakeProject, idle_python: Path, where: str
) -> None:
    """Every path of the config does the same, from any working directory."""
    folder = project("local: {python: ../idle-python}\n")
    cwd = folder if where == "beside the config" else folder.parent.parent
    cli.ok("submit", "-d", "-f", folder / "cloudtrain.yaml", cwd=cwd)
    assert cli("list", "--json", "--active").json["jobs"], cli("status", "last").stdout
    assert cli("stop", "last", "--now", "-y", "--json").json["state"] == "stopped"


@pytest.mark.slow
def test_stopped_job_leaves_no_temporary_files(cli: Any, project: MakeProject, tmp_path: Path) -> None:
    """Neither cloudtrain nor torchrun leaves files that would fill up a long-lived machine."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert cli("submit", "-d", cwd=project(), env={"TMPDIR": str(scratch)}).code == 0
    until(lambda: "looping" in cli("logs", "last").stdout, every_s=0.3)
    assert cli("stop", "last", "--now", "-y").code == 0
    assert [path.name for path in scratch.iterdir()] == []


# `cloudtrain ARGS` with a starter that is killed before its orders, or between its agents' start and its answer.
STARTER = """\
import subprocess, sys
from cloudtrain.launcher.cli import main

real = subprocess.Popen.communicate
def communicate(self, input=None, timeout=None):
    if input is None: return real(self, input, timeout)
    if when == "before": self.kill()
    answer = real(self, input, timeout)
    self.returncode = -9
    return "", ""
subprocess.Popen.communicate = communicate

when, *sys.argv[1:] = sys.argv[1:]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "code"), [("before", 3), pytest.param("after", 0, marks=pytest.mark.soak)])
def test_killed_starter_leaves_a_job_only_with_live_agents(
    cli: Any, project: MakeProject, idle_python: Path, when: str, code: int
) -> None:
    """Live agents are the job, even if their starter dies; without agents no job was sent."""
    folder = project(f"local: {{python: {idle_python}}}\n")
    command = [sys.executable, "-c", STARTER, when, "submit", "-d", "--name", "mine"]
    done = subprocess.run(command, cwd=folder, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert bool(processes.with_environment(CLOUDTRAIN_HOME=str(cli.home))) == (code == 0)
    again = cli("submit", "-d", "--name", "mine", cwd=folder)
    assert again.code == (2 if code == 0 else 0), again.stderr
    assert cli("stop", "mine", "--now", "-y").code == 0
