"""A pre-empted job from its follower's side, on a real Slurm with torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from doubles.slurm.handle import Slurm
from doubles.waiting import until

MORE = "cpus_per_node: 1, partition: spot"
CONFIG = f"""\
name: j
backend: slurm
task: task.py
env: {{OMP_NUM_THREADS: "1"}}
resources: {{instances: 2}}
{wholejobs.TRAINING.replace("max_steps: 100", "max_steps: 300")}limits: {{max_duration: 20m}}
slurm: {{login: alice@login, ssh_config: "${{SSH_CONFIG}}", python: "${{SSH_PYTHON}}", {MORE}}}
"""


@pytest.mark.soak
def test_followed_job_goes_on_after_a_preemption(
    cli: Any, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower lifts Slurm's delay of 2 minutes: the job trains within 45 s, in the same attempt; no line is lost."""
    slurm.apply(monkeypatch)
    whole = wholejobs.run_whole(cli, wholejobs.write_task(tmp_path / "project", CONFIG), tmp_path)
    assert cli("submit", "--force", "-y", "-d", "--name", "kept", cwd=tmp_path / "project").code == 0
    cli.watch("step 30/", "logs", "-f", "kept")
    following = cli.start("wait", "kept")
    urgent = slurm.submit("true", "--nodes=3", "--exclusive")
    slurm.wait(urgent, "RUNNING", "COMPLETED")
    until(lambda: cli("status", "kept", "--json").json["state"] == "pending", 45, 0.5)
    until(lambda: cli("status", "kept", "--json").json["state"] == "running", 60, 0.5)
    following.communicate(timeout=180)
    assert following.returncode == 0
    status = cli("status", "kept", "--json").json
    assert (status["state"], status["attempt"]) == ("succeeded", 1)
    assert wholejobs.losses(cli, "kept") == whole.losses
    wholejobs.assert_equal(wholejobs.weights(cli, "kept", tmp_path), whole.weights)
    lines = cli("logs", "kept", "--json", "--raw").stdout.splitlines()
    assert sum("resuming from step" in line for line in lines) == 1
    assert all(json.loads(line) for line in lines)
