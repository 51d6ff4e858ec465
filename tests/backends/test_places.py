"""Places of jobs: no two jobs share a folder, and a place that holds another job's files is refused."""

import base64
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from wholejobs import SETTINGS, TASK

from cloudtrain.backends.channel.copies import own_folders
from cloudtrain.backends.local.jobs import here
from cloudtrain.entrypoints.host import files
from cloudtrain.entrypoints.host.calls import Here
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.jobs import submit
from cloudtrain.launcher.planning import prepare as planning
from cloudtrain.launcher.planning.request_rules import own_places, shared_places
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import Aws
from doubles.google.names import BUCKET
from doubles.waiting import until

ROOTS = {
    "sagemaker": "s3://cloudtrain-tests/own",
    "vertex": f"gs://{BUCKET}/own",
    "azureml": "azureml://datastores/workspaceblobstore/paths/own",
}
STORES = {"azureml": "https://account.blob.core.windows.net/container/own"}
KEYS = {"checkpoint.uri": "checkpoint.uri={}", "outputs": "outputs.model={}", "mirror": "checkpoint.mirror={}"}
KINDS = {"task": "task: task.py\ntraining: {global_batch_size: 16, max_steps: 2}\n", "script": "script: train.py\n"}
SAVES = """
import os, sys
from pathlib import Path
place, model = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]) / "last.txt", Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
found = sorted(path.name for path in place.parent.iterdir() if path.is_file())
print("found", found, flush=True)
place.write_text(" ".join(sys.argv[1:]))
print("step 1/1 loss 1.0", flush=True)
for folder in model.glob("*"):
    (folder / "weights.bin").write_bytes(b"12345")
sys.exit("fails" in sys.argv and int(os.environ["CLOUDTRAIN_ATTEMPT"]) < 3)
"""


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


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/w/jobs/j/attempt-1/node-0", "/data/ckpt/j", "/data/ckpt", "/m/j/"], ["/w/jobs/j", "/data/ckpt/j", "/m/j"]),
        (["s3://j/c/jobs/j/checkpoints", "s3://j/ckpt", "s3://j"], ["s3://j/c/jobs/j"]),  # named like the bucket
        (["/home/j/.cloudtrain/jobs/j/attempt-1/node-0", "/home/j/ckpt"], ["/home/j/.cloudtrain/jobs/j"]),
        (["/home/jobs/j/ckpt", "/j/x"], []),
        (["s3://b/own/j", "s3://b/own/j-2", "s3://b/own/j/j"], ["s3://b/own/j", "s3://b/own/j/j"]),
    ],
)
def test_only_folders_of_the_job_alone_are_removed(paths: list[str], found: list[str]) -> None:
    """A folder above, a bucket and a user's home stay, also if the job has their name."""
    assert list(own_folders("j", *paths)) == found


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


def test_place_below_the_home_folder_is_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts, `~/` is the user's home folder; it made a folder named `~` beside the config file."""
    monkeypatch.setenv("HOME", "/home/me")
    places = [str(here(Path("/job"), path)) for path in ("~/x", "x", "/x", "~x")]
    assert places == ["/home/me/x", "/job/x", "/x", "/job/~x"]


ALONE = "distributed: {allow_alone: true}\n"
MORE = f"checkpoint: {{uri: ckpt}}\noutputs: {{model: models}}\n{ALONE}"


def test_second_job_here_begins_anew_and_a_resume_goes_on(cli: Any, project: Callable[..., Path]) -> None:
    """The second job of a file finds no file of the first; a resume finds its own; `rm --everywhere` takes all."""
    folder = project(f"args: [--data, cats, fails]\n{MORE}", script="train.py", text=SAVES)
    shown = [cli("submit", "-y", "--name", name, cwd=folder).stdout for name in ("one", "two")]
    assert ["found []" in text for text in shown] == [True, True]
    assert (folder / "ckpt" / "two" / "last.txt").read_text() == "--data cats fails"
    assert [path.name for path in sorted((folder / "models").glob("*/weights.bin"))] == ["weights.bin"] * 2
    again = cli("resume", "-y", "one")
    assert ("found ['last.txt']" in again.stdout, "changed since the submit" in again.stderr) == (True, False)
    assert "code: 2 files" in cli.ok("plan", cwd=folder).stdout  # without the files of the two jobs
    asked = cli("rm", "one", cwd=folder).stderr
    assert re.search(rf"{folder}/models/one  5 B  stays: --everywhere", asked), asked
    cli.ok("rm", "-y", "--everywhere", "one", cwd=folder)
    assert sorted(path.parent.name for path in folder.glob("[cm]*/*/*")) == ["two", "two"]


def test_second_sweep_here_tries_its_trials_anew(cli: Any, project: Callable[..., Path]) -> None:
    """No trial of a second sweep, and no further trial of the first, starts from saved files of another."""
    sweep = "sweep: {space: {args.lr: [1, 2]}, algorithm: grid, metric: loss, mode: min, parallel: 1}\n"
    folder = project(f"checkpoint: {{uri: ckpt}}\n{ALONE}{sweep}", script="train.py", text=SAVES)
    for name in ("one", "two"):
        shown = cli.ok("submit", "-y", "--name", name, cwd=folder, timeout_s=120).stdout
        assert (shown.count("found []"), shown.count("found [")) == (2, 2), shown


@pytest.mark.parametrize("more", ["checkpoint.uri=ckpt", "outputs.model=ckpt"])
def test_place_with_files_of_another_job_is_refused_here(cli: Any, project: Callable[..., Path], more: str) -> None:
    """Another home's job has the same name: nothing starts, and the message names the place and the ways on."""
    folder = project(ALONE, script="train.py", text=SAVES)
    (folder / "ckpt" / "one").mkdir(parents=True)
    (folder / "ckpt" / "one" / "last.txt").write_text("dogs")
    done = cli("submit", "-y", "--name", "one", "--set", more, cwd=folder)
    said = re.sub(r"\s+", " ", done.stderr)
    refused = f"{folder}/ckpt/one holds files of another job: choose another --name or place" in said
    assert (done.code, refused) == (3, True), said
    assert cli("list", "--json").json["jobs"] == []
    cli.ok("submit", "-d", "-y", "--name", "two", "--set", more, cwd=folder)


def test_job_of_an_older_version_keeps_its_place(cli: Any, project: Callable[..., Path], home: Path) -> None:
    """A stored place without the job's id stays for resume, also with --update-config, for artifacts and for rm."""
    folder = project(f"args: [fails]\n{MORE}", script="train.py", text=SAVES)
    assert cli("submit", "-y", "--name", "one", cwd=folder).code == 1
    (folder / "ckpt" / "one" / "last.txt").rename(folder / "ckpt" / "last.txt")
    with closing(sqlite3.connect(home / "registry.sqlite")) as database, database:
        for table, column in (("jobs", "config"), ("attempts", "ref")):
            cut = (
                f"UPDATE {table} SET {column} = replace(replace({column}, 'ckpt/one', 'ckpt'), 'models/one', 'models')"
            )
            database.execute(cut)
    cli.ok("artifacts", "one", "-o", "got", cwd=folder)
    assert [path.name for path in (folder / "got").rglob("last.txt")] == ["last.txt"]
    for more in ([], ["--update-config"]):
        assert "found ['last.txt']" in cli("resume", "-y", *more, "one").stdout
    cli.ok("rm", "-y", "--everywhere", "one", cwd=folder)
    assert (folder / "ckpt" / "last.txt").exists()


CLOUDS = [("sagemaker", "account"), ("azureml", "azure_account"), ("vertex", "google_project")]
PUT: dict[str, Callable[[Any, str], Any]] = {
    "sagemaker": lambda aws, key: aws.client("s3").put_object(Bucket="cloudtrain-tests", Key=key, Body=b"x"),
    "azureml": lambda azure, name: azure.put_blob(name, b"x"),
    "vertex": lambda google, name: google.put_object(name, b"x"),
}


@pytest.mark.parametrize(("backend", "stand_in"), CLOUDS)
@pytest.mark.parametrize("key", ["checkpoint.uri", "outputs"])
def test_place_with_files_of_another_job_is_refused_before_the_send(
    cli: Any, project: Callable[..., Path], request: pytest.FixtureRequest, backend: str, stand_in: str, key: str
) -> None:
    """The launcher looks into the store: no job is created, and the next name is free."""
    cloud: Any = request.getfixturevalue(stand_in)
    cloud.settings(execute=False)
    folder, root = project(SETTINGS[backend] + ALONE, script="train.py", text=SAVES), ROOTS[backend]
    PUT[backend](cloud, "own/one/last.txt")
    more = ("--set", KEYS[key].format(root))
    done = cli("submit", "-d", "-y", "--name", "one", *more, cwd=folder)
    said = re.sub(r"\s+", " ", done.stderr)
    refused = f"{root}/one holds files of another job: choose another --name or place" in said
    assert (done.code, refused) == (3, True), said
    cli.ok("submit", "-d", "-y", "--name", "two", *more, cwd=folder)
    assert [job["job"] for job in cli("list", "--json").json["jobs"]] == ["two"]


LIST: dict[str, Callable[[Any], list[str]]] = {
    "sagemaker": lambda aws: [
        each["Key"] for each in aws.client("s3").list_objects_v2(Bucket="cloudtrain-tests").get("Contents", ())
    ],
    "azureml": lambda azure: list(azure.blobs()),
    "vertex": lambda google: list(google.objects()),
}


@pytest.mark.parametrize(("backend", "stand_in"), CLOUDS)
def test_removal_takes_the_order_of_a_job_with_places_of_its_own(
    cli: Any, project: Callable[..., Path], request: pytest.FixtureRequest, backend: str, stand_in: str
) -> None:
    """Checkpoints and outputs are elsewhere, and the order, the claim and the reports are in jobs/JOB."""
    cloud: Any = request.getfixturevalue(stand_in)
    cloud.settings(execute=False)
    more = f"checkpoint: {{uri: {ROOTS[backend]}}}\noutputs: {{model: {ROOTS[backend]}-models}}\n"
    block = SETTINGS[backend].replace("sagemaker: {", "sagemaker: {bucket: cloudtrain-tests, ")
    folder = project(block + more + ALONE, script="train.py", text=SAVES)
    cli.ok("submit", "-d", "-y", "--name", "one", cwd=folder)
    cli("stop", "one")
    until(lambda: cli("status", "one", "--json").json["state"] not in ("running", "pending", "stopping"))
    cli.ok("rm", "-y", "--everywhere", "one")
    assert not [name for name in LIST[backend](cloud) if "/one/" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_second_job_at_sagemaker_begins_anew(cli: Any, project: Callable[..., Path], account: Aws, kind: str) -> None:
    """The reports: a second script took the first one's checkpoint for its own, and a second task died on the node."""
    block = SETTINGS["sagemaker"].replace("instances: 2", "instances: 1")
    folder = project(script="train.py", text=SAVES)
    (folder / "task.py").write_text(TASK)
    more = ALONE if kind == "script" else 'env: {OMP_NUM_THREADS: "1"}\n'
    text = f"name: j\n{KINDS[kind]}{block}{more}checkpoint: {{uri: {ROOTS['sagemaker']}}}\n"
    (folder / "cloudtrain.yaml").write_text(text)
    for name in ("one", "two"):
        shown = cli.ok("submit", "-y", "--name", name, cwd=folder, timeout_s=120).stdout
        assert ("found []" if kind == "script" else "step 2/2") in shown, shown
    keys = [each["Key"] for each in account.client("s3").list_objects_v2(Bucket="cloudtrain-tests")["Contents"]]
    last = "last.txt" if kind == "script" else "step-00000002/manifest.json"
    assert [key for key in keys if key.endswith(last)] == [f"own/one/{last}", f"own/two/{last}"]


def test_mirror_with_files_of_another_job_is_refused_and_ones_own_is_removed(
    cli: Any, project: Callable[..., Path], account: Aws
) -> None:
    """A mirror in a bucket is one job's, too: MIRROR/JOB is empty at the submit, and goes with `rm --everywhere`."""
    account.settings(execute=False)
    more = f"checkpoint: {{mirror: {ROOTS['sagemaker']}}}\n{SETTINGS['sagemaker']}"
    folder = project(f"{more}training: {{global_batch_size: 16, max_steps: 2}}\n", script="task.py", text=TASK)
    file = folder / "cloudtrain.yaml"
    file.write_text(file.read_text().replace("script:", "task:"))
    PUT["sagemaker"](account, "own/one/latest.json")
    done = cli("submit", "-d", "-y", "--name", "one", cwd=folder)
    refused = f"{ROOTS['sagemaker']}/one holds files of another job" in done.stderr
    assert (done.code, refused) == (3, True), done.stderr
    cli.ok("submit", "-d", "-y", "--name", "two", cwd=folder)
    PUT["sagemaker"](account, "own/two/latest.json")
    account.end("two-1", status="Stopped")
    until(lambda: cli("status", "two", "--json").json["state"] not in ("running", "pending", "stopping"))
    asked = cli("rm", "two").stderr
    assert f"{ROOTS['sagemaker']}/two  1 B  stays" in asked, asked
    cli.ok("rm", "-y", "--everywhere", "two")
    keys = [each["Key"] for each in account.client("s3").list_objects_v2(Bucket="cloudtrain-tests")["Contents"]]
    assert [key for key in keys if key.startswith("own/")] == ["own/one/latest.json"]


def test_home_folder_stays_whatever_a_job_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older job named like the user could have the home folder itself as its `checkpoint.uri`."""
    home, job = tmp_path / "mine", tmp_path / "mine/job"
    job.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    nowhere = Here(tmp_path / "none", "", 0, "")
    told = files.left(nowhere, folders=[str(home), str(tmp_path), str(job)], remove=True)
    assert told["kept"] == dict.fromkeys([str(home), str(tmp_path)], "the home folder is there")
    assert (home.is_dir(), job.exists()) == (True, False)
