"""Every tutorial's commands run in order against the stand-ins, and print the output on the page."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CLOUDS, COMMAND
from docs.console import Session, Written, missing, steps

from doubles import warmpython
from doubles.aws.handle import Aws
from doubles.sshhosts.cluster import Cluster

CLONE = Path(__file__).resolve().parents[2]
PAGES = CLONE / "docs" / "tutorials"
# Page -> stand-in of the platform; its `environ` is all that the reader's terminal adds to the test's.
STAND_INS = {
    "local": None,
    "sweep": None,
    "serving": None,
    "slurm": "slurm",
    "ssh": "lab",
    "sagemaker": "aws",
    "capacity": "aws",
    "azureml": "azure",
    "vertex": "google",
}

# On a host: once the caller's login has ended, the host is silent, and no process but the first lives.
POWEROFF = """#!/bin/sh
setsid sh -c 'while [ -d /proc/$0 ]; do :; done; ip link set eth0 down; kill -9 -1' $PPID > /dev/null 2>&1 < /dev/null &
"""
SSH = '#!/bin/sh\nexec {ssh} -F {config} "$@"\n'  # as if the hosts were in the reader's ~/.ssh/config


@pytest.fixture
def lab(cluster: Callable[..., Cluster], tmp_path: Path) -> Cluster:
    """Return three hosts that a reader reaches by `ssh NAME`, and switches off by `ssh NAME poweroff`."""
    hosts = cluster(3)
    for host in hosts.hosts:
        _program(host.bin / "poweroff", POWEROFF)
    _program(tmp_path / "bin/ssh", SSH.format(ssh=hosts.client_folder / "bin/ssh", config=hosts.ssh_config))
    return hosts


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(params=sorted(STAND_INS))
def page(request: pytest.FixtureRequest) -> str:
    """Return the tutorial's name."""
    return str(request.param)


@pytest.fixture
def environment(page: str, cli: Any, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the variables of a reader with an account, or hosts, who has just installed cloudtrain.

    The commands begin with their imports, which cost more than most commands; `doctor` and `plan` are real processes.
    """
    (tmp_path / "bin").mkdir()
    warmpython.write_stand_in(tmp_path / "bin/cloudtrain", COMMAND, CLOUDS, ["doctor", "plan"])
    name = STAND_INS[page]
    platform = request.getfixturevalue(name) if name else None
    if isinstance(platform, Aws):
        platform.bucket()
        platform.settings(stop_grace_s=30, interrupt_grace_s=20)
    if isinstance(platform, Aws) and page == "capacity":  # the first region has no machines, the second no quota
        platform.role()
        platform.capacity("failed", region="us-east-1")
        platform.capacity("no_quota", region="us-west-2")
    found: dict[str, str] = cli.environment(platform.environ if platform else {})
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{found['PATH']}"
    _program(tmp_path / "bin/systemctl", "#!/bin/sh\n")  # `watch --install` only looks whether it is there
    own = {"PATH": path, "SHELL": "/bin/bash", "CLONE": str(CLONE), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return {**found, **own}


@pytest.mark.slow
@pytest.mark.soak  # CI runs a page where the page, a backend or a command has changed (tools/soak_of_changes.py)
@pytest.mark.timeout(900)
def test_tutorial_prints_the_output_on_its_page(page: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Each command ends with 0, unless the page shows its exit code, and prints the lines on the page."""
    (tmp_path / "reader").mkdir()
    session = Session(tmp_path / "reader", environment)
    for step in steps((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        if isinstance(step, Written):
            session.write(step)
            continue
        assert session.code == 0 or step.command == "echo $?", f"line {step.line}: exit code {session.code} before it"
        printed = session.run(step.command)
        lacking = missing(step.shown, printed)
        told = "\n".join(["", f"docs/tutorials/{page}.md:{step.line}: $ {step.command}", *printed])
        assert lacking is None, f"{told}\n--- not as shown: {lacking}"
    assert session.code == 0


def test_every_page_is_run() -> None:
    """Every tutorial has a stand-in: a page without an entry would not be tested."""
    assert {path.stem for path in PAGES.glob("*.md")} == set(STAND_INS)
