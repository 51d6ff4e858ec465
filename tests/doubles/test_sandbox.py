"""Containers for stand-ins: their view of the machine, and nothing left after their end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doubles import process, sandbox
from doubles.aws.handle import Aws
from doubles.conftest import request_of
from doubles.waiting import new_mark, sleepers, until

# Runs a container in a separate process, for a choice of the mode: argv is the mode, a folder and a mark. With
# namespaces the container has a read-only folder at the root, too.
RUN = """
import os, sys
os.environ["DOUBLES_SANDBOX"] = sys.argv[1]
from pathlib import Path
from doubles import sandbox
root = Path(sys.argv[2])
for name in ("ml", "given"):
    (root / name).mkdir()
(root / "given/file").write_text("given")
script = "echo here > /opt/ml/file; hostname; cat /opt/ml/file; ls /opt | wc -l; setsid sleep MARK & "
places = {"private": {"/opt/ml": root / "ml"}}
if sys.argv[1] != "none":
    places["read_only"] = {"/given": root / "given"}
    script += "cat /given/file; touch /given/new 2>/dev/null || touch /opt/ml/new; touch /tmp/new; "
    script += "ls -d /given /proc/1; "
script = script.replace("MARK", sys.argv[3]) + "exit 3"
container = sandbox.Container(["/bin/sh", "-c", script], {"PATH": os.defpath}, root / "own", "algo-1", **places)
running = sandbox.start(container)
print(sandbox.mode())
print(running.process.stdout.read().decode(), end="")
print("code", running.process.wait())
"""


@pytest.mark.parametrize("mode", ["root", "user", "none"])
def test_container_has_private_folders_in_every_mode(mode: str, tmp_path: Path) -> None:
    """Private folders work in all modes, with or without namespaces; all processes of the container are gone.

    A folder at the root is read-only, next to the private folders; the machine itself has no folder there.
    """
    env, mark = {**os.environ, "PYTHONPATH": str(process.TESTS)}, new_mark()
    done = subprocess.run([sys.executable, "-c", RUN, mode, tmp_path, mark], env=env, capture_output=True, text=True)
    assert done.stderr == ""
    found, name, content, opt, *given, code = done.stdout.splitlines()
    if found != mode:
        pytest.skip(f"this machine lets us make no namespaces of the kind {mode}")
    assert (content, code) == ("here", "code 3")
    assert (tmp_path / "ml/file").read_text() == "here\n"
    if mode != "none":
        assert name == "algo-1"
        assert int(opt) == len({*os.listdir("/opt"), "ml"})
        assert given == ["given/given", "/proc/1"]
        assert (os.listdir(tmp_path / "given"), sorted(os.listdir(tmp_path / "ml"))) == (["file"], ["file", "new"])
    assert not Path("/given").exists()
    assert sleepers(mark) == []


@pytest.mark.skipif(sandbox.mode() == "none", reason="this machine lets us make no namespaces")
def test_host_sees_no_trace_of_the_container(tmp_path: Path) -> None:
    """The host sees no mount, no folder and no network interface of the container."""
    before = Path("/proc/mounts").read_text(), os.listdir("/opt"), os.listdir("/sys/class/net")
    switch = sandbox.Switch.open()
    container = sandbox.Container(
        ["/bin/sh", "-c", "touch /tmp/x /dev/shm/double-x; sleep 0.2"],
        {"PATH": os.defpath},
        tmp_path / "own",
        "algo-1",
        {"/opt/ml": tmp_path},
        address=switch.address() if switch else None,
    )
    running = sandbox.start(container, switch)
    assert (Path("/proc/mounts").read_text(), os.listdir("/opt"), os.listdir("/sys/class/net")) == before
    assert running.process.wait() == 0
    running.process.stdout.close()
    assert not Path("/dev/shm/double-x").exists()
    if switch is not None:
        switch.close()


def test_missing_command_exits_with_127(tmp_path: Path) -> None:
    """The code is a shell's, and the output has the reason."""
    container = sandbox.Container(["nothing"], {"PATH": os.defpath}, tmp_path / "own", "h", {"/opt/ml": tmp_path})
    process = sandbox.start(container).process
    assert process.stdout is not None
    with process.stdout as output:
        assert b"cannot start ['nothing']" in output.read()
    assert process.wait() == 127


@pytest.mark.parametrize("victim", ["server", "its parent"])
def test_killed_server_leaves_no_containers_or_folder(victim: str, tmp_path: Path) -> None:
    """SIGKILL to the server, or to its parent, ends its containers and removes its folder."""
    state = tmp_path / "state"
    code = f"from doubles.aws.handle import Aws; from pathlib import Path; a = Aws.start(Path({str(state)!r}))\n"
    code += "print(a.url, a.process.pid, flush=True); a.process.wait()"
    env = {**os.environ, "PYTHONPATH": str(process.TESTS)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    url, pid = parent.stdout.readline().split()
    try:
        _run_sleepers(Aws(url, parent), mark := new_mark())
        os.kill(int(pid) if victim == "server" else parent.pid, signal.SIGKILL)
        until(lambda: sleepers(mark) == [] and not state.exists() and not _is_alive(pid))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def _run_sleepers(aws: Aws, mark: str) -> None:
    script = f"setsid sleep {mark} & sleep {mark}".encode()
    aws.client("s3").put_object(Bucket=aws.bucket(), Key="job/code/run.sh", Body=script)
    aws.client("sagemaker").create_training_job(**request_of("job"))
    until(lambda: len(sleepers(mark)) == 2)


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie's is empty
    except OSError:
        return False
