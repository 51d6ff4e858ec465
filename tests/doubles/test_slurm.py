"""The real Slurm in namespaces: what a user finds there, and nothing left after the site's end."""

import os
from pathlib import Path

import pytest

from doubles.slurm import handle
from doubles.slurm.handle import Slurm, missing


def test_user_reaches_the_site_over_ssh(slurm: Slurm) -> None:
    """The login host answers with partitions, limits and GPUs, and the compute nodes refuse a user."""
    told = slurm.ssh("sinfo -h -o '%P %D %l %G'; sacctmgr -nP show assoc user=alice format=account").stdout.split("\n")
    assert told[:3] == [f"{name} {3} 1:00:00 gpu:a100:4" for name in ("main*", "spot")] + ["short 3 1:00 gpu:a100:4"]
    assert sorted(told[3:5]) == ["lab", "other"]
    assert slurm.cluster.ssh("alice@node0", "true").returncode == 255
    assert slurm.ssh("sbatch --account=nobody --wrap true").stderr.endswith(
        "Invalid account or account/partition combination specified\n"
    )


def test_site_leaves_nothing(tmp_path: Path) -> None:
    """After the stop, no process of the site, no link and no file is left; no port was ever open outside."""
    if reason := missing():
        pytest.skip(reason)
    links = os.listdir("/sys/class/net")
    site = Slurm.start(1, tmp_path / "site")
    space = Path(f"/proc/{site.controller.pid}/ns/pid")
    with space.open("rb"):  # the open file keeps the namespace's number from being given to others
        pids = str(space.readlink())
        assert {name for name in _commands(pids) if "/sbin/slurm" in name or "mariadb" in name}
        site.stop()
        assert _commands(pids) == []
    assert os.listdir("/sys/class/net") == links
    assert os.listdir(tmp_path) == []


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is given to tests that must be skipped."""
    monkeypatch.setattr(handle, "hosts_missing", lambda: None)
    monkeypatch.setattr(handle, "SYSTEM_PATH", "/nowhere")
    assert missing() == "Slurm needs the packages slurmctld slurmd slurmdbd slurm-client munge mariadb-server-core"


def _commands(space: str) -> list[str]:
    """Return the command lines of the processes in a namespace of process numbers."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if str((proc / "ns/pid").readlink()) == space:
                found.append((proc / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
