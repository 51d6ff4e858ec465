"""A resume whose newest save lies on a host that does not answer asks first, on real hosts."""

from contextlib import closing
from typing import Any

import pytest

from cloudtrain.launcher import api
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.jobs import retry
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.ui import pages
from doubles.signatures import MakeProject
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster
from doubles.waiting import until

pytestmark = pytest.mark.slow

# In place of torchrun: saves step 50 as the trainer names it, reports the save as rank 0, and fails.
TRAIN = """\
import os
from pathlib import Path
folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
log = (Path(os.environ["CLOUDTRAIN_LOG_DIR"]) / "rank-0.log").open("a")
print("has", sorted(path.name for path in folder.glob("step-*")), file=log, flush=True)
(folder / "step-00000050").mkdir(exist_ok=True)
(folder / "step-00000050" / "weights").write_text("50")
print('saved  ::ct {"e": "checkpoint", "step": 50, "path": "/x/step-00000050"}', file=log, flush=True)
raise SystemExit(1)
"""
CONFIG = f"""\
backend: ssh
retry: {{max_attempts: 9, on: [error]}}
ssh: {{hosts: [h0, h1], ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}}}
"""
LOST = "step 50 is on h0 (no answer): the next attempt starts from the beginning"


def test_newest_save_on_a_silent_host_is_not_given_up(cli: Any, pair: Cluster, project: MakeProject) -> None:
    """`-y`, Python, the page and a retry refuse by one rule; --from-older agrees, a returned host helps."""
    where = project(CONFIG, script="train.py", text=TRAIN)
    job = cli.ok("submit", "-d", "-y", "--json", cwd=where).json["job"]
    until(lambda: cli("status", job, "--json").json["state"] == "failed", 90, 1.0)
    assert cli("status", job, "--json").json["checkpoint_step"] == 50
    pair.hosts[0].cut()
    refused = cli("resume", job, "-y", "-d")
    assert (refused.code, LOST in refused.stderr) == (2, True), refused.stderr
    assert f"cloudtrain resume {job} --from-older" in refused.stderr
    with pytest.raises(UsageError, match="step 50 is on h0") as error:
        api.resume(job)
    assert error.value.hint == "add from_older=True"
    with closing(Registry()) as registry:
        found = registry.find(job)
        with pytest.raises(UsageError, match="step 50 is on h0"):
            pages.resume_offer(registry, job)
        assert retry.send_if_due(registry, found) is None
        assert registry.find(job).attempt.number == 1
    gone = cli("resume", job, "-y", "-d", "--set", "ssh.hosts=[h1]", "--instances", "1")
    assert "step 50 is on h0 (not in ssh.hosts)" in gone.stderr, gone.stderr
    pair.hosts[0].join()
    until(lambda: cli("resume", job, "-y", "-d").code == 0, 60, 1.0)  # a busy host answers later
    until(lambda: cli("status", job, "--json").json["state"] == "failed", 90, 1.0)
    assert "has ['step-00000050']" in cli.ok("logs", job).stdout
    pair.hosts[0].cut()
    sent = cli.ok("resume", job, "-y", "-d", "--from-older")
    assert LOST in sent.stderr
    until(lambda: cli("status", job, "--json").json["state"] == "failed", 90, 1.0)
    assert "has []" in cli.ok("logs", job).stdout
