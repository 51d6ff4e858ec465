"""The site from a test's side: start, commands of users and administrator, faults, a new state for each test."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from doubles.slurm import answers, boot, daemons
from doubles.slurm.daemons import Daemon
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.cluster import missing as hosts_missing
from doubles.sshhosts.disks import USERS
from doubles.sshhosts.host import Host
from doubles.sshhosts.machine import SYSTEM_PATH
from doubles.waiting import until

if TYPE_CHECKING:
    import pytest

PEOPLE = ("alice", "bob")
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
}


class Slurm:
    """A login host, a controller and compute nodes; alice and bob are users with a shared home folder."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.login, self.controller, *self.nodes = cluster.hosts
        self.slurmctld = Daemon(self.controller, daemons.SLURMCTLD)
        self.slurmdbd = Daemon(self.controller, daemons.SLURMDBD)
        self.mariadbd = Daemon(self.controller, daemons.DATABASE)
        self.slurmd = [Daemon(node, daemons.SLURMD) for node in self.nodes]
        self._munged = [Daemon(host, daemons.MUNGED) for host in cluster.hosts]
        self._changes: dict[str, str] = {}

    @staticmethod
    def start(nodes: int, root: Path) -> Slurm:
        """Start the site and return when all nodes are idle; `root` is made here and removed by `stop`.

        Raises RuntimeError with the output of a part that does not start. See `missing` for the requirements.
        """
        names = ["login", "controller", *(f"node{number}" for number in range(nodes))]
        slurm = Slurm(Cluster.start(len(names), root, called=names, is_home_shared=True))
        try:
            boot.set_up(slurm.cluster)
            answers.install(slurm.login)
        except BaseException:
            slurm.stop()
            raise
        return slurm

    def stop(self) -> None:
        """Remove the site with all its hosts."""
        self.cluster.stop()

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables of a client's process, as `Cluster.environ`."""
        return self.cluster.environ

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the calling process reach the login host, by the `ssh` in its PATH."""
        self.cluster.apply(monkeypatch)

    def home(self, user: str = "alice") -> Path:
        """Return a user's home folder, which all hosts share, as a path on this machine."""
        return self.cluster.root / "home" / user

    def ssh(self, command: str, *, user: str = "alice", timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a user's command on the login host, over real ssh."""
        return self.cluster.ssh(f"{user}@login", command, timeout_s=timeout_s)

    def admin(self, *argv: str) -> str:
        """Return the output of the administrator's command on the controller."""
        return self.controller.run(argv)

    def submit(self, script: str, *options: str, user: str = "alice") -> int:
        """Submit a batch script as a user does, and return the number of the job."""
        path = self.home(user) / f"script-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        done = self.ssh(f"sbatch --parsable {' '.join(options)} {path.name}", user=user)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """Return the controller's record of a job by field, such as JobState, Reason and NodeList."""
        line = self.admin("scontrol", "show", "job", "-o", str(number)).splitlines()[0]
        return dict(reversed(re.findall(r"(\S+?)=(\S*)", line)))  # a job's comment, with any text, comes late

    def state(self, number: int) -> str:
        """Return the controller's state of a job."""
        return self.job(number)["JobState"]

    def wait(self, number: int, *states: str, timeout_s: float = 30.0) -> dict[str, str]:
        """Wait until a job is in one of the states; return the job's record."""
        return until(lambda: job if (job := self.job(number))["JobState"] in states else None, timeout_s, 0.05)

    def wait_until_saved(self, number: int) -> None:
        """Wait until the controller has saved a running job: a controller that is killed earlier forgets the job.

        Slurm writes its state up to 5 s late.
        """
        path = self.controller.path("/var/lib/slurm/slurmctld/job_state")
        started = datetime.fromisoformat(self.job(number)["StartTime"]).timestamp()
        until(lambda: path.exists() and path.stat().st_mtime > started + 1, every_s=0.1)

    def record(self, number: int, *fields: str) -> list[str]:
        """Return the fields of each run of a job from the accounting database, such as `COMPLETED|0:0`."""
        argv = ["sacct", "-nPXD", "-j", str(number), "-o", ",".join(fields or ("State", "ExitCode"))]
        return self.admin(*argv).splitlines()

    def requests(self, user: str = "alice") -> int:
        """Return the number of requests that the controller has had from a user since the test's start."""
        text = self.admin("sdiag").partition("statistics by user")[2]
        counted = re.search(rf"^\s*{user}\s.*count:(\d+)", text, re.MULTILINE)
        return int(counted[1]) if counted else 0

    def configure(self, **changes: str) -> None:
        """Change settings of slurm.conf until the end of the test: `configure(MessageTimeout="2")`.

        The name `spot_GraceTime` is the setting GraceTime of the partition spot.
        """
        self._changes |= {name.replace("_", "."): value for name, value in changes.items()}
        self._restart()

    def drain(self, node: Host) -> None:
        """Take no new job on a node."""
        self.admin("scontrol", "update", f"nodename={node.name}", "state=drain", "reason=test")

    def undrain(self, node: Host) -> None:
        """Let a drained node, or a node that was down, take jobs."""
        self.admin("scontrol", "update", f"nodename={node.name}", "state=resume")

    def lose_answers(self, count: int, kind: answers.Kind = "lost") -> None:
        """Lose the answers of the next calls of sbatch on the login host; see `answers.KINDS`."""
        answers.lose(self.login, count, kind)

    def reset(self) -> None:
        """Make the site new: no jobs, all daemons and nodes at work, the first configuration, empty home folders."""
        self._restore_hosts()
        if self._changes:
            self._changes.clear()
            self._restart()
        self._cancel_all()
        self._free_nodes()
        answers.forget(self.login)
        for user in PEOPLE:
            for entry in os.scandir(self.home(user)):
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else Path(entry.path).unlink()
        self.admin("sdiag", "--reset")

    def _restart(self) -> None:
        """Let all daemons of Slurm read the configuration as at their start."""
        boot.write_conf(self.cluster.root, len(self.nodes), self._changes)
        self.slurmctld.kill(signal.SIGTERM)  # the controller saves its state
        self.slurmctld.start()
        self.admin("scontrol", "reconfigure")

    def _restore_hosts(self) -> None:
        """Boot hosts that are off, restore the network lines, and start daemons that are killed or paused."""
        self.cluster.client.join()
        off = [host for host in self.cluster.hosts if host.pid is None]
        for host in self.cluster.hosts:
            if host.pid is not None:
                host.join()
        assert not {self.login, self.controller} & set(off), "a test boots the login host and the controller itself"
        for host in off:
            host.boot()
        boot.start_nodes(off)
        for daemon in (*self._munged, self.mariadbd, self.slurmdbd, self.slurmctld, *self.slurmd):
            daemon.resume()
            daemon.start()

    def _cancel_all(self) -> None:
        """Cancel the jobs of all users, and kill the users' processes, so that no job ends late."""
        if self.admin("squeue", "-h", "-t", "all", "-o", "%i"):
            for user in PEOPLE:
                self.admin("scancel", f"--user={user}")
        for host in (self.login, *self.nodes):
            for user in PEOPLE:
                uid = str(USERS[user][0])
                host.run(["sh", "-c", f"setpriv --reuid={uid} --regid={uid} --clear-groups kill -9 -1 || true"])
        until(lambda: not self.admin("squeue", "-h"))

    def _free_nodes(self) -> None:
        for node in self.nodes:
            if boot.node_states(self.controller)[node.name].startswith(boot.CLOSED):
                self.undrain(node)
        boot.wait_for_nodes(self.controller)


def missing() -> str | None:
    """Return the reason why this machine cannot have the site, or None if it can."""
    if reason := hosts_missing():
        return reason
    lacking = [package for tool, package in PACKAGES.items() if shutil.which(tool, path=SYSTEM_PATH) is None]
    return f"Slurm needs the packages {' '.join(lacking)}" if lacking else None
