"""Jobs that run without a registry: each cloud's stand-in and two hosts know the jobs, and `adopt` adds them."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE
from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, REGION, SUBSCRIPTION, WORKSPACE
from doubles.google.handle import Google
from doubles.google.names import BUCKET, PROJECT
from doubles.google.names import REGION as GOOGLE_REGION
from doubles.sshhosts.cluster import Cluster

WHERE = f"subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}"
MACHINES = {"sagemaker": "ml.g5.xlarge", "azureml": "Standard_NC4as_T4_v3", "vertex": "n1-standard-4"}
BLOCKS = {
    "sagemaker": f'{{role: "{ROLE}", bucket: cloudtrain-tests}}',
    "azureml": f"{{{WHERE}, identity: managed}}",
    "vertex": f"{{project: {PROJECT}, location: {GOOGLE_REGION}, staging_bucket: {BUCKET}}}",
}

# Answers the preflight's queries, and sleeps instead of the training of a rank.
IDLE = """\
#!/bin/sh
export PYTHONPATH=/opt/bin
case "$*" in
*entrypoints.agent.boot*) exec sleep 600 ;;
"-I -S "*) exec {python} "$@" ;;
*) {python} "$@" | sed 's#{python}#/opt/bin/idle-python#' ;;
esac
"""


def forget(home: Path) -> None:
    """Delete only the registry in the home folder."""
    for path in home.glob("registry.sqlite*"):
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a project for the backend and returns its folder."""

    def write(backend: str) -> Path:
        folder = tmp_path / "project"
        folder.mkdir()
        (folder / "loop.py").write_text("print('x')\n")
        machine = f"{{instances: 2, instance_type: {MACHINES[backend]}}}"
        lines = ["name: j", f"backend: {backend}", "script: loop.py", f"resources: {machine}", "project: vision"]
        lines += ["limits: {max_duration: 1h}", f"{backend}: {BLOCKS[backend]}", ""]
        (folder / "cloudtrain.yaml").write_text("\n".join(lines))
        return folder

    return write


def adopted(run: Any, home: Path, folder: Path, backend: str) -> dict[str, Any]:
    """Send a job, delete the registry, find and adopt the job; return its status, with the registry's row before."""
    assert run("submit", "-d", "-y", "--name", "lost", cwd=folder).code == 0
    registry = Registry(home)
    before, held = registry.find("lost"), ledger.held(registry.database)
    registry.close()
    forget(home)
    assert "the registry does not know 1 running: lost" in run("doctor", backend, cwd=folder).stdout
    done = run("adopt", "-y", "--json", "--backend", backend, cwd=folder)
    assert (done.code, done.json["adopted"]) == (0, ["lost"]), done.stderr
    registry = Registry(home)
    after = registry.find("lost")
    assert (after.config, after.bundle, after.attempt.plan) == (before.config, before.bundle, before.attempt.plan)
    ours, theirs = dict(after.attempt.ref or {}), dict(before.attempt.ref or {})
    for key in ("sent_s", "doubtful_until_s", "studio"):  # of the poll; Azure sends the tenant only once
        ours.pop(key, None)
        theirs.pop(key, None)
    assert ours == theirs
    assert [(each.job_id, each.project, each.amount_micro) for each in ledger.held(registry.database)] == [
        (each.job_id, each.project, each.amount_micro) for each in held
    ]
    registry.close()
    assert "registry does not know" not in run("doctor", backend, cwd=folder).stdout
    found: dict[str, Any] = run("status", "lost", "--json", cwd=folder).json
    assert run("stop", "lost", "-y", cwd=folder).code == 0
    return found


@pytest.mark.soak  # test_job_of_a_different_home_is_adopted_only_by_name adopts from a cloud
def test_vertex_job_is_adopted(vertex: Any, google_project: Google, home: Path, folder: Callable[[str], Path]) -> None:
    """Row, handle and held money equal those of the submit."""
    google_project.settings(execute=False)
    found = adopted(vertex, home, folder("vertex"), "vertex")
    assert found["state"] in ("pending", "running")
    assert google_project.job("lost-1")["state"] in ("JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED")


@pytest.mark.soak
def test_azureml_job_is_adopted(cli: Any, azure_account: Azure, folder: Callable[[str], Path]) -> None:
    """Row, handle and held money equal those of the submit."""
    azure_account.settings(execute=False)
    found = adopted(replace(cli, preloaded=("azure.ai.ml",)), cli.home, folder("azureml"), "azureml")
    assert found["state"] in ("pending", "running")


@pytest.mark.parametrize("backend", [pytest.param("sagemaker", marks=pytest.mark.soak), "azureml", "vertex"])
def test_job_of_a_different_home_is_adopted_only_by_name(
    request: pytest.FixtureRequest, home: Path, folder: Callable[[str], Path], backend: str
) -> None:
    """Colleagues share an account: -y adopts no job of theirs; the owner of a lost home names the job."""
    fixtures = {"sagemaker": "account", "azureml": "azure_account", "vertex": "google_project"}
    request.getfixturevalue(fixtures[backend]).settings(execute=False)
    run, where = request.getfixturevalue("vertex" if backend == "vertex" else "cli"), folder(backend)
    assert run("submit", "-d", "-y", "--name", "lost", cwd=where).code == 0
    forget(home)
    (home / "identity").write_text("f" * 32)
    checks = run("doctor", backend, "--json", cwd=where).json[backend]
    assert "sent from other homes: lost" in json.dumps(checks)
    assert "registry does not know" not in json.dumps(checks)
    assert run("adopt", "-y", "--json", "--backend", backend, cwd=where).json["adopted"] == []
    assert run("adopt", "--json", "--backend", backend, "lost", cwd=where).json["adopted"] == ["lost"]
    assert run("status", "lost", "--json", cwd=where).json["state"] in ("pending", "running")
    assert run("stop", "lost", "-y", cwd=where).code == 0


@pytest.fixture
def hosts(ssh_pair: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a project for two hosts whose interpreters only sleep; connections end with the test."""
    ssh_pair.apply(monkeypatch)
    for host in ssh_pair.hosts:
        (host.bin / "idle-python").write_text(IDLE.format(python=sys.executable))
        (host.bin / "idle-python").chmod(0o755)
        (host.bin / "torch").mkdir()
        (host.bin / "torch/__init__.py").write_text("")
        (host.bin / "torch/version.py").write_text("__version__ = '2.9.0'\n")
    block = f'{{hosts: [h0, h1], ssh_config: "{ssh_pair.ssh_config}", python: idle-python}}'
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text("print('x')\n")
    text = f"name: j\nbackend: ssh\nscript: train.py\nresources: {{instances: 2}}\nssh: {block}\n"
    (tmp_path / "project/cloudtrain.yaml").write_text(text)
    yield tmp_path / "project"
    for pid in processes.with_environment(CLOUDTRAIN_HOME=str(home)):
        if b"ControlMaster=yes" in Path(f"/proc/{pid}/cmdline").read_bytes():
            processes.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_notes", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_ssh_job_is_adopted(cli: Any, hosts: Path, keeps_notes: bool) -> None:
    """The hosts' job folders hold the record: with notes in the home folder `adopt` needs no config, else a config."""
    assert cli("submit", "-d", "-y", "--name", "lost", cwd=hosts).code == 0
    forget(cli.home)
    if not keeps_notes:
        shutil.rmtree(cli.home / "ssh")
    where = cli.cwd if keeps_notes else hosts
    assert "the registry does not know 1 running: lost" in cli("doctor", "ssh", cwd=where).stdout
    done = cli("adopt", "-y", "--json", "--backend", "ssh", cwd=where)
    assert (done.code, done.json["adopted"]) == (0, ["lost"]), done.stderr
    assert cli("status", "lost", "--json").json["state"] in ("pending", "running")
    assert cli("stop", "lost", "--now", "-y").code == 0
    assert cli("wait", "lost").code == 9
