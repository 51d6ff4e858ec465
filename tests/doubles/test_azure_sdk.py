"""The unmodified azure-ai-ml submits jobs to Azure's stand-in."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import sandbox
from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, SUBSCRIPTION, WORKSPACE

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # many warnings of the SDK itself
    pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces"),
]

JOB = """\
type: command
experiment_name: tests
code: ./src
environment: {image: "mcr.microsoft.com/x:1"}
compute: azureml:cpu-cluster
distribution: {type: pytorch, process_count_per_instance: 1}
limits: {timeout: 60}
tags: {a: b}
"""


@pytest.fixture
def client(azure: Azure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return the SDK's client, signed in as a service principal."""
    from azure.ai.ml import MLClient
    from azure.identity import DefaultAzureCredential

    azure.apply(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    logging.getLogger("azure.ai.ml").setLevel(logging.ERROR)
    with DefaultAzureCredential() as credential:
        yield MLClient(credential, SUBSCRIPTION, GROUP, WORKSPACE, enable_telemetry=False)


@pytest.fixture
def submit(client: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that writes a job's file, loads it and submits it: `submit("name", "command", key=value)`."""
    from azure.ai.ml import load_job

    def create(name: str, command: str, **more: Any) -> Any:
        code = tmp_path / "src"
        code.mkdir(exist_ok=True)
        (code / "train.py").write_text("print('training')\n")
        (tmp_path / "job.yml").write_text(JOB)
        told = [{"name": name}, {"command": command}, *({key: value} for key, value in more.items())]
        return client.jobs.create_or_update(load_job(tmp_path / "job.yml", params_override=told))

    return create


def test_job_submitted_by_the_sdk_runs(azure: Azure, submit: Callable[..., Any]) -> None:
    """Each node runs in the code's folder, with its own log file; its files are in the datastore."""
    output = {"type": "uri_folder", "mode": "rw_mount", "path": "azureml://datastores/workspaceblobstore/paths/ck/j"}
    command = "python train.py; ls; echo $RANK of $WORLD_SIZE > ${{outputs.ckpt}}/$NODE_RANK"
    told = submit("j", command, outputs={"ckpt": output}, resources={"instance_count": 2})
    assert told.status == "Starting"
    assert [status for status, _ in azure.wait("j")["history"]] == [
        *("NotStarted", "Queued", "Preparing", "Starting", "Running", "Finalizing", "Completed")
    ]
    assert azure.log("j", "user_logs/std_log_process_0.txt") == "training\ntrain.py\n"
    assert azure.log("j", "user_logs/std_log_process_1.txt") == "training\ntrain.py\n"
    assert (azure.blob("ck/j/0"), azure.blob("ck/j/1")) == (b"0 of 2\n", b"1 of 2\n")
    assert azure.unserved() == []


def test_submit_makes_the_sdks_requests_in_order(azure: Azure, submit: Callable[..., Any]) -> None:
    """The calls have the SDK's order, and unchanged code is not uploaded again."""
    submit("j1", "true")
    assert [call["operation"] for call in azure.journal()] == [
        *("openid", "token", "codes.list", "codes.upload", "blob.head", "blob.put", "blob.metadata", "codes.put"),
        *("environments.put", "jobs.put"),
    ]
    azure.clear_journal()
    submit("j2", "true")
    assert [call["operation"] for call in azure.journal()] == [
        *("codes.list", "codes.get", "environments.put", "jobs.put")
    ]
