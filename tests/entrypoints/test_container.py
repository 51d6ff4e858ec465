"""A managed platform's container: the node's identity, the output, and the report of a failure."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent.node import identify
from cloudtrain.entrypoints.container import log_relay as pump_module
from cloudtrain.entrypoints.container.container import FAILURE_BYTES, account
from cloudtrain.entrypoints.container.inputs import Note, used_s, with_lead_back
from cloudtrain.entrypoints.container.log_relay import LogRelay
from cloudtrain.entrypoints.contract import ContainerOrder, ExitReport, has_checkpoint
from doubles.waiting import until

REPOSITORY = Path(__file__).resolve().parents[2]

FAILED = ExitReport("failed", "error", restarts=1, resumable=True)

SCRIPT = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("here", rank, os.environ["WORLD_SIZE"], os.environ["CLOUDTRAIN_INPUT_TRAIN"], flush=True)
if rank == int(sys.argv[1]):
    time.sleep(0.5)
    raise ValueError("bad batch: it's \\"quoted\\" $HOME é")
if sys.argv[2] == "loop":
    def save(signum, frame):
        open(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] + f"/saved-{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    while True:
        time.sleep(0.05)
"""


def resource_config(root: Path, hosts: list[str], current: str) -> None:
    """Write the file by which SageMaker describes a host."""
    path = root / "input/config/resourceconfig.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"current_host": current, "hosts": hosts, "network_interface_name": "lo"}))


def test_sagemakers_hosts_are_ordered_by_number(tmp_path: Path) -> None:
    """As text, 127.0.0.10 would come before 127.0.0.2, as algo-10 before algo-2."""
    hosts = ["127.0.0.10", "127.0.0.2", "127.0.0.1"]
    resource_config(tmp_path, hosts, "127.0.0.10")
    found = identify({"CLOUDTRAIN_PLATFORM_ROOT": str(tmp_path), "RANK": "7"})
    assert (found.platform, found.rank, found.count, found.head) == ("SageMaker", 2, 3, "127.0.0.1")
    assert (found.address, found.port) == ("127.0.0.10", 7777)


def test_log_relay_passes_every_line_once_with_its_rank(tmp_path: Path) -> None:
    """Late lines, a last line without newline and overlong lines all arrive; lines of other files do not."""
    path = tmp_path / "out"
    with path.open("wb") as out:
        pump = LogRelay(tmp_path, out.fileno())
        pump.start()
        with (tmp_path / "rank-3.log").open("wb", buffering=0) as log:
            for number in range(2000):
                log.write(b"line %d\n" % number if number % 2 else b"line")
                log.write(b"" if number % 2 else b" %d\n" % number)
        (tmp_path / "rank-0.log").write_bytes(b"x" * 200_000 + b"\nno newline")
        (tmp_path / "boot.log").write_bytes(b"node 0\n\n")
        (tmp_path / "torchrun.log").write_bytes(b"chatter\n")
        pump.finish()
    lines = path.read_bytes().decode().splitlines()
    assert [line for line in lines if line.startswith("[3]")] == [f"[3] line {n}" for n in range(2000)]
    long = [line.removeprefix("[0] ") for line in lines if line.startswith("[0] ")]
    assert ("".join(long[:-1]), long[-1], len(long)) == ("x" * 200_000, "no newline", 5)
    assert [line for line in lines if not line.startswith("[")] == ["node 0", ""]


def test_log_relay_frees_the_space_of_passed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file keeps its length while its read parts become holes, and every line arrives once."""
    monkeypatch.setattr(pump_module, "GIVE_BYTES", 1 << 20)
    (tmp_path / "rank-0.log").touch()
    with (tmp_path / "out").open("wb") as out, (tmp_path / "rank-0.log").open("ab", buffering=0) as log:
        pump = LogRelay(tmp_path, out.fileno())
        pump.start()
        for number in range(80_000):
            log.write(b"%06d %s\n" % (number, b"x" * 50))
        pump.finish()
    lines = (tmp_path / "out").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(80_000))
    kept = (tmp_path / "rank-0.log").stat()
    assert kept.st_size == 80_000 * 58
    assert kept.st_blocks * 512 < kept.st_size / 2


def cluster(index: int, pool: str = "workerpool1", workers: int = 2) -> dict[str, str]:
    """Return the variables by which Vertex AI describes a replica; its RANK counts nodes."""
    pools = {"workerpool0": ["127.0.0.1:2222"], "workerpool1": [f"127.1.0.{n + 2}:2222" for n in range(workers)]}
    spec = {"cluster": pools, "environment": "cloud", "task": {"type": pool, "index": index, "trial": ""}, "job": "{}"}
    nodes = {"CLOUDTRAIN_NODES": str(workers + 1), "RANK": "7", "WORLD_SIZE": "3", "MASTER_PORT": "3333"}
    return {"CLOUD_ML_JOB_ID": "123", "CLUSTER_SPEC": json.dumps(spec), **nodes}


def test_vertex_replicas_are_counted_over_the_pools() -> None:
    """Pool 0 is the head node, pool 1 has the remaining nodes, and further pools (reduction servers) have no rank.

    CLUSTER_SPEC announces the port.
    """
    found = identify(cluster(1))
    assert (found.platform, found.rank, found.count, found.head, found.port) == ("Vertex AI", 2, 3, "127.0.0.1", 2222)
    assert found.address == "127.1.0.3"
    assert identify(cluster(0, "workerpool0")).rank == 0
    with pytest.raises(ValueError, match="does not train"):
        identify(cluster(0, "workerpool2"))


@pytest.mark.parametrize("spec", [{}, {"CLUSTER_SPEC": ""}, {"CLUSTER_SPEC": "{}"}])
def test_vertex_single_replica_needs_no_cluster_spec(spec: dict[str, str]) -> None:
    """For a single replica the variable may be missing or empty."""
    found = identify({"CLOUD_ML_JOB_ID": "1", "CLOUDTRAIN_NODES": "1", **spec})
    assert (found.platform, found.rank, found.count, found.head) == ("Vertex AI", 0, 1, "127.0.0.1")
    with pytest.raises(ValueError, match="names no replicas"):
        identify({"CLOUD_ML_JOB_ID": "1", "CLOUDTRAIN_NODES": "2", **spec})


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("step 10/100 loss 0.5", "INFO"),
        ("WARNING: slow disk", "WARNING"),
        ("[rank0]:W1122 12:00:00 WARN something", "WARNING"),
        ("2026-11-22 12:00:00,000 - root - ERROR - boom", "ERROR"),
        ("Traceback (most recent call last):", "ERROR"),
        ("ValueError: bad batch", "ERROR"),
        ("FATAL: no space", "CRITICAL"),
        (f"{'x' * 100} ERROR is what this line tells about", "INFO"),
        ("the errors went down, information too", "INFO"),
    ],
)
def test_log_relay_writes_json_with_number_time_and_severity(line: str, severity: str, tmp_path: Path) -> None:
    """Cloud Logging keeps neither the order nor the level of a container's lines, so each line carries both."""
    (tmp_path / "rank-3.log").write_text(f'{line}\n"quoted" \\ é\n')
    with (tmp_path / "out").open("wb") as out:
        pump = LogRelay(tmp_path, out.fileno(), form="json")
        pump.start()
        pump.finish()
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (first["message"], first["severity"], first["ct"]["n"]) == (f"[3] {line}", severity, 1)
    assert (second["message"], second["ct"]["n"], second["ct"]["l"]) == ('[3] "quoted" \\ é', 2, pump.life)
    assert abs(first["ct"]["t"] / 1000 - time.time()) < 60
    assert pump.count == 2


@pytest.mark.parametrize("message", ["bad batch", "é" * 5000, 'it\'s "quoted"\nin two lines', "x" * 5000])
def test_exit_report_is_an_event_that_fits(message: str) -> None:
    """The report fits SageMaker's 1024 characters whole: words first, then data with the traceback's end."""
    frames = "".join(f'  File "train.py", line {n}, in f{n}\n    call()\n' for n in range(100))
    error = {"rank": 5, "kind": "exception", "type": "ValueError", "message": message, "traceback": frames + "the end"}
    lines = [*(f"loading shard {n}, é" for n in range(9)), "in a very long line " * 20]
    line = account(replace(FAILED, error={**error, "lines": lines}))
    text, fields = events.parse(line)
    assert len(line.encode()) <= FAILURE_BYTES
    assert text.startswith("rank 5: ValueError: " + message[:8].replace("\n", " "))
    assert (fields["rank"], fields["state"], fields["resumable"]) == (5, "failed", True)
    assert fields["traceback"].endswith("the end")
    assert fields["lines"]
    assert lines[-1].startswith(fields["lines"][-1])
    assert fields["lines"][:-1] == lines[-len(fields["lines"]) : -1]


@pytest.mark.parametrize("message", ["bad batch", "é" * 5000, "x" * 5000, f"{'y' * 90}\n" * 20])
def test_exit_report_keeps_the_frame_of_the_users_code(message: str) -> None:
    """The user's frame stays, although 99 library frames follow and the message is very long."""
    above = '  File "train.py", line 90, in <module>\n    main()\n'
    own = '  File "pkg/models/own.py", line 7, in forward\n    return self.head(batch["label"])\n    ~~~~~^^^^\n'
    library = "".join(f'  File "/opt/lib/site-packages/lib/{n}.py", line {n}, in f\n    call()\n' for n in range(99))
    trace = f"Traceback (most recent call last):\n{above}{own}{library}ValueError: {message}"
    error = {"rank": 5, "kind": "exception", "type": "ValueError", "message": message, "traceback": trace}
    line = account(replace(FAILED, error={**error, "lines": ["in a very long line " * 20] * 9}))
    fields = events.parse(line)[1]
    assert len(line.encode()) <= FAILURE_BYTES
    assert '  ...\n  File "pkg/models/own.py", line 7, in forward\n    return self' in fields["traceback"]
    assert "~~~" not in fields["traceback"]
    assert fields["lines"]


def test_exit_report_without_an_error_gives_the_reason() -> None:
    """A job that saved and stopped is no failure, whatever name the platform uses."""
    text, fields = events.parse(account(ExitReport("stopped", "budget", resumable=True)))
    assert (text, fields and fields["kind"]) == ("stopped (budget)", None)


Containers = Callable[..., list["subprocess.Popen[bytes]"]]


@pytest.fixture
def containers(tmp_path: Path, request: pytest.FixtureRequest) -> Containers:
    """Return a function that starts two containers of a job, each with the platform's folder layout."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.add(REPOSITORY / "entrypoints", "runtime/cloudtrain/entrypoints")
        member = tarfile.TarInfo("code/train.py")
        member.size = len(SCRIPT.encode())
        tar.addfile(member, io.BytesIO(SCRIPT.encode()))
    # The head's port is fixed, so each process of the tests has addresses of its own.
    hosts = [f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.{number}" for number in (2, 3)]

    def start(*args: str, **changes: Any) -> list[subprocess.Popen[bytes]]:
        spec = {**_spec(hashlib.sha256(data.getvalue()).hexdigest(), list(args)), **changes}
        found = []
        for number, host in enumerate(hosts):
            root = tmp_path / f"node-{number}"
            resource_config(root, hosts, host)
            for name in ("code", "job"):
                (root / "input/data" / name).mkdir(parents=True)
            (root / "input/data/code/bundle.tar.gz").write_bytes(data.getvalue())
            (root / "input/data/job/spec.json").write_text(json.dumps(spec))
            command = [sys.executable, "-m", "cloudtrain.entrypoints.container", str(root), "input/data/job/spec.json"]
            with (root / "output.txt").open("wb") as out:
                process = subprocess.Popen(command, stdout=out, stderr=out, cwd=root)
            request.addfinalizer(process.kill)
            found.append(process)
        return found

    return start


def _spec(sha256: str, args: list[str]) -> dict[str, Any]:
    return {
        "job": "j",
        "attempt": 1,
        "nodes": 2,
        "min_nodes": 2,
        "node_counts": [1, 2],
        "nproc_per_node": 1,
        "max_restarts": 0,
        "timeout_s": 60,
        "hang_timeout_s": 300,
        "environment": {"A": "b"},
        "secrets": None,
        "deadline_s": 500,
        "max_duration_s": 600,
        "grace_s": 20,
        "join_timeout_s": 60,
        "token": "t",
        "limit_reason": "time_limit",
        "bundle_sha256": sha256,
        "checkpoint": {},
        "run": {"kind": "script", "target": "train.py", "args": args, "allow_alone": True},
        "places": {
            "own": "cloudtrain",
            "bundle": "input/data/code/bundle.tar.gz",
            "checkpoints": "checkpoints",
            "output": "model",
            "failure": "output/failure",
            "inputs": {"train": "input/data/train"},
        },
    }


@pytest.mark.parametrize(("since_s", "back_s"), [(0, 300), (40, 260), (300, 0), (5000, 0), (-1, 0), (None, 0)], ids=str)
def test_quick_start_gets_its_lead_time_back(since_s: float | None, back_s: float) -> None:
    """The limit loses only the time since the sending; with an unknown or invalid time the lead counts."""
    spec = {**_spec("0" * 64, []), "lead_s": 300, "sent_s": None if since_s is None else 1000.0 - since_s}
    told = with_lead_back(ContainerOrder.load(spec), 1000.0)
    assert (told.max_duration_s, told.deadline_s) == (600 + back_s, 500 + back_s)


def test_time_used_on_other_machines_is_counted(tmp_path: Path) -> None:
    """The note returns with the checkpoints; a broken note or a note of a different attempt counts 0 s."""
    note = Note(tmp_path, "j", 2, 100.0)
    note.start()
    note.finish()
    assert 100 <= used_s(tmp_path, "j", 2) < 110
    assert (used_s(tmp_path, "j", 3), used_s(tmp_path, "k", 2)) == (0, 0)
    (tmp_path / ".used.json").write_text("[")
    assert used_s(tmp_path, "j", 2) == 0
    assert not has_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_both_containers_report_the_rank_that_failed_first(containers: Containers, tmp_path: Path, rank: int) -> None:
    """Both containers write the same report, with the exception and not its echo."""
    codes = [process.wait(100) for process in containers(str(rank), "loop")]
    accounts = [(tmp_path / f"node-{n}/output/failure").read_text() for n in range(2)]
    text, fields = events.parse(accounts[0])
    assert (codes, accounts[0]) == ([70, 70], accounts[1])
    assert text == f'rank {rank}: ValueError: bad batch: it\'s "quoted" $HOME é'
    assert "raise ValueError" in fields["traceback"]
    assert f"[{rank}] here {rank} 2 {tmp_path}/node-{rank}/input/data/train" in output(tmp_path, rank)
    assert json.loads(output(tmp_path, 0)[-1].partition(events.MARK)[2])["e"] == "end"


@pytest.mark.slow
def test_signal_to_one_container_makes_both_save(containers: Containers, tmp_path: Path) -> None:
    """A platform's signal may reach a single container; both save and end with code 75."""
    both = containers("9", "loop")
    until(lambda: all(any("here" in line for line in output(tmp_path, n)) for n in range(2)), 60)
    os.kill(both[1].pid, signal.SIGTERM)
    assert [process.wait(60) for process in both] == [75, 75]
    assert [(tmp_path / f"node-{n}/checkpoints/saved-{n}").exists() for n in range(2)] == [True, True]
    fields = events.parse((tmp_path / "node-0/output/failure").read_text())[1]
    assert (fields["state"], fields["reason"], fields["resumable"]) == ("stopped", "preempted", True)


def test_container_without_node_0_obeys_a_signal(containers: Containers, tmp_path: Path) -> None:
    """If node 0 has died before node 1 connects, SIGTERM ends node 1 long before the join timeout."""
    both = containers("9", "loop")
    both[0].kill()  # before the process can listen
    until((tmp_path / "node-1/cloudtrain/state.json").exists, 50)
    os.kill(both[1].pid, signal.SIGTERM)
    assert both[1].wait(30) == 75
    fields = events.parse((tmp_path / "node-1/output/failure").read_text())[1]
    assert (fields["state"], fields["reason"]) == ("stopped", "preempted")


def output(folder: Path, node: int) -> list[str]:
    """Return the lines that a container has written so far."""
    return (folder / f"node-{node}" / "output.txt").read_text().splitlines()


def test_unreadable_order_is_reported_in_the_failure_file(tmp_path: Path) -> None:
    """Without the keys of a container order, a line names our error instead of a traceback, and the log is complete."""
    spec = _spec("0" * 64, [])
    del spec["token"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    resource_config(tmp_path, ["127.0.0.1"], "127.0.0.1")
    command = [sys.executable, "-m", "cloudtrain.entrypoints.container", str(tmp_path), "spec.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    line, end = done.stdout.splitlines()
    said = "cannot read the job's spec: ContractError('the container order lacks `token`')"
    assert (done.returncode, line, done.stderr) == (64, said, "")
    parsed = events.parse(end)
    end = {key: parsed[1][key] for key in ("e", "final", "lines", "node")}
    assert end == {"e": "end", "final": True, "lines": 1, "node": 0}
    assert "cannot read the job's spec" in (tmp_path / "output/failure").read_text()


def test_script_runs_under_smddp_only_where_it_is(tmp_path: Path) -> None:
    """The toolkit's program refuses an image without the SMDDP library, and otherwise runs the script."""
    guard = tmp_path / "runtime/cloudtrain/entrypoints/container/smddp.py"
    guard.parent.mkdir(parents=True)
    guard.write_bytes((REPOSITORY / "entrypoints/container/smddp.py").read_bytes())
    (tmp_path / "code/src").mkdir(parents=True)
    (tmp_path / "code/at_root.py").write_text("")
    (tmp_path / "code/src/beside.py").write_text("WORD = 'beside'")
    (tmp_path / "code/src/train.py").write_text(
        "import sys, beside, at_root; print(__name__, beside.WORD, sys.argv[1:])"
    )
    library = tmp_path / "site/smdistributed/dataparallel/torch"
    env = {**os.environ, "CLOUDTRAIN_SCRIPT": "code/src/train.py", "PYTHONPATH": str(tmp_path / "site")}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(guard), "--lr", "1"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    refused = run()
    assert (refused.returncode, "this image has no SMDDP library" in refused.stderr) == (1, True)
    library.mkdir(parents=True)
    (library / "torch_smddp.py").write_text("")
    assert run().stdout == "__main__ beside ['--lr', '1']\n"
