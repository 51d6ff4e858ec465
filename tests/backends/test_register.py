"""`cloudtrain register` with the real SDKs: the requests fit the vendors' models, and a folder is one version."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from doubles.aws.handle import ROLE, Aws
from doubles.azure.handle import Azure
from doubles.azure.names import CONTAINER, GROUP, SUBSCRIPTION, WORKSPACE
from doubles.google.handle import Google
from doubles.google.names import BUCKET
from doubles.modelfolders import write_model

CONFIG = f"""\
name: j
backend: sagemaker
script: loop.py
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/serve:1
resources: {{instance_type: ml.g5.xlarge}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests}}
azureml: {{subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}}}
vertex: {{location: us-central1, staging_bucket: "gs://{BUCKET}"}}
"""
NO_IMAGE = ["--set", "image=null", "--set", "vertex.project=my-project"]
FILES = ["README.md", "check.json", "code/task.py", "config.json", "model.safetensors"]
# Registers the folder in the child processes of one interpreter, all at once: an interpreter takes a second to start.
TWENTY = """\
import functools, os, sys
from pathlib import Path
import boto3, botocore.session, google.auth.transport.requests, requests
from cloudtrain.launcher.models import registering
from cloudtrain.launcher.models.checked import checked_model
botocore.session.create_loader = functools.cache(botocore.session.create_loader)  # one copy of AWS's descriptions
target, store, count = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
if target == "sagemaker":
    boto3.client("sagemaker"), boto3.client("s3")
children = []
gate, opener = os.pipe()
for _ in range(count):
    if (child := os.fork()) == 0:
        os.close(opener)
        os.read(gate, 1)
        model = checked_model(Path("m"), None, None)
        registry = registering.registry_of(target, model, Path("cloudtrain.yaml"), (), store)
        version, is_new = registering.register(registry)
        os.write(1, f"{version}\\n".encode())
        os._exit(0)
    children.append(child)
os.close(opener)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.fixture
def model(folder: Path) -> Path:
    """Return a checked model folder `m` in the project's folder."""
    return write_model(folder / "m")


class _Mlflow(BaseHTTPRequestHandler):
    """MLflow's three calls, without idempotency, as the server has none."""

    models: dict[str, list[dict[str, Any]]]
    lock: threading.Lock
    refusal: int
    garbage: Any = None

    def do_GET(self) -> None:
        """Return all versions."""
        assert "/model-versions/search?filter=name%3D%27digits%27" in self.path
        self._answer(200, {"model_versions": [each for versions in self.models.values() for each in versions]})

    def do_POST(self) -> None:
        """Make a model or a version."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            if self.refusal:
                self._answer(self.refusal, {"error_code": "PERMISSION_DENIED", "message": "not you"})
            elif self.path.endswith("registered-models/create"):
                is_new = self.models.setdefault(body["name"], found := []) is found
                told = {} if is_new else {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "exists"}
                self._answer(200 if is_new else 400, told)
            else:
                versions = self.models[body["name"]]
                versions.append({**body, "version": str(len(versions) + 1)})
                self._answer(200, {"model_version": versions[-1]})

    def _answer(self, status: int, told: Any) -> None:
        data = json.dumps(told if self.garbage is None else self.garbage).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Mlflow]]:
    """Return an MLflow server's state; the command finds the server."""
    state = type("State", (_Mlflow,), {"models": {}, "lock": threading.Lock(), "refusal": 0})
    server = ThreadingHTTPServer(("127.0.0.1", 0), state)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}/")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def twenty(cli: Any, folder: Path, target: str, store: str = "") -> list[str]:
    """Register the folder `m` from 20 processes at once; return the versions that the processes printed."""
    command = [sys.executable, "-c", TWENTY, target, store, "20"]
    done = subprocess.run(command, cwd=folder, env=cli.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_sagemaker_gets_the_dry_runs_requests_once(cli: Any, folder: Path, account: Aws, model: Path) -> None:
    """The second register of a folder says so, and sends nothing; the checksums are uploaded last."""
    dry = cli("register", "m", "--to", "sagemaker", "--dry-run", cwd=folder).json
    assert account.journal("CreateModelPackage") == []
    first = cli("register", "m", "--to", "sagemaker", cwd=folder)
    again = cli("register", "m", "--to", "sagemaker", "--json", cwd=folder)
    assert (first.code, first.stdout, again.code) == (0, "digits/1\n", 0), first.stderr + again.stderr
    assert "with the metrics of `eval`: accuracy 0.9625" in first.stderr
    assert (again.json["version"], again.json["is_new"]) == ("digits/1", False)
    sent = [account.journal(request["call"])[0]["params"] for request in dry["requests"]]
    assert sent == [request["body"] for request in dry["requests"]]
    keys = [call["params"]["Key"] for call in account.journal("PutObject")]
    place = dry["upload"]["to"].removeprefix("s3://cloudtrain-tests/")
    assert keys == [place + name for name in [*FILES, "SHA256SUMS"]]
    package = sent[1]
    assert package["ModelMetrics"]["ModelQuality"]["Statistics"]["S3Uri"].endswith("/config.json")
    assert package["CustomerMetadataProperties"]["eval.accuracy"] == "0.9625"
    assert package["ModelApprovalStatus"] == "PendingManualApproval"


def test_another_folder_is_the_next_version(cli: Any, folder: Path, account: Aws, model: Path) -> None:
    """A name has several versions; the metrics of the split `test` win, and are called so."""
    write_model(folder / "m2", test={"accuracy": 0.94})
    assert cli("register", "m", "--to", "sagemaker", cwd=folder).stdout == "digits/1\n"
    done = cli("register", "m2", "--to", "sagemaker", cwd=folder)
    assert (done.stdout, "metrics of `test`: accuracy 0.94" in done.stderr) == ("digits/2\n", True), done.stderr
    metadata = account.journal("CreateModelPackage")[-1]["params"]["CustomerMetadataProperties"]
    assert {"test.accuracy": "0.94"}.items() <= metadata.items()
    assert not any(key.startswith("eval") for key in metadata)
    write_model(folder / "m3", test={"accuracy": 0.99}, same=True)
    done = cli("register", "m3", "--to", "sagemaker", "--name", "other", cwd=folder)
    assert (done.stdout, "metrics of `eval`" in done.stderr) == ("other/1\n", True), done.stderr


def test_lost_answer_makes_no_second_version(cli: Any, folder: Path, account: Aws, model: Path) -> None:
    """The client's token makes the SDK's retry the same version."""
    account.fault("CreateModelPackage", "lost", count=1)
    assert cli("register", "m", "--to", "sagemaker", cwd=folder).stdout == "digits/1\n"
    assert len(account.journal("CreateModelPackage")) == 2
    assert [each["ModelPackageVersion"] for each in packages(account)] == [1]


def packages(aws: Aws) -> list[dict[str, Any]]:
    """Return the versions of `digits`."""
    found = aws.client("sagemaker").list_model_packages(ModelPackageGroupName="digits")
    return list(found["ModelPackageSummaryList"])


def test_twenty_processes_make_one_version_at_sagemaker(cli: Any, folder: Path, account: Aws, model: Path) -> None:
    """All 20 print the same version."""
    assert twenty(cli, folder, "sagemaker") == ["digits/1"] * 20
    assert [each["ModelPackageVersion"] for each in packages(account)] == [1]


def test_azure_gets_the_dry_runs_request(cli: Any, folder: Path, azure_account: Azure, model: Path) -> None:
    """The version is the beginning of the digest; the files are in the workspace's datastore."""
    dry = cli("register", "m", "--to", "azureml", "--dry-run", cwd=folder).json
    first, again = (cli("register", "m", "--to", "azureml", cwd=folder) for _ in range(2))
    assert (first.code, again.code, first.stdout) == (0, 0, again.stdout), first.stderr + again.stderr
    assert "has this folder already" in again.stderr
    (put,) = azure_account.journal("models.put")
    ((call, body),) = ((request["call"], request["body"]) for request in dry["requests"])
    assert (f"PUT {put['path']}", put["body"]) == (call, body)
    prefix = f"cloudtrain/models/digits/{first.stdout.strip().partition(':')[2]}/"
    assert prefix in dry["upload"]["to"]
    assert blobs(azure_account, prefix) == [*FILES, "SHA256SUMS"]


def blobs(azure: Azure, prefix: str) -> list[str]:
    """Return the names of uploaded blobs below a prefix, in the order of the uploads."""
    start = f"/{CONTAINER}/{prefix}"
    paths = [call["path"] for call in azure.journal() if call["operation"] == "blob.put"]
    return [path.removeprefix(start) for path in paths if path.startswith(start)]


def test_twenty_processes_make_one_version_at_vertex(
    cli: Any, folder: Path, google_project: Google, model: Path
) -> None:
    """An upload has no request id, so a mark in the bucket admits one process at a time."""
    dry = cli("register", "m", "--to", "vertex", "--dry-run", cwd=folder).json
    assert twenty(cli, folder, "vertex") == ["digits@1"] * 20
    (sent,) = google_project.journal("models.upload")
    assert sent["body"] == dry["requests"][0]["body"]
    write_model(folder / "m2", step=80)
    done = cli("register", "m2", "--to", "vertex", cwd=folder)
    assert done.stdout == "digits@2\n", done.stderr
    assert google_project.journal("models.upload")[1]["body"]["parentModel"].endswith("/models/digits")


def test_twenty_processes_make_one_version_at_mlflow(
    cli: Any, folder: Path, mlflow: type[_Mlflow], model: Path, tmp_path: Path
) -> None:
    """MLflow repeats nothing by itself; the files are in the named store, and the tags name the split."""
    assert twenty(cli, folder, "mlflow", str(tmp_path / "store")) == ["digits/1"] * 20
    (version,) = mlflow.models["digits"]
    assert {"key": "eval.accuracy", "value": "0.9625"} in version["tags"]
    assert (Path(version["source"]) / "SHA256SUMS").read_bytes() == (model / "SHA256SUMS").read_bytes()
    assert list(Path(version["source"]).parent.glob("*.registering")) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"x"), "model.safetensors is damaged"),
        (lambda path: (path / "SHA256SUMS").unlink(), "is no model folder"),
        (lambda path: (path / "more").write_text("x"), "which SHA256SUMS does not list"),
    ],
    ids=["changed", "no sums", "additional"],
)
def test_damaged_folder_is_refused(
    cli: Any, folder: Path, model: Path, change: Callable[[Path], object], said: str
) -> None:
    """Every byte is verified before anything is sent."""
    change(model)
    done = cli("register", "m", "--to", "sagemaker", cwd=folder)
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (3, True, False), done.stderr


@pytest.mark.parametrize(("passed", "said"), [(False, "its check failed"), (None, "was not checked")])
def test_folder_without_a_passed_check_is_refused(cli: Any, folder: Path, passed: bool | None, said: str) -> None:
    """Only a folder that is proven to be the trained model comes into a registry."""
    write_model(folder / "m", passed=passed)
    done = cli("register", "m", "--to", "mlflow", "--dry-run", cwd=folder)
    assert (done.code, said in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--to", "local"], 2, "local has no registry of models"),
        (["--to", "sagmaker"], 2, "did you mean `sagemaker`?"),
        (["--to", "sagemaker", "--name", "A b"], 2, "cannot name a model"),
        (["--to", "sagemaker", "--store", "s3://x/y"], 2, "--store is for mlflow"),
        (["--to", "mlflow"], 3, "no MLflow server"),
        (["--to", "vertex", *NO_IMAGE], 3, "without a container image"),
        (["--to", "sagemaker", "--set", "sagemaker.role=null"], 3, "no execution role"),
    ],
)
def test_bad_input_is_a_clear_error(cli: Any, folder: Path, model: Path, args: list[str], code: int, said: str) -> None:
    """A wrong registry, name, store or setting is named, without a traceback."""
    done = cli("register", "m", *args, "--dry-run", cwd=folder)
    assert (done.code, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_mlflow_refusal_is_a_clear_error(cli: Any, folder: Path, mlflow: type[_Mlflow], model: Path) -> None:
    """A refused login names the variables; no version is made."""
    mlflow.refusal = 403
    done = cli("register", "m", "--to", "mlflow", "--store", str(folder / "store"), cwd=folder)
    assert (done.code, "MLFLOW_TRACKING_TOKEN" in done.stderr, mlflow.models) == (4, True, {}), done.stderr


@pytest.mark.parametrize(("refusal", "garbage"), [(0, {}), (0, []), (0, {"model_versions": 3}), (400, [1]), (500, 5)])
def test_unexpected_answer_of_mlflow_is_a_clear_error(
    cli: Any, folder: Path, mlflow: type[_Mlflow], model: Path, refusal: int, garbage: Any
) -> None:
    """An answer in another form, as of a proxy, ends without a traceback."""
    mlflow.refusal, mlflow.garbage = refusal, garbage
    done = cli("register", "m", "--to", "mlflow", "--store", str(folder / "store"), cwd=folder)
    assert (done.code in (3, 7), "MLflow" in done.stderr, "itself failed" in done.stderr) == (True, True, False), done
