"""`doctor slurm` on a real Slurm: the checks before a first job, and the cures."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher.planning.render import render_text
from doubles.slurm.handle import Slurm
from doubles.waiting import until

CONFIG = f"""\
name: digits
backend: slurm
script: train.py
resources: {{instances: 2, accelerators: "A100:2"}}
limits: {{max_duration: 30m}}
slurm: {{login: alice@login, ssh_config: "${{SSH_CONFIG}}", python: {sys.executable}, cpus_per_node: 2}}
"""
Doctor = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def doctor(slurm: Slurm, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return a function that asks for the checks of the job with further settings, by the checks' names."""
    slurm.apply(monkeypatch)
    (tmp_path / "train.py").write_text("")

    def ask(*changes: tuple[str, str], command: tuple[str, ...] = ("doctor", "slurm", "--json")) -> Any:
        text = CONFIG
        for old, new in changes:
            text = text.replace(old, new)
        (tmp_path / "cloudtrain.yaml").write_text(text)
        told = cli(*command, cwd=tmp_path)
        assert told.code in (0, 1), told.stderr
        return {check["name"]: check for check in told.json["slurm"]}

    return ask


def test_sound_job_has_no_warning(doctor: Doctor) -> None:
    """All that a job needs is found, and Slurm says when the job would start."""
    found = doctor()
    names = ["login node", "controller", "partition", "account", "site budget", "shared disk", "python", "job"]
    assert list(found) == names
    assert {name for name, check in found.items() if check["verdict"] != "ok"} <= {"shared disk"}
    assert found["partition"]["found"] == "main: 3 nodes with gpu:a100:4, 4 cores, 8000 MB, at most 1:00:00"
    assert found["account"]["found"] == "lab, other; QOS normal"
    assert found["job"]["found"] == "would start now on node[0-1]"


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (("cpus_per_node: 2", "cpus_per_node: 2, partition: nowhere"), "partition", "there is no nowhere"),
        (("cpus_per_node: 2", "cpus_per_node: 2, account: rich"), "account", "rich is not yours"),
        (("cpus_per_node: 2", "cpus_per_node: 2, qos: high"), "account", "the QOS high is not yours"),
        (("A100:2", "H100:2"), "job", "3 nodes with gpu:a100:4"),
        (("A100:2", "A100:8"), "job", "no node has all of --gres=gpu:a100:8 --cpus-per-task=2; main: 3 nodes with gpu"),
        (("cpus_per_node: 2", "cpus_per_node: 64"), "job", "no node has all of --gres=gpu:a100:2 --cpus-per-task=64"),
        ((f"python: {sys.executable}", "python: /opt/none"), "login node", "/opt/none"),
    ],
)
@pytest.mark.soak
def test_fault_is_named_with_its_cure(change: tuple[str, str], name: str, words: str, doctor: Doctor) -> None:
    """Each fault that Slurm would refuse, or let wait for ever, fails the check of its name."""
    found = doctor(change)[name]
    assert found["verdict"] == "fail"
    assert words in found["found"]
    assert found["cure"]
    assert "ssh." not in found["cure"]


SITE = """\
module() {
  if [ "$2" != train/1 ]; then echo "no module $2" >&2; return 1; fi
  export TRAINLIB=loaded
}
"""


def test_modules_are_loaded_as_in_the_job(doctor: Doctor, slurm: Slurm) -> None:
    """A site sets up `module` in a file of its own: the login node's check and the job's script both find the file."""
    absent = doctor(("cpus_per_node: 2", "cpus_per_node: 2, modules: [train/1]"))["python"]
    assert (absent["verdict"], "`module load train/1` fails" in absent["found"]) == ("warn", True)
    folder = slurm.cluster.root / "etc/profile.d"  # of all hosts
    before = folder.readlink()
    folder.unlink()
    folder.mkdir()
    try:
        (folder / "zz-site.sh").write_text(SITE)
        found = doctor(("cpus_per_node: 2", "cpus_per_node: 2, modules: [train/1]"))["python"]
        assert (found["verdict"], found["found"].partition(" ")[0]) == ("ok", sys.executable), found
        assert "after `module load train/1` on the login node" in found["found"]
        wrong = doctor(("cpus_per_node: 2", "cpus_per_node: 2, modules: [train/2]"))["python"]
        assert "no module train/2" in wrong["found"]
        assert "slurm.modules" in wrong["cure"]
        bare = doctor((f"python: {sys.executable}", "python: /usr/bin/python3"))["python"]
        assert (bare["verdict"], bare["found"][-13:], bare["cure"][:16]) == (
            "warn",
            "without torch",
            "/usr/bin/python3",
        )
        script = render_text("slurm/modules.sh", modules=["train/1"])
        number = slurm.submit(f"refuse() {{ exit 64; }}\n{script}echo $TRAINLIB", "--nodelist=node0", "--output=told")
        slurm.wait(number, "COMPLETED")
        assert (slurm.home() / "told").read_text() == "loaded\n"
    finally:
        shutil.rmtree(folder)
        folder.symlink_to(before)


@pytest.mark.soak
def test_dead_controller_and_spent_budget_are_told(doctor: Doctor, slurm: Slurm) -> None:
    """A site's budget is shown in hours; without a controller only the checks without Slurm remain."""
    slurm.admin("sacctmgr", "-i", "modify", "account", "lab", "set", "GrpTRESMins=cpu=600")
    try:
        found = doctor()["site budget"]
        assert (found["verdict"], found["found"]) == ("ok", "lab: 10 of 10 cpu-hours left")
    finally:
        slurm.admin("sacctmgr", "-i", "modify", "account", "lab", "set", "GrpTRESMins=cpu=-1")
    slurm.slurmctld.kill()
    found = doctor()
    assert list(found) == ["login node", "controller", "shared disk"]
    assert found["controller"]["verdict"] == "fail"


def test_job_is_removed_from_the_shared_disk_too(cli: Any, doctor: Doctor, slurm: Slurm, tmp_path: Path) -> None:
    """`rm` names the job's folder on the cluster with its size; --everywhere removes that folder alone."""
    doctor(("instances: 2", "instances: 1"), (', accelerators: "A100:2"', ""))
    (tmp_path / "train.py").write_text("import time\ntime.sleep(300)\n")
    job = cli.ok("submit", "-d", "-y", "--json", cwd=tmp_path).json["job"]
    cli("stop", job, "--now", "-y")
    until(lambda: cli("status", job, "--json").json["state"] not in ("running", "stopping", "pending"), 90)
    asked = cli("rm", job).stderr
    assert f"login:/home/alice/.cloudtrain/jobs/{job}  " in asked, asked
    assert "stays: --everywhere removes it, too" in asked
    cli.ok("rm", "-y", "--everywhere", job)
    assert not (slurm.home() / ".cloudtrain/jobs" / job).exists()
    assert (slurm.home() / ".cloudtrain/runtime").exists()
    assert "/home/alice/.cloudtrain/runtime" in cli.ok("hosts", "--disk", "--backend", "slurm", cwd=tmp_path).stdout
