"""Azure ML: the command job of a config, impossible configs, and the price."""

import base64
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.azureml import api, backend, files, machine
from cloudtrain.backends.azureml.api import AzureAccess
from cloudtrain.backends.azureml.backend import AzureMLBackend
from cloudtrain.backends.azureml.block import AzureML
from cloudtrain.backends.azureml.records import Workspace
from cloudtrain.entrypoints import foreign
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from doubles.azure.names import SUBSCRIPTION

HERE = Path(__file__).parent
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
WHERE = "subscription: 00000000-0000-0000-0000-000000000000, resource_group: ml, workspace: research, region: eastus"
NO_GPU = "resources.accelerators=null"

# The minimum for a job, and a config with all settings.
PLAIN = f"""
name: digits
backend: azureml
task: task.py
resources: {{instances: 2, accelerators: "A100:4"}}
training: {{global_batch_size: 64, max_steps: 100}}
azureml: {{{WHERE}}}
"""
EVERYTHING = """
name: digits
backend: azureml
task: task.py
params: {hidden: 128, note: "it's \\"quoted\\" $${{inputs.train}}"}
env: {NCCL_DEBUG: WARN}
secrets: [WANDB_API_KEY]
image: mcr.microsoft.com/azureml/openmpi5.0-cuda12.6-ubuntu24.04
resources: {instances: 2, instance_type: Standard_ND96isr_H100_v5, spot: true}
training: {global_batch_size: 64, max_steps: 100, tensorboard: true}
checkpoint: {uri: azureml://datastores/fast/paths/ck}
inputs: {train: azureml://datastores/data/paths/train, labels: https://acc.blob.core.windows.net/con/labels.csv}
outputs: {model: azureml://datastores/fast/paths/out}
limits: {max_duration: 12h}
budget: {limit: 5000 USD}
retry: {max_attempts: 3}
tags: {team: vision}
azureml:
  subscription: 00000000-0000-0000-0000-000000000000
  resource_group: ml
  workspace: research
  region: eastus
  conda: {dependencies: ["python=3.11", {pip: ["torch==2.8.0"]}]}
  experiment: nightly
  input_mode: download
  identity: managed
  services: [tensorboard, jupyter_lab]
  shm_gb: 64
  raw: {description: night run, environment_variables: {EXTRA: "1"}}
project: vision
"""

Render = Callable[..., Request]


def order(request: Request) -> dict[str, Any]:
    """Return the container order."""
    return json.loads(base64.b64decode(request.body["environment_variables"]["CLOUDTRAIN_ORDER"]))


@pytest.mark.parametrize(("name", "text"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_request_equals_the_golden_file(name: str, text: str, render: Render) -> None:
    """The whole request is compared, so every new or missing field shows; and Azure would accept the request."""
    golden = yaml.safe_load((HERE / "golden" / f"azureml_{name}.yml").read_text())
    request = render(text)
    body = {**request.body, "environment_variables": {**request.body["environment_variables"]}}
    assert order(request) == golden["environment_variables"].pop("CLOUDTRAIN_ORDER")
    body["environment_variables"].pop("CLOUDTRAIN_ORDER")
    assert body == golden
    assert AzureMLBackend().check(request) == []
    assert yaml.safe_load(request.text) == request.body
    assert next(iter(request.body)) == "$schema"
    assert render(text).text == request.text


def test_order_contains_no_characters_that_azure_expands(render: Render) -> None:
    """The request contains no quote and no `${{...}}` of a config, which Azure might expand."""
    request = render(EVERYTHING)
    assert order(request)["params"]["note"] == 'it\'s "quoted" ${{inputs.train}}'
    assert json.loads(request.files["order.json"]) == order(request)
    assert set("${}'\"") & set(request.body["environment_variables"]["CLOUDTRAIN_ORDER"]) == set()


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["azureml.subscription=abc"], "azureml.subscription", "`abc` is not a subscription id"),
        (["azureml.subscription=null"], "azureml.subscription", "no Azure subscription"),
        (["azureml.workspace=a/b"], "azureml.workspace", "cannot be part of an Azure id"),
        ([NO_GPU], "resources", "which machines"),
        (["resources.accelerators=B300:8"], "resources.accelerators", "no Azure machine"),
        (["resources.accelerators=MI300X:8"], "resources", "does not run on MI300X"),
        (
            [NO_GPU, "resources.instance_type=NC96ads A100-v4"],
            "resources.instance_type",
            "is not an Azure machine size",
        ),
        ([NO_GPU, "resources.instance_type=Standard_NX9_v9"], "resources.instance_type", "how many GPUs"),
        ([NO_GPU, "azureml.compute=gpus"], "azureml.compute", "not known here"),
        (["azureml.compute=gpus", "resources.spot=true"], "resources.spot", "the cluster's own"),
        (["inputs.train=/data/x"], "inputs.train", "cannot mount"),
        (
            ["outputs.a=azureml://datastores/a/paths/b", "outputs.b=azureml://datastores/a/paths/c"],
            "outputs",
            "one place",
        ),
        (["checkpoint.uri=s3://b/c"], "checkpoint.uri", "cannot mount"),
        (["inputs.train=azureml://datastores/data/train"], "inputs.train", "is not a path of a datastore"),
        (["inputs.train=abfss://Data@acc.dfs.core.windows.net/x"], "inputs.train", "`Data` is not a valid container"),
        (["inputs.train=azureml://datastores/a/paths/*.csv"], "inputs.train", "is a pattern"),
        (["inputs.train=azureml://registries/r/environments/e/versions/1"], "inputs.train", "reads data or a model"),
        (["outputs.a=azureml://locations/l/workspaces/w/data/d/versions/1"], "outputs.a", "a job writes none"),
        (["outputs.a=https://bkt.s3.amazonaws.com/x"], "outputs.a", "is not a host of Azure's blob storage"),
        (["checkpoint.uri=wasbs://c@acc.file.core.windows.net/x"], "checkpoint.uri", "is not a host of Azure's"),
        (["azureml.datastore=azureml://datastores/mine"], "azureml.datastore", "is not a datastore's name"),
        (["checkpoint.mirror=/mnt/nas"], "checkpoint.mirror", "end with the container"),
        (["checkpoint.resume=azureml://datastores/a/paths/b"], "checkpoint.resume", "its own checkpoints"),
        (["secrets=[TOKEN]"], "azureml.identity", "needs an identity"),
        (["azureml.environment=azureml:e:1", "image=x:1"], "azureml.environment", "exclude each other"),
        (["azureml.conda={dependencies: [pip]}"], "azureml.conda", "needs an `image`"),
        (["azureml.raw={limits: {timeout: 99}}"], "azureml.raw", "limits.timeout"),
        (["azureml.raw={tags: {cloudtrain.job: null}}"], "azureml.raw", "tags.cloudtrain.job"),
        (["azureml.raw={outputs: {checkpoints: null}}"], "azureml.raw", "outputs.checkpoints"),
    ],
    ids=str,
)
def test_impossible_config_is_refused(settings: list[str], key: str, words: str, render: Render) -> None:
    """Each fault is reported at its key, before any request."""
    with pytest.raises(ConfigError) as caught:
        render(PLAIN, *settings)
    [fault] = caught.value.faults
    assert (fault.key, words in fault.message, bool(fault.hint)) == (key, True, True), fault


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["limits.max_duration=30s"], "limits.max_duration"),
        (["limits.max_duration=30d"], "limits.max_duration"),
        (["azureml.environment=my-env"], "azureml.environment"),
        (["azureml.raw={resources: {shm_size: 16 GiB}}"], "azureml.shm_gb"),
        (["azureml.raw={queue_settings: {priority: 3}}"], "azureml.raw"),
        (["azureml.raw={inputs: {x: 1}}"], "inputs"),
        (["azureml.raw={environment: {image: 5}}"], "image"),
        (["azureml.raw={environment: {image: x, conda_file: {dependencies: 5}}}"], "azureml.conda"),
        (["azureml.raw={resorces: {}}"], "azureml.raw"),
    ],
    ids=str,
)
def test_request_that_azure_would_refuse_is_found_offline(settings: list[str], key: str, render: Render) -> None:
    """The check names the config's key."""
    assert key in [fault.key for fault in AzureMLBackend().check(render(PLAIN, *settings))]


def test_mirror_needs_no_mount(render: Render) -> None:
    """With a mirror in blob storage, the checkpoint folder is the container's own."""
    uri = "https://acc.blob.core.windows.net/ckpt/x"
    request = render(PLAIN, f"checkpoint.mirror={uri}")
    assert list(request.body["outputs"]) == ["output"]
    assert "checkpoints=" not in request.body["command"]
    assert order(request)["checkpoint"]["mirror"] == uri
    assert AzureMLBackend().check(request) == []


def test_checkpoints_belong_to_the_job_not_the_attempt(render: Render) -> None:
    """All attempts have the same place, so the next attempt can resume; the place contains no run's name."""
    path = render(PLAIN).body["outputs"]["checkpoints"]["path"]
    assert path == "azureml://datastores/workspaceblobstore/paths/cloudtrain/jobs/digits-abcde/checkpoints"
    assert render(PLAIN, "azureml.prefix=a/b/").body["outputs"]["checkpoints"]["path"] == path.replace(
        "cloudtrain", "a/b"
    )


@pytest.mark.parametrize(
    ("settings", "hourly", "idle_s", "words"),
    [
        ([], 14.692, 0, "list price"),
        (["azureml.region=westus2"], 14.692, 0, "list price"),
        (["azureml.region=null"], None, 0, "an unknown region"),
        (["azureml.compute=gpus"], 14.692, 120, "idles"),
        (["azureml.compute=gpus", "azureml.idle=10m"], 14.692, 600, "with 10m in which the cluster idles"),
        (["resources.spot=true"], 14.692, 0, "spot machines cost less"),
        (["azureml.price_per_hour=2.50 USD"], 2.5, 0, "azureml.price_per_hour"),
        (["azureml.compute=gpus", NO_GPU, "distributed.nproc_per_node=4"], None, 120, "the machines of gpus"),
    ],
    ids=str,
)
def test_price_of_a_machine(settings: list[str], hourly: float | None, idle_s: int, words: str, tmp_path: Path) -> None:
    """An unknown price is None, never 0; the source of the price is given."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text(PLAIN)
    config = configs.load(tmp_path / "cloudtrain.yaml", overrides=settings, environ={})
    found = AzureMLBackend().capacity(config)
    assert (found.hourly_usd, found.terms.tail_s, found.gpus) == (hourly, backend.CANCEL_S + idle_s, 4)
    assert words in found.price_source


def test_workspace_may_come_from_the_environment() -> None:
    """The subscription comes from AZURE_SUBSCRIPTION_ID if the config has none."""
    block = AzureML(resource_group="ml", workspace="research")
    found = machine.workspace_of(block, {"AZURE_SUBSCRIPTION_ID": SUBSCRIPTION})
    assert found.arm_id == (
        f"/subscriptions/{SUBSCRIPTION}/resourceGroups/ml/providers/Microsoft.MachineLearningServices/workspaces/research"
    )


def test_dry_run_is_input_for_az(cli: Any, project: Callable[..., Path]) -> None:
    """`-o` writes the file next to the code, as `az ml job create -f` uploads both; else a line says so."""
    folder = project(f"backend: azureml\nresources: {{accelerators: 'T4:1'}}\nazureml: {{{WHERE}}}\n")
    out = folder.parent / "out"
    done = cli.ok("submit", "--dry-run", "-o", out, cwd=folder)
    job = yaml.safe_load((out / "job.yml").read_text())
    assert yaml.safe_load(done.stdout) == job
    with tarfile.open(out / job["code"] / "bundle.tar.gz") as archive:
        assert "code/loop.py" in archive.getnames()
    told = cli("submit", "--dry-run", "--json", cwd=folder).json
    assert (told["request"], told["plan"]["ranks"]) == (job, 1)
    order = json.loads(base64.b64decode(job["environment_variables"]["CLOUDTRAIN_ORDER"]))
    assert told["decoded"] == {"CLOUDTRAIN_ORDER": order}
    shown = cli("submit", "--dry-run", cwd=folder).stderr
    first, plan = shown.split("\n", 1)  # the decoded order would fill more than a screen
    assert first == "CLOUDTRAIN_ORDER in the request is encoded; `-o DIR` writes it as text"
    assert "1 instance x 1 = 1 rank" in plan.splitlines()[0]
    assert plan.endswith("dry run: nothing was sent\n")
    assert json.loads((out / "order.json").read_text()) == order


@pytest.mark.parametrize(
    ("name", "is_safe"), [("a/b.txt", True), ("../x", False), ("/etc/x", False), ("a/../../x", False), ("a/", False)]
)
def test_blob_names_stay_below_the_folder(name: str, is_safe: bool) -> None:
    """Blob names may be anything, but a download must not leave its target folder."""
    assert foreign.is_inside(name) is is_safe


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"accountName": "acc", "containerName": "c"}, ("https://acc.blob.core.windows.net", "c")),
        ({"accountName": "acc", "filesystem": "f", "endpoint": "x"}, ("https://acc.blob.x", "f")),
        ({"datastoreType": "AzureFile", "accountName": "acc", "fileShareName": "s"}, None),
    ],
)
def test_datastores_of_all_kinds(
    told: dict[str, Any], place: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blob storage and Data Lake Gen2 name their container differently; different kinds are refused."""
    monkeypatch.setattr(api, "get_json", lambda *args, **more: {"properties": told})
    if place is not None:
        assert files.datastore_of(AzureAccess(Workspace("s", "g", "w")), "d") == place
        return
    with pytest.raises(ConfigError, match="is AzureFile, not blob storage"):
        files.datastore_of(AzureAccess(Workspace("s", "g", "w")), "d")


@pytest.mark.parametrize(
    ("backend", "written", "meant"),
    [("azureml", "Standard_ND96asr_v5", "Standard_ND96asr_v4"), ("sagemaker", "ml.p4d.24xlrge", "ml.p4d.24xlarge")],
)
def test_misspelt_machine_type_gets_the_similar_type(
    cli: Any, project: Any, backend: str, written: str, meant: str
) -> None:
    """The hint names a known machine before it names the number of ranks."""
    done = cli("validate", "--backend", backend, "--instance-type", written, cwd=project())
    assert (done.code, f"did you mean `{meant}`? else set distributed.nproc_per_node" in done.stderr) == (3, True)
