"""Scripts under the real torchrun, with two ranks on this machine: their process group, and the save at a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import boot
from cloudtrain.entrypoints.scripts import meeting
from doubles import one_node
from doubles.waiting import until

pytestmark = pytest.mark.slow

PLAIN = "print('step 1 loss 0.5')\n"
MEET = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
PART = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LIGHTNING = """
import os, time
from pathlib import Path
import lightning, torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep(0.02)
        return self.line(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(20000, 4)), 4)
root = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
saved = root / "checkpoints/cloudtrain-stop.ckpt"
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
steps = 500 if not saved.exists() else torch.load(saved, weights_only=True)["global_step"] + 3
trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=root, **quiet)
trainer.fit(Model(), data, ckpt_path=saved if saved.exists() else None)
"""
HUGGING_FACE = """
import os, sys, time
from pathlib import Path
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.line(x) - labels).pow(2).mean()}
class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        time.sleep(0.02)
torch.manual_seed(0)
data = [{"x": torch.arange(4.0) * i, "labels": torch.ones(1)} for i in range(4000)]
root = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
saved = sorted(root.glob("checkpoint-*"))
given = {"use_cpu": True, "report_to": [], "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-9}
steps = int(sys.argv[1])
given |= {"output_dir": str(root), "max_steps": steps}
trainer = Trainer(Model(), TrainingArguments(**given), train_dataset=data, callbacks=[Slow()])
trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
"""


class Job:
    """A script's starts in one folder: `start` begins a start, `end` waits for its code."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.checkpoints.mkdir()
        (folder / "train.py").write_text(text)
        self.number = 0

    def start(self, *args: str, **options: Any) -> Job:
        """Start two ranks with these options of the spec's `run`."""
        self.number += 1
        self.place = self.folder / str(self.number)
        (self.place / "log").mkdir(parents=True)
        run = {"kind": "script", "target": "train.py", "args": args, **options}
        spec = {"job": "t", "attempt": 1, "nproc_per_node": 2, "max_restarts": 0, "run": run}
        (self.place / "spec.json").write_text(json.dumps(spec))
        names = {"SPEC": self.place / "spec.json", "RESULT_DIR": self.place, "LOG_DIR": self.place / "log"}
        names |= {"CHECKPOINT_DIR": self.checkpoints, "WARN_S": "0"}
        env = os.environ | one_node.variables() | {f"CLOUDTRAIN_{name}": str(value) for name, value in names.items()}
        command = [sys.executable, "-m", "cloudtrain.entrypoints.agent.boot"]
        self.process = subprocess.Popen(command, cwd=self.folder, env=env, stdout=subprocess.DEVNULL)
        return self

    def end(self) -> int:
        """Return the exit code."""
        return self.process.wait(240)

    @property
    def log(self) -> str:
        """Return rank 0's log."""
        path = self.place / "log/rank-0.log"
        return path.read_text() if path.exists() else ""

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return rank 0's events."""
        return [event for line in self.log.splitlines() if (event := events.parse(line)[1]) is not None]

    def steps(self) -> dict[int, float]:
        """Return the losses of the steps."""
        return {each["step"]: each["loss"] for each in self.events if each["e"] == "step" and "loss" in each}

    @property
    def message(self) -> str:
        """Return the reason of the job's failure."""
        return str(json.loads((self.place / "result.json").read_text())["failures"][0]["message"])


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Return a function that makes a job of a script's text; its processes are killed at the end."""
    made: list[Job] = []

    def make(text: str) -> Job:
        made.append(Job(tmp_path, text))
        return made[-1]

    yield make
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.mark.parametrize("text", [PLAIN, PART], ids=["none", "part"])
def test_ranks_without_a_common_group_fail(job: Callable[[str], Job], text: str) -> None:
    """Each rank has trained on all the data: the message names the group, a nested launcher and the permission."""
    ran = job(text).start()
    assert ran.end() == boot.EXIT_CONFIG
    for words in ("init_process_group", "starts torchrun or another launcher", "allow_alone"):
        assert words in ran.message


@pytest.mark.parametrize(("text", "allowed"), [(MEET, False), (PLAIN, True)], ids=["met", "allowed"])
def test_ranks_that_meet_or_are_allowed_alone_succeed(job: Callable[[str], Job], text: str, allowed: bool) -> None:
    """A group of all ranks is enough, and `allow_alone` needs no group."""
    assert job(text).start(allow_alone=allowed).end() == 0


@pytest.mark.soak  # test_failure_has_the_reason_that_a_rank_has_left has the message
def test_lightning_with_one_device_is_alone(job: Callable[[str], Job]) -> None:
    """Explicit numbers override the variables."""
    pytest.importorskip("lightning", reason="lightning is in the extra `bench`")
    text = LIGHTNING.replace("steps = 500", "steps = 3").replace(
        'accelerator="cpu"', 'accelerator="cpu", num_nodes=1, devices=1'
    )
    ran = job(text).start()
    assert (ran.end(), "leave num_nodes and devices" in ran.message) == (boot.EXIT_CONFIG, True)


@pytest.mark.soak  # the same stop, with the callback of the other Trainer: the test below
def test_lightning_saves_at_a_stop(job: Callable[[str], Job]) -> None:
    """SIGTERM reaches the ranks at any step; they exit together with a checkpoint, and the next start continues."""
    pytest.importorskip("lightning", reason="lightning is in the extra `bench`")
    ran = job(LIGHTNING).start(on_stop="save")
    until(ran.steps, 120)
    ran.process.send_signal(signal.SIGTERM)
    assert ran.end() == boot.EXIT_SAVED
    saved = ran.events[-1]["step"]
    assert [each["e"] for each in ran.events[-2:]] == ["checkpoint", "preempt"]
    assert {each["epoch"] for each in ran.events if each.get("step") == 1} == {1 / 2500}  # two ranks share 5000 batches
    assert (ran.start(on_stop="save").end(), min(ran.steps())) == (0, saved + 1)


@pytest.mark.soak
def test_hugging_face_saves_at_a_stop_and_continues_exactly(job: Callable[[str], Job]) -> None:
    """The losses after the resume equal those of a run without a stop."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ran = job(HUGGING_FACE).start("2000", on_stop="save")
    until(ran.steps, 120)
    ran.process.send_signal(signal.SIGTERM)
    assert ran.end() == boot.EXIT_SAVED
    saved = ran.events[-1]["step"]
    assert ran.start(str(saved + 3)).end() == 0
    resumed = ran.steps()
    for path in ran.checkpoints.iterdir():
        path.rename(ran.folder / path.name)
    assert ran.start(str(saved + 3)).end() == 0
    assert resumed == {step: loss for step, loss in ran.steps().items() if step > saved}
    assert sorted(resumed) == [saved + 1, saved + 2, saved + 3]


def test_missing_trainer_is_reported(job: Callable[[str], Job]) -> None:
    """`on_stop: save` has no effect on further scripts, and the log reports the missing Trainer."""
    waiting = "import pathlib, time\nwhile not pathlib.Path('over').exists(): time.sleep(0.1)\n"
    ran = job(MEET + waiting).start(on_stop="save")
    until(lambda: "on_stop: save has found no Trainer" in ran.log, 60)
    (ran.folder / "over").touch()
    assert ran.end() == 0


SAVES_AT_USR1 = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
rank, saves = os.environ["RANK"], 0
pathlib.Path(f"ready-{rank}").touch()
while True:
    time.sleep(0.05)
    if asked:
        asked.clear()
        saves += 1
        time.sleep(float(rank))  # rank 0 leaves while rank 1 saves
        pathlib.Path(f"saved-{rank}-{saves}").touch()
        if saves == 2:
            sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", ["0", "85"])
def test_own_signal_saves_and_stops(job: Callable[[str], Job], code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `stop_signal: SIGUSR1` that signal saves, a stop sends it to ranks that ignore SIGTERM, and SIGHUP is none.

    torchrun waits for all ranks, whatever the first rank's exit code.
    """
    monkeypatch.setenv("COLD_PYTHON", "1")  # a process that stands in passes on other signals
    ran = job(MEET + SAVES_AT_USR1).start(code, stop_signal="SIGUSR1")
    until(lambda: len([*ran.folder.glob("ready-*")]) == 2, 60)
    for signum in (signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1):
        ran.process.send_signal(signum)
    until(lambda: len([*ran.folder.glob("saved-*-1")]) == 2, 30)
    assert ran.process.poll() is None
    ran.process.send_signal(signal.SIGTERM)
    assert ran.end() == boot.EXIT_STOPPED
    assert len([*ran.folder.glob("saved-*-2")]) == 2


def test_failure_has_the_reason_that_a_rank_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Lightning in the rank, the message names Lightning's arguments and not the general cure."""
    monkeypatch.setattr(meeting, "_given", {"CLOUDTRAIN_RESULT_DIR": str(tmp_path), "RANK": "1"})
    monkeypatch.setitem(sys.modules, "lightning", sys.modules[__name__])
    meeting.report_missing_group(2)
    assert "leave num_nodes and devices" in (meeting.failure(tmp_path, 2, 2) or {})["message"]


def test_build_of_an_extension_delays_the_warning() -> None:
    """A rank that builds, or waits for a build below the functions of torch, does not train alone."""
    scope: dict[str, Any] = {"inner": meeting.is_compiling}
    exec(compile("def load():\n    return inner()", "/opt/torch/utils/cpp_extension.py", "exec"), scope)
    assert [scope["load"](), meeting.is_compiling()] == [True, False]


@pytest.mark.parametrize(
    ("own", "given", "nodes", "rehearsed", "met"),
    [
        ("localhost", "127.9.9.1", "2", True, False),
        ("127.9.9.1", "127.9.9.1", "2", True, True),
        ("localhost", "127.9.9.1", "1", True, True),
        ("localhost", "127.0.0.1", "2", True, True),  # the backend `local`
        ("localhost", "127.9.9.1", "2", False, True),
    ],
)
def test_rehearsal_sees_an_address_that_is_each_machines_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, given: str, nodes: str, rehearsed: bool, met: bool
) -> None:
    """The nodes of a rehearsal meet at `localhost`, and the job's would not: the reason is there at once."""
    place = {"MASTER_ADDR": given, "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setattr(meeting, "_given", {"CLOUDTRAIN_RESULT_DIR": str(tmp_path), **place})
    for name, value in {**place, "MASTER_ADDR": own, "CLOUDTRAIN_NUM_NODES": nodes}.items():
        monkeypatch.setenv(name, value)
    if rehearsed:
        monkeypatch.setenv("CLOUDTRAIN_REHEARSAL", "{}")
    group: Any = SimpleNamespace(init_process_group=lambda init_method=None: None, get_world_size=lambda: 2)
    meeting.watch_groups(group, 2)
    group.init_process_group()
    assert (tmp_path / "met-1").exists() is met
    assert met or "MASTER_ADDR localhost, set by the script" in (tmp_path / "missing_group-1").read_text()


def test_count_of_met_ranks_is_per_node(tmp_path: Path) -> None:
    """Each node examines its own ranks."""
    (tmp_path / "met-4").touch()
    assert meeting.failure(tmp_path, 2, 8) is not None
    (tmp_path / "met-5").touch()
    assert meeting.failure(tmp_path, 2, 8) is None
