"""Faults of a job over ssh, on hosts with a real sshd: a part of the fault table, once each.

The whole table with its times: benchmarks/ssh_faults.py, which `make soak` repeats twenty times.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.launcher import config as configs
from doubles.faulttable.table import FAULTS, Fault, named
from doubles.faulttable.training import TRAIN
from doubles.faulttable.trial import run
from doubles.sshhosts.cluster import Cluster

QUICK = ("link cut",)  # a permanent cut of the network
# The loss of the access, and one fault of each further kind: a process, an agent, a short cut, a machine, a disk.
MORE = (
    *("sshd killed on all hosts", "power off node 0, fewer", "trainer kill -9", "agent kill -9, node 1"),
    *("agent SIGSTOP, node 1", "link cut 5 s", "nodes cut from each other, fewer", "power off node 1, fewer"),
    *("power off node 0", "disk full at a checkpoint", "link cut, spare", "power off node 1, spare"),
)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK),
        *(pytest.param(name, marks=pytest.mark.soak) for name in MORE),
    ],
)
def test_fault_ends_as_the_table_says(name: str, cluster: Callable[[int], Cluster]) -> None:
    """The state is right, no forbidden process remains, and a continuing job has its checkpoint.

    The benchmark checks the times: in this test the machine is busy with further tests.
    """
    fault = named(name)
    assert run(fault, cluster(fault.machines), seed=0).wrong == []


def test_faults_have_unique_names() -> None:
    """The name selects the fault."""
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_settings_of_faults_are_valid_configs(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of each row are a valid job."""
    monkeypatch.setenv("SSH_CONFIG", str(tmp_path / "ssh_config"))
    monkeypatch.setenv("SSH_PYTHON", "python3")
    path = tmp_path / "cloudtrain.yaml"
    (tmp_path / "train.py").write_text(TRAIN)
    path.write_text(f"name: faults\nbackend: ssh\nscript: train.py\n{fault.config()}")
    assert configs.load(path).resources.instances == fault.hosts
