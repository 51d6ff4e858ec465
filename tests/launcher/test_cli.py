"""The command line: exit codes, streams, and error messages."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend, errors
from cloudtrain.launcher import cli as commandline
from cloudtrain.launcher.job import State
from cloudtrain.launcher.store.registry import Registry
from doubles.plans import make_job
from doubles.signatures import MakeJob, MakeProject, OpenTerminal
from doubles.terminals import COMMAND
from doubles.waiting import until

ESCAPE = "\x1b["


def subclasses(kind: type[errors.CloudtrainError]) -> dict[str, int]:
    """Return the exit code of each direct subclass of the error."""
    return {one.__name__: one.exit_code for one in kind.__subclasses__()}


def test_errors_have_the_published_exit_codes() -> None:
    """The numbers are part of the contract."""
    assert backend.DamagedRecordError  # a subclass outside of errors.py
    assert subclasses(errors.CloudtrainError) == {
        "UsageError": 2,
        "ConfigError": 3,
        "CredentialError": 4,
        "CapacityError": 5,
        "BudgetError": 6,
        "UnreachableError": 7,
        "NoSuchJobError": 8,
        "DamagedRecordError": 1,
    }


# -- exit codes ---


def test_help_and_version_are_data(cli: Any) -> None:
    """The help lists every command; no command has the name `alerts`: the error names `watch` and `notify`."""
    result = cli("--help", "--all")
    assert (result.code, result.stderr) == (0, "")
    assert all(f"  {name} " in result.stdout for name in commandline.COMMANDS)
    assert cli("--version").stdout.startswith("cloudtrain 0.")
    done = cli("alerts")
    assert (done.code, "`watch` sends alerts" in done.stderr, "`notify`" in done.stderr) == (2, True, True)


def test_help_has_ten_commands_and_names_the_rest(cli: Any) -> None:
    """`--help --all` has all commands and the exit codes; `help` and no word at all show the short help."""
    short, whole = cli("--help"), cli("--help", "--all")
    shown = [line.split()[0] for line in short.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert shown == ["init", "doctor", "plan", "submit", "status", "logs", "stop", "resume", "list", "watch"]
    assert "cloudtrain --help --all" in short.stdout
    assert "124 wait timed out" in whole.stdout
    assert cli("help").stdout == short.stdout
    assert cli("help", "--all").stdout == cli("--all", "-h").stdout == whole.stdout
    assert cli("help", "stop").stdout == cli("stop", "--help").stdout
    assert short.stdout in cli().stderr


@pytest.mark.parametrize(
    "line",
    [
        *("nonsense", "list --nonsense", "submit --instances 0", "submit --instances two", "submit -o x"),
        *("submit --backend all", "submit --name Bad_Name", "wait x --timeout soon", "explain no.such.key"),
        "submit -d --name last",  # `last` is the newest job in every command
    ],
)
def test_usage_errors_are_exit_code_2(cli: Any, project: MakeProject, line: str) -> None:
    """Invalid input is reported on stderr, and no action follows."""
    result = cli(*line.split(), cwd=project())
    assert (result.code, result.stdout, bool(result.stderr)) == (2, "", True)
    assert "Traceback" not in result.stderr


def test_file_and_arguments_follow_submit(cli: Any, project: MakeProject) -> None:
    """`submit FILE -- ARGS` is `-f FILE` with new `args`; ARGS keep their spelling, including options."""
    folder = project("args: [--epochs, 10]\n")
    (folder / "cloudtrain.yaml").rename(folder / "job.yaml")

    def args_of(*words: str) -> list[str]:
        done = cli.ok(words[0], "--json", *words[1:], cwd=folder)
        found: list[str] = done.json["request"]["spec"]["run"]["args"]
        return found

    given = ["--lr", "1e-1", "é b", "-h", "--json"]
    assert args_of("render", "job.yaml") == ["--epochs", "10"]
    assert args_of("submit", "job.yaml", "--dry-run", "--", *given) == given
    assert args_of("render", "-f", "job.yaml", "--") == []


@pytest.mark.parametrize("line", ["submit", "render", "validate", "plan", "rehearse", "diagnose", "notify"])
def test_every_command_that_reads_a_config_accepts_a_file(cli: Any, line: str) -> None:
    """FILE means the same as -f."""
    done = cli(line, "no.yaml")
    assert (done.code, "no file no.yaml" in done.stderr) == (3, True), done.stderr
    job = cli(line, "last").stderr
    assert "no file last\n  hint: name a config file, not a job: for example cloudtrain.yaml" in job


@pytest.mark.parametrize("backend", ["azureml", "sagemaker", "vertex", "ssh", "local"])
@pytest.mark.parametrize("name", ["k" * 1100, "k" * 129, "", "a\nb", "a\u2028b"])
def test_tag_name_has_a_limit_on_every_backend(cli: Any, project: MakeProject, backend: str, name: str) -> None:
    """A tag's name that no platform accepts is a fault of the config, with its place."""
    folder = project(f"backend: {backend}\nresources: {{accelerators: T4:1}}\ntags:\n  ? {json.dumps(name)}\n  : v\n")
    done = cli("validate", "--json", cwd=folder)
    fault = next(fault for fault in done.json["faults"] if fault["key"] == "tags")
    assert (done.code, fault["message"].startswith("expected a tag's name: 1 to 128"), fault["line"]) == (3, True, 6)
    assert len(fault["message"]) < 130


@pytest.mark.parametrize("line", ["status", "logs", "artifacts", "report --json", "wait", "stop", "stop --now"])
def test_newest_job_is_the_default(cli: Any, line: str) -> None:
    """Without JOB, `stop` and each command that reads mean the newest job; in an empty registry the exit code is 8."""
    done = cli(*line.split())
    assert (done.code, "Usage:" in done.stderr) == (8, False), done.stderr


@pytest.mark.parametrize(("config", "is_hinted"), [({"script": "train.py"}, True), ({"task": "task.py"}, False)])
def test_artifacts_without_files_leaves_no_folder_and_names_keep_for_a_script(
    cli: Any, tmp_path: Path, registry: Registry, config: dict[str, str], is_hinted: bool
) -> None:
    """A wrong name in `keep` leaves no file; a task has its own folders."""
    job, _ = registry.add("one", lambda *args: make_job(*args, config=config), exclusive=True, key=None)
    for name in ("output", "checkpoints/logs"):
        (tmp_path / name).mkdir(parents=True)
    ref = {"folder": str(tmp_path / "attempt-1"), "nodes": 1, "checkpoint_dir": str(tmp_path / "checkpoints")}
    registry.mark_sent(job.attempt, ref)
    registry.set_state(job.attempt, State("succeeded", started_s=1.0, ended_s=2.0), {})
    (tmp_path / "train.py").touch()
    into_file = cli("artifacts", "one", "-o", "train.py", cwd=tmp_path)
    assert (into_file.code, "train.py is a file: name a folder" in into_file.stderr) == (2, True), into_file.stderr
    done = cli("artifacts", "one", cwd=tmp_path)
    assert (done.code, "one has no output files\n" in done.stderr) == (0, True), done.stderr
    assert not (tmp_path / "one-output").exists()
    assert ("hint: `keep` in the config" in done.stderr) == is_hinted


@pytest.mark.parametrize("line", ["validate", "plan", "submit -d", "submit --dry-run", "render"])
@pytest.mark.parametrize("text", ["name: [", "name: x\nscript: no.py\n", "nmae: x\nscript: loop.py\n", ""])
def test_config_errors_are_exit_code_3(cli: Any, project: MakeProject, line: str, text: str) -> None:
    """Every command that reads the file reports the same, and no job is sent."""
    folder = project()
    (folder / "cloudtrain.yaml").write_text(text)
    result = cli(*line.split(), cwd=folder)
    assert (result.code, result.stderr.startswith("error: ")) == (3, True), result.stderr
    assert not (cli.home / "local").exists()


def test_missing_config_names_init_and_two_configs_are_refused(cli: Any, project: MakeProject) -> None:
    """The hint names `cloudtrain init`."""
    result = cli("submit")
    assert (result.code, "cloudtrain init" in result.stderr) == (3, True)
    done = cli("submit", "job.yaml", "-f", "cloudtrain.yaml", cwd=project())
    assert (done.code, "two config files" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("line", ["status x", "logs x", "stop x", "wait x", "resume x", "report x", "status last"])
def test_unknown_jobs_are_exit_code_8(cli: Any, line: str) -> None:
    """Every command that names a job does the same."""
    result = cli(*line.split())
    assert (result.code, result.stdout) == (8, "")


@pytest.mark.parametrize(
    ("line", "code"), [("status x --json", 8), ("submit --json", 3), ("list --json -n x", 2), ("stop --json", 8)]
)
def test_errors_are_a_json_object_with_json(cli: Any, line: str, code: int) -> None:
    """A script that reads only standard output gets the message and the exit code."""
    result = cli(*line.split())
    error = result.json["error"]
    assert (result.code, error["exit_code"], error["message"] in result.stderr) == (code, code, True)


def test_json_has_all_config_errors(cli: Any, project: MakeProject) -> None:
    """Each fault has its key, place and hint."""
    folder = project()
    (folder / "cloudtrain.yaml").write_text("name: x\nscript: no.py\nnum_nodes: 3\n")
    error = cli("submit", "-d", "--json", cwd=folder).json["error"]
    assert error["where"] == "cloudtrain.yaml:2:9"
    assert [(each["key"], each["at"]["line"]) for each in error["faults"]] == [("script", 2), ("num_nodes", 3)]


def test_wait_gives_up_or_has_the_first_bad_exit_code(cli: Any, seed: MakeJob) -> None:
    """A pending job lasts as long as its submitting process; of several jobs the first bad end counts."""
    seed("pending")
    result = cli("wait", "pending", "--timeout", "0s")
    assert (result.code, "still running: pending" in result.stderr) == (124, True)
    for name, state in {"a": State("succeeded"), "b": State("stopped", "user"), "c": State("failed")}.items():
        seed(name, state)
    assert cli("wait", "a", "b", "c").code == 9
    assert cli("wait", "c", "b").code == 1


def test_wait_interrupted_is_exit_code_130(cli: Any, seed: MakeJob) -> None:
    """Ctrl-C ends the command, not the job."""
    seed("pending")
    waiting = cli.start("wait", "pending")
    until(lambda: any("registry.sqlite" in name for name in open_files(waiting.pid)))
    waiting.send_signal(signal.SIGINT)
    told = waiting.communicate(timeout=30)[1]
    assert waiting.returncode == 130, told
    assert "Traceback" not in told


def open_files(pid: int) -> list[str]:
    """Return the names of the files that the process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            found.append(str(path.readlink()))
    return found


# -- error messages ---


@pytest.mark.parametrize(("typed", "meant"), [("sumbit", "submit"), ("lst", "list"), ("cancle", "cancel")])
def test_misspelt_command_has_a_suggestion(cli: Any, typed: str, meant: str) -> None:
    """The suggestions include aliases."""
    assert f"Did you mean `{meant}`?" in cli(typed).stderr


def test_submit_takes_the_name_of_a_config_without_one(cli: Any, project: MakeProject) -> None:
    """`--name` is also the missing key `name`; a name in the config stays, and a config of another form is refused."""
    folder = project()
    file = folder / "cloudtrain.yaml"
    cases = ((file.read_text(), "loop"), (file.read_text().replace("name: loop", "name:"), "mine"))
    for text, name in (*cases, (file.read_text().replace("name: loop\n", ""), "mine")):
        file.write_text(text)
        done = cli("submit", "--name", "mine", "--dry-run", "--json", cwd=folder)
        assert (done.code, done.json["job"].rpartition("-")[0]) == (0, name), done.stderr
    file.write_text("- a\n")
    done = cli("submit", "--name", "mine", "--dry-run", cwd=folder)
    assert (done.code, "expected a mapping" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize(("alias", "line"), [("ps", "ps"), ("run", "run --dry-run"), ("render", "render")])
def test_aliases_do_the_same(cli: Any, project: MakeProject, alias: str, line: str) -> None:
    """The aliases are run = submit, render = submit --dry-run, ps = list, cancel = stop."""
    full = {"ps": "list", "run": "submit --dry-run", "render": "submit --dry-run"}[alias]
    folder = project()
    assert cli(*line.split(), cwd=folder).stdout == cli(*full.split(), cwd=folder).stdout


def test_traceback_is_shown_only_with_debug(cli: Any) -> None:
    """The option works anywhere on the line but after `--`, and keeps the exit code."""
    for words in ("--debug status x", "status x --debug"):
        shown = cli(*words.split())
        assert ("Traceback" in shown.stderr, shown.code) == (True, 8)
    assert "Traceback" not in cli("status", "x").stderr
    assert "--debug" in cli("explain", "--", "--debug").stderr


def test_internal_fault_is_a_line_with_a_hint(cli: Any, tmp_path: Path) -> None:
    """The message says that cloudtrain failed, and how to report the fault."""
    broken = "import sqlite3\n\ndef connect(*_, **__):\n    raise KeyError('gone')\n\nsqlite3.connect = connect\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    result = cli("status", "a", env={"PYTHONPATH": str(tmp_path)})
    assert (result.code, result.stderr.startswith("error: cloudtrain itself failed: KeyError")) == (1, True)
    assert ("--debug" in result.stderr, "Traceback" in result.stderr) == (True, False)


# -- streams ---


def in_bash(cli: Any, line: str, cwd: Path | None = None) -> Any:
    """Run a line of bash, in which `cloudtrain` is the installed command."""
    line = line.replace("cloudtrain", f"'{COMMAND}'")
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=cli.environment(), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("line", ["explain", "schema", "--help", "logs long"])
def test_closed_pipe_is_no_error(cli: Any, seed: MakeJob, line: str) -> None:
    """`cloudtrain ... | head -1` prints no traceback and no message, and the exit code is no job's code."""
    seed("long", State("succeeded"), {"0": "x\n" * 100_000, "1": ""})
    done = in_bash(cli, f"cloudtrain {line} | head -1; exit ${{PIPESTATUS[0]}}")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert done.returncode in (0, 141)


@pytest.mark.parametrize(
    "line", ["--help", "list", "status ended", "logs ended", "explain", "validate", "submit --dry-run", "nonsense"]
)
@pytest.mark.parametrize("more", [{}, {"FORCE_COLOR": "", "TERM": "xterm-256color"}])
def test_piped_output_has_no_colour(
    cli: Any, seed: MakeJob, project: MakeProject, line: str, more: dict[str, str]
) -> None:
    """Neither stream has an escape sequence if neither is a terminal."""
    seed("ended", State("failed", "error"))
    result = cli(*line.split(), cwd=project(), env=more)
    assert ESCAPE not in result.stdout + result.stderr


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_terminal_gets_colour_unless_no_color_is_set(
    terminal: OpenTerminal, seed: MakeJob, env: dict[str, str], coloured: bool
) -> None:
    """The ranks' prefixes are coloured on a terminal, except with NO_COLOR."""
    seed("ended", State("succeeded"))
    shown = terminal(argv=[str(COMMAND), "logs", "ended"], **env)
    assert shown.end() == 0
    assert (ESCAPE.encode() in shown.output) == coloured


@pytest.mark.parametrize("line", ["list", "status ended", "wait ended", "validate", "plan", "backends", "doctor"])
def test_json_is_a_single_object_on_stdout(cli: Any, seed: MakeJob, project: MakeProject, line: str) -> None:
    """Every command that reads prints only the object to stdout."""
    seed("ended", State("succeeded"))
    assert isinstance(cli(*line.split(), "--json", cwd=project()).json, dict)


def test_status_as_json_has_the_published_names(cli: Any, seed: MakeJob) -> None:
    """Scripts rely on these names."""
    seed("ended", State("failed", "error", True, {"rank": 1, "type": "ValueError", "message": "no"}))
    status = cli("status", "ended", "--json").json
    names = {"job", "backend", "state", "reason", "resumable", "attempt", "step", "max_steps", "loss", "spend_usd"}
    assert names | {"error"} <= set(status)
    assert (status["state"], status["reason"], status["resumable"]) == ("failed", "error", True)
    said = cli("status", "ended").stdout
    assert ("rank 1: ValueError: no\n" in said, "cloudtrain resume ended" in said) == (True, True)


def test_dry_run_keeps_the_request_on_stdout_and_the_plan_on_stderr(cli: Any, project: MakeProject) -> None:
    """stdout can be redirected to a file, a second run gives the same bytes, and the state folder is unchanged."""
    result, again = (cli("submit", "--dry-run", "--instances", "2", cwd=project()) for _ in range(2))
    assert result.stdout == again.stdout
    assert [node["node"] for node in result.json["nodes"]] == [0, 1]
    assert ("2 instances x 1 = 2 ranks" in result.stderr, "nothing was sent" in result.stderr) == (True, True)
    assert not cli.home.exists()
    shown = cli("submit", "--dry-run", "--json", cwd=project()).json
    assert set(shown) >= {"job", "backend", "request", "plan"}


@pytest.mark.parametrize("line", ["list", "submit -d", "status x", "logs x"])
def test_unwritable_state_folder_is_exit_code_3(
    cli: Any, project: MakeProject, unprivileged: Callable[..., Any], line: str
) -> None:
    """The message names the folder, and the variable that changes the folder."""
    cli.home.mkdir(mode=0o500)
    result = unprivileged(*line.split(), cwd=project())
    assert result.code == 3, result.stderr
    assert (str(cli.home) in result.stderr, "CLOUDTRAIN_HOME" in result.stderr) == (True, True)


def test_unwritable_registry_is_exit_code_3(
    cli: Any, project: MakeProject, unprivileged: Callable[..., Any], seed: MakeJob
) -> None:
    """The registry was created by root, and a normal user opens the registry later."""
    seed("ended", State("succeeded"))
    for path in cli.home.glob("registry.sqlite*"):
        path.chmod(0o400)
    result = unprivileged("submit", "-d", cwd=project())
    assert (result.code, "registry" in result.stderr) == (3, True), result.stderr


def test_limits_of_the_machine_are_told(cli: Any, project: MakeProject, seed: MakeJob) -> None:
    """A full disk is named with the file, without a partial archive; a slip in a range makes no list in memory."""
    folder = project()
    (folder / "weights.bin").write_bytes(os.urandom(2_000_000))
    done = in_bash(cli, "ulimit -f 1000; exec cloudtrain submit -d", folder)
    assert (done.returncode, "could not be packed" in done.stderr) == (3, True), done.stderr
    assert list((cli.home / "bundles").iterdir()) == []
    seed("ended", State("succeeded"))
    done = in_bash(cli, "ulimit -v 2000000; exec cloudtrain logs ended --rank 0-99999999999")
    assert (done.returncode, "rank" in done.stderr) == (2, True), done.stderr[-300:]


# A module for Python's start: the process gets SIGINT when the import of a given module begins; with INSIDE, inside a
# weak reference's callback, as an import makes many.
INTERRUPTING = """\
import os, signal, sys, weakref

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"] and "INSIDE" in os.environ:
            thing = type("Thing", (), {})()
            kept = weakref.ref(thing, interrupt)
            del thing
        elif name == os.environ["INTERRUPT_AT"]:
            interrupt()

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("at", "line", "said"),
    [
        ("click", "submit -d", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.text.terminal", "status", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.commands.submit", "submit -d", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.jobs.approval", "submit -d", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.store.registry", "submit -d", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.config.schema", "submit -d", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.config.schema", "submit --dry-run", "interrupted: nothing was sent"),
        ("cloudtrain.launcher.config.schema", "plan", "interrupted"),
        ("cloudtrain.launcher.store.registry", "list", "interrupted"),
        ("INSIDE cloudtrain.launcher.config.schema", "submit -d", "interrupted: nothing was sent"),
    ],
)
def test_interrupt_during_the_imports_is_a_single_line(
    cli: Any, project: MakeProject, tmp_path: Path, at: str, line: str, said: str
) -> None:
    """Ctrl-C at any import exits with 130 and a line; Python alone would ignore an interrupt in a callback."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    *inside, name = at.split()
    env = {"PYTHONPATH": str(tmp_path), "INTERRUPT_AT": name, **dict.fromkeys(inside, "1")}
    process = cli.start(*line.split(), cwd=project(), env=env)
    shown = process.communicate()[1].strip()
    assert (process.returncode, shown.startswith(said), len(shown.splitlines())) == (130, True, 1), shown


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("submit --max_duration 5h", "--set limits.max_duration=5h"),
        ("plan --max-steps=5", "--set training.max_steps=5"),
        ("submit --args --epochs", "cloudtrain submit -- --epochs 10"),
        ("plan --args x", "cloudtrain plan -- --epochs 10"),
        ("plan --set args=[--epochs, 400]", "quote the value: --set 'args=...'"),
        ("prune", "cloudtrain prune --older 30d"),
        ("submit --instances two", "expected a whole number of at least 1, such as `--instances 2`"),
        ("logs --tail -1", "expected a whole number of at least 0, such as `--tail 2`"),
        ("ui --port 0", "expected a whole number from 1 to 65535, such as `--port 65535`"),
    ],
)
def test_hint_shows_the_option_to_type(cli: Any, line: str, hint: str) -> None:
    """A config key as an option, a partial setting, and a missing option have an example as their hint."""
    done = cli(*line.split())
    assert (done.code, done.stderr.splitlines()[-1]) == (2, f"  hint: {hint}")


def test_plan_and_submit_show_the_same_form(cli: Any, project: MakeProject) -> None:
    """Both begin with the backend; a dry run of two backends names each backend once in a line."""
    folder = project("resources: {instances: 2}\n")
    first = cli("plan", cwd=folder).stdout.splitlines()[0]
    assert (
        first
        == cli("submit", "--dry-run", cwd=folder).stderr.splitlines()[0]
        == "local: 2 instances x 1 = 2 ranks (CPU)"
    )
    several = cli("submit", "--dry-run", "--backend", "local,ssh", cwd=folder).stderr
    assert several.startswith("local: 2 instances"), several


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("plan --backend all", 3, "error: no price list has an accelerator `A1000`; did you mean `A100`?"),
        ("plan", 0, "no price list has an accelerator `A1000`; did you mean `A100`?"),
        ("validate", 0, "warning: no price list has an accelerator `A1000`; did you mean `A100`?"),
        ("plan --backend ssh --set ssh.hosts=[gpu1]", 0, "no price list has an accelerator `A1000`"),
        ("plan --backend all --set ssh.hosts=[gpu1]", 0, "no price is known"),
    ],
)
def test_unknown_accelerator_is_named(cli: Any, project: MakeProject, line: str, code: int, said: str) -> None:
    """A comparison without a machine fails with the similar name; a plan for the user's own machines warns."""
    done = cli(*line.split(), "--set", "resources.accelerators=A1000:8", cwd=project("sagemaker: {}\n"))
    assert (done.code, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        ("plan", ("--accelerators", "A100:8"), 0, "a2-highgpu-8g"),
        ("plan", ("--accelerators", "nvidia-tesla-a100:2"), 0, "a2-highgpu-2g"),
        ("plan", ("--accelerators", "l4"), 0, "g2-standard-4"),
        ("plan", ("--accelerators", "T4:1"), 0, "0.65 USD an hour (n1-standard-4 + 1 x NVIDIA_TESLA_T4, derived from"),
        ("submit", ("--dry-run", "--accelerators", "A100:4"), 0, "a2-highgpu-4g"),
        ("rehearse", ("--accelerators", "8xA100"), 3, "did you mean `A100:8`?"),
        ("plan", ("--accelerators", "type=nvidia-tesla-t4,count=1"), 3, "did you mean `nvidia-tesla-t4:1`?"),
        ("plan", ("--accelerators", "A100:8", "--instance-type", "a2-highgpu-8g"), 2, "give one of them"),
    ],
)
def test_accelerators_are_an_option(
    cli: Any, project: MakeProject, command: str, words: tuple[str, ...], code: int, said: str
) -> None:
    """`--accelerators` replaces the file's machines, also an `instance_type`."""
    folder = project(
        "resources: {instance_type: n1-standard-8}\n"
        "vertex: {project: my-project, location: us-central1, staging_bucket: gs://my-bucket}\n"
    )
    done = cli(command, "--backend", "vertex", *words, cwd=folder)
    assert (done.code, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["local", "ssh", "sagemaker", "azureml", "vertex"])
def test_miswritten_accelerators_are_refused_with_the_right_form(cli: Any, project: MakeProject, backend: str) -> None:
    """`validate` refuses `A100x8` on each backend, once, and the hint has the type and the count from the config."""
    done = cli("validate", "--backend", backend, cwd=project("resources: {accelerators: H200x4}\n"))
    assert (done.code, "did you mean `H200:4`?" in done.stderr) == (3, True), done.stderr
    assert done.stderr.count("H200x4") == 2, done.stderr  # in the message and in the quoted line


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("sagemaker", "A100:8; `cloudtrain prices --accelerators A100` lists"),
        ("azureml", "A100:4, A100:8; `cloudtrain prices --accelerators A100` lists"),
        ("vertex", "A100:8, A100:16; or name `instance_type`"),
    ],
)
def test_unavailable_count_names_the_existing_counts(cli: Any, project: MakeProject, backend: str, said: str) -> None:
    """The hint for `A100:3` has existing counts, and how to find the machines."""
    done = cli("plan", "--backend", backend, "--set", "resources.accelerators=A100:3", cwd=project())
    assert (done.code, said in done.stderr) == (3, True), done.stderr
