"""The front page: its order, its length, and its commands, run as a reader types them."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from docs.console import Session, Step, missing, steps

from cloudtrain.launcher.backend_table import BUILT_IN
from cloudtrain.launcher.commands.submit import command

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SECTIONS = ["A first run", "Your own script", "Backends", "Compared with other launchers", "More", "Development"]
MAX_LINES, FIRST_RUN_LINES, SCRIPT_LINES, BLOCK_LINES, SCREEN_LINES = 190, 5, 10, 3, 40
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the script, its data, and the README's config with all blocks."""
    folder = tmp_path / "reader"
    folder.mkdir()
    shutil.copy(ROOT / "tests/scripts/nanogpt/train.py", folder)
    (folder / "data").mkdir()
    shutil.copy(ROOT / "tests/scripts/nanogpt/train.py", folder / "data/input.txt")
    (folder / "cloudtrain.yaml").write_text("".join(YAML.findall(README.read_text(encoding="utf-8"))))
    return folder


def test_front_page_is_short_and_in_order() -> None:
    """The sections have their order; the page, the first run, the script and each backend's block are short."""
    text = README.read_text(encoding="utf-8")
    script, *blocks = (block.splitlines() for block in YAML.findall(text))
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split("\n## ")[0].splitlines()) <= SCREEN_LINES  # file, command, proof and status: the first screen
    assert [len(block.splitlines()) for block in BASH.findall(text)] == [FIRST_RUN_LINES]
    assert len(script) <= SCRIPT_LINES
    assert [block[0].split(":")[0] for block in blocks] == list(BUILT_IN)[1:]
    assert all(len(block) <= BLOCK_LINES for block in blocks)


@pytest.mark.parametrize("backend", BUILT_IN)
@pytest.mark.usefixtures("home")
def test_readme_config_has_a_dry_run_on(backend: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of each backend is complete: request and price need no other key."""
    monkeypatch.chdir(project)
    done = CliRunner().invoke(command, ["--dry-run", "--backend", backend], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_readme_commands_run(project: Path, cli: Any) -> None:
    """First run (all lines after the installation) and own script end with 0 and print the lines of the page."""
    text = README.read_text(encoding="utf-8")
    lines = BASH.findall(text)[0].splitlines()
    own = {**cli.environment({}), "PATH": f"{Path(sys.executable).parent}:{cli.environment({})['PATH']}"}
    first = Session(project, own)
    for line in lines[2:]:
        assert (first.run(line), first.code)[1] == 0, line
    session = Session(project, own)
    for step in steps(text):
        if isinstance(step, Step):
            printed = session.run(step.command)
            assert session.code == 0, (step.command, *printed)
            assert missing(step.shown, printed) is None, (step.command, printed)
