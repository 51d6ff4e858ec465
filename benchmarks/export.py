"""What an export's copy of the weights costs: 2 GB in four shards, beside `cp` and `sha256sum` of the same bytes.

    python benchmarks/export.py [FOLDER]

The checkpoint is made of random numbers in FOLDER (default: /dev/shm, so that
the speed of a disk does not hide the work). The rounds of copy and export alternate, because the machine may be shared.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from report import Report

from cloudtrain.entrypoints.atomic_json import sync
from cloudtrain.entrypoints.checkpoints import folder as checkpoints
from cloudtrain.entrypoints.checkpoints import shards
from cloudtrain.entrypoints.models.order import ExportOrder

TENSORS, ROWS, COLUMNS, RANKS, ROUNDS = 40, 4096, 3072, 4, 5  # 50 MB a tensor, 2 GB
LARGEST_MB = ROWS * COLUMNS * 4 / 1e6
PROGRAM = """
import json, sys, time
from pathlib import Path
from cloudtrain.entrypoints.models.order import ExportOrder
from cloudtrain.entrypoints.export import build
begin_s = time.perf_counter()
build.build(ExportOrder.load(json.load(sys.stdin)))
seconds = time.perf_counter() - begin_s
print(seconds, int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1000)
"""


def make(folder: Path) -> Path:
    """Write the checkpoint; return its path."""
    partial = checkpoints.begin(folder, 1, 0)
    files = {}
    for rank in range(RANKS):
        rows = ROWS // RANKS
        offset, shape = (rank * rows, 0), (rows, COLUMNS)
        boxes = [shards.Box(f"model.w{i}", torch.float32, (ROWS, COLUMNS), offset, shape) for i in range(TENSORS)]
        head, _, size = shards.place(boxes)
        data = torch.empty(size, dtype=torch.uint8)
        data.view(torch.float32).normal_()
        name = f"shard-{rank:05d}-of-{RANKS:05d}.safetensors"
        files[name] = shards.write(partial / name, head, data)
    torch.save({}, partial / checkpoints.PLAIN)
    plain = (partial / checkpoints.PLAIN).read_bytes()
    files[checkpoints.PLAIN] = checkpoints.write_bytes(partial / checkpoints.PLAIN, plain)
    files[checkpoints.TRAINER] = checkpoints.write_json(partial / checkpoints.TRAINER, {"step": 1})
    return checkpoints.finish(folder, 1, files)


def run(folder: Path) -> Report:
    """Measure in the folder."""
    report = Report("export of 2 GB in four shards")
    with tempfile.TemporaryDirectory(prefix="export-", dir=folder) as scratch:
        source, copy, place = make(Path(scratch)), Path(scratch) / "copy", Path(scratch) / "model"
        copies, sums, exports, memory = [], [], [], []
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            subprocess.run(["cp", "-r", source, copy], check=True)
            for path in copy.iterdir():  # an export writes its files durably, too
                sync(path)
            copies.append(time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            subprocess.run(["sha256sum", *map(str, copy.iterdir())], check=True, stdout=subprocess.DEVNULL)
            sums.append(time.perf_counter() - begin_s)
            shutil.rmtree(copy)
            order = ExportOrder(str(source), str(place), "big", is_unchecked=True, forms=("safetensors",))
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                input=json.dumps(order.dump()),
                capture_output=True,
                text=True,
                check=True,
            )
            seconds, megabytes = map(float, done.stdout.split())
            exports.append(seconds)
            memory.append(megabytes)
            shutil.rmtree(place)
    rounds = list(zip(exports, copies, sums, strict=True))
    ratio = statistics.median(export / (copied + summed) for export, copied, summed in rounds)
    plain = statistics.median(export / copied for export, copied, _ in rounds)
    most_mb = 1.3 * LARGEST_MB + 200
    report.timing("peak memory", f"{max(memory):.0f} MB", f"{most_mb:.0f} MB", ok=max(memory) <= most_mb)
    report.timing("export / (cp + sha256sum), median of rounds", f"{ratio:.2f}", "1.3", ok=ratio <= 1.3)
    report.timing("export / cp, median of rounds", f"{plain:.2f}", "1.5", ok=plain <= 1.5)
    for name, values in (("export", exports), ("cp", copies), ("sha256sum", sums)):
        report.timing(f"seconds of {name}", " ".join(f"{value:.2f}" for value in values))
    report.notes.append(f"{folder}; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return report


if __name__ == "__main__":
    run(Path(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm")).show()
