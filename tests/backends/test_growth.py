"""A job that has lost a machine goes back to its full number at a save, with the samples and losses of a whole run."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from cloudtrain.backends.local import backend
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.backends.ssh import jobs_send
from cloudtrain.entrypoints import events, processes
from cloudtrain.launcher import api
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Shipment
from cloudtrain.launcher.planning.prepare import prepare
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import forget
from doubles.waiting import until

pytestmark = pytest.mark.slow

# The task is slow until the file FAST exists: it cannot end before its growth.
SLOW = "time.sleep(0 if os.path.exists(os.path.expanduser(os.environ['FAST'])) else 0.1)"
TASK = wholejobs.TASK.replace("time.sleep(0.01)", SLOW).replace("import time", "import os, time")
CONFIG = """\
name: %s
backend: local
task: task.py
env: {OMP_NUM_THREADS: "1", FAST: %s}
resources: {instances: 2, min_instances: 1}
distributed: {nproc_per_node: 1}
training:
  strategy: ddp
  precision: fp32
  reproducible: strict
  global_batch_size: 8
  max_steps: 120
  optimizer: {name: adamw, lr: 1e-2}
  log_every: 1
  seed: 3
checkpoint: {every_steps: 5, keep: 3}
"""


SSH = """\
backend: ssh
ssh: {hosts: [h0, h1], ssh_config: "${SSH_CONFIG}", python: "${SSH_PYTHON}"}
"""
ENDED = [
    "node 1 was lost: its agent is silent; going on with 1 of 2 nodes",
    "node 1 has joined; going on with 2 of 2 nodes",
]


class Started:
    """A job whose agents were started in this process's name."""

    def __init__(self, home: Path, folder: Path) -> None:
        config = configs.load(folder / "cloudtrain.yaml")
        ready = prepare(config, folder / "cloudtrain.yaml", home / "bundles", dry=False)
        self.ref = LocalBackend().send(ready.request, Shipment(ready.bundle, home, folder))
        self.folder = Path(self.ref["folder"])

    def state(self) -> Any:
        """Return the state as the launcher sees it."""
        return LocalBackend().state(self.ref)

    def agent(self, node: int) -> int:
        """Return the pid of the node's agent."""
        return int(json.loads((self.folder / f"node-{node}" / "state.json").read_text())["pid"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return rank 0's events of the name, in order."""
        log = self.folder / "node-0/log/rank-0.log"
        told = [events.parse(line)[1] for line in (log.read_text() if log.exists() else "").splitlines()]
        return [event for event in told if event is not None and event["e"] == name]

    def losses(self) -> dict[int, float]:
        """Return the losses by step."""
        return {event["step"]: event["loss"] for event in self.events("step")}


@pytest.fixture
def start(home: Path, project: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts the job; a growth needs no five minutes since the last start."""
    made = backend.agent_spec
    monkeypatch.setattr(backend, "agent_spec", lambda *args: replace(made(*args), grow_s=1.0))

    def begin(name: str) -> Started:
        where = project("", script="task.py", text=TASK, folder=name)
        (where / "cloudtrain.yaml").write_text(CONFIG % (name, tmp_path / "fast"))
        return Started(home, where)

    return begin


def test_lost_node_returns_at_a_save_with_the_same_losses(
    start: Callable[[str], Started], warm_nodes: None, tmp_path: Path
) -> None:
    """2, 1 and again 2 machines: all losses are those of a run without a fault; the time away costs nothing."""
    job = start("grown")
    until(lambda: len(job.losses()) > 6, 120, 0.2)
    first = job.agent(1)
    os.kill(first, signal.SIGKILL)
    until(lambda: job.state().detail == "node 1 has joined; going on with 2 of 2 nodes", 90, 0.2)
    assert job.agent(1) != first
    (tmp_path / "fast").touch()
    until(lambda: job.state().state == "succeeded", 120, 0.2)
    ended = json.loads((job.folder / "node-0" / "exit.json").read_text())
    assert [cause["message"] for cause in ended["restarted_after"]] == ENDED
    assert 0 < ended["held_s"] - ended["gone_s"]["1"] < ended["ended_s"] - ended["started_s"]
    assert json.loads((job.folder / "node-1" / "exit.json").read_text())["state"] == "succeeded"
    until(lambda: processes.with_environment(CLOUDTRAIN_JOB=job.folder.parent.name) == [], 20)
    whole = start("whole")
    until(lambda: whole.state().state == "succeeded", 120, 0.2)
    assert len(whole.losses()) == 120
    assert job.losses() == whole.losses()


def test_host_that_was_cut_off_returns_at_a_save_with_the_same_losses(
    cli: Any, ssh_pair: Cluster, project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host ends its ranks, and joins when its link is back, without any process of the user."""
    ssh_pair.apply(monkeypatch)
    made = jobs_send.agent_spec
    monkeypatch.setattr(jobs_send, "agent_spec", lambda *args: replace(made(*args), grow_s=1.0))
    where = project("", script="task.py", text=TASK)
    (where / "cloudtrain.yaml").write_text((CONFIG % ("cut", "~/fast")).replace("backend: local\n", SSH, 1))
    forget()  # the channels of an earlier test, whose folder is gone
    job = api.submit(api.Config(where / "cloudtrain.yaml")).id
    until(lambda: len(wholejobs.losses(cli, job)) > 6, 120, 0.5)
    ssh_pair.hosts[1].cut()
    until(lambda: "1 of 2 nodes" in (cli("status", job, "--json").json["detail"] or ""), 60, 0.5)
    ssh_pair.hosts[1].join()
    until(lambda: cli("status", job, "--json").json["detail"] == ENDED[1], 90, 0.5)
    for host in ssh_pair.hosts:
        (host.home / "fast").touch()
    until(lambda: cli("status", job, "--json").json["state"] == "succeeded", 120, 0.5)
    assert cli("status", job, "--json").json["restarts"] == 2
    cli.ok("submit", "--force", "-y", "--name", "whole", "--backend", "local", "--set", "env.FAST=/", cwd=where)
    assert len(wholejobs.losses(cli, job)) == 120
    assert wholejobs.losses(cli, job) == wholejobs.losses(cli, "whole")
