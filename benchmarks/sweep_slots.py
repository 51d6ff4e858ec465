"""The share of a sweep's slot time that trains: `python benchmarks/sweep_slots.py [SECONDS]`.

Runs 8 trials of about SECONDS each on two slots of this machine's CPUs. A slot trains from a segment's first step to
its end. The other time is the start of torch, the driver's, and the slots' idle time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cloudtrain.entrypoints.sweep.journal import NAME

TASK = """
import time, torch
class Points:
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.randn(4), torch.zeros(1)
def dataset(params, split): return Points() if split == "train" else [(torch.zeros(4), torch.zeros(1))] * 4
def model(params): return torch.nn.Linear(4, 1)
def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
"""
STEP_S = 0.2  # four samples


def main() -> None:
    """Run the sweep, and print the figures."""
    steps = int(float(sys.argv[1] if len(sys.argv) > 1 else 30) / STEP_S)
    space = {"training.optimizer.lr": {"log": [1e-4, 1e-1]}}
    search = {"algorithm": "random", "space": space, "trials": 8, "parallel": 2, "rungs": [steps]}
    training = {"global_batch_size": 4, "max_steps": steps}
    run = {"kind": "sweep", "target": "task.py"}
    sweep = {"search": search, "slots": 1, "instances": 1, "nproc_per_node": 2, "until": "rung"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.py").write_text(TASK)
        (folder / "spec.json").write_text(json.dumps({"run": run, "training": training, "sweep": sweep}))
        folders = {kind: str(folder / kind.lower()) for kind in ("CHECKPOINT", "OUTPUT", "RESULT")}
        environment = {f"CLOUDTRAIN_{kind}_DIR": path for kind, path in folders.items()}
        node = {"HEAD": "127.0.0.1:29555", "ADDRESS": "127.0.0.1", "NODE_RANK": "0", "NUM_NODES": "1"}
        environment |= {f"CLOUDTRAIN_{name}": value for name, value in node.items()}
        (folder / "result").mkdir()
        began_s = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "cloudtrain.entrypoints.agent.boot"],
            cwd=folder,
            env={**os.environ, **environment, "CLOUDTRAIN_SPEC": str(folder / "spec.json"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        took_s = time.monotonic() - began_s
        lines = [json.loads(line[9:]) for line in (folder / "checkpoint" / NAME).read_text().splitlines()]
    ends = [line for line in lines if line["e"] == "end"]
    used_s, starts_s = (sum(each[name] for each in ends) for name in ("seconds", "start_s"))
    print(f"{len(ends)} segments on 2 slots in {took_s:.1f} s; a start takes {starts_s / len(ends):.2f} s")
    print(
        f"{(used_s - starts_s) / (2 * took_s):.1%} of the slot-seconds trained, {used_s / (2 * took_s):.1%} were in use"
    )


if __name__ == "__main__":
    main()
