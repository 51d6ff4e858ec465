"""`export --for`: the files for a vendor's own tools, compared whole, and held to the vendors' own models."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend.model_files import ServedModel
from cloudtrain.launcher.config.schema import model
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import serving
from doubles.aws import validate

HERE = Path(__file__).parent
ROLE, ACCOUNT = "arn:aws:iam::111122223333:role/train", "a@my-project.iam.gserviceaccount.com"
SUBSCRIPTION = 8 * "0" + 3 * "-0000" + "-" + 12 * "0"
SETTINGS: dict[str, dict[str, Any]] = {
    "sagemaker": {"region": "cn-north-1", "role": ROLE, "subnets": ["subnet-0a1b"], "security_groups": ["sg-0a1b"]},
    "azureml": {"subscription": SUBSCRIPTION, "resource_group": "ml", "workspace": "research"},
    "vertex": {"project": "my-project", "location": "europe-west4", "service_account": ACCOUNT},
}
MACHINES = {"sagemaker": "ml.g5.xlarge", "azureml": "Standard_NC4as_T4_v3", "vertex": "g2-standard-8"}
DIGITS = ServedModel("digits", "0a1b2c3d4e5f", torch="2.13.0+cpu")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove what the machine's own AWS and gcloud would add."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))


def files(vendor: str, served: ServedModel = DIGITS, **block: Any) -> dict[str, str]:
    """Return the files for a model with the settings of the vendor's block."""
    data = {"name": "digits", "task": "task.py", vendor: block}
    backend = backends.load(vendor)
    assert isinstance(backend, backends.Serves)
    return dict(backend.serving(served, model(data).model_validate(data)).files)


def everything(vendor: str) -> dict[str, str]:
    """Return the files of a model that is not traced, on a machine with a GPU, with all settings."""
    served = ServedModel("digits", "12345e678901", MACHINES[vendor], "2.13.0+cu130", "requirements/serve.txt")
    return files(vendor, served, **SETTINGS[vendor])


@pytest.mark.parametrize("case", ["plain", "everything"])
@pytest.mark.parametrize("vendor", SETTINGS)
def test_files_equal_the_golden_file(vendor: str, case: str) -> None:
    """The golden file holds all files, one after the other."""
    found = files(vendor) if case == "plain" else everything(vendor)
    golden = HERE / "golden" / f"serving_{vendor}_{case}.txt"
    assert "".join(f"==> {name}\n{text}\n" for name, text in found.items()) == golden.read_text()


def test_requests_pass_botocores_model() -> None:
    """SageMaker's own limits, patterns and enumerations accept the requests."""
    found = everything("sagemaker")
    calls = {"create-model": "CreateModel", "create-endpoint": "CreateEndpoint"}
    for name, call in (*calls.items(), ("create-endpoint-config", "CreateEndpointConfig")):
        validate.check("sagemaker", call, json.loads(found[f"{name}.json"]))


def test_requests_are_googles_messages() -> None:
    """Google's own client reads the bodies, without an unknown field."""
    from google.cloud.aiplatform_v1 import types
    from google.protobuf import json_format

    found = everything("vertex")
    for name, message in (
        ("upload-model", types.UploadModelRequest),
        ("create-endpoint", types.Endpoint),
        ("deploy-model", types.DeployModelRequest),
    ):
        json_format.Parse(found[f"{name}.json"], message()._pb)


@pytest.mark.filterwarnings("ignore")  # of the SDK's own use of marshmallow
def test_files_are_those_of_azures_sdk(tmp_path: Path) -> None:
    """The SDK, which `az ml` calls, loads each file, and takes a version of digits around an `e` as text."""
    from azure.ai.ml import load_model, load_online_deployment, load_online_endpoint

    (tmp_path / "model").mkdir()
    for name, text in everything("azureml").items():
        (tmp_path / name).write_text(text)
    assert load_model(tmp_path / "model.yml").version == "12345e678901"
    endpoint = load_online_endpoint(tmp_path / "endpoint.yml")
    deployment = load_online_deployment(tmp_path / "deployment.yml")
    assert (deployment.endpoint_name, deployment.instance_type) == (endpoint.name, MACHINES["azureml"])
    assert deployment.model == "digits:12345e678901"


@pytest.mark.parametrize(
    ("vendor", "machine", "block", "key", "words"),
    [
        ("sagemaker", "g5-xlarge", {}, "--machine", "not a SageMaker instance type"),
        ("sagemaker", "ml.trn1.2xlarge", {}, "--machine", "Trainium"),
        ("sagemaker", None, {"role": "not-the-arn-of-any-role"}, "sagemaker.role", "ExecutionRoleArn"),
        ("sagemaker", None, {"subnets": ["a b"], "security_groups": ["sg"]}, "sagemaker.subnets", "create-model.json"),
        ("azureml", "NC4as T4 v3", {}, "--machine", "not an Azure machine size"),
        ("vertex", "ml.g5.xlarge", {}, "--machine", "ml.g5.xlarge"),
    ],
)
def test_refused_value_is_named(vendor: str, machine: str | None, block: dict[str, Any], key: str, words: str) -> None:
    """A value that the vendor would refuse is an error here, with the config's key or the option."""
    with pytest.raises(ConfigError) as raised:
        files(vendor, ServedModel("digits", "0a1b2c3d4e5f", machine), **block)
    (fault,) = raised.value.faults
    assert (fault.key, words in fault.message) == (key, True), fault


def test_machine_newer_than_the_table_is_a_note() -> None:
    """AWS adds types each month, so a well-formed unknown type passes, with a note."""
    data = {"name": "digits", "task": "task.py"}
    backend = backends.load("sagemaker")
    assert isinstance(backend, backends.Serves)
    found = backend.serving(ServedModel("digits", "0a1b2c3d4e5f", "ml.m99.large"), model(data).model_validate(data))
    (note,) = found.notes
    assert "--machine: create-endpoint-config.json: " in note
    assert "`ml.m99.large` is not in our table" in note


def test_image_has_the_packages_of_the_extra() -> None:
    """The Dockerfile and the extra of the server name the same packages."""
    project = (HERE.parents[1] / "pyproject.toml").read_text()
    assert f"= {json.dumps(serving.SERVER)}\n" in project
