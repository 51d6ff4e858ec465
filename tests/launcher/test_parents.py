"""`init_from` in the config, and the parent's place among a job's inputs."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cloudtrain.entrypoints.checkpoints.folder import CheckpointError
from cloudtrain.entrypoints.models import tensors
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice import parents, taskcode
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.config import JobConfig
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.job import State
from cloudtrain.launcher.planning.job_spec import job_spec
from cloudtrain.launcher.store.progress import fold, lineage
from cloudtrain.launcher.store.registry import Registry

TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., JobConfig]:
    """Return a loader of a task's config with one more text."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "train.py").write_text("")

    def load(more: str, *, run: str = "task: task.py") -> JobConfig:
        file = tmp_path / "cloudtrain.yaml"
        file.write_text(f"name: child\n{run}\n{more}\n")
        return configs.load(file, environ={})

    return load


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("digits", ("digits", None, None)),
        ("digits-x7k2p@best", ("digits-x7k2p", "best", None)),
        ("digits@step-200", ("digits", "step-200", None)),
        ("s3://bucket/export/", (None, None, "s3://bucket/export/")),
        ("model.safetensors", (None, None, "model.safetensors")),
        ("{job: digits, checkpoint: last}", ("digits", "last", None)),
    ],
)
def test_short_forms(text: str, wanted: tuple[Any, ...], load: Callable[..., JobConfig]) -> None:
    """Text with a slash is a path, other text a job with an optional checkpoint, in the stored config too."""
    found = load(f"init_from: {text}")
    again = configs.stored(json.loads(json.dumps(found.model_dump(mode="json"))))
    for each in (found, again):
        assert (each.init_from.job, each.init_from.checkpoint, each.init_from.path) == wanted


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("init_from: digits@newest", "after `@`, not `newest`"),
        ("init_from: {job: a, path: b/}", "exactly one of `job` and `path`"),
        ("init_from: {checkpoint: best}", "exactly one of `job` and `path`"),
        ("init_from: {job: a, checkpoint: newest}", "best, last, or a step such as step-200"),
        ("init_from: {job: a, skip: ['(']}", "a regular expression"),
        ("init_from: {job: a, load: all}", "weights+optimizer"),
        ("init_from: {job: a, load: weights+optimizer, skip: [x]}", "`skip` goes with `load: weights`"),
        ("init_from: a\ncheckpoint: {resume: /x/step-5}", "exclude each other"),
        ("evaluate: {only: true}", "tests the weights of `init_from`"),
        ("evaluate: {split: test}\nsweep: {space: {training.seed: [1, 2]}, trials: 2}", "each trial would look"),
        ("init_form: a", "did you mean `init_from`?"),
    ],
)
def test_faults_name_the_key(more: str, words: str, load: Callable[..., JobConfig]) -> None:
    """Each fault is reported with the place in the file, before any look at a job."""
    with pytest.raises(ConfigError) as refusal:
        load(more)
    text = " ".join(f"{fault.message} {fault.hint}" for fault in refusal.value.faults)
    assert words in text
    assert all(fault.place is not None for fault in refusal.value.faults)


def test_scripts_read_the_variable_and_patterns_are_for_tasks(load: Callable[..., JobConfig]) -> None:
    """A script's arguments may hold the parent's place; patterns of names have no reader there."""
    script = "script: train.py"
    assert load("init_from: a\nargs: [--init, $CLOUDTRAIN_INPUT_INIT_FROM]", run=script).args[1].endswith("INIT_FROM")
    with pytest.raises(ConfigError, match="goes with `task`"):
        load("init_from: {job: a, strict: false}", run=script)
    with pytest.raises(ConfigError, match="no node sets the variable"):
        load("args: [--init, $CLOUDTRAIN_INPUT_INIT_FROM]", run=script)


def test_place_becomes_an_input(load: Callable[..., JobConfig], tmp_path: Path, home: Path) -> None:
    """A path is an input of the job and its settings are in the spec; a missing path is refused before the send."""
    config = load("init_from: {path: ./weights/, skip: ['^head'], rename: {'^a': b}, strict: false}")
    file = tmp_path / "cloudtrain.yaml"
    with pytest.raises(ConfigError, match=r"weights does not exist"):
        prepare(config, file, Path(), dry=True)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.pt").write_bytes(b"pickled")
    prepared = prepare(config, file, Path(), dry=True)
    assert prepared.config.inputs == {"init_from": "./weights/"}
    spec = job_spec(prepared.plan, prepared.config, "child", 1).dump()["init_from"]
    assert spec == {"job": None, "checkpoint": None, "load": "weights", "rename": {"^a": "b"}, "skip": ["^head"],
                    "strict": False}  # fmt: skip
    far = load("init_from: s3://bucket/export/")
    with pytest.raises(ConfigError) as refusal:
        prepare(far, file, Path(), dry=True)
    assert [fault.key for fault in refusal.value.faults] == ["init_from.path"]
    assert "init_from" not in job_spec(prepared.plan, load(""), "child", 1).dump()


def test_parent_must_have_ended_on_the_same_backend(load: Callable[..., JobConfig], tmp_path: Path, seed: Any) -> None:
    """A missing, a running and a foreign parent are refused, and a pipe, of which a read would wait."""
    with pytest.raises(ConfigError, match="no job `digits`"):
        parents.resolved(load("init_from: digits"), tmp_path)
    seed("digits")
    with pytest.raises(ConfigError, match="digits is still running"):
        parents.resolved(load("init_from: digits"), tmp_path)
    foreign = load("init_from: digits").model_copy(update={"backend": "ssh"})
    with pytest.raises(ConfigError, match="digits ran on local, this job runs on ssh"):
        parents.resolved(foreign, tmp_path)
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"w\.safetensors is neither a file nor a folder"):
        parents.resolved(load("init_from: ./w.safetensors"), tmp_path)


@pytest.mark.parametrize(
    ("state", "config", "words"),
    [
        ("failed", {"task": "task.py"}, "ended (failed) before the first checkpoint"),
        ("stopped", {"task": "task.py"}, "ended (stopped) before the first checkpoint"),
        ("succeeded", {"script": "a.py"}, "runs a script"),
        ("succeeded", {"task": "task.py", "init_from": {"job": "a"}, "evaluate": {"only": True}}, "is a test of other"),
    ],
)
def test_parent_without_a_checkpoint_is_refused(
    state: Any,
    config: dict[str, Any],
    words: str,
    load: Callable[..., JobConfig],
    tmp_path: Path,
    seed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The registry knows before the send that the node would find no weights; a saved checkpoint is accepted."""
    job = seed("digits", State(state))
    monkeypatch.setattr(parents, "_job", lambda name: replace(job, config={"name": "digits", **config}))
    with pytest.raises(ConfigError) as refusal:
        parents.resolved(load("init_from: digits"), tmp_path)
    assert words in refusal.value.faults[0].message
    if "task" in config and "evaluate" not in config:
        Registry().set_state(job.attempt, State(state), {"checkpoint_step": 5, "checkpoint": "step-00000005"})
        parents._require_weights(parents._job("digits"))


TINY = """
from torch import nn
def model(params): return nn.Linear(2, params.get("classes", 3))
def dataset(params, split): ...
def loss(model, batch): ...
"""
OWN = "init_from: ./w.safetensors\ntraining: {max_steps: 1, global_batch_size: 1}\n"
CLOUD = """backend: sagemaker
sagemaker: {region: us-east-1, bucket: mine, role: "arn:aws:iam::123456789012:role/x"}
resources: {instance_type: ml.m5.xlarge}
"""
HOSTS = "backend: ssh\nssh: {hosts: [h1], workdir: /tmp/x}\n"


def write_weights(folder: Path, columns: int = 2) -> None:
    """Write the weights of a layer with three outputs."""
    save_file({"weight": torch.zeros(3, columns), "bias": torch.zeros(3)}, folder / "w.safetensors")


def test_plan_compares_names_and_shapes(cli: Any, load: Callable[..., JobConfig], tmp_path: Path) -> None:
    """A difference is an error in the file, in the node's words, below the plan; `--json` says that weights fit."""
    (tmp_path / "task.py").write_text(TINY)
    write_weights(tmp_path)
    load(OWN + "params: {classes: 5}")
    told = cli("plan", cwd=tmp_path)
    assert (told.code, "init_from: ./w.safetensors" in told.stdout) == (3, True)
    assert "the shape of bias differs: 3 in the parent, 5 here" in told.stderr
    assert "at cloudtrain.yaml:3:12, init_from" in told.stderr
    load(OWN)
    fits = "init_from: names and shapes of 2 weights fit the model"
    assert cli("plan", "--json", cwd=tmp_path).json["parent"] == fits


@pytest.mark.parametrize(
    ("place", "backend", "change", "words"),
    [
        ("./torch", "", "", "on the node, before step 1: model.pt has no header with shapes"),
        ("./torch/model.pt", "", "", "on the node, before step 1: model.pt has no header with shapes"),
        # The process has a limit of memory.
        (
            "./w.safetensors",
            "",
            "(2 if __import__('resource').getrlimit(2)[0] > 0 else missing,",
            "names and shapes of 2 weights fit the model",
        ),
        ("./w.safetensors", "", "(missing,", "on the node, before step 1: NameError: name 'missing' is not defined"),
        ("s3://bucket/export/", CLOUD, "", "names and shapes are compared at the submit"),
        ("./w.safetensors", "sweep: {space: {training.seed: [1, 2]}}\n", "", "each trial of a sweep has its own model"),
        *(("./w.safetensors", place, "", "names and shapes of 2 weights fit the model") for place in (HOSTS, CLOUD)),
        ("/srv/w.safetensors", HOSTS, "", "on the node, before step 1: /srv/w.safetensors is a path on a host"),
    ],
)
def test_comparison_that_is_not_possible_here_is_told(
    place: str, backend: str, change: str, words: str, load: Callable[..., JobConfig], tmp_path: Path, home: Path
) -> None:
    """The line says whether the weights fit, or where the names and shapes will be compared."""
    (tmp_path / "task.py").write_text(TINY.replace("(2,", change or "(2,"))
    write_weights(tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/model.pt").write_bytes(b"pickled")
    prepared = prepare(
        load(OWN.replace("./w.safetensors", place) + backend), tmp_path / "cloudtrain.yaml", Path(), dry=True
    )
    (line,) = parents.compared(prepared)
    assert line.endswith(words)


def test_comparison_is_kept(
    load: Callable[..., JobConfig], tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second comparison of the same code, spec and shapes starts no process; other shapes start a process."""
    (tmp_path / "task.py").write_text(TINY)
    write_weights(tmp_path)
    prepared = prepare(load(OWN), tmp_path / "cloudtrain.yaml", Path(), dry=True)
    first = parents.compared(prepared)
    monkeypatch.setattr(taskcode, "run", lambda *asked: ([{"why": "a new process"}], False))
    assert parents.compared(prepared) == first
    write_weights(tmp_path, 3)
    assert parents.compared(prepared)[0].endswith("a new process")


BOX = json.dumps({"boxes": json.dumps({"a": {"name": 3, "whole": [1], "offset": [0]}})})
ONE = '{"__metadata__":%s,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
INDEX = "model.safetensors.index.json"


def stored(header: str) -> bytes:
    """Return a safetensors file with the header."""
    return len(header).to_bytes(8, "little") + header.encode() + bytes(4)


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("", b"", "there is neither a checkpoint nor model.safetensors.index.json, model.safetensors, model.pt"),
        ("model.safetensors", b"\xff" * 4000, "model.safetensors has no header"),
        ("model.safetensors", stored("[]"), "has a header that contradicts itself"),
        ("model.safetensors", stored(ONE % BOX), "the name of a is no text"),
        ("model.safetensors", stored((ONE % "{}").replace("[1]", "[Infinity]")), "contradicts itself"),
        (INDEX, b"{}", f"{INDEX} is damaged"),
        (INDEX, b"[]", f"{INDEX} is damaged"),
        (INDEX, b'{"weight_map": 5}', f"{INDEX} is damaged"),
        (INDEX, b'{"weight_map": {"a": 3}}', "names 3, which is no file of this folder"),
        (INDEX, b'{"weight_map": {"a": [3]}}', f"{INDEX} is damaged"),
        (INDEX, b'{"weight_map": {"a": "../w.safetensors"}}', "names '../w.safetensors'"),
        (INDEX, b'{"weight_map": {"a": "w.safetensors"}}', "w.safetensors is no file"),
        ("manifest.json", b"{}", "is damaged: manifest.json is not readable: its checksum differs"),
        ("manifest.json", b"null\n25cbfc4f\n", "is damaged: manifest.json is not readable"),
        ("manifest.json", b'{"format":1}\naf1ec339\n', "another version wrote the checkpoint"),
    ],
)
def test_parent_that_no_job_can_read_is_refused(
    file: str, data: bytes, words: str, load: Callable[..., JobConfig], tmp_path: Path, home: Path
) -> None:
    """Damaged weights on this machine are a fault of the config; of a store they raise an error that is expected."""
    (tmp_path / "export").mkdir()
    if file:
        (tmp_path / "export" / file).write_bytes(data)
    config = load("init_from: ./export/")
    with pytest.raises(ConfigError) as refusal:
        parents.resolved(config, tmp_path)
    assert words in refusal.value.faults[0].message
    with pytest.raises((ValueError, FileNotFoundError, CheckpointError)):
        tensors.at(f"file://{tmp_path}/export")


def test_lineage_is_the_nodes_report_else_the_config() -> None:
    """Before the start the config names the parent; the start's event gives step and checksum."""
    asked = {"init_from": {"job": "digits", "checkpoint": "step-40"}}
    assert lineage(asked, {}) == "digits step 40"
    assert lineage({}, {}) == ""
    origin = {"job": "digits", "step": 40, "sha256": "ab" * 32, "path": "/x"}
    line = f"start  ::ct {json.dumps({'e': 'start', 'step': 0, 'parent': origin})}"
    assert lineage(asked, fold({}, [line])) == "digits step 40, sha256 abababababab"


def test_rehearsal_takes_a_copy_of_the_parent(cli: Any, load: Callable[..., JobConfig], tmp_path: Path) -> None:
    """`--input init_from=DIR` gives a rehearsal the weights, so names and shapes are compared before a payment."""
    load("init_from: s3://bucket/export/")
    told = cli("rehearse", "--input", f"nope={tmp_path}", cwd=tmp_path)
    assert (told.code, "there are: init_from" in told.stderr) == (2, True)
