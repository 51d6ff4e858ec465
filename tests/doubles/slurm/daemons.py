"""The site's daemons: their commands, and one daemon on a host, which a test can kill, pause and start."""

import signal
from pathlib import Path

from doubles.sshhosts.host import Host
from doubles.waiting import until

# A small database without a disk's guarantees: the tests never cut the controller's power and keep the database.
_MARIADB = (
    *("/usr/sbin/mariadbd", "--no-defaults", "--user=root", "--datadir=/var/lib/mysql", "--skip-log-bin"),
    *("--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0"),
    *("--innodb-log-file-size=4M", "--innodb-buffer-pool-size=24M", "--aria-log-file-size=8M"),
    *("--innodb-data-file-path=ibdata1:4M:autoextend", "--innodb-temp-data-file-path=ibtmp1:4M:autoextend"),
)
_TABLES = "/usr/share/mysql/mysql_system_tables.sql"
BOOTSTRAP = (
    "mkdir -p /var/lib/mysql /run/mysqld && { echo 'create database mysql;'; echo 'use mysql;'; "
    f"cat {_TABLES}; }} | {' '.join(_MARIADB)} --bootstrap 2>/var/log/mariadb-bootstrap.log"
)
DATABASE = (*_MARIADB, "--skip-grant-tables", "--skip-networking", "--socket=/run/mysqld/mysqld.sock")
MUNGED = ("/usr/sbin/munged",)
SLURMDBD = ("/usr/sbin/slurmdbd",)
SLURMCTLD = ("/usr/sbin/slurmctld",)
SLURMD = ("/usr/sbin/slurmd",)
FOLDERS = "mkdir -p /run/munge /run/mysqld /var/lib/munge /var/log/munge /var/lib/slurm/slurmctld /var/lib/slurm/slurmd"


# A daemon is at work when the shell's words come true.
_READY = {
    "mariadbd": "[ -S /run/mysqld/mysqld.sock ]",
    "slurmdbd": "(: </dev/tcp/controller/6819) 2>/dev/null",
    "slurmctld": "scontrol ping | grep -q UP",
}


class Daemon:
    """A daemon of a host, found by its command."""

    def __init__(self, host: Host, argv: tuple[str, ...]) -> None:
        self.host, self.argv, self.name = host, argv, Path(argv[0]).name

    def __repr__(self) -> str:
        return f"Daemon({self.name} on {self.host.name})"

    @property
    def pids(self) -> list[int]:
        """Return the daemon's process numbers on the host; an empty list while the host is off."""
        if self.host.pid is None:
            return []
        return [pid for pid, line in self.host.processes() if line.split()[0] == self.argv[0]]

    def start(self) -> None:
        """Start the daemon unless it runs, and return when it answers. A slurmd may still look for its controller."""
        if self.pids:
            return
        # No pipe of the caller stays open. The database does not go into the background by itself.
        begin = f"{' '.join(self.argv)} >>/var/log/{self.name}.out 2>&1 </dev/null{' &' * (self.argv is DATABASE)}"
        ready = _READY.get(self.name)
        wait = f"\nuntil {ready}; do sleep 0.02; done" if ready else ""
        self.host.run(["bash", "-ec", f"{FOLDERS}\n{begin}{wait}"])

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Kill the daemon and return after its end. Processes of jobs live on."""
        pids = self.pids
        assert pids, f"{self} does not run"
        self._send(pids, signum)
        until(lambda: not set(pids) & set(self.pids), every_s=0.005)

    def pause(self) -> None:
        """Suspend the daemon: the kernel accepts connections, but no request is answered."""
        self._send(self.pids, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused daemon."""
        self._send(self.pids, signal.SIGCONT)

    def _send(self, pids: list[int], signum: int) -> None:
        self.host.run(
            ["sh", "-c", 'kill "$@" || true', "sh", f"-{int(signum)}", *map(str, pids)]
        )  # some may have ended
