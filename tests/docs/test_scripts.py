"""The configs of docs/scripts.md are files of tests/scripts and serve all backends; each script survives a fault."""

import importlib.util
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cloudtrain.entrypoints import processes
from cloudtrain.launcher.backend_table import BUILT_IN
from cloudtrain.launcher.commands.submit import command
from doubles.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
NAMES = sorted(path.parent.name for path in SCRIPTS.glob("*/cloudtrain.yaml"))
ON_THE_PAGE = ["nanogpt", "trainer", "sft", "accelerate", "lightning", "fsdp2"]
BLOCK = re.compile(r"^```yaml\n(name: .*?)^```$", re.MULTILINE | re.DOTALL)

# Arguments for a run that lasts until a test ends the job, and the script's words when it continues from a checkpoint.
LONG = {
    "nanogpt": ("[--max_iters=1000000, --eval_interval=20]", r"Resuming training from out"),
    "multinode": ("['1000000', '1']", r"Resuming training from snapshot at Epoch \d"),
    "mingpt": ("[max_epochs=1000000, save_every=1]", r"Resuming training from snapshot at Epoch \d"),
    "imagenet": ("{epochs: 1000000}", r"loaded checkpoint 'checkpoint.pth.tar' \(epoch [1-9]"),
    "fsdp2": ("{steps: 1000000, save-every: 20}", r"resumed from step [1-9]"),
    "accelerate": ("{epochs: 1000000}", r"Resumed from checkpoint: .*/runs/epoch_\d"),
}
PACKAGES = {"accelerate": "accelerate"}
FORMS = ["nanogpt", *(pytest.param(name, marks=pytest.mark.soak) for name in LONG if name != "nanogpt")]


def test_page_shows_the_files() -> None:
    """The page has the configs of six scripts, each identical to its file; the machines and accounts of all once."""
    page = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    files = [(SCRIPTS / name / "cloudtrain.yaml").read_text(encoding="utf-8") for name in ON_THE_PAGE]
    own, machines = zip(*(file.split("\n\nresources: ") for file in files), strict=True)
    assert BLOCK.findall(page) == [f"{config}\n" for config in own]
    assert re.findall(r"^```yaml\nresources: (.*?)^```$", page, re.MULTILINE | re.DOTALL) == [*set(machines)]


@pytest.mark.parametrize("backend", BUILT_IN)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("home")
def test_config_serves_every_backend(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run renders each backend's request with every key; the local machine has no GPU to choose."""
    monkeypatch.chdir(SCRIPTS / name)
    done = CliRunner().invoke(command, ["--dry-run", "--backend", backend], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    ignored = [line for line in done.output.splitlines() if line.startswith("ignored on")]
    assert [line for line in ignored if not line.startswith("ignored on local: resources.accelerators")] == []


@pytest.fixture
def long_job(cli: Any, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that starts a script without an end, and returns the job once a checkpoint exists."""

    def start(name: str) -> str:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            pytest.skip(f"{PACKAGES[name]} is not installed")
        folder = shutil.copytree(SCRIPTS / name, tmp_path / name)
        own = ["--set", f"args={LONG[name][0]}", "--set", "requirements=null"]
        sent = cli.ok("submit", "-d", "--json", *own, cwd=folder)
        job = str(sent.json["job"])
        kept = cli.home / "local" / job / "checkpoints"
        last = ".metadata" if name == "fsdp2" else "[!.]*"  # the last file of a save
        until(lambda: any(path.is_file() for path in kept.rglob(last)), 120)
        return job

    return start


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_killed_rank_continues_from_the_scripts_checkpoint(name: str, cli: Any, long_job: Callable[[str], str]) -> None:
    """After kill -9 of a rank both ranks restart from the script's own file."""
    job = long_job(name)
    for pid in processes.with_environment(CLOUDTRAIN_JOB=job, RANK="1"):  # a warm rank has a proxy, which ends with it
        processes.kill(pid, signal.SIGKILL)
    said = LONG[name][1]
    cli.watch(re.match(r"[\w ]+", said)[0], "logs", "-f", job)  # type: ignore[index]
    assert cli("stop", job, "-y").code == 0
    assert cli("wait", job).code != 0
    assert re.search(said, cli("logs", job).stdout)
    status = cli("status", job, "--json").json
    assert (status["state"], status["restarts"], status["step"] is None) == ("stopped", 1, False)
    brought = cli("artifacts", job, "-o", "brought").stdout.splitlines()
    assert any(path.endswith((".pt", ".tar", ".distcp", ".bin", ".safetensors")) for path in brought)


@pytest.mark.slow
@pytest.mark.soak  # a killed rank continues from the same files: the test above
@pytest.mark.parametrize("name", LONG)
def test_resumed_script_continues_from_its_checkpoint(name: str, cli: Any, long_job: Callable[[str], str]) -> None:
    """After stop and resume the next attempt has the script's files in the working directory, and continues."""
    job = long_job(name)
    assert cli("stop", job, "-y").code == 0
    assert cli("wait", job).code != 0
    assert cli("resume", job, "-d", "-y", cwd=cli.cwd / name).code == 0
    said = LONG[name][1]
    cli.watch(re.match(r"[\w ]+", said)[0], "logs", "-f", job)  # type: ignore[index]
    assert cli("stop", job, "-y").code == 0
    cli("wait", job)
    assert re.search(said, cli("logs", job).stdout)
