"""An attempt's folder as a send would make it, and the job that Slurm makes of it: for tests of the nodes' side."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.entrypoints.contract import AgentSpec, JobSpec
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.planning import bundle as bundles
from doubles.slurm.handle import Slurm
from doubles.sshhosts.disks import USERS
from doubles.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SILENCE_S = 8.0


class SlurmAttempt:
    """An attempt of alice on the shared disk."""

    def __init__(
        self, slurm: Slurm, request: Request, code: Path, *, name: str = "digits-abcde", **changes: Any
    ) -> None:
        """Make the folder from the rendered request and the project's folder; `changes` are fields of the order."""
        self.slurm, self.options = slurm, request.body["sbatch"]
        work = slurm.home() / ".cloudtrain"
        self.job = work / "jobs" / name
        self.folder = self.job / "attempt-1"
        self.folder.mkdir(parents=True)
        for name in ("checkpoints", "output"):
            (self.job / name).mkdir()
        runtime = work / "runtime" / "cloudtrain"
        if not runtime.exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "entrypoints", runtime / "entrypoints", ignore=ignored)
        for number in range(request.body["order"]["job"]["nodes"]):
            (self.folder / f"node-{number}" / "log").mkdir(parents=True)
        bundle = bundles.pack(code, [], 1 << 20, work)
        body, inside = request.body["order"], self._inside
        order = AgentSpec(
            job=JobSpec.load(body["job"]),
            **{key: body[key] for key in ("max_duration_s", "limit_reason", "deadline_s", "grace_s")},
            node=0,
            address="",
            root=inside(self.folder),
            bundle=inside(bundle.path),
            sha256=bundle.sha256,
            python=sys.executable,
            environment={
                **body["environment"],
                "CLOUDTRAIN_CHECKPOINT_DIR": inside(self.job / "checkpoints"),
                "CLOUDTRAIN_OUTPUT_DIR": inside(self.job / "output"),
            },
            secrets={"API_TOKEN": "s3cret-of-the-test"},
            token="token-of-the-test",
            workdir=inside(work),
            silence_s=SILENCE_S,
            succeeds=body["job"]["nodes"] > 2,
            requeues="--requeue" in request.body["sbatch"],
        )
        (self.folder / "order.json").write_text(json.dumps(replace(order, **changes).dump()))
        (self.folder / "order.json").chmod(0o600)
        (self.folder / "job.sh").write_text(request.body["script"])
        (self.folder / "package").symlink_to(inside(runtime.parent))
        (self.folder / "open").touch()
        uid = USERS["alice"][0]
        for path in (work, *work.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)

    def _inside(self, path: Path) -> str:
        """Return a path as the hosts see it."""
        return f"/home/alice/{path.relative_to(self.slurm.home())}"

    def submit(self, *more: str) -> int:
        """Submit the job, with further options of sbatch; return the job's number."""
        words = " ".join(f"'{option}'" for option in (*self.options, *more))
        folder = self._inside(self.folder)
        sent = self.slurm.ssh(f"sbatch --parsable --chdir={folder} {words} {folder}/job.sh")
        assert sent.returncode == 0, sent.stderr
        return int(sent.stdout)

    def lines(self, node: int = 0) -> str:
        """Return the node's log, of the agent and the ranks."""
        paths = sorted((self.folder / f"node-{node}" / "log").glob("*.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths if path.suffix in (".log", ".txt"))

    def told(self) -> str:
        """Return all that a failed test needs."""
        words = [f"--- {path.name}\n{path.read_text()}" for path in self.folder.glob("*.log")]
        return "\n".join([*words, *(self.lines(node) for node in range(3))])

    def started_s(self) -> float:
        """Return the first start of node 0's agent, in unix seconds."""
        return float(json.loads((self.folder / "node-0" / "state.json").read_text())["started_s"])

    def exit(self, node: int = 0) -> dict[str, Any] | None:
        """Return the node's exit report, None without a report."""
        path = self.folder / f"node-{node}" / "exit.json"
        return json.loads(path.read_text()) if path.exists() else None

    def steps(self) -> dict[int, float]:
        """Return the losses by step, from all lines of rank 0 so far."""
        return dict(self.steps_in_order())

    def steps_in_order(self) -> list[tuple[int, float]]:
        """Return step and loss of all lines of rank 0, also of repeated steps."""
        return [(event["step"], event["loss"]) for event in self._events("step")]

    def ranks(self) -> list[int]:
        """Return the number of ranks of each start, in order."""
        return [event["ranks"] for event in self._events("start")]

    def agent(self, node: int) -> int:
        """Return the process number of the node's agent on its host."""
        return int(json.loads((self.folder / f"node-{node}" / "state.json").read_text())["pid"])

    def _events(self, name: str) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("node-*/log/rank-0.log"):
            told = (event for _, event in map(events.parse, path.read_text().splitlines()))
            found += [event for event in told if event is not None and event["e"] == name]
        return found

    def ask_to_stop(self) -> None:
        """Leave the nodes the user's stop request."""
        for root in self.folder.glob("node-*"):
            node_folder.ask_to_stop(root, "user")

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until rank 0 has logged a step, at least the given one."""
        until(lambda: max(self.steps(), default=0) >= step, timeout_s, 0.05)

    def lift_delay(self, number: int) -> None:
        """Let a requeued job start at once: Slurm waits 2 minutes else. The owner may do the same."""
        until(lambda: self.slurm.job(number)["JobState"] == "PENDING")
        until(lambda: self.slurm.ssh(f"scontrol update job={number} StartTime=now+2").returncode == 0)

    def processes(self) -> list[str]:
        """Return the command lines of the job's processes on all nodes that are up."""
        mark, up = str(self._inside(self.folder)), [node for node in self.slurm.nodes if node.pid is not None]
        ours = ("cloudtrain", "torch", mark)
        return [f"{n.name}: {pid} {line}" for n in up for pid, line in n.processes() if any(w in line for w in ours)]
