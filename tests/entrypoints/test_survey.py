"""A host's facts: on this machine, and with recorded answers of nvidia-smi."""

import errno
import fcntl
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.agent import gpulocks, gpus, node, starting
from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import probes, reachability, survey
from cloudtrain.entrypoints.host.calls import Here
from doubles.waiting import until

A, B = "GPU-6f1c2d3e-0000-1111-2222-333344445555", "GPU-7a7a7a7a-0000-1111-2222-333344445555"
TWO = f"""\
0, {A}, NVIDIA A100-SXM4-80GB, 81920, 535.104.05, Disabled
1, {B}, NVIDIA A100-SXM4-80GB, 81920, 535.104.05, Disabled
"""
NO_DRIVER = """\
NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
Make sure that the latest NVIDIA driver is installed and running.

"""

Answers = Callable[..., None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return a function that makes nvidia-smi answer: the output for each query, and the exit code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answer(query: str = "", apps: str = "", listing: str = "", code: int = 0, body: str = "") -> None:
        script = folder / "nvidia-smi"
        cases = f"""case "$1" in
          {body}
          --query-gpu=*) printf %s {shlex.quote(query)};;
          --query-compute-apps=*) printf %s {shlex.quote(apps)};;
          -L) printf %s {shlex.quote(listing)};;
        esac
        exit {code}"""
        script.write_text(f"#!/bin/sh\n{cases}\n")
        script.chmod(0o755)

    return answer


def test_gpus_are_listed_one_by_one(nvidia_smi: Answers) -> None:
    """Index, UUID, model, memory and driver of each GPU are listed."""
    nvidia_smi(TWO)
    found = gpus.found()
    assert found["fault"] is None
    assert found["gpus"][1] == {
        "index": 1,
        "uuid": B,
        "name": "NVIDIA A100-SXM4-80GB",
        "memory_mb": 81920,
        "driver": "535.104.05",
        "mig": False,
        "slices": [],
        "fault": None,
    }


def test_missing_feature_of_a_gpu_is_no_fault(nvidia_smi: Answers) -> None:
    """[N/A] stands for a feature that the model lacks, such as its own memory or MIG."""
    nvidia_smi(f"0, {A}, NVIDIA GB10, [N/A], 580.95.05, [N/A]\n")
    gpu = gpus.found()["gpus"][0]
    assert (gpu["memory_mb"], gpu["mig"], gpu["fault"]) == (None, False, None)


@pytest.mark.parametrize("said", ["ERR!", "[Unknown Error]", "[GPU is lost]"])
def test_broken_gpu_has_its_own_fault(nvidia_smi: Answers, said: str) -> None:
    """The intact GPUs can still be used."""
    nvidia_smi(f"0, {A}, NVIDIA A100-SXM4-80GB, {said}, 535.104.05, Disabled\n{TWO.splitlines()[1]}\n")
    assert [gpu["fault"] for gpu in gpus.found()["gpus"]] == [f"memory.total is {said}", None]


def test_gpu_cut_into_slices_lists_their_uuids(nvidia_smi: Answers) -> None:
    """Only the listing contains the UUIDs of MIG devices."""
    listing = f"""\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: {A})
  MIG 3g.40gb     Device  0: (UUID: MIG-aaaa1111-0000-1111-2222-333344445555)
  MIG 2g.20gb     Device  1: (UUID: MIG-bbbb2222-0000-1111-2222-333344445555)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {B})
"""
    nvidia_smi(TWO.replace("Disabled", "Enabled", 1), listing=listing)
    first, second = gpus.found()["gpus"]
    assert first["mig"]
    assert [uuid[:12] for uuid in first["slices"]] == ["MIG-aaaa1111", "MIG-bbbb2222"]
    assert (second["mig"], second["slices"]) == (False, [])


def test_old_driver_is_queried_without_mig(nvidia_smi: Answers) -> None:
    """An old driver does not know the field, and exits with code 2."""
    old = "".join(f"{line.rpartition(',')[0]}\n" for line in TWO.splitlines())
    unknown = 'Field "mig.mode.current" is not a valid field to query.\n'
    nvidia_smi(old, body=f"--query-gpu=*mig*) printf %s {shlex.quote(unknown)}; exit 2;;")
    found = gpus.found()
    assert found["fault"] is None
    assert [gpu["mig"] for gpu in found["gpus"]] == [False, False]


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.104\n", 18, "mismatch"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "driver"),
        (NO_DRIVER, 9, "driver"),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n", 255, "lost"),
        ("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system\n", 15, "lost"),
        ("", 1, "unreadable"),
    ],
)
def test_driver_failure_is_reported_in_its_own_words(nvidia_smi: Answers, said: str, code: int, kind: str) -> None:
    """A machine without GPUs differs from a machine with unusable GPUs."""
    nvidia_smi(said, code=code)
    found = gpus.found()
    assert found["gpus"] == []
    assert found["fault"]["kind"] == kind
    assert " ".join(said.split()) in found["fault"]["text"]


def test_one_lost_gpu_does_not_hide_the_rest(nvidia_smi: Answers) -> None:
    """The lines of the intact GPUs come with the error."""
    nvidia_smi(f"{TWO}Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n", code=255)
    found = gpus.found()
    assert len(found["gpus"]) == 2
    assert found["fault"]["kind"] == "lost"


def test_machine_without_gpus_has_no_fault(nvidia_smi: Answers) -> None:
    """The tool may be installed on a machine without GPUs."""
    nvidia_smi("No devices were found\n", code=6)
    assert gpus.found() == {"gpus": [], "fault": None}


def test_gpu_without_its_tool_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault needs the device, or at least the card."""
    monkeypatch.setattr(gpus, "_tool", lambda: None)
    assert gpus.found(tmp_path, tmp_path) == {"gpus": [], "fault": None}
    card = tmp_path / "0000:3b:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x020000\n")
    assert gpus.found(tmp_path, tmp_path)["fault"] is None  # a network card of the same vendor
    (card / "class").write_text("0x030200\n")
    assert gpus.found(tmp_path, tmp_path)["fault"]["kind"] == "no-driver"
    (tmp_path / "nvidia0").touch()
    assert gpus.found(tmp_path, tmp_path)["fault"]["kind"] == "no-tool"


def test_tool_that_hangs_is_given_up(nvidia_smi: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that never answers costs a limited time."""
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.2)
    nvidia_smi(body="*) exec sleep 60;;")
    assert gpus.found()["fault"]["kind"] == "silent"


def test_processes_on_gpus_are_listed_with_their_owner(nvidia_smi: Answers) -> None:
    """Names with commas work, and processes of foreign containers."""
    own = os.getpid()
    nvidia_smi(apps=f"{own}, {A}, python train.py --a=1, 2, 512\n99999999, {B}, [Not Found], [N/A]\nnonsense\n")
    mine, other = gpus.in_use()
    assert mine["name"] == "python train.py --a=1, 2"
    assert (mine["pid"], mine["gpu"], mine["memory_mb"]) == (own, A, 512)
    assert mine["owner"] == processes.user_name(os.getuid())
    assert (other["owner"], other["memory_mb"], other["job"]) == (None, None, None)


def test_facts_are_complete_and_serialisable(tmp_path: Path, nvidia_smi: Answers) -> None:
    """All facts are present, and the folder was written to and left clean."""
    nvidia_smi(TWO)
    here = Here(tmp_path / "work", "", 0o022, "h1")
    folders = {"checkpoint": str(tmp_path / "no" / "such"), "lock_folder": str(tmp_path / "locks")}
    facts = json.loads(json.dumps(survey.facts(here, python=sys.executable, **folders)))
    assert facts["errors"] == {}
    assert len(facts["gpus"]["gpus"]) == 2
    assert facts["write"] == {"error": None}
    assert list((tmp_path / "work").iterdir()) == []
    assert not (tmp_path / "locks").exists()
    assert facts["checkpoint_disk"]["free_mb"] > 0
    assert facts["python"]["version"].startswith("3.")
    assert any(interface["name"] == "lo" and interface["mtu"] > 1000 for interface in facts["interfaces"])


def test_probe_that_fails_or_hangs_leaves_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining facts arrive in time."""
    over = threading.Event()
    monkeypatch.setattr(probes, "own_name", lambda: over.wait(30))
    monkeypatch.setattr(probes, "infiniband", lambda: os.listdir(tmp_path / "missing"))
    start = time.monotonic()
    facts = survey.facts(Here(tmp_path, "", 0o022, "h1"), patience_s=1.5)
    over.set()
    assert time.monotonic() - start < 5
    assert facts["errors"] == {"own_name": "no answer within 1.5 s", "infiniband": "No such file or directory"}
    assert (facts["own_name"], facts["infiniband"]) == (None, None)
    assert facts["limits"]["nofile"][0] > 0


def test_unwritable_folder_gives_a_reason(tmp_path: Path) -> None:
    """A file is in the place of the folder."""
    (tmp_path / "file").touch()
    assert probes.write(tmp_path / "file" / "work")["error"] == f"{tmp_path / 'file' / 'work'}: Not a directory"


def test_interpreter_is_asked_without_importing_torch(tmp_path: Path) -> None:
    """Version, CUDA build and NCCL are read from files; an import of this torch would fail."""
    site = tmp_path / "site"
    for name, version in (("torch", "2.13.0"), ("nvidia_nccl_cu12", "2.27.5")):
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "torch" / "version.py").write_text(
        "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    told = probes.interpreter(str(python), 0o022, 4.0)
    assert (told["torch"], told["cuda"], told["nccl"]) == ("2.13.0+cu128", "12.8", "2.27.5")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not there"),
        ("#!/bin/sh\necho no >&2; exit 3\n", "is no Python: no"),
        ("#!/no/such\n", "does not start"),
        ("folder", "is a folder: its interpreter is "),
        ("link", "leads to /no/base/python, which is not there"),  # a venv whose base was removed
    ],
)
def test_invalid_interpreter_gives_a_reason(tmp_path: Path, text: str | None, words: str) -> None:
    """The message has the path and the fault."""
    python = tmp_path / "python"
    if text == "folder":
        python.mkdir()
    elif text == "link":
        python.symlink_to("/no/base/python")
    elif text is not None:
        python.write_text(text)
        python.chmod(0o755)
    error = probes.interpreter(str(python), 0o022, 4.0)["error"]
    assert str(python) in error
    assert words in error


def test_leftovers_are_ranks_of_a_dead_agent(tmp_path: Path) -> None:
    """A rank whose agent lives is no leftover, and neither is a rank in a different folder."""
    node = tmp_path / "work" / "jobs" / "x-abcde" / "attempt-1" / "node-0"
    (node / "log").mkdir(parents=True)
    rank = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "CLOUDTRAIN_LOG_DIR": str(node / "log"), "CLOUDTRAIN_JOB": "x-abcde"}
    )
    agent = subprocess.Popen(["sleep", "60"])
    try:
        until(lambda: Path(f"/proc/{rank.pid}/cmdline").read_bytes() == b"sleep\x0060\0")
        state = {"pid": agent.pid, "stamp": processes.stamp(agent.pid)}
        (node / "state.json").write_text(json.dumps(state))
        assert probes.leftovers(tmp_path / "work") == []
        agent.kill()
        agent.wait()
        found = [{"pid": rank.pid, "job": "x-abcde"}]
        assert probes.leftovers(tmp_path / "work") == found
        assert probes.leftovers(tmp_path / "other") == []
    finally:
        for process in (rank, agent):
            process.kill()
            process.wait()


def test_logind_that_kills_at_logout_is_found(tmp_path: Path) -> None:
    """The last file by name wins; an excluded user is safe."""
    folder = tmp_path / "etc/systemd/logind.conf.d"
    folder.mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf").write_text("[Login]\n#KillUserProcesses=no\nKillUserProcesses=no\n")
    (folder / "50-site.conf").write_text("[Login]\nKillUserProcesses=yes\nKillExcludeUsers=\n")
    assert probes.logind(tmp_path)["kills"] is False  # no systemd runs on this root
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert probes.logind(tmp_path) == {"kills": True}
    (folder / "60-ours.conf").write_text(f"[Login]\nKillExcludeUsers=root {processes.user_name(os.getuid())}\n")
    assert probes.logind(tmp_path)["kills"] is False


def test_holders_lists_the_jobs_on_the_gpus(tmp_path: Path, nvidia_smi: Answers) -> None:
    """The result is the data for `cloudtrain hosts`."""
    nvidia_smi(TWO)
    place = gpulocks.folder(str(tmp_path / "locks"))
    taken = gpulocks.take(place, [A], {"job": "x-abcde"})
    told = survey.holders(lock_folder=str(place))
    taken.release()
    assert [(holder["name"], holder["job"]) for holder in told["holders"]] == [(A, "x-abcde")]
    assert len(told["gpus"]["gpus"]) == 2


def test_own_address_is_on_the_route_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address towards this machine is the loopback address."""
    monkeypatch.setattr(node, "ELSEWHERE", "127.0.0.1")
    assert survey.address() == {"address": "127.0.0.1"}
    assert survey.address(interface="lo")["address"] == "127.0.0.1"
    with pytest.raises(Refused, match=r"nosuch0 has no IPv4 address here; there are .*lo"):
        survey.address(interface="nosuch0")


@pytest.fixture
def listening() -> Iterator[dict[str, Any]]:
    """Return the address at which a peer `h1` of the round `word` listens."""
    yield reachability.listen(address="127.0.0.1", name="h1", token="word", ports=[20000, 28000])
    reachability.close_listener()


def test_peer_that_answers_is_reached(listening: dict[str, Any]) -> None:
    """The peer answers on a port of the job's range, by name, in the same round, as often as dialled.

    After the end of the round the port is free.
    """
    assert 20000 <= listening["port"] <= 28000
    peers = [{"name": "h1", **listening}]
    for _ in range(3):
        assert reachability.dial(peers=peers, token="word") == {"failed": []}
    reachability.close_listener()
    told = reachability.dial(peers=peers, token="word")
    assert [failed["how"] for failed in told["failed"]] == ["refused"]


def test_each_kind_of_failure_is_reported(listening: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, no answer, wrong machine, foreign peer: all within the time limit of one."""
    closed, silent = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    gone = closed.getsockname()[1]
    closed.close()
    peers = [
        {"name": "h0", "address": "127.0.0.1", "port": gone},
        {"name": "h2", "address": "127.0.0.1", "port": silent.getsockname()[1]},
        {"name": "h3", **listening},
        {"name": "h1", **listening},
    ]
    start = time.monotonic()
    monkeypatch.setattr(reachability, "DIAL_S", 0.5)
    told = reachability.dial(peers=peers, token="word")
    assert time.monotonic() - start < 5
    silent.close()
    found = [(failed["name"], failed["how"]) for failed in told["failed"]]
    assert found == [("h0", "refused"), ("h2", "timeout"), ("h3", "wrong answer")]
    assert told["failed"][2]["text"].endswith("is h1")
    stranger = reachability.dial(peers=peers[3:], token="other")["failed"]
    assert [failed["text"].endswith("is no host of this job") for failed in stranger] == [True]


def test_range_without_a_free_port_is_reported() -> None:
    """A foreign address is reported too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = reachability.listen(address="127.0.0.1", name="h", token="t", ports=[port, port])
    assert told == {"error": "cannot listen on 127.0.0.1: Address already in use"}
    told = reachability.listen(address="192.0.2.77", name="h", token="t", ports=[port, port])
    assert "cannot listen" in told["error"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_work_folder_without_file_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """On Lustre without `-o flock`, or NFS without its lock service, the survey and an agent's start name the cause."""

    def flock(held: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    seen = probes.write(tmp_path)
    assert seen["no_locks"]
    assert seen["error"].startswith(f"{tmp_path}: no file locks there ({os.strerror(number)})")
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"folder": str(tmp_path), "nodes": []})))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", said)
    own = os.umask(0o077)
    try:
        starting.main()
    finally:
        os.umask(own)
    told = json.loads(said.getvalue())
    assert (told["started"], told["no_locks"]) == (False, True)
    assert told["why"].startswith(f"{tmp_path}/")
    assert "-o flock" in told["why"]


def test_folder_for_temporary_files_and_load_are_read(tmp_path: Path) -> None:
    """The job's own TMPDIR counts; the load is of the whole machine."""
    assert probes.temporary(str(tmp_path))["path"] == str(tmp_path)
    assert probes.temporary(str(tmp_path / "no"))["absent"]
    assert probes.temporary("/proc")["noexec"] == bool(os.statvfs("/proc").f_flag & os.ST_NOEXEC)
    assert probes.load()["mean"] >= 0
