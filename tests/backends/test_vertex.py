"""Vertex AI: the custom job of a config, impossible configs, and the price."""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.vertex import machine, request
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.backends.vertex.block import Vertex
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError

HERE = Path(__file__).parent
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
WHERE = "project: my-project, location: us-central1, staging_bucket: gs://my-bucket"
NO_GPU = "resources.accelerators=null"

# The minimum for a job, and a config with all settings.
PLAIN = f"""
name: digits
backend: vertex
task: task.py
resources: {{instances: 2, accelerators: "A100:8"}}
training: {{global_batch_size: 64, max_steps: 100}}
vertex: {{{WHERE}}}
"""
EVERYTHING = """
name: digits
backend: vertex
script: train.py
args: {note: "it's \\"quoted\\" $(HOME)"}
env: {NCCL_DEBUG: WARN}
secrets: [WANDB_API_KEY]
image: europe-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest
resources: {instances: 4, instance_type: a3-ultragpu-8g, disk_gb: 500}
checkpoint: {uri: gs://fast/ck}
inputs: {train: gs://data/train, labels: gs://data/labels.csv}
outputs: {model: gs://fast/out}
limits: {max_duration: 12h, max_wait: 2h}
budget: {limit: 500 USD}
retry: {max_attempts: 3}
tags: {team: vision, Cost Centre: "R&D 7"}
vertex:
  project: my-project
  location: europe-west4
  staging_bucket: my-bucket
  prefix: teams/vision
  service_account: train@my-project.iam.gserviceaccount.com
  scheduling: flex_start
  network_attachment: projects/my-project/regions/europe-west4/networkAttachments/a
  kms_key: projects/my-project/locations/europe-west4/keyRings/k/cryptoKeys/c
  tensorboard: projects/my-project/locations/europe-west4/tensorboards/1
  web_access: true
  input_mode: download
  price_per_hour: 50 USD
  endpoints: {storage: "https://storage-x.p.googleapis.com"}
  raw: {labels: {extra: "1"}, jobSpec: {enableDashboardAccess: true}}
project: vision
"""

DISK = 100 * 0.1955 / 730  # the default disk, an hour

Render = Callable[..., Request]


def without_boot(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without the boot program, which has its own tests."""
    told = yaml.safe_load(yaml.safe_dump(body))
    for pool in told["jobSpec"]["workerPoolSpecs"]:
        if "containerSpec" in pool:
            assert pool["containerSpec"]["command"].pop() == request.boot_source()
        else:
            [uri] = pool["pythonPackageSpec"]["packageUris"]
            pool["pythonPackageSpec"]["packageUris"] = [uri.replace(wheel_digest(), "DIGEST")]
    return told  # type: ignore[no-any-return]


def wheel_digest() -> str:
    """Return the name of the boot's package in the bucket."""
    return hashlib.sha256(request.wheel(request.boot_source())[1]).hexdigest()


def test_dry_run_shows_the_boot_program_once(render: Render) -> None:
    """Both pools have the program: the text has an alias in the second, and a file for gcloud has the whole text."""
    made = render(PLAIN)
    assert len(made.body["jobSpec"]["workerPoolSpecs"]) == 2
    assert (made.text.count("# Fetches a job's code"), yaml.safe_load(made.text)) == (1, made.body)
    assert made.files["job-spec.yml"].count("# Fetches a job's code") == 2


@pytest.mark.parametrize(("name", "text"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_request_equals_the_golden_file(name: str, text: str, render: Render) -> None:
    """The whole request is compared, so every new or missing field shows; Google's client and our check accept it."""
    golden = yaml.safe_load((HERE / "golden" / f"vertex_{name}.yml").read_text())
    made = render(text)
    assert {"request": without_boot(made.body), "order": made.sending["order"]} == golden
    assert VertexBackend().check(made) == []
    from google.cloud.aiplatform_v1.types import (
        CustomJob,
    )  # takes seconds, and each worker of a session collects this file
    from google.protobuf import json_format

    json_format.ParseDict(made.body, CustomJob.pb(CustomJob()))
    assert yaml.safe_load(made.text) == made.body
    assert render(text).text == made.text


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["vertex.project=null"], "vertex.project", "no Google Cloud project"),
        (["vertex.location=us-central1-a"], "vertex.location", "is not a region"),
        (["vertex.location=us-central-1"], "vertex.location", "did you mean `us-central1`?"),
        (["vertex.staging_bucket=null"], "vertex.staging_bucket", "no bucket"),
        (["vertex.staging_bucket=s3://x"], "vertex.staging_bucket", "is not a bucket name"),
        (["vertex.staging_bucket=Gs://X"], "vertex.staging_bucket", "is not a bucket name"),
        ([NO_GPU], "resources", "which machines"),
        (["resources.accelerators=B300:8"], "resources.accelerators", "no accelerator"),
        (["resources.accelerators=H100:3"], "resources.accelerators", "no machine of Google's"),
        (["resources.accelerators=T4:2", "vertex.machine_type=a2-highgpu-1g"], "vertex.machine_type", "has 1 x"),
        (["resources.accelerators=T4:3", "vertex.machine_type=n1-standard-8"], "vertex.machine_type", "takes"),
        (
            ["resources.accelerators=T4:1", "vertex.machine_type=n1-standrd-4"],
            "vertex.machine_type",
            "did you mean `n1-standard-4`?",
        ),
        ([NO_GPU, "resources.instance_type=p4d"], "resources.instance_type", "not a Google machine type"),
        ([NO_GPU, "resources.instance_type=ct5lp-hightpu-4t"], "resources.instance_type", "has TPUs"),
        ([NO_GPU, "resources.instance_type=z9-highgpu-8g"], "resources.instance_type", "not in our table"),
        ([NO_GPU, "resources.instance_type=a2-highgpu-8"], "resources.instance_type", "did you mean `a2-highgpu-8g`?"),
        (
            [NO_GPU, "resources.instance_type=a2-highgpu-8g", "vertex.machine_type=a2-highgpu-1g"],
            "vertex.machine_type",
            "says",
        ),
        (["resources.spot=true", "vertex.scheduling=flex_start"], "resources.spot", "one way"),
        (["vertex.reservation=projects/p/zones/z/reservations/r", "resources.spot=true"], "resources.spot", "one way"),
        (["inputs.train=s3://b/x"], "inputs.train", "is elsewhere"),
        (["inputs.train=gs://b/data"], "inputs.train", "`b` is not a bucket name"),
        (["inputs.train=gs://bkt/[ab].csv"], "inputs.train", "is a pattern"),
        (["inputs.train=https://storage.googleapis.com/bkt/x"], "inputs.train", "is not an address of the form gs://"),
        (["outputs={a: gcs://bkt/x}"], "outputs.a", "is not an address of the form gs://"),
        (["checkpoint.uri=gs://goog-x/x"], "checkpoint.uri", "is not a bucket name"),
        (["vertex.staging_bucket=arn:aws:s3:::b"], "vertex.staging_bucket", "is not a bucket name"),
        (["outputs.a=gs://bb1/a", "outputs.b=gs://bb1/b"], "outputs", "one place"),
        (["checkpoint.uri=/mnt/x"], "checkpoint.uri", "is elsewhere"),
        (["checkpoint.mirror=/mnt/nas"], "checkpoint.mirror", "would end with it"),
        (["checkpoint.mirror=gs://bb1/a", "checkpoint.uri=gs://bb1/b"], "checkpoint.mirror", "same thing"),
        (["checkpoint.resume=gs://bb1/a"], "checkpoint.resume", "its own checkpoints"),
        (["vertex.endpoints={logging: http://logs.corp}"], "vertex.endpoints", "token"),
        (["vertex.endpoints={loging: https://logs.corp}"], "vertex.endpoints", "not a service"),
        (["vertex.raw={displayName: x}"], "vertex.raw", "displayName"),
        (["vertex.raw={jobSpec: {scheduling: {timeout: 99s}}}"], "vertex.raw", "jobSpec.scheduling.timeout"),
        (["vertex.raw={jobSpec: {workerPoolSpecs: []}}"], "vertex.raw", "machines"),
        (["vertex.raw={labels: {cloudtrain_run: x}}"], "vertex.raw", "cloudtrain_run"),
        (["vertex.raw={labels: x}"], "vertex.raw", "cloudtrain_run"),
        (["vertex.raw={jobSpec: {persistentResourceId: mine}}"], "vertex.raw", "persistentResourceId"),
    ],
    ids=str,
)
def test_impossible_config_is_refused(settings: list[str], key: str, words: str, render: Render) -> None:
    """Each fault is reported at its key, before any request."""
    with pytest.raises(ConfigError) as caught:
        render(PLAIN, *settings)
    [fault] = caught.value.faults
    assert (fault.key, words in f"{fault.message} {fault.hint}", bool(fault.hint)) == (key, True, True), fault


def test_raw_adds_no_machines_outside_the_price(render: Render) -> None:
    """Larger disks are refused too; without a known price, users may add their own pool after ours."""
    ours, unknown = render(PLAIN).body["jobSpec"]["workerPoolSpecs"], "vertex.location=me-central2"
    more = [*ours, {"replicaCount": 20, "machineSpec": {"machineType": "a2-highgpu-8g"}}]
    larger = [{**pool, "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 9000}} for pool in ours]
    for pools, words in ((more, "adds machines"), (larger, "changes the machines, their number, disks")):
        raw = f"vertex.raw={json.dumps({'jobSpec': {'workerPoolSpecs': pools}})}"
        with pytest.raises(ConfigError, match=words):
            render(PLAIN, raw)
    raw = f"vertex.raw={json.dumps({'jobSpec': {'workerPoolSpecs': more}})}"
    assert len(render(PLAIN, unknown, raw).body["jobSpec"]["workerPoolSpecs"]) == 3


@pytest.mark.parametrize("raw", ["{jobSpec: null}", "{jobSpec: 5}", "{jobSpec: {workerPoolSpecs: [5, {}]}}"])
def test_invalid_raw_is_a_fault_and_no_traceback(raw: str, render: Render) -> None:
    """Any value may replace a rendered part."""
    with pytest.raises(ConfigError, match="`raw` changes"):
        render(PLAIN, f"vertex.raw={raw}")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["limits.max_duration=30d", "vertex.scheduling=flex_start"], "limits.max_duration"),
        (["vertex.boot_disk_type=floppy"], "vertex.boot_disk_type"),
        (["vertex.network=default"], "vertex.network"),
        (["vertex.tensorboard=projects/p/locations/us-central1/tensorboards/1"], "vertex.service_account"),
        (["vertex.raw={jobSpec: {nework: x}}"], "vertex.raw"),
        (["vertex.raw={labels: {Bad: x}}"], "tags"),
    ],
    ids=str,
)
def test_request_that_vertex_would_refuse_is_found_offline(settings: list[str], key: str, render: Render) -> None:
    """The check names the config's key."""
    assert key in [fault.key for fault in VertexBackend().check(render(PLAIN, *settings))]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], ("a2-highgpu-8g", "NVIDIA_TESLA_A100", 8, "pd-ssd", None)),
        (["resources.accelerators=H200:8"], ("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8, "hyperdisk-balanced", None)),
        (["resources.accelerators=T4:2"], ("n1-standard-4", "NVIDIA_TESLA_T4", 2, "pd-ssd", None)),
        (
            ["resources.accelerators=T4:2", "vertex.machine_type=n1-standard-16", "resources.spot=true"],
            ("n1-standard-16", "NVIDIA_TESLA_T4", 2, "pd-ssd", "SPOT"),
        ),
        ([NO_GPU, "resources.instance_type=n1-standard-8"], ("n1-standard-8", None, None, "pd-ssd", None)),
        (
            ["vertex.scheduling=flex_start", "vertex.boot_disk_type=pd-standard"],
            ("a2-highgpu-8g", "NVIDIA_TESLA_A100", 8, "pd-standard", "FLEX_START"),
        ),
    ],
    ids=str,
)
def test_machines_follow_from_the_settings(settings: list[str], expected: tuple[Any, ...], render: Render) -> None:
    """Accelerators built in or attached, disks that fit the machine, and the scheduling strategy."""
    made = render(PLAIN, *settings)
    for pool in made.body["jobSpec"]["workerPoolSpecs"]:
        spec = pool["machineSpec"]
        found = (spec["machineType"], spec.get("acceleratorType"), spec.get("acceleratorCount"))
        assert (*found, pool["diskSpec"]["bootDiskType"]) == expected[:4]
    assert made.body["jobSpec"]["scheduling"].get("strategy") == expected[4]
    assert VertexBackend().check(made) == []


def test_one_instance_is_one_pool(render: Render) -> None:
    """A second pool without replicas would be an error; a single instance needs no common restart."""
    spec = render(PLAIN, "resources.instances=1").body["jobSpec"]
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1]
    assert spec["scheduling"] == {"timeout": "86400s"}


def test_fence_marks_job_and_order_alike(render: Render) -> None:
    """The mark of a send is in every pool of ours, and in no further field."""
    for text in (PLAIN, EVERYTHING):
        body = render(text).body
        marked = request.with_fence(body, "the-mark")
        changed = [
            pool.get("containerSpec", pool.get("pythonPackageSpec")) for pool in marked["jobSpec"]["workerPoolSpecs"]
        ]
        assert [own["args"][2] for own in changed] == ["the-mark"] * len(changed)
        for own in changed:
            own["args"][2] = "digits-abcde-1"
        assert marked == body


def test_boot_wheel_is_installable_by_pip(tmp_path: Path) -> None:
    """The same source gives the same bytes; pip installs the wheel without a network, and the module runs."""
    name, data = request.wheel("import sys\nprint('booted', *sys.argv[1:])\n")
    assert (name, data) == request.wheel("import sys\nprint('booted', *sys.argv[1:])\n")
    assert zipfile.ZipFile(BytesIO(data)).testzip() is None
    (tmp_path / name).write_bytes(data)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*install, "--target", tmp_path / "site", tmp_path / name], check=True)
    command = [sys.executable, "-m", request.BOOT_MODULE, "a"]
    done = subprocess.run(command, cwd=tmp_path / "site", capture_output=True, text=True, check=True)
    assert done.stdout == "booted a\n"


@pytest.mark.parametrize(
    ("settings", "hourly", "words"),
    [
        ([], 33.795142 + DISK, "derived"),
        ([], 33.795142 + DISK, ", with a disk of 100 GB"),
        (["resources.disk_gb=2000"], 33.795142 + 20 * DISK, ", with a disk of 2000 GB"),
        (["vertex.boot_disk_type=hyperdisk-balanced"], 33.795142, "without its disk: hyperdisk-balanced has no known"),
        (["vertex.location=us-west9"], None, "us-west9"),
        (["vertex.price_per_hour=2.50 USD"], 2.5, "vertex.price_per_hour"),
        (["vertex.scheduling=flex_start"], 33.795142 + DISK, "upper bound"),
        (["resources.accelerators=T4:1"], 0.620999 + DISK, "n1-standard-4 + 1 x NVIDIA_TESLA_T4, derived"),
        (["resources.accelerators=T4:1", "vertex.location=us-west9"], None, "n1-standard-4 + 1 x NVIDIA_TESLA_T4"),
    ],
    ids=str,
)
def test_price_of_a_machine(settings: list[str], hourly: float | None, words: str, tmp_path: Path) -> None:
    """An unknown price is None, never 0; the source of the price is given."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "cloudtrain.yaml").write_text(PLAIN)
    found = VertexBackend().capacity(configs.load(tmp_path / "cloudtrain.yaml", overrides=settings, environ={}))
    assert found.hourly_usd == pytest.approx(hourly) if hourly is not None else found.hourly_usd is None
    assert words in found.price_source


def test_project_and_region_may_come_from_gcloud(tmp_path: Path) -> None:
    """The order is that of Google's own tools: the environment, then the active configuration."""
    (tmp_path / "configurations").mkdir()
    (tmp_path / "active_config").write_text("work\n")
    text = "[core]\nproject = of-gcloud\naccount = me\n[compute]\nregion = europe-west1\n"
    (tmp_path / "configurations" / "config_work").write_text(text)
    environ = {"CLOUDSDK_CONFIG": str(tmp_path)}
    place = machine.project_of(Vertex(), environ), machine.region_of(Vertex(), environ)
    assert place == ("of-gcloud", "europe-west1")
    more = {**environ, "GOOGLE_CLOUD_PROJECT": "env", "CLOUDSDK_AI_REGION": "us-east4"}
    assert (machine.project_of(Vertex(), more), machine.region_of(Vertex(), more)) == ("env", "us-east4")
    (tmp_path / "configurations" / "config_work").write_text("broken")
    assert machine.project_of(Vertex(), environ) is None


def test_dry_run_is_input_for_gcloud(cli: Any, project: Callable[..., Path]) -> None:
    """`-o` writes the spec, the order, the code, and the commands that send them."""
    folder = project(f"backend: vertex\nresources: {{accelerators: 'L4:1'}}\nvertex: {{{WHERE}}}\n")
    out = folder.parent / "out"
    done = cli.ok("submit", "--dry-run", "-o", out, cwd=folder)
    job = yaml.safe_load(done.stdout)
    assert yaml.safe_load((out / "job-spec.yml").read_text()) == job["jobSpec"]
    script = (out / "create.sh").read_text()
    code_uri, order_uri, _ = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert f" {code_uri}\n" in script
    assert f"order.json {order_uri}\n" in script
    assert f"--display-name {job['displayName']} " in script
    [archive] = out.glob("code/*/bundle.tar.gz")
    assert archive.parent.name in code_uri
    with tarfile.open(archive) as tar:
        assert "code/loop.py" in tar.getnames()
    assert subprocess.run(["sh", "-n", out / "create.sh"], check=False).returncode == 0
