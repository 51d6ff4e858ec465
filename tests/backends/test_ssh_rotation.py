"""Checkpoints that a script rotates on node 0 alone, on two real hosts without a shared disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.signatures import MakeProject
from doubles.sshhosts import lightpython
from doubles.sshhosts.cluster import Cluster
from doubles.waiting import until

pytestmark = pytest.mark.slow

# In place of torchrun: saves two checkpoints in each attempt as Hugging Face's Trainer does, and fails once both ranks
# have saved. Each rank writes its random state; rank 0 writes the weights, and keeps the newest two checkpoints.
TRAIN = """\
import os, shutil, socket
from pathlib import Path
rank, attempt = os.environ["RANK"], int(os.environ["CLOUDTRAIN_ATTEMPT"])
log = (Path(os.environ["CLOUDTRAIN_LOG_DIR"]) / f"rank-{rank}.log").open("a")
out = Path("results")
print("has", *sorted(path.parent.name for path in out.glob("*/model.bin")), file=log, flush=True)
for step in (20 * attempt - 10, 20 * attempt):
    (out / f"checkpoint-{step}").mkdir(exist_ok=True)
    (out / f"checkpoint-{step}" / f"rng_state_{rank}.pth").write_text("random")
    if rank == "0":
        (out / f"checkpoint-{step}" / "model.bin").write_text("weights" * 1000)
host, _, port = os.environ["CLOUDTRAIN_HEAD"].rpartition(":")
if rank == "0":
    with socket.create_server((host, int(port))) as server, server.accept()[0]:
        for folder in sorted(out.iterdir())[:-2]:
            shutil.rmtree(folder)
        # The last file of all: the next attempt's node 0 is the host with the newest.
        (out / f"checkpoint-{step}" / "model.bin").write_text("weights" * 1000)
else:
    while True:
        try:
            with socket.create_connection((host, int(port)), 5) as peer:
                peer.recv(1)
            break
        except ConnectionRefusedError:
            pass
raise SystemExit(1)
"""
CONFIG = f"""\
backend: ssh
resources: {{instances: 2}}
keep: [results/]
ssh: {{hosts: [h0, h1], ssh_config: "${{SSH_CONFIG}}", python: {lightpython.PATH}}}
"""


def test_removed_checkpoints_are_removed_everywhere(
    cli: Any, pair: Cluster, project: MakeProject, tmp_path: Path
) -> None:
    """A start fetches the newest checkpoint alone, and copies that node 0 has removed neither stay nor come back."""
    job = cli.ok("submit", "-d", "-y", "--json", cwd=project(CONFIG, script="train.py", text=TRAIN)).json["job"]
    seen = []
    for number in (1, 2, 3):
        if number > 1:
            cli.ok("resume", job, "-y", "-d")
        until(lambda: cli("status", job, "--json").json["state"] == "failed", 90, 1.0)
        lines = [json.loads(line) for line in cli.ok("logs", job, "--json").stdout.splitlines()]
        seen.append(sorted(line["text"].split()[1:] for line in lines if line["text"].startswith("has")))
    assert seen == [
        [[], []],
        [["checkpoint-10", "checkpoint-20"], ["checkpoint-20"]],
        [["checkpoint-30", "checkpoint-40"], ["checkpoint-40"]],
    ]
    files = cli.ok("artifacts", job, "-o", tmp_path / "got", "--json").json["files"]
    assert {Path(path).parent.name for path in files} == {"checkpoint-50", "checkpoint-60"}
