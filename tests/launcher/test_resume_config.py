"""`resume` and a config file that changed since the submit: a warning with the keys, and `--update-config`."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import api
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.store.registry import Registry
from doubles.signatures import MakeProject

CONFIG = "local: {{python: {python}}}\nargs: {args}\nlimits: {{max_duration: {most}}}\n"
COUNTS = """\
import pathlib, sys
file = pathlib.Path("out/ckpt.json")
file.parent.mkdir(exist_ok=True)
begin = int(file.read_text()) if "--resume" in sys.argv else 0
last = int(sys.argv[sys.argv.index("--steps") + 1])
print("begin at", begin, flush=True)
for step in range(begin + 1, last + 1):
    print(f"step {step}/{last} loss {1 / step:.3f}", flush=True)
    file.write_text(str(step))
"""


@pytest.fixture
def folder(project: MakeProject, idle_python: Path) -> Path:
    """Return a project with the config, not yet submitted."""
    return project(CONFIG.format(python=idle_python, args="{lr: 0.1}", most="10m"))


def change(folder: Path, before: str, after: str) -> None:
    """Replace a text of the config file."""
    file = folder / "cloudtrain.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def submitted(cli: Any, folder: Path, *options: str) -> None:
    """Submit the job `one`, and stop it."""
    assert cli("submit", "-d", "--name", "one", *options, cwd=folder).code == 0
    assert cli("stop", "--now", "-y", "one").code == 0


def config_of(cli: Any) -> dict[str, Any]:
    """Return the config of the job's newest attempt."""
    with closing(Registry()) as registry:
        return registry.find("one").config


def test_resume_names_the_changed_keys_of_the_config(cli: Any, folder: Path) -> None:
    """The attempt runs the submitted config; with `--update-config` the present one, and the changes are printed."""
    submitted(cli, folder)
    change(folder, "0.1", "0.01")
    change(folder, "10m", "20m")
    changes = "args: --lr 0.1 -> --lr 0.01, limits.max_duration: 10m -> 20m"
    warning = (
        f"warning: cloudtrain.yaml changed since the submit ({changes}); this attempt runs the submitted config: "
        "--update-config takes the new config"
    )
    old = cli("resume", "-d", "--update-code", "one")
    assert (old.code, warning in old.stderr.splitlines()) == (0, True), old.stderr
    assert config_of(cli)["args"] == ["--lr", "0.1"]
    cli("stop", "--now", "-y", "one")
    new = cli("resume", "-d", "--update-config", "--set", "limits.max_duration=30m", "one")
    assert (new.code, "warning: cloudtrain.yaml" in new.stderr) == (0, False), new.stderr
    assert "config: args: --lr 0.1 -> --lr 0.01, limits.max_duration: 10m -> 30m" in new.stderr.splitlines()
    config = config_of(cli)
    assert (config["args"], config["limits"]["max_duration"]) == (["--lr", "0.01"], "30m")
    cli("stop", "--now", "-y", "one")
    again = cli("resume", "--dry-run", "--update-config", "--set", "limits.max_duration=30m", "one").stderr
    assert "config: as it was submitted" in again.splitlines()


def test_options_of_the_submit_are_no_change(cli: Any, folder: Path) -> None:
    """The options of the submit and of a resume stay on top of the file, also with `--update-config`."""
    submitted(cli, folder, "--set", "args.lr=0.5", "--instances", "2")
    assert "cloudtrain.yaml" not in cli("resume", "--dry-run", "one").stderr
    change(folder, "10m", "20m")
    assert "(limits.max_duration: 10m -> 20m)" in cli("resume", "--dry-run", "one").stderr
    assert cli("resume", "-d", "one", "--set", "args.seed=3").code == 0
    cli("stop", "--now", "-y", "one")
    assert cli("resume", "-d", "one", "--update-config").code == 0
    config = config_of(cli)
    assert (config["args"], config["limits"]["max_duration"]) == (["--lr", "0.5", "--seed", "3"], "20m")
    assert config["resources"]["instances"] == 2
    cli("stop", "--now", "-y", "one")


def test_name_and_backend_stay(cli: Any, folder: Path) -> None:
    """The file's new name and backend do not move the job."""
    submitted(cli, folder)
    name = config_of(cli)["name"]
    file = folder / "cloudtrain.yaml"
    file.write_text(file.read_text().replace(f"name: {name}", "name: other") + "backend: ssh\nssh: {hosts: [h1]}\n")
    cli.ok("resume", "-d", "--update-config", "one")
    assert (config_of(cli)["name"], config_of(cli)["backend"]) == (name, "local")
    cli("stop", "--now", "-y", "one")


def test_changes_without_effect_on_a_dry_run_are_told(cli: Any, folder: Path) -> None:
    """A secret's change is hidden; a job stays on its backend; a faulty file has a warning, or is refused."""
    submitted(cli, folder)
    change(folder, "{lr: 0.1}", "{lr: 0.1, api_key: sesame}")
    shown = cli("resume", "--dry-run", "one").stderr
    assert ("sesame" in shown, "args: --lr 0.1 -> --lr 0.1 --api_key (not shown)" in shown) == (False, True), shown
    for given in (["--backend", "sagemaker"], ["--set", "backend=sagemaker"]):
        done = cli("resume", "one", "--dry-run", *given)
        assert (done.code, done.stdout) == (2, "")
        assert "a job stays on its backend (local)" in done.stderr
        assert "submit a new job with --backend sagemaker" in done.stderr
    for given in (["--backend", "local"], ["--set", "backend=local"]):
        assert cli("resume", "one", "--dry-run", *given).code == 0
    with pytest.raises(UsageError, match="stays on its backend"):
        api.resume("one", backend="vertex")
    change(folder, "10m", "soon")
    warning = "warning: cloudtrain.yaml changed since the submit (faults: cloudtrain validate names them); this attempt"
    shown = cli("resume", "--dry-run", "one")
    assert (shown.code, warning in shown.stderr) == (0, True), shown.stderr
    refused = cli("resume", "-d", "--update-config", "one")
    assert (refused.code, "limits.max_duration" in refused.stderr) == (3, True), refused.stderr


def succeeded(progress: dict[str, Any]) -> None:
    """Store that the last attempt of `one` has succeeded, with this progress."""
    with closing(Registry()) as registry:
        registry.set_state(registry.find("one").attempt, State("succeeded", ended_s=time.time()), progress)


@pytest.mark.parametrize("option", ["--update-config", "--update-code", "--set=args={steps: 9}"])
def test_done_job_trains_further_with_a_change(cli: Any, folder: Path, option: str) -> None:
    """The checkpoint may be an earlier attempt's; without a change the refusal names the option."""
    assert cli("submit", "-d", "--name", "one", cwd=folder).code == 0
    cli("stop", "--now", "-y", "one")
    succeeded({"step": 5, "checkpoint": "out/ckpt.pt"})
    for number in (2, 3):
        refused = cli("resume", "-d", "one")
        hint = "to train further: raise the steps and resume it with --update-config"
        assert (refused.code, f"one is done\n  hint: {hint}" in refused.stderr) == (2, True), refused.stderr
        with pytest.raises(UsageError, match="one is done"):
            api.resume("one")
        done = cli("resume", "-d", option, "one")
        assert (done.code, f"sent: one, attempt {number}" in done.stderr) == (0, True), done.stderr
        assert "no checkpoint" not in done.stderr
        cli("stop", "--now", "-y", "one")
        succeeded({"step": 5})


def test_done_job_without_a_checkpoint_is_not_resumed(cli: Any, folder: Path) -> None:
    """The attempt would start from the beginning, so a new job does the same."""
    submitted(cli, folder)
    succeeded({"step": 5})
    refused = cli("resume", "-d", "--update-config", "one")
    words = "one is done, and has no checkpoint\n  hint: submit a new job, with more steps"
    assert (refused.code, words in refused.stderr) == (2, True), refused.stderr


@pytest.mark.slow
def test_done_script_continues_its_steps(cli: Any, project: MakeProject) -> None:
    """A script that has kept its files takes them again, and ends at the new number of steps."""
    folder = project("keep: [out]\nargs: {steps: 2}\nresume_args: {resume: true}\n", text=COUNTS)
    assert cli("submit", "--name", "one", cwd=folder).code == 0
    change(folder, "steps: 2", "steps: 4")
    done = cli("resume", "--update-config", "one")
    assert (done.code, "begin at 2" in done.stdout, "step 4/4" in done.stdout) == (0, True, True), done.stderr
