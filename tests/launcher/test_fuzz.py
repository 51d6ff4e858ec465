"""Random changes of what each reader of foreign files reads: an answer or the reader's own error, in bounded time."""

import json
import math
import random
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.contract import AgentSpec, NodeStatus
from cloudtrain.entrypoints.environments import requirements
from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.models import folder as models
from cloudtrain.entrypoints.sweep.journal import Journal
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import agent_state
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.money import shared_ledger
from cloudtrain.launcher.planning.ignore import IgnoreFile
from cloudtrain.launcher.prices import own
from cloudtrain.launcher.store import progress

MOST_S, MOST_BYTES = 1.0, 200 << 20
CONFIG = b"""\
name: run
task: task.py
backend: ssh
resources: {instances: 2, accelerators: A100:8}
ssh: {hosts: [h0, {host: h1, user: bob}]}
limits: {max_duration: 2h}
budget: {limit: 20 USD, alert_at: [50%, 80%]}
training: {global_batch_size: 64, max_steps: 100, optimizer: {name: adamw, lr: 1e-3}}
env: {A: "1", B: $HOME}
sweep: {algorithm: asha, metric: loss, space: {training.optimizer.lr: {log: [1e-5, 1e-2]}}, trials: 20}
notify: [{webhook: https://example.com/x}]
"""
STATUS: dict[str, Any] = {
    "state": {"pid": 7, "state": "running", "generation": 2, "started_s": 1.5, "seen_s": 9.0},
    "exit": {"state": "failed", "reason": "error", "ended_s": 8.0, "error": {"rank": 1, "type": "E", "message": "m"}},
    "alive": True,
    "resumable": True,
}
LINES = [
    {"e": "start", "world": 2, "max_steps": 9, "parameters": 5},
    {"e": "step", "step": 3, "loss": 1.5, "lr": 0.1, "samples_s": 3.0, "bubble": 0.1, "gpu": [{"use": 1.0}]},
    {"e": "checkpoint", "step": 3, "bytes": 5, "path": "/c/step-00000003"},
    {"e": "trial", "trial": 1, "rung": 0, "state": "paused", "value": 0.5, "params": {"lr": 0.1}},
    {"e": "test", "metrics": {"accuracy": 0.5}, "confusion": [[1, 2], [3, 4]]},
]
SEGMENT = {"trial": 0, "rung": 0, "from_step": 0, "until_step": 5, "values": {"lr": 0.1}, "source": 1}
JOURNAL = [
    {"e": "start", "segment": SEGMENT, "place": "0/0"},
    {"e": "end", "trial": 0, "rung": 0, "value": 0.5, "start_s": 1.0, "step_s": 0.1},
    {"e": "start", "segment": {**SEGMENT, "rung": 1}, "place": "0/0"},
    {"e": "start", "segment": {**SEGMENT, "trial": 1}, "place": "0/1"},
]
MANIFEST = {
    "format": checkpoints.FORMAT,
    "files": {
        name: {"size": 5, "crc32": "00000000"}
        for name in ("trainer.json", "plain.pt", "shard-00000-of-00001.safetensors")
    },
}
PRICE = f"{','.join(own.COLUMNS)}\nsagemaker,ml.g5.xlarge,us-east-1,on_demand,1.5,no,1,2026-11-01,user\n".encode()
LEDGER = shared_ledger._dump(
    shared_ledger.Book(
        {("p", "month"): shared_ledger.LedgerBudget("p", "month", 5, 100, 1.0, "me")},
        {"k": shared_ledger.Held("j", 1, "p", 5, 1.0, "me")},
        {"c": shared_ledger.End("p", 5, 1.0, {"2026-11": 3})},
        {"p": {"2026-11": 3}},
    )
)
PACKAGES = b"torch>=2\nnumpy==1.0 ; python_version > '3'\n-r more.txt\n# x\npkg @ https://e.org/p.whl\n"
PROJECT = b'[project]\nname = "x"\ndependencies = ["numpy"]\n[project.optional-dependencies]\ntrain = ["torch"]\n'
HEADER = b"# /// script\n# dependencies = ['numpy']\n# requires-python = '>=3.10'\n# ///\nprint(1)\n"
PIECES = [
    *(b"", b"\0", b"\xff", b"\n", b"[" * 1100, b"{" * 1100, b'{"a":' * 1100, b"9" * 4400, b"NaN", b"1e999", b"-1"),
    *(b"null", b"true", b'""', b"[]", b"{}", b": ", b"- ", b"&a ", b"*a", b"!!python/object ", b"%", b"\t", b"#", b"*"),
    *(b"(" * 500, b"\xef\xbb\xbf", b"\r", b"'", b'"', b"\\", b"..", b"/", b"a" * 900, b"1e400", b"0x1f", b"2026-02-30"),
]
VALUES: list[Any] = [
    *(None, True, -1, 0, 10**30, 10**400, 1e308, math.inf, "", "x", "\0", "é" * 3000, [], {}, [[]], {"a": None}),
    *([None], 1.5, "nan", -0.0),
    json.loads("[" * 400 + "]" * 400),
]


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Return the data with a few places changed."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(found) + 1)
        found[at : at + rng.choice((0, 0, 1, 3, 20))] = rng.choice(PIECES)
    return bytes(found)


def value_changed(rng: random.Random, value: Any) -> Any:
    """Return a copy of the JSON value with one place changed, or removed."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    if isinstance(value, dict):
        changed = {**value, key: value_changed(rng, value[key])}
        return changed if rng.random() < 0.85 else {k: v for k, v in value.items() if k != key}
    return [value_changed(rng, each) if at == key else each for at, each in enumerate(value)]


def json_or_bytes(rng: random.Random, value: Any) -> bytes:
    """Return the value's JSON with a value changed, or with bytes changed."""
    if rng.random() < 0.7:
        return json.dumps(value_changed(rng, value)).encode()
    return bytes_changed(rng, json.dumps(value).encode())


def with_checksum(text: bytes) -> bytes:
    """Return a line of a journal."""
    return b"%08x %b\n" % (zlib.crc32(text), text)


def read_config(folder: Path, rng: random.Random) -> None:
    """Read a changed config file."""
    (folder / "task.py").write_text("model = dataset = loss = print\n")
    (folder / "cloudtrain.yaml").write_bytes(bytes_changed(rng, CONFIG))
    configs.load(folder / "cloudtrain.yaml")


def read_ignore(folder: Path, rng: random.Random) -> None:
    """Read changed lines, and ask for some names."""
    found = IgnoreFile(bytes_changed(rng, b"*.pt\n!keep.pt\n/build/\nsrc/**/x[0-9]?\n\\#a\n**/b\nc/**\n"))
    for name in (b"a.pt", b"src/a/b/x1y", b"c/d/e", b"a" * 300, b"a/" * 200 + b"b"):
        found.verdict(name, is_dir=False)


def read_requirements(folder: Path, rng: random.Random) -> None:
    """Read a changed list of packages in one of its three forms."""
    name, text = rng.choice((("r.txt", PACKAGES), ("pyproject.toml[train]", PROJECT), ("s.py", HEADER)))
    (folder / name.partition("[")[0]).write_bytes(bytes_changed(rng, text))
    requirements.read(name, folder)


def read_spec(folder: Path, rng: random.Random) -> None:
    """Load a changed message to an agent."""
    job = {"job": "a", "attempt": 1, "run": {"kind": "task", "target": "t.py"}, "params": {}, "env": {"A": "1"}}
    spec = {"spec": job, "node": 0, **dict.fromkeys(("address", "root", "bundle", "sha256", "workdir", "python"), "/a")}
    limits = {"limit_reason": "budget", **dict.fromkeys(("max_duration_s", "deadline_s", "grace_s"), 9.0)}
    AgentSpec.load(value_changed(rng, {**spec, **limits, "secrets": {}}))


def read_status(folder: Path, rng: random.Random) -> None:
    """Fold changed reports of two nodes."""
    agent_state.fold({0: NodeStatus.load(value_changed(rng, STATUS)), 1: NodeStatus.load(STATUS)}, 2)


def read_journal(folder: Path, rng: random.Random) -> None:
    """Open a changed journal, whose checksums are right."""
    lines = [with_checksum(json_or_bytes(rng, line).replace(b"\n", b"")) for line in JOURNAL]
    (folder / "sweep.jsonl").write_bytes(b"".join(lines))
    Journal(folder).close()


def read_manifest(folder: Path, rng: random.Random) -> None:
    """Read a changed manifest, whose checksum is right."""
    text = json_or_bytes(rng, MANIFEST).replace(b"\n", b"").decode(errors="replace")
    checkpoints.parse_manifest(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode(), folder)


def read_trainer(folder: Path, rng: random.Random) -> None:
    """Read a changed trainer.json."""
    trainer = {"step": 5, "job": "a", "loss": 0.5, "metrics": {"a": 1.0}, "save": "a 5 0", "parent": {"job": "b"}}
    (folder / "trainer.json").write_bytes(json_or_bytes(rng, trainer))
    checkpoints.read_trainer(folder)


def read_events(folder: Path, rng: random.Random) -> None:
    """Fold changed lines of a job, and show them."""
    lines = [f"text{events.MARK}{json_or_bytes(rng, line).decode(errors='replace')}" for line in LINES]
    found = progress.fold({}, lines)
    progress.shown(found)
    progress.sound(json.loads(json.dumps(found)))


def read_prices(folder: Path, rng: random.Random) -> None:
    """Read changed prices."""
    own._parsed(bytes_changed(rng, PRICE))


def read_ledger(folder: Path, rng: random.Random) -> None:
    """Read a changed ledger of a bucket."""
    shared_ledger.load(json_or_bytes(rng, json.loads(LEDGER)), "s3://b/ledger.json")


def read_model(folder: Path, rng: random.Random) -> None:
    """Read changed checksums, and a changed config of a model folder."""
    sums = b"".join(b"0" * 64 + b"  %b.json\n" % name for name in (b"config", b"check"))
    (folder / models.SUMS).write_bytes(bytes_changed(rng, sums))
    (folder / models.CONFIG).write_bytes(json_or_bytes(rng, {"name": "a", "format": 1, "call": [], "inputs": [{}]}))
    models.read_config(folder)
    models.read_sums(folder)


READERS: dict[Callable[[Path, random.Random], None], tuple[type[Exception], ...]] = {
    read_config: (CloudtrainError,),
    read_ignore: (),
    read_requirements: (Refused,),
    read_spec: (ValueError,),
    read_status: (ValueError,),
    read_journal: (),
    read_manifest: (ValueError, checkpoints.CheckpointError),
    read_trainer: (ValueError,),
    read_events: (),
    read_prices: (),
    read_ledger: (CloudtrainError,),
    read_model: (models.ModelFolderError,),
}


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize("reader", READERS, ids=lambda each: each.__name__)
def test_random_content_is_read_or_refused(
    reader: Callable[[Path, random.Random], None], count: int, tmp_path: Path
) -> None:
    """No error of another kind, no input above a second, no memory above 200 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        began_s = time.process_time()
        try:
            reader(tmp_path, random.Random(seed))
        except READERS[reader]:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert time.process_time() - began_s < MOST_S, f"seed {seed}"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_BYTES


@pytest.mark.parametrize("reader", READERS, ids=lambda each: each.__name__)
def test_sound_content_is_read(
    reader: Callable[[Path, random.Random], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What the changes begin with is right: else most of them would end at the same first fault."""
    for name in ("bytes_changed", "value_changed"):
        monkeypatch.setattr(f"{__name__}.{name}", lambda rng, value: value)
    monkeypatch.setattr(f"{__name__}.json_or_bytes", lambda rng, value: json.dumps(value).encode())
    for seed in range(6):
        reader(tmp_path, random.Random(seed))
    assert "damaged" not in capsys.readouterr().out
