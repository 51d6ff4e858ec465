"""A model pushed to eight hosts against a push to one: `python benchmarks/push.py [MB]`, with real sshd in namespaces.

The hosts share the processors and the disk of this machine, so each further copy costs this machine's own time: real
hosts copy side by side.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from report import Report
from sandbox import Sandbox, sandbox

from cloudtrain.entrypoints.models.folder import verify, write_sums
from doubles.sshhosts.cluster import Cluster, missing

HOSTS = 8


def run(size_mb: int = 256) -> Report:
    """Push a model to one host and to eight, and the same model again."""
    report = Report(f"push: a model of {size_mb} MB to one host and to {HOSTS}")
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = Cluster.start(HOSTS, Path(folder) / "hosts")
        try:
            with sandbox(cluster.environ) as box:
                _measure(report, box, _model(Path(folder) / "model", size_mb), cluster)
        finally:
            cluster.stop()
    return report


def _model(folder: Path, size_mb: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"format": 1, "name": "m"}))
    (folder / "check.json").write_text(json.dumps({"passed": True}))
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(1 << 20) * size_mb)
    write_sums(folder, {})
    return folder


def _measure(report: Report, box: Sandbox, model: Path, cluster: Cluster) -> None:
    names = [host.name for host in cluster.hosts]
    block = f"ssh: {{hosts: [{', '.join(names)}], ssh_config: {cluster.environ['SSH_CONFIG']}}}"
    (box.folder / "cloudtrain.yaml").write_text(f"name: m\nbackend: ssh\nscript: a.py\n{block}\n")
    (box.folder / "a.py").touch()
    one_s = _timed(box, model, f"{names[0]}:/opt/one")
    all_s = _timed(box, model, f"{','.join(names)}:/opt/all")
    again_s = _timed(box, model, f"{','.join(names)}:/opt/all")
    version = verify(model).digest[:12]
    current = [host.run(["readlink", "/opt/all/current"]).strip() for host in cluster.hosts]
    report.count("hosts with the version as the current one", current.count(version), len(names))
    report.timing("a push to one host", f"{one_s:.1f} s")
    report.timing("a push to eight hosts", f"{all_s:.1f} s, {all_s / one_s:.1f} times")
    report.timing("the same push again: eight checks", f"{again_s:.1f} s")


def _timed(box: Sandbox, model: Path, place: str) -> float:
    begin_s = time.monotonic()
    child = box.start("push", str(model), place)
    if child.wait(timeout=900):
        raise RuntimeError("".join(map(str, child.communicate())))
    return time.monotonic() - begin_s


if __name__ == "__main__":
    run(*map(int, sys.argv[1:])).show()
