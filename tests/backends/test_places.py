"""Places of jobs: no two jobs share a folder, and a place that holds another job's files is refused."""

import base64
import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from wholejobs import SETTINGS, TASK

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.jobs import submit
from cloudtrain.launcher.planning import prepare as planning
from cloudtrain.launcher.planning.request_rules import own_places, shared_places
from cloudtrain.launcher.store.registry import Registry
from doubles.google.names import BUCKET

ROOTS = {
    "sagemaker": "s3://cloudtrain-tests/own",
    "vertex": f"gs://{BUCKET}/own",
    "azureml": "azureml://datastores/workspaceblobstore/paths/own",
}
STORES = {"azureml": "https://account.blob.core.windows.net/container/own"}
KEYS = {"checkpoint.uri": "checkpoint.uri={}", "outputs": "outputs.model={}", "mirror": "checkpoint.mirror={}"}
KINDS = {"task": "task: task.py\ntraining: {global_batch_size: 16, max_steps: 2}\n", "script": "script: train.py\n"}


class _Sender:
    """A backend that renders, and keeps the requests instead of sending them."""

    def __init__(self, backend: Any) -> None:
        self.request, self.sent = backend.request, list[backends.Request]()

    def send(self, request: backends.Request, shipment: backends.Shipment) -> backends.JobRef:
        """Keep the request."""
        self.sent.append(request)
        return {"name": request.name}


def places_of(request: backends.Request, root: str) -> set[str]:
    """Return the addresses below the root in the request; the trainer adds the job to the address of a mirror."""
    text = json.dumps([request.body, request.sending])
    for encoded in re.findall(r'"CLOUDTRAIN_ORDER": "([^"]+)"', text):
        text += base64.b64decode(encoded).decode()
    job = request.name.rpartition("-")[0]
    text = re.sub(rf'("mirror": ?"){re.escape(root)}"', rf'\1{root}/{job}"', text)
    return {uri.rstrip("/") for uri in re.findall(rf"{re.escape(root)}[^\"' \\]*", text)}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", sorted(backends.BUILT_IN))
def test_two_jobs_of_a_file_share_no_folder(
    backend: str, kind: str, key: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address that a job writes to has the job's id, in whatever form the backend has it."""
    for name in ("SSH_CONFIG", "SSH_PYTHON", "AWS_REGION"):
        monkeypatch.setenv(name, "eu-west-1" if name == "AWS_REGION" else "/etc")
    root = (STORES if key == "mirror" else {}).get(backend) or ROOTS.get(backend, "/data/own")
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "cloudtrain.yaml"
    block = SETTINGS[backend].replace("sagemaker: {", "sagemaker: {bucket: cloudtrain-tests, ")
    file.write_text(f"name: j\n{KINDS[kind]}{block}")
    config = configs.load(file, overrides=[KEYS[key].format(root)])
    if (backend, kind, key) == ("vertex", "script", "mirror"):
        with pytest.raises(ConfigError, match="a mirror is the shared trainer's"):
            planning.prepare(config, file, home / "bundles", dry=False)
        return
    prepared = planning.prepare(config, file, home / "bundles", dry=False)
    sender = _Sender(prepared.backend)
    with closing(Registry()) as registry:
        jobs = [submit.send(registry, replace(prepared, backend=cast("Any", sender)))[0] for _ in range(2)]
    one, two = (places_of(request, root) for request in sender.sent)
    assert one
    assert not one & two
    assert all(f"{root}/{job.id}" in uri for job, uris in zip(jobs, (one, two), strict=True) for uri in uris)


def test_config_for_people_has_the_places_of_the_file() -> None:
    """A report, a comparison and `best -o` show no job's id, which a further job would take over."""
    config = {"checkpoint": {"uri": "s3://b/ck", "keep": 3}, "outputs": {"model": "/m"}, "task": "t.py"}
    whole = JobConfig.model_validate({**config, "name": "j"})
    stored = own_places(whole, "j-1").model_dump(mode="json")
    assert (stored["checkpoint"]["uri"], stored["outputs"]) == ("s3://b/ck/j-1", {"model": "/m/j-1"})
    assert shared_places(stored, "j-1") == whole.model_dump(mode="json")
    resumed = JobConfig.model_validate(stored)
    assert own_places(resumed, "j-1", stored) == resumed
    assert own_places(whole, "j-1", whole.model_dump(mode="json")) == whole  # sent by an older version


@pytest.mark.parametrize("uri", ["gs://fast/ck", "gs://fast/ck/", "gs://fast/ck/digits-abcde"])
def test_vertex_resumes_in_the_place_of_either_version(render: Callable[..., backends.Request], uri: str) -> None:
    """Older versions stored the address of the config file, and Vertex AI's request had the job's id already."""
    request = render(f"name: digits\n{KINDS['script']}{SETTINGS['vertex']}", f"checkpoint.uri={uri}")
    assert request.sending["checkpoint_uri"] == "gs://fast/ck/digits-abcde"
