"""The skill for coding agents: its form, its places, and its commands, run without a terminal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from docs.console import Step, steps

from cloudtrain.launcher.commands.init import SKILLS, command

ROOT = Path(__file__).resolve().parents[2]
SKILL = ROOT / "skills" / "cloudtrain" / "SKILL.md"


def test_skill_has_the_form_of_agent_skills() -> None:
    """Name and description begin the file, within the format's limits; the name is the folder's; the page is short."""
    _, head, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(head)
    assert (fields["name"], len(fields["description"]) <= 1024) == (SKILL.parent.name, True)
    assert set(fields) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert len(body.splitlines()) < 200


def test_init_writes_the_skill_and_no_project(tmp_path: Path) -> None:
    """Both folders get the repository's file; a changed file stays, unless --force is given, which keeps a copy."""
    places = [tmp_path / place / "cloudtrain" / "SKILL.md" for place in SKILLS]
    for _ in range(2):
        assert CliRunner().invoke(command, [str(tmp_path), "--skill"]).exit_code == 0
    assert {place.read_bytes() for place in places} == {SKILL.read_bytes()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".agents", ".claude"]
    places[0].write_text("mine")
    assert "already there" in str(CliRunner().invoke(command, [str(tmp_path), "--skill"]).exception)
    assert CliRunner().invoke(command, [str(tmp_path), "--skill", "--force"]).exit_code == 0
    assert places[0].with_name("SKILL.md.before-init").read_text() == "mine"


@pytest.mark.slow
def test_skill_commands_run_without_a_terminal(cli: Any, tmp_path: Path) -> None:
    """Each command ends with 0 or the code on the page; with --json, stdout has nothing but JSON."""
    folder = tmp_path / "agent"
    folder.mkdir()
    own = cli.environment({})
    environment = {**own, "PATH": f"{Path(sys.executable).parent}:{own['PATH']}"}
    commands = [step for step in steps(SKILL.read_text(encoding="utf-8")) if isinstance(step, Step)]
    codes = [after.shown[0] if after.command == "echo $?" else "0" for after in commands[1:]] + ["0"]
    for step, code in zip(commands, codes, strict=True):
        if step.command == "echo $?":
            continue
        done = subprocess.run(
            ["bash", "-c", step.command],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            start_new_session=True, timeout=120, check=False,
        )  # fmt: skip
        assert str(done.returncode) == code, (step.command, done.stdout, done.stderr)
        if "--json" in step.command and code != "124":  # of `wait`: no job has ended
            whole = "-n" not in step.command.split()  # `logs` prints a line of JSON for each line
            found = [json.loads(each) for each in ([done.stdout] if whole else done.stdout.splitlines())]
            assert found, step.command
