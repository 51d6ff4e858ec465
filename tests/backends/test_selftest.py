"""`cloudtrain selftest` end to end: on this machine, over a real sshd and on a real Slurm."""

import itertools
import json
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Cli
from wholejobs import SETTINGS, STAND_INS

from cloudtrain.launcher.commands import selftest
from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.selftest import planned
from cloudtrain.launcher.store.registry import Registry
from doubles.slurm.handle import Slurm

NO_RECORD = {"the backend has no record beside our own"}
LIMIT_S = 16  # of the second job, whose ranks start at once here


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the second job on this machine a shorter time limit."""
    folder = tmp_path / "templates"
    shutil.copytree(str(planned.TEMPLATES), folder)
    (folder / "backends.yaml").write_text(f"local: {{limit: {LIMIT_S}s}}\n")
    monkeypatch.setattr(planned, "TEMPLATES", folder)
    return tmp_path


@pytest.mark.slow
def test_life_on_this_machine_is_as_expected(quick: Path, home: Path) -> None:
    """Each step comes as expected, no step names a place of the user, and no job, file or process is left."""
    (quick / "cloudtrain.yaml").write_text("backend: local\nlocal: {price_per_hour: 0.10 USD}\n")
    path = quick / "report.json"
    done = CliRunner().invoke(selftest.command, ["-f", str(quick / "cloudtrain.yaml"), "-y", "-o", str(path)])
    report = json.loads(path.read_text())
    rows = {row["step"]: row for row in report["steps"]}
    assert {row["came"].get("why") for row in rows.values() if row["verdict"] != "ok"} == NO_RECORD, done.output
    assert list(rows) == list(planned.read("steps.yaml")["steps"])
    assert (rows["bill"]["came"]["micro"] > 0, rows["losses"]["came"]["compared"] > 20) == (True, True)
    assert "The selftest" not in done.output
    assert str(quick) not in path.read_text()
    assert not Registry(home).jobs()
    assert not list((home / "local").iterdir())


@pytest.mark.slow
def test_wait_for_a_partition_is_told_and_ended_by_a_signal(slurm: Slurm, cli: Cli, tmp_path: Path) -> None:
    """A warning of the doctor and the cause of the wait are shown at once; SIGTERM removes the job, as Ctrl-C does."""
    (tmp_path / "cloudtrain.yaml").write_text(SETTINGS["slurm"])
    slurm.admin("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        process = cli.start("selftest", "slurm", env=slurm.environ)
        assert process.stderr is not None
        said = list(itertools.takewhile(lambda line: "waits, as the partition is down" not in line, process.stderr))
        process.send_signal(signal.SIGTERM)
        rest = process.communicate()[1]
    finally:
        slurm.admin("scontrol", "update", "PartitionName=main", "State=UP")
    assert "warning: partition: main takes no jobs now" in "".join(said)
    assert (process.returncode, "ok           cleaning" in rest) == (130, True), rest
    assert slurm.ssh("squeue --noheader").stdout == ""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ssh", "slurm"])
def test_life_on_other_machines_is_as_expected(
    backend: str, cli: Cli, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each step comes as expected on two hosts, and on two nodes of a partition."""
    stand_in = request.getfixturevalue(STAND_INS[backend])
    (tmp_path / "cloudtrain.yaml").write_text(SETTINGS[backend])
    done = cli("selftest", "-y", "--json", env=stand_in.environ, timeout_s=380)
    rows = {row["step"]: row for row in done.json["steps"]}
    assert {row["came"].get("why") for row in rows.values() if row["verdict"] != "ok"} == NO_RECORD, done.stderr
    assert done.code == 0
    assert cli.ok("list", "--all", "--json").json["jobs"] == []


@pytest.mark.parametrize(("backend", "fixture"), [("sagemaker", "account"), ("azureml", "azure_account")])
def test_price_of_the_small_machine_is_read_from_the_vendor(
    backend: str, fixture: str, request: pytest.FixtureRequest, home: Path, tmp_path: Path
) -> None:
    """The worst case is known by one command; the price is kept; without an answer of the vendor, nothing is sent."""
    double = request.getfixturevalue(fixture)
    double.settings(**{"price_damage": "truncated"} if backend == "sagemaker" else {"price_currency": "EUR"})
    (tmp_path / "cloudtrain.yaml").write_text(SETTINGS[backend].replace("azureml: {", "azureml: {region: eastus, "))
    command = [backend, "-f", str(tmp_path / "cloudtrain.yaml"), "--budget", "0.01USD"]
    refused = CliRunner().invoke(selftest.command, command).exception
    assert isinstance(refused, BudgetError)
    assert "what the selftest may cost is not known: no price of" in refused.message
    assert f"cloudtrain prices refresh --backend {backend} --type " in refused.hint
    double.settings(**{"price_damage": ""} if backend == "sagemaker" else {"price_currency": "USD"})
    above = CliRunner().invoke(selftest.command, command)
    assert "the selftest may cost up to" in str(above.exception)
    assert ("price: " in above.output, "; kept for plans" in above.output) == (True, True)
    assert (home / "prices.csv").exists()
