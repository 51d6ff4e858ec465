"""The site's start: the configuration's files, and the daemons of all hosts in the order of their needs."""

import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from doubles.slurm import site
from doubles.slurm.daemons import BOOTSTRAP, DATABASE, MUNGED, SLURMCTLD, SLURMD, SLURMDBD, Daemon
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.host import Host
from doubles.waiting import until

CLOSED = ("down", "drain", "drng", "fail", "maint")
GPUS = 4


def set_up(cluster: Cluster) -> None:
    """Write the configuration and start all daemons; return when all nodes are idle."""
    login, controller, *nodes = cluster.hosts
    etc = cluster.root / "etc"
    for name, mode in (("slurm", 0o755), ("munge", 0o700)):
        (etc / name).unlink(missing_ok=True)  # a link to the machine's own folder
        (etc / name).mkdir(mode=mode)
    key = etc / "munge/munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    write_conf(cluster.root, len(nodes), {})
    for node in nodes:
        # A site's nodes refuse users without a job there (pam_slurm_adopt); `srun --overlap` is the way in.
        (node.folder / "etc/ssh/authorized_keys").write_text("")
    with ThreadPoolExecutor(2 + len(nodes)) as pool:
        started = [pool.submit(_start_controller, controller), pool.submit(Daemon(login, MUNGED).start)]
        started.append(pool.submit(start_nodes, nodes))
        for one in started:
            one.result()
    wait_for_nodes(controller)


def write_conf(root: Path, nodes: int, changes: Mapping[str, str]) -> None:
    """Write the files of /etc/slurm, which all hosts share."""
    for name, text in site.conf_files(nodes, changes).items():
        path = root / "etc/slurm" / name
        path.write_text(text)
        path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)


def start_nodes(nodes: Sequence[Host]) -> None:
    """Start the daemons of nodes that have just booted, all at once."""
    if not nodes:
        return
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(_start_node, nodes))


def wait_for_nodes(controller: Host) -> None:
    """Wait until all nodes are idle."""
    until(lambda: set(node_states(controller).values()) == {"idle"}, every_s=0.05)


def node_states(controller: Host) -> dict[str, str]:
    """Return the controller's state of each node, such as `idle` or `down*`."""
    return dict(line.split() for line in controller.run(["sinfo", "-hN", "-p", "main", "-o", "%N %t"]).splitlines())


def _start_node(node: Host) -> None:
    (node.folder / "opt/gpus").mkdir(exist_ok=True)
    null = Path(os.devnull).stat().st_rdev
    for number in range(GPUS):
        path = f"{node.folder}{site.GPU_FILES}{number}"
        if not Path(path).exists():
            os.mknod(path, stat.S_IFCHR | 0o666, null)
    for argv in (MUNGED, SLURMD):
        Daemon(node, argv).start()


def _start_controller(controller: Host) -> None:
    Daemon(controller, MUNGED).start()
    controller.run(["sh", "-c", BOOTSTRAP])
    Daemon(controller, DATABASE).start()
    Daemon(controller, SLURMDBD).start()
    controller.run(["sacctmgr", "-i"], stdin=site.ACCOUNTS)
    Daemon(controller, SLURMCTLD).start()
