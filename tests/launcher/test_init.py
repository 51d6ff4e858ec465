"""`cloudtrain init`, and its starters."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cloudtrain.launcher import cli, config
from cloudtrain.launcher.commands.init import BACKENDS, KINDS, command
from cloudtrain.launcher.errors import UsageError
from doubles import warmpython


def init(*arguments: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_valid_project(tmp_path: Path, kind: str) -> None:
    """The unchanged starter passes validation, under its folder's name, on the local backend."""
    init(tmp_path / "My Project", "--kind", kind)
    job = config.load(tmp_path / "My Project" / "cloudtrain.yaml", environ={})
    assert (job.name, job.backend, getattr(job, kind) is not None) == ("my-project", "local", True)


@pytest.mark.parametrize("kind", KINDS)
def test_starter_has_a_block_for_every_backend(tmp_path: Path, kind: str) -> None:
    """Without its comment signs, each block makes a config that is valid for its backend."""
    init(tmp_path, "--kind", kind)
    file = tmp_path / "cloudtrain.yaml"
    text = file.read_text("utf-8")
    blocks = re.sub("^# ?", "", text.partition("# ssh:")[2].partition("# On a cloud")[0], flags=re.MULTILINE)
    file.write_text(f"{text}\nssh:{blocks}", encoding="utf-8")
    assert [config.load(file, environ={}, backend=name).backend for name in BACKENDS] == list(BACKENDS)
    assert {config.written(file, (name, "python")) for name in ("ssh", "slurm")} == {"~/venv/bin/python"}


@pytest.mark.slow
def test_script_starter_resumes_from_its_last_save(tmp_path: Path) -> None:
    """The starter's arguments and `resume_args` continue after the saved step; `keep` names the folder of the save."""
    init(tmp_path, "--kind", "script")
    job = config.load(tmp_path / "cloudtrain.yaml", environ={})
    printed = []
    for arguments in (["--steps", "100"], ["--steps", "120", *job.resume_args]):
        done = warmpython.run(["train.py", *arguments], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, 100)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert (job.keep, (tmp_path / "out" / "ckpt.pt").exists()) == (("out/",), True)
    assert [line.split()[1] for line in printed[1].splitlines()] == ["120/120"]


def test_init_names_the_written_files_and_the_next_commands(tmp_path: Path) -> None:
    """The output has the files and the commands."""
    output = init(tmp_path).output
    assert f"wrote {tmp_path / 'cloudtrain.yaml'}, {tmp_path / 'task.py'}" in output
    first, *rest = [line.split("#")[0].split()[:2] for line in output.partition("next:\n")[2].splitlines()[1:]]
    assert (first, len(rest)) == (["cloudtrain", "submit"], 2)


def test_init_overwrites_only_with_force(tmp_path: Path) -> None:
    """Without `--force` no file is written, and the message names the existing file."""
    (tmp_path / "task.py").write_text("mine")
    with pytest.raises(UsageError, match=r"already there: .*task\.py"):
        init(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["task.py"]
    init(tmp_path, "--force")
    assert "def model(" in (tmp_path / "task.py").read_text("utf-8")


def test_init_beside_an_own_script_writes_only_the_config(tmp_path: Path) -> None:
    """The script stays, the config is valid and without the starter's arguments; `--force` overwrites the script."""
    (tmp_path / "train.py").write_text("print('mine')\n")
    output = init(tmp_path, "--kind", "script").output
    assert f"wrote {tmp_path / 'cloudtrain.yaml'}\n" in output
    assert f"{tmp_path / 'train.py'} exists and is used" in output
    assert (tmp_path / "train.py").read_text() == "print('mine')\n"
    job = config.load(tmp_path / "cloudtrain.yaml", environ={})
    assert (job.script, job.args, job.keep, job.resume_args) == ("train.py", (), (), ())
    with pytest.raises(UsageError, match=r"already there: .*cloudtrain.yaml") as refused:
        init(tmp_path, "--kind", "script")
    assert f"`--force` overwrites {tmp_path / 'cloudtrain.yaml'} and {tmp_path / 'train.py'}" in str(refused.value)
    init(tmp_path, "--kind", "script", "--force")
    assert "def main(" in (tmp_path / "train.py").read_text("utf-8")


def test_next_commands_fit_the_project(tmp_path: Path) -> None:
    """A rehearsal comes first for a script, in 80 columns; an own script may be for a single process."""
    lines = init(tmp_path, "--kind", "script").output.partition("next:\n")[2].splitlines()
    assert (lines[1].split("#")[0].split(), max(map(len, lines[1:])) <= 80) == (["cloudtrain", "rehearse"], True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("print('mine')\n")
    lines = init(tmp_path / "own", "--kind", "script").output.partition("next:\n")[2].splitlines()
    assert [line.split("#")[0].strip() for line in lines if "submit" in line] == ["cloudtrain submit"]


@pytest.mark.parametrize("name", ["file/below", "x" * 300])
def test_init_refuses_a_folder_that_cannot_be_created(tmp_path: Path, name: str) -> None:
    """A folder that cannot be created is a usage error without a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        init(tmp_path / name)


@pytest.mark.parametrize(
    ("files", "given", "script"),
    [
        ("fit.py requirements.txt", "--kind script", "fit.py"),
        ("src/fit.py", "--kind script", "src/fit.py"),
        ("train.py util.py", "--kind script", "train.py"),
        ("a.py b.py", "b.py", "b.py"),
        ("a.py b.py", "--kind script", "which is the script? here are a.py, b.py"),
        ("a.py", "b.py", "there is no script b.py below this folder"),
        ("a.py", "../b.py", "there is no script ../b.py below this folder"),
    ],
)
def test_own_script_of_any_name_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, given: str, script: str
) -> None:
    """The config names the user's script, and no script of ours appears beside it; of several the user names one."""
    monkeypatch.chdir(tmp_path)
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("print('x')\n")
    if " " in script:
        with pytest.raises(UsageError, match=re.escape(script)):
            init(*given.split())
        return
    init(*given.split())
    job = config.load(tmp_path / "cloudtrain.yaml", environ={})
    assert (job.script, bool(job.requirements)) == (script, "requirements.txt" in files)
    assert len([*tmp_path.rglob("*.py")]) == files.count(".py")


@pytest.mark.parametrize("kind", KINDS)
def test_starters_show_each_cloud(tmp_path: Path, kind: str) -> None:
    """The commented blocks are valid without their comment marks."""
    init(tmp_path, "--kind", kind)
    file = tmp_path / "cloudtrain.yaml"
    above, below = file.read_text("utf-8").split("# ssh:")
    below = "\n".join(line.removeprefix("# ") for line in f"# ssh:{below}".splitlines() if "say also" not in line)
    above = above.replace("resources:\n  instances: 1\n", "").rpartition("# Where else")[0]
    file.write_text(above + below.replace("#\n", "\n"), "utf-8")
    job = config.load(file, environ={})
    assert all(getattr(job, block) is not None for block in ("ssh", "sagemaker", "azureml", "vertex", "budget"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_init_for_a_backend_writes_its_block_alone(
    tmp_path: Path, backend: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is valid and plans, also with the commented keys, and names no other backend."""
    output = init(tmp_path / "new", "--kind", kind, "--backend", backend).output
    assert f"cloudtrain doctor {backend}" in output
    file = tmp_path / "new/cloudtrain.yaml"
    text = file.read_text("utf-8")
    assert not [name for name in BACKENDS if name != backend and f"{name}:" in text]
    cli.cli.main(["plan", "--no-code", "-f", str(file)], standalone_mode=False)
    assert f"{backend}: 1 instance x 1 = 1 rank" in capsys.readouterr().out
    for each in (text, text.replace("\n  # ", "\n  ")):
        file.write_text(each)
        job = config.load(file, environ={})
        assert (job.backend, getattr(job, backend) is not None) == (backend, True)


@pytest.mark.parametrize("name", ["train.py", "cloudtrain.yaml"])
def test_replaced_file_is_kept_under_another_name(tmp_path: Path, name: str) -> None:
    """`--force` loses no text of the user, however often it is used."""
    for text in ("mine", "mine too"):
        (tmp_path / name).write_text(text)
        assert (
            f"{tmp_path / name} is kept as {name}.before-init" in init(tmp_path, "--kind", "script", "--force").output
        )
    init(tmp_path, "--kind", "script", "--force")
    assert sorted(file.read_text() for file in tmp_path.glob("*.before-init*")) == ["mine", "mine too"]
