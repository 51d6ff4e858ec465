"""`cloudtrain export` and `cloudtrain serve`: a real job becomes a folder, and the folder answers requests."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.checkpoints import shards
from cloudtrain.entrypoints.models import folder as folders
from cloudtrain.entrypoints.models import scratch
from cloudtrain.entrypoints.models.order import ExportOrder
from cloudtrain.launcher.commands import serve
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UsageError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.models import deployment, exporting
from cloudtrain.launcher.planning import shipped
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.extras import install
from doubles import modelfolders
from doubles.signatures import MakeJob
from doubles.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.soak  # the tutorial about serving exports, serves and pushes a trained job
def test_trained_job_is_exported_and_served(cli: Any, tmp_path: Path) -> None:
    """Submit, export and serve, as a user types them: the best checkpoint is chosen, checked, and answers."""
    project = Path(shutil.copytree(ROOT / "examples/digits", tmp_path / "digits"))
    settings = ["training.max_steps=20", "training.eval_every=10", "checkpoint={every_steps: 10, keep_best: true}"]
    words = [word for each in settings for word in ("--set", each)]
    done = cli.ok("submit", "--force", "-y", "--name", "digits", "--backend", "local", *words, cwd=project)
    done = cli.ok("export", "digits", "--json", cwd=project)
    assert set(done.json["check"]["forms"]) == {"pt2", "safetensors"}
    model = folders.verify(Path(done.json["place"]), checked=True)
    trainer = model.config["checkpoint"]["trainer"]
    assert (trainer["job"], trainer["step"]) == ("digits", 20)
    assert model.config["job"]["metrics"]["accuracy"] > 0
    assert str(model.config["job"]["metrics"]["accuracy"]) in (model.path / "README.md").read_text()
    again = cli("export", "digits", cwd=project)
    assert (again.code, "exists" in again.stderr) == (2, True)
    done = cli("export", "digits", "--for", "vertex", "--checkpoint", "step-10", "-o", tmp_path / "out", cwd=project)
    assert (done.code, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.stderr
    version = folders.verify(tmp_path / "out/model", checked=True).digest[:12]
    assert f"/cloudtrain/digits:{version}" in (tmp_path / "out/upload-model.json").read_text()
    assert shipped.collect(project) == ["cloudtrain.yaml", "sweep.yaml", "task.py"]

    server = subprocess.Popen(
        [*cli.command, "serve", model.path, "--port", "0"], env=cli.environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        line = server.stderr.readline()
        found = re.fullmatch(r"ready: digits \(pt2, [0-9a-f]{12}\) on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        body = json.dumps({"instances": torch.rand(3, 1, 8, 8).tolist()}).encode()
        with urllib.request.urlopen(f"{found[1]}/invocations", body, timeout=20) as answer:
            assert torch.tensor(json.load(answer)["predictions"]).shape == (3, 10)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0
        server.stderr.close()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["export", "nothing"], 8, "no job"),
        (["export", "nothing", "--checkpoint", "newest"], 2, "`newest` names no checkpoint"),
        (["export", "nothing", "--form", "pickle"], 2, "`pickle` is no form of a model"),
        (["export", "nothing", "--input", "x"], 2, "expected NAME=PATH"),
        (["export", "nothing", "--name", "Digits"], 2, "`Digits` cannot name a model"),
        (["export", "nothing", "--sign", "missing"], 2, "there is no key missing"),
        (["export", "./missing"], 1, "there is no checkpoint"),
        (["serve", "missing"], 2, "is no model folder"),
        (["export", "nothing", "--machine", "ml.m5.xlarge"], 2, "add --for sagemaker"),
        (["export", "./step-1", "--for", "vertex"], 2, "--for needs a job"),
    ],
)
def test_wrong_words_are_refused(cli: Any, words: list[str], code: int, reason: str) -> None:
    """Each mistake on the command line has its message and exit code."""
    done = cli(*words)
    assert (done.code, reason in done.stderr) == (code, True), done.stderr


def exported(place: Path) -> dict[str, Any]:
    """Write a model folder, in place of an export."""
    modelfolders.write_model(place)
    return {"place": str(place), "files": ["config.json"], "digest": folders.file_sha256(place / folders.SUMS)}


def test_folder_for_a_vendor_is_whole(tmp_path: Path) -> None:
    """The model folder is verified inside; the server's code, the requests and the commands are beside it."""
    found, notes = deployment.write("sagemaker", JobConfig(name="digits"), "digits", None, tmp_path / "out", exported)
    assert (found["place"], notes) == (str(tmp_path / "out"), ())
    assert "model/config.json" in found["files"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model", "cloudtrain", *(name for name in found["files"] if "/" not in name)}
    model = folders.verify(tmp_path / "out/model", checked=True)
    assert f"digits, version {model.digest[:12]}" in (tmp_path / "out/README.md").read_text()
    environ = {"PYTHONPATH": str(tmp_path / "out"), "PATH": "/usr/bin"}
    imported = [sys.executable, "-c", "import cloudtrain.entrypoints.models.folder as f; print(f.__file__)"]
    shown = subprocess.run(imported, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.startswith(str(tmp_path / "out"))
    assert (tmp_path / "out/serve").stat().st_mode & 0o111 == 0o111


@pytest.mark.parametrize(
    ("vendor", "name", "machine", "words"),
    [
        ("local", "digits", None, "has no endpoints"),
        ("azure", "digits", None, "has no endpoints"),
        ("vertex", "My_Model", None, "cannot name a model"),
        ("sagemaker", "digits", "n1-standard-4", "not a SageMaker instance type"),
    ],
)
def test_vendor_refuses_before_the_export(
    tmp_path: Path, vendor: str, name: str, machine: str | None, words: str
) -> None:
    """A wrong word is an error before minutes of work, and no folder is left."""
    with pytest.raises(CloudtrainError, match=words):
        deployment.write(vendor, JobConfig(name="digits"), name, machine, tmp_path / "out", exported)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_missing_server_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The message of `serve` has the command that installs the extra, before the server's process starts."""
    (tmp_path / folders.SUMS).write_text("")
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(UsageError, match=f"`{missing}` is not installed") as raised:
        serve.command.main([str(tmp_path)], standalone_mode=False)
    assert raised.value.hint == install("server")


def saved(folder: Path, *steps: int, job: str = "seeded", best: int | None = None, extra: tuple[str, ...] = ()) -> None:
    """Write small checkpoints of a job, by the functions of the saver that need no process group.

    `extra`: the names of the model's state that is no tensor.
    """
    for step in steps:
        partial = checkpoints.begin(folder, step, 0)
        box = shards.Box("model.w", torch.float32, (3,), (0,), (3,))
        head, _, size = shards.place([box])
        data = torch.full((3,), float(step)).view(torch.uint8)
        assert size == data.numel()
        name = "shard-00000-of-00001.safetensors"
        files = {name: shards.write(partial / name, head, data)}
        torch.save({"groups": [{"lr": 0.1}], "extra": dict.fromkeys(extra, 1)}, partial / checkpoints.PLAIN)
        files[checkpoints.PLAIN] = checkpoints.write_bytes(
            partial / checkpoints.PLAIN, (partial / checkpoints.PLAIN).read_bytes()
        )
        trainer = {"job": job, "step": step, "samples": step, "extra": extra}
        files[checkpoints.TRAINER] = checkpoints.write_json(partial / checkpoints.TRAINER, trainer)
        checkpoints.finish(folder, step, files)
    if best is not None:
        checkpoints.mark_best(folder, best, "loss", 0.5)


@pytest.mark.parametrize(
    ("best", "choice", "step"),
    [(None, None, 30), (20, None, 20), (20, "last", 30), (20, "best", 20), (None, "step-10", 10), (10, "step-30", 30)],
)
def test_choice_of_a_checkpoint(tmp_path: Path, best: int | None, choice: str | None, step: int) -> None:
    """Without a choice the best is taken if the job keeps the best, else the last."""
    saved(tmp_path, 10, 20, 30, best=best)
    assert exporting.choose(tmp_path, choice).name == checkpoints.step_name(step)


@pytest.mark.parametrize(
    ("choice", "reason"), [("best", "keeps no best"), ("step-7", "step 7 is not kept"), (None, "has no checkpoint")]
)
def test_absent_checkpoint_is_named(tmp_path: Path, choice: str | None, reason: str) -> None:
    """The message says that the choice is absent, and lists the steps that exist."""
    if choice is not None:
        saved(tmp_path, 10, 20)
    with pytest.raises(CloudtrainError, match=reason) as raised:
        exporting.choose(tmp_path, choice)
    assert choice != "step-7" or raised.value.hint == "there are step-10, step-20"


def test_damaged_mark_of_the_best_is_an_error(tmp_path: Path) -> None:
    """Without a choice the last checkpoint is not taken for the best."""
    saved(tmp_path, 10, 20, best=10)
    (tmp_path / checkpoints.BEST).write_text('{"step": 1')
    with pytest.raises(CloudtrainError, match=r"best\.json is damaged"):
        exporting.choose(tmp_path, None)
    assert exporting.choose(tmp_path, "last").name == checkpoints.step_name(20)


def test_message_names_no_removed_folder(tmp_path: Path) -> None:
    """A job without checkpoints has an empty copy, which is gone when the message is read."""
    with pytest.raises(CloudtrainError, match="has no checkpoint") as raised:
        exporting.choose(tmp_path, None, is_copy=True)
    assert not any(str(tmp_path) in each for each in map(str, vars(raised.value).values()))


def test_checkpoints_come_from_the_backend(seed: MakeJob, registry: Registry, home: Path, tmp_path: Path) -> None:
    """If no reported path is here, the backend copies the named checkpoint, or all, and a copy is exported."""
    job = seed("seeded", State("succeeded"))
    saved(home / "local" / "seeded" / "attempt-1", 10, 20)
    one = tmp_path / "one"
    one.mkdir()
    assert exporting.saved_checkpoints(registry, job, one, "step-10") == one
    assert [path.name for path in one.iterdir()] == ["step-00000010"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert exporting.saved_checkpoints(registry, job, scratch, None) == scratch
    found = exporting.choose(scratch, None)
    place = tmp_path / "model"
    exporting.export_path(registry, found, place, name="words", key=None, is_unchecked=True)
    config = folders.verify(place).config
    assert (config["checkpoint"]["step"], config["name"]) == (20, "words")


def test_folders_beside_a_model_are_named(cli: Any, tmp_path: Path) -> None:
    """A folder of checkpoints names the steps, the folder above pushed versions the command for the current."""
    saved(tmp_path / "steps", 10, 20)
    done = cli("export", tmp_path / "steps", "--unchecked", cwd=tmp_path)
    assert (done.code, "is a folder of checkpoints" in done.stderr) == (2, True), done.stderr
    assert "step-00000020, step-00000010" in done.stderr
    for words in (["--checkpoint", "last"], ["--input", "train=x"], ["--form", "pt2"]):
        done = cli("export", tmp_path / "steps/step-00000010", "--unchecked", *words, cwd=tmp_path)
        assert (done.code, f"{words[0]} needs a job" in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.glob("*-model")) == list(tmp_path.glob(".*")) == []
    modelfolders.write_model(tmp_path / "place" / "0123456789ab")
    (tmp_path / "place" / "current").symlink_to("0123456789ab")
    done = cli("serve", tmp_path / "place")
    assert (done.code, f"cloudtrain serve {tmp_path}/place/current" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("place", "kind", "reason"),
    [("/proc/foo", ConfigError, "no folder can be made"), ("link", UsageError, "link exists")],
)
def test_place_that_cannot_be_written_is_named(
    registry: Registry, tmp_path: Path, place: str, kind: type[Exception], reason: str
) -> None:
    """A place in /proc, and a link to nothing, are refused before the export."""
    saved(tmp_path, 10)
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(kind, match=reason):
        exporting.export_path(registry, tmp_path / "step-00000010", tmp_path / place, key=None, is_unchecked=True)


def test_dead_export_is_removed_although_its_model_exists(tmp_path: Path) -> None:
    """An export that dies after the model has its name leaves a folder, perhaps with a copy of the checkpoints."""
    (tmp_path / ".model.exporting-dead/step-00000010").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="model exists"), exporting.hidden_beside(tmp_path / "model"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_is_refused_before_it_begins(registry: Registry, tmp_path: Path, seed: MakeJob) -> None:
    """A script's files have a form of their own; a state that is no tensor has no room in safetensors."""
    saved(tmp_path, 10, extra=("norm._extra_state",))
    with pytest.raises(CloudtrainError, match=r"no tensor: norm\._extra_state"):
        exporting.export_path(registry, tmp_path / "step-00000010", tmp_path / "model", key=None, is_unchecked=True)
    assert list(tmp_path.glob("model")) == list(tmp_path.glob(".*")) == []
    job = seed("seeded", State("succeeded"))
    with pytest.raises(UsageError, match="a script saves its model") as raised:
        exporting.export_job(registry, job, tmp_path / "model", None, forms=(), inputs={}, key=None, is_unchecked=False)
    assert "artifacts" in raised.value.hint


def test_key_with_a_passphrase_is_refused_before_the_export(tmp_path: Path) -> None:
    """The key is tried first; the hint names ssh-add. A key without a passphrase passes."""
    for name, phrase in (("open", ""), ("shut", "secret")):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-f", tmp_path / name], check=True)
    exporting.require_key(tmp_path / "open")
    with pytest.raises(UsageError, match="cannot be signed") as raised:
        exporting.require_key(tmp_path / "shut")
    assert "ssh-add" in raised.value.hint


PARENT = """
import json, pathlib, sys
from cloudtrain.entrypoints.models.order import ExportOrder
from cloudtrain.launcher.commands import export
from cloudtrain.launcher.models import exporting
export._end_on_signals()
order = ExportOrder.load(json.loads(sys.argv[1]))
with exporting.hidden_beside(pathlib.Path(order.place)):
    exporting._run(order, pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_ended_command_leaves_no_process_and_no_folder(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends all processes of an export and removes the hidden folders; a later export removes those left."""
    monkeypatch.setenv("COLD_PYTHON", "1")  # a warm process has another parent
    saved(tmp_path / "steps", 10)
    (tmp_path / "task.py").write_text("import time\ntime.sleep(100)\n")
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "task.py", "code/task.py")
    order = ExportOrder(
        checkpoint=str(tmp_path / "steps/step-00000010"),
        place=str(tmp_path / "out/model"),
        name="m",
        archive=str(tmp_path / "code.tar.gz"),
        archive_sha256=hashlib.sha256((tmp_path / "code.tar.gz").read_bytes()).hexdigest(),
    )
    command = [sys.executable, "-c", PARENT, json.dumps(order.dump()), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        until(lambda: list((tmp_path / "out").glob(".model.exporting-*/work/reference.log")))
        until(lambda: len(processes.descendants(parent.pid)) == 2)
        below = [(pid, processes.stamp(pid)) for pid in processes.descendants(parent.pid)]
        parent.send_signal(number)
        parent.wait(20)
    until(lambda: not any(processes.alive(*each) for each in below))
    left = list((tmp_path / "out").iterdir())
    assert len(left) == (1 if number is signal.SIGKILL else 0)
    scratch.remove_dead(tmp_path / "out/model")
    assert list((tmp_path / "out").iterdir()) == []
