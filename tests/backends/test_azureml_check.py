"""Azure ML's command jobs, checked offline: against the SDK's schema, its real PUT, and the published ARM schemas."""

import copy
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.backends.azureml import check, request_body

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path(__file__).with_name("schemas")
WORKSPACE = (
    "/subscriptions/{}/resourceGroups/ml/providers/Microsoft.MachineLearningServices/workspaces/research".format(
        "00000000-0000-0000-0000-000000000000"
    )
)
STORE = "azureml://datastores/workspaceblobstore/paths"

FILE = f"""
$schema: https://azuremlschemas.azureedge.net/latest/commandJob.schema.json
type: command
name: digits-abcde-1
display_name: digits-abcde, attempt 1
experiment_name: digits
tags: {{team: vision, cloudtrain.job: digits-abcde, cloudtrain.attempt: "1"}}
code: ./code
command: >-
  mkdir -p /tmp/cloudtrain && tar -xzf bundle.tar.gz -C /tmp/cloudtrain && exec env PYTHONPATH=/tmp/cloudtrain/runtime
  python3 -u -m cloudtrain.entrypoints.container . env:CLOUDTRAIN_ORDER checkpoints="${{{{outputs.checkpoints}}}}"
  output="${{{{outputs.output}}}}" input.train="${{{{inputs.train}}}}"
environment: azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest
environment_variables: {{CLOUDTRAIN_ORDER: eyJqb2IiOiAiZGlnaXRzIn0=}}
resources: {{instance_count: 2, instance_type: Standard_NC24ads_A100_v4, shm_size: 64g}}
distribution: {{type: pytorch, process_count_per_instance: 1}}
limits: {{timeout: 43200}}
queue_settings: {{job_tier: spot}}
inputs: {{train: {{type: uri_folder, path: {STORE}/data, mode: ro_mount}}}}
outputs:
  checkpoints: {{type: uri_folder, mode: rw_mount, path: {STORE}/cloudtrain/jobs/digits-abcde/checkpoints}}
  output: {{type: uri_folder, mode: rw_mount, path: {STORE}/cloudtrain/jobs/digits-abcde/output}}
identity: {{type: managed}}
services: {{my_tensorboard: {{type: tensor_board, log_dir: outputs/tb, nodes: all}}}}
"""


def _job(*changes: tuple[str, Any]) -> dict[str, Any]:
    """Return the good job with fields at dotted paths set, or removed for the value `...`; a `/` is a dot."""
    job: dict[str, Any] = yaml.safe_load(FILE)
    for path, value in changes:
        *parents, last = path.split(".")
        node = job
        for name in parents:
            node = node.setdefault(name, {})
        if value is ...:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return job


ON_CLUSTER = [("compute", "azureml:gpu-cluster"), ("queue_settings", ...), ("resources.instance_type", ...)]
CONDA = {"name": "mine", "dependencies": ["python=3.11", {"pip": ["torch"]}]}

# Jobs that Azure accepts, one for each form that we render or that `raw` may add.
GOOD: dict[str, list[tuple[str, Any]]] = {
    "example": [],
    "cluster": ON_CLUSTER,
    "cluster by id": [*ON_CLUSTER, ("compute", f"azureml:{WORKSPACE}/computes/gpu")],
    "environment": [("environment", "azureml:my-env:3")],
    "environment by id": [("environment", f"azureml:{WORKSPACE}/environments/my-env/versions/3")],
    "image": [("environment", {"image": "mcr.microsoft.com/azureml/x:1"})],
    "image and conda": [("environment", {"image": "mcr.microsoft.com/azureml/x:1", "conda_file": CONDA})],
    "least": [
        *((name, ...) for name in ("tags", "display_name", "environment_variables", "queue_settings", "services")),
        *((name, ...) for name in ("identity", "inputs", "outputs")),
        ("command", "python train.py"),
    ],
    "a week and a bit": [("queue_settings", ...), ("limits.timeout", 7 * 86_400 + 3_661)],
    "literals": [
        ("inputs", {"lr": 0.1, "steps": 5, "fast": True, "note": "x", "boxed": {"value": 3}}),
        ("command", "go ${{inputs.lr}} ${{ inputs.steps }} {inputs.fast} ${{inputs.note}} ${{inputs.boxed}}"),
        ("outputs", ...),
        ("queue_settings", ...),
    ],
    "data": [
        ("inputs.train.path", "azureml:digits:1"),
        ("inputs.model", {"type": "custom_model", "path": "azureml:start:2", "mode": "Download"}),
        ("inputs.table", {"type": "mltable", "path": "azureml:rows:3", "mode": "eval_mount"}),
        ("inputs.web", {"path": "https://example.org/x"}),
        ("outputs.output", None),
    ],
    "identities": [("identity", {"type": "managed", "client_id": "00000000-0000-0000-0000-00000000000a"})],
    "user": [("identity", {"type": "UserIdentity"})],
    "token": [("identity", {"type": "aml_token"}), ("description", "x"), ("properties", {"a": "b"})],
    "services": [
        ("services.shell", {"type": "ssh", "ssh_public_keys": "ssh-ed25519 AAAA", "nodes": "all"}),
        ("services.lab", {"type": "jupyter_lab", "port": 8888, "properties": {"a": "b"}}),
        ("services.code", {"type": "vs_code"}),
    ],
    "docker": [("resources.docker_args", "--ipc=host"), ("resources.properties", {"a": {"b": 1}})],
    "docker list": [("resources.docker_args", ["--ipc=host", "--pid=host"])],
}

# Jobs that Azure refuses, or that would run wrongly: the change of a good job, the key and the fault's words.
BROKEN: list[tuple[str, Any, str, str]] = [
    ("name", "-digits", "name", "does not match"),
    ("name", "digits job", "name", "does not match"),
    ("name", "x" * 256, "name", "256 characters is more than 255"),
    ("name", ..., "name", "a job sent twice is two jobs"),
    ("name", 7, "name", "name: expected a string, found 7"),
    ("type", "sweep", "azureml.raw", "`sweep` is not a command job"),
    ("comand", "ls", "azureml.raw", "is not a field of a command job; did you mean `command`?"),
    ("status", "Running", "azureml.raw", "is set by Azure"),
    ("command", ..., "azureml.raw", "command: is required"),
    ("command", "", "azureml.raw", "0 characters is less than 1"),
    ("command", "ls ${{inputs.trian}}", "inputs", "is not defined; did you mean `train`?"),
    ("command", "ls {outputs.model}", "outputs", "${{outputs.model}} is not defined"),
    ("command", "ls ${{search_space.lr}}", "azureml.raw", "belongs to other kinds of job"),
    ("code", ..., "azureml.raw", "code does not reach the job"),
    ("code", "git+https://github.com/a/b", "azureml.raw", "takes no git path"),
    ("experiment_name", ..., "azureml.experiment", "the name of the folder that submits"),
    ("experiment_name", "x" * 257, "azureml.experiment", "257 characters; Azure keeps 1 to 256"),
    ("tags", {f"t{n}": "x" for n in range(51)}, "tags", "51 entries; Azure keeps 50"),
    ("tags", {"a": "x" * 1001}, "tags", "1001 characters, more than 1000"),
    ("tags", {"a" * 101: "x"}, "tags", "101 characters, not 1 to 100"),
    ("tags", {"a": 1}, "tags", "expected a string, found 1"),
    ("tags", {"a": None}, "tags", "expected a string, found null"),
    ("environment", ..., "azureml.environment", "is required"),
    ("environment", "azureml:my-env", "azureml.environment", "names no version"),
    ("environment", "azureml://registries/azureml/environments/acpt", "azureml.environment", "names no version"),
    ("environment", "AzureML-ACPT-pytorch-2.8", "azureml.environment", "lacks the `azureml:`"),
    ("environment", "mcr.microsoft.com/azureml/x:1", "azureml.environment", "is an image, not an environment"),
    ("environment", {"conda_file": CONDA}, "image", "the environment has no image"),
    ("environment", "/subscriptions/0/x/environments/e/versions/1", "azureml.environment", "lacks the `azureml:`"),
    ("environment", {"image": "x", "conda_file": {"dependencies": 5}}, "azureml.conda", "are lists of packages"),
    ("environment", {"image": "x", "conda_file": {"dependencies": [{"pip": "x"}]}}, "azureml.conda", "are lists of"),
    ("environment", {"image": "MCR.microsoft.com/A B"}, "image", "is not a valid image name"),
    ("environment", {"image": "x", "docker": "y"}, "azureml.environment", "environment.docker: is not a field"),
    ("environment_variables", {"1A": "x"}, "env", "`1A` is not a valid variable name"),
    ("environment_variables", {"A": 1}, "env", "expected a string, found 1"),
    ("environment_variables", {"A": "x" * 131_070}, "env", "Linux starts nothing with more than 131072"),
    ("environment_variables", {"NODE_RANK": "0"}, "env", "Azure sets NODE_RANK itself"),
    ("compute", "azureml:gpu_cluster", "azureml.compute", "cannot be a cluster's name"),
    ("compute", "azureml:gpu-1", "azureml.compute", "cannot be a cluster's name"),
    ("compute", "local", "azureml.compute", "runs on this machine"),
    ("compute", "azureml:gpu", "resources.spot", "a job tier is for serverless compute"),
    ("resources.instance_type", ..., "resources.instance_type", "neither a cluster nor an instance type"),
    ("resources.instance_type", "NC24ads_A100_v4", "resources.instance_type", "is not an Azure machine size"),
    ("resources.instance_count", 0, "resources.instances", "0 instances run nothing"),
    ("resources.instance_count", "2", "resources.instances", 'expected an integer, found "2"'),
    ("resources.shm_size", "16 GiB", "azureml.shm_gb", "`16 GiB` does not match"),
    ("resources.shm_size", "0g", "azureml.shm_gb", "is zero"),
    ("resources.shm_size", 64, "azureml.shm_gb", "expected a string, found 64"),
    ("resources.docker_args", "--shm-size=1g", "azureml.raw", "overrule each other"),
    ("resources.max_instance_count", 4, "azureml.raw", "properties.resources.maxInstanceCount: is not a field"),
    ("limits", ..., "limits.max_duration", "nothing ends the job in time"),
    ("limits.timeout", 0, "limits.max_duration", "0 s is less than 60"),
    ("limits.timeout", "12h", "limits.max_duration", 'expected an integer, found "12h"'),
    ("limits.timeout", 8 * 86_400, "limits.max_duration", "more than the 7 days that Azure gives spot machines"),
    ("queue_settings.job_tier", "spotty", "resources.spot", "`spotty` is not one of spot, basic"),
    ("queue_settings.priority", "high", "azureml.raw", "queueSettings.priority: is not a field"),
    ("distribution", ..., "azureml.raw", "only one of 2 nodes starts anything"),
    ("distribution.type", "mpi", "azureml.raw", "sets no NODE_RANK"),
    ("distribution.type", "horovod", "azureml.raw", "`horovod` is not one of pytorch, tensorflow, mpi, ray"),
    ("distribution.process_count_per_instance", 8, "azureml.raw", "8 agents on each node"),
    ("inputs.train.path", "s3://bucket/data", "inputs", "is not a URI of Azure storage"),
    ("inputs.train.path", "./data", "inputs", "is not a URI of Azure storage"),
    ("inputs.train.path", f"{STORE}/runs/a:b", "inputs", "takes what follows `:` or `@`"),
    ("inputs.train.path", ..., "inputs", "inputs.train has no path"),
    ("inputs.train.mode", "rw_mount", "inputs", "`rw_mount` is not one of download, ro_mount, direct"),
    ("inputs.train.type", "folder", "inputs", "`folder` is not one of uri_file, uri_folder"),
    ("inputs.my-data", 5, "inputs", "`my-data` cannot name one of the inputs"),
    ("inputs.lr", "-", "inputs", "does not match"),
    ("inputs.output", 5, "outputs", "outputs.output and inputs.output have one name"),
    ("outputs.9x", None, "outputs", "`9x` cannot name one of the outputs"),
    ("outputs.output.mode", "ro_mount", "outputs", "`ro_mount` is not one of mount, upload"),
    ("outputs.output.path", f"{STORE}/cloudtrain/jobs/digits-abcde/checkpoints/", "outputs", "are one place"),
    ("outputs.output.path", "/mnt/out", "outputs", "is not a URI of Azure storage"),
    ("outputs.output.version", "2", "outputs", "outputs.output.assetVersion: is not a field"),
    ("outputs.checkpoints.path", ..., "checkpoint.uri", "stores its checkpoints in another place"),
    ("outputs.checkpoints.path", STORE + "/ck/${{name}}", "checkpoint.uri", "another place in each run"),
    ("outputs.checkpoints.mode", "upload", "checkpoint.uri", "reach the store at the end"),
    ("outputs.checkpoints.type", "uri_file", "checkpoint.uri", "checkpoints are a folder"),
    ("identity.type", "user", "azureml.identity", "`user` is not one of managed"),
    ("identity.client_id", "mine", "azureml.identity", "4 characters is less than 36"),
    ("identity.msi_resource_id", "/x", "azureml.identity", "load_job breaks on"),
    ("services.my_tensorboard.type", "tensorbord", "azureml.raw", "`tensorbord` is not one of jupyter_lab"),
    ("services.my_tensorboard.nodes", "0", "azureml.raw", "is `all` or left out"),
]

# Makes the SDK submit each job from stdin, over a transport of ours; prints the PUT request or the refusal.
SUBMIT = """\
import base64, io, json, logging, pathlib, sys, time, warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import requests, urllib3
from azure.ai.ml import MLClient, load_job
from azure.core.credentials import AccessToken
from azure.core.pipeline.transport import RequestsTransport

class Put(BaseException):
    pass

class Credential:
    def get_token(self, *scopes, **options):
        claims = base64.urlsafe_b64encode(b'{"aud": "https://ml.azure.com"}').decode().strip("=")
        return AccessToken(f"eyJhbGciOiJub25lIn0.{claims}.", int(time.time()) + 3600)

class Azure(requests.adapters.HTTPAdapter):
    def send(self, request, **options):
        place = request.url.split("?")[0].removeprefix("https://management.azure.com")
        if "/jobs/" in place:
            raise Put({"method": request.method, "url": request.url, "body": json.loads(request.body)})
        answer = json.loads(request.body or '{"properties": {"codeUri": "https://x.blob.core.windows.net/c/a"}}')
        answer["id"] = place
        if place.endswith("/versions"):
            answer = {"value": [answer | {"id": place + "/1"}]}
        raw = urllib3.HTTPResponse(io.BytesIO(json.dumps(answer).encode()), status=200, preload_content=False)
        raw.headers["Content-Type"] = "application/json"
        return self.build_response(request, raw)

session = requests.Session()
session.mount("https://", Azure())
transport = RequestsTransport(session=session, session_owner=False)
client = MLClient(Credential(), "00000000-0000-0000-0000-000000000000", "ml", "research", transport=transport)
pathlib.Path("code").mkdir()
pathlib.Path("code/bundle.tar.gz").write_bytes(b"x")
found = []
for text in json.load(sys.stdin):
    pathlib.Path("job.yml").write_text(text)
    try:
        client.jobs.create_or_update(load_job("job.yml"))
    except Put as put:
        found.append(put.args[0])
    except Exception as error:
        found.append({"refused": f"{type(error).__name__}: {error}"})
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the SDK's PUT for each of GOOD, and for each of BROKEN by its number: all in one process, 3 s."""
    jobs = {name: _job(*changes) for name, changes in GOOD.items()}
    jobs |= {str(number): _job((path, value)) for number, (path, value, _, _) in enumerate(BROKEN)}
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT],
        input=json.dumps([yaml.safe_dump(job) for job in jobs.values()]),
        cwd=tmp_path_factory.mktemp("submit"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, json.loads(done.stdout), strict=True))


@pytest.mark.soak  # makes the table anew; test_body_passes_the_published_schema holds the table
def test_table_equals_the_sdks_schema() -> None:
    """rules.json contains the installed azure-ai-ml's own schema and models, word for word."""
    script = ROOT / "tools" / "azureml_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("name", GOOD)
def test_good_job_passes(name: str) -> None:
    """The file, the body and the rules between fields have no fault."""
    job = _job(*GOOD[name])
    assert [str(fault) for fault in check.faults(job) if not fault.is_warning] == []
    assert list(check.violations(request_body.body_of(job))) == []


def test_example_has_no_warning() -> None:
    """The rendered example has neither faults nor warnings."""
    assert list(check.faults(_job())) == []


@pytest.mark.parametrize(("path", "value", "key", "said"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_job_is_refused(path: str, value: Any, key: str, said: str) -> None:
    """Each job is one fault away from a good job; the fault is named under its key, on one line."""
    found = [fault for fault in check.faults(_job((path, value))) if not fault.is_warning]
    assert (key, True) in [(fault.key, said in fault.message) for fault in found], [str(fault) for fault in found]
    assert not any("\n" in fault.message for fault in found)


@pytest.mark.parametrize(
    ("path", "value", "key", "said"),
    [
        ("inputs.extra", 5, "inputs", "the command does not use it"),
        ("outputs.extra", None, "outputs", "the command does not use it"),
        ("environment_variables", {"A": "${{inputs.train}}"}, "env", "only in the command"),
        ("environment", {"image": "x:1", "name": "mine"}, "azureml.environment", "the SDK drops it"),
    ],
)
def test_doubtful_job_is_a_warning(path: str, value: Any, key: str, said: str) -> None:
    """The job runs, but perhaps not as intended."""
    (fault,) = check.faults(_job((path, value)))
    assert (fault.key, fault.is_warning) == (key, True)
    assert said in fault.message


def test_new_job_tier_is_a_warning() -> None:
    """Azure adds tiers; a body may contain a tier that the table does not know."""
    body = request_body.body_of(_job())
    body["properties"]["queueSettings"]["jobTier"] = "Flex"
    ((path, message, is_warning),) = check.violations(body)
    assert (path, is_warning) == ("properties.queueSettings.jobTier", True)
    assert "Azure may know it" in message


def test_all_faults_come_at_once() -> None:
    """Faults of the file, of the body and of the rules between fields are reported together."""
    changes = [("resources.shm_size", "16 GiB"), ("limits", ...), ("name", "a b"), ("tags.a", "x" * 1001)]
    keys = {fault.key for fault in check.faults(_job(*changes))}
    assert keys == {"azureml.shm_gb", "limits.max_duration", "name", "tags"}


# Values of the body that only a submit knows, with the reason.
SUBMIT_ALONE = {
    r"/codes/[0-9a-f-]{36}/versions/1\Z": ("/codes/{upload}/versions/1", "the SDK draws a UUID for an upload"),
    r"/CliV2AnonymousEnvironment/versions/[0-9a-f]{64}\Z": (
        "/CliV2AnonymousEnvironment/versions/{hash}",
        "the SDK's own hash over image and conda file",
    ),
}


@pytest.mark.slow
@pytest.mark.soak
def test_bodies_equal_the_sdks_puts(sent: dict[str, dict[str, Any]]) -> None:
    """Each whole body is equal, with submit-only values in braces; so load_job accepts the file."""
    place = f"https://management.azure.com{WORKSPACE}/jobs/digits-abcde-1?api-version=2025-01-01-preview"
    for name, changes in GOOD.items():
        assert "body" in sent[name], (name, sent[name])
        theirs = sent[name]["body"]
        for field in ("codeId", "environmentId"):
            for pattern, (braces, _) in SUBMIT_ALONE.items():
                theirs["properties"][field] = re.sub(pattern, braces, theirs["properties"][field])
        assert request_body.body_of(_job(*changes), WORKSPACE) == theirs, name
        assert (sent[name]["method"], sent[name]["url"]) == ("PUT", place), name


@pytest.mark.soak  # our own body: test_broken_job_is_refused
@pytest.mark.slow
def test_table_finds_the_same_faults_in_the_sdks_body(sent: dict[str, dict[str, Any]]) -> None:
    """A broken job that the SDK sends has our body's violations, unless the file's rules refuse it."""
    for number, (path, value, _, _) in enumerate(BROKEN):
        body = sent[str(number)].get("body")
        job = _job((path, value))
        if body is None or any(fault.message.startswith(f"{path}:") for fault in check.faults(job)):
            continue
        assert list(check.violations(body)) == list(check.violations(request_body.body_of(job))), path


def _schema(version: str) -> dict[str, Any]:
    """Return the published ARM schema in a form for a validator.

    As published, a polymorphic type is a base that forbids further fields, next to a choice that has further fields: no
    PyTorch distribution passes. In other places unknown fields pass. Therefore the base is folded into each case, and
    every object with named fields is closed. ARM's template expressions are left out, because a PUT has none.
    """
    schema: dict[str, Any] = json.loads(lzma.decompress((SCHEMAS / f"azureml-{version}.json.xz").read_bytes()))
    definitions = schema["definitions"]

    def case(base: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        reference, constant = choice["allOf"]
        own = definitions[reference["$ref"].rsplit("/", 1)[-1]]
        properties = {**base["properties"], **own["properties"]}
        ((by, word),) = constant["properties"].items()
        return {
            "type": "object",
            "properties": {**properties, by: {"enum": [word["const"]]}},
            "required": sorted({*base.get("required", ()), *own.get("required", ()), by}),
        }

    def usable(node: Any) -> Any:
        if isinstance(node, list):
            return [usable(each) for each in node if "expression" not in str(each.get("$ref", "") if each else "")]
        if not isinstance(node, dict):
            return node
        if "allOf" in node and len(node["allOf"]) == 2 and "oneOf" in node["allOf"][1]:
            base, choice = node["allOf"]
            return {"oneOf": [usable(case(base, each)) for each in choice["oneOf"]]}
        if node.get("properties") and "additionalProperties" not in node and node.get("type") == "object":
            node = {**node, "additionalProperties": False}
        plain = ("enum", "required", "type", "pattern", "description")
        return {
            key: value if key in plain and not isinstance(value, dict) else usable(value) for key, value in node.items()
        }

    job = schema["resourceDefinitions"]["workspaces_jobs"]
    return {**usable(job), "definitions": usable(definitions)}


@pytest.mark.parametrize("version", ["2025-01-01-preview", "2026-05-01"])
def test_body_passes_the_published_schema(version: str) -> None:
    """The version of the SDK and the newest stable version accept good jobs, and refuse the faults that we refuse."""
    validator = jsonschema.Draft4Validator(_schema(version))

    def refusals(body: dict[str, Any]) -> list[Any]:
        kind = "Microsoft.MachineLearningServices/workspaces/jobs"
        return list(validator.iter_errors({"name": "digits-abcde-1", "type": kind, "apiVersion": version, **body}))

    for changes in GOOD.values():
        assert refusals(request_body.body_of(_job(*changes))) == []
    mutations: list[tuple[str, Any]] = [
        ("shmSize", ("resources", "16 GiB")),
        ("instanceCount", ("resources", "2")),
        ("instanceTyp", ("resources", "x")),
        ("priority", ("queueSettings", 3)),
        ("jobTier", ("queueSettings", "Spotty")),
        ("identityType", ("identity", "managed")),
        ("distributionType", ("distribution", "Horovod")),
        ("process_count", ("distribution", 1)),
        ("jobLimitsType", ("limits", "Pipeline")),
        ("train", ("inputs", {"jobInputType": "uri_folder"})),
        ("lr", ("inputs", {"jobInputType": "literal", "value": 5})),
        ("output", ("outputs", {"jobOutputType": "uri_folder", "mode": "ReadOnlyMount"})),
        ("A", ("environmentVariables", 1)),
    ]
    for field, (part, value) in mutations:
        body = request_body.body_of(_job())
        body["properties"][part][field] = value
        assert refusals(body), (part, field)
        assert [found for found in check.violations(body) if not found[2] or field == "jobTier"], (part, field)


@settings(max_examples=100)
@given(data=st.data())
def test_any_garbage_is_a_fault_and_no_crash(data: st.DataObject) -> None:
    """For any value of `raw` at any place in the job, the check answers with faults."""
    job = _job(("environment", {"image": "x:1", "conda_file": CONDA}), ("inputs.lr", {"value": 3}))
    junk: list[Any] = [None, 0, -1, 1.5, True, "", "x", "${{", [], ["x"], {}, {"type": "x"}, {"x": {}}, {1: 2}]
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = job
        while True:
            key = data.draw(st.sampled_from(sorted(node)))
            if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
                break
            if not all(isinstance(each, str) for each in node[key]):
                break
            node = node[key]
        node[key] = copy.deepcopy(data.draw(st.sampled_from(junk)))
    for fault in check.faults(job):
        assert fault.message
        assert fault.key


@pytest.mark.parametrize("job", [None, [], "x", {}])
def test_non_job_is_a_fault(job: Any) -> None:
    """Even a value that is no mapping gives faults."""
    assert [fault for fault in check.faults(job) if not fault.is_warning]


def test_check_stays_light() -> None:
    """A dry run has a quarter of a second in all: no SDK, no network library."""
    code = "import sys; from cloudtrain.backends.azureml import check, request_body; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"azure", "requests", "marshmallow", "jsonschema", "pydantic", "yaml", "urllib3", "ssl", "asyncio"}
    assert heavy & {name.split(".")[0] for name in done.stdout.split()} == set()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60, "PT1M"), (43_200, "PT12H"), (86_400, "P1D"), (90_061, "P1DT1H1M1S"), (0, "P0D"), (-5, "-PT5S")],
)
def test_duration_has_the_sdks_form(seconds: int, text: str) -> None:
    """ISO 8601, the largest units first, without zero parts."""
    assert request_body.duration(seconds) == text
