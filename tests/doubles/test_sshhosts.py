"""Hosts with real sshd: their properties, their faults, and nothing left after their end."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from doubles import process
from doubles.sshhosts import clocks
from doubles.sshhosts.cluster import Cluster, missing
from doubles.waiting import until

PYTHON = sys.executable
KINDS = ("pid", "net", "mnt")
QUICK = ("-o", "ConnectTimeout=1")
HELLO = "import socket; print(socket.create_connection(('h1', 22), {}).recv(7).decode())"

# Starts hosts in a separate process that the test kills: argv is their folder.
START = """
import sys, time
from pathlib import Path
from doubles.sshhosts import clocks
from doubles.sshhosts.cluster import Cluster
cluster = Cluster.start(2, Path(sys.argv[1]))
cluster.ssh("h0", "setsid sleep 600 >/dev/null 2>&1 &")
print(*(host.pid for host in cluster.hosts), flush=True)
time.sleep(600)
"""
# Calls `missing` as a root user without the right to make namespaces: drops CAP_SYS_ADMIN by PR_CAPBSET_DROP.
UNPRIVILEGED = """
import ctypes
ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)
from doubles.sshhosts import clocks
from doubles.sshhosts.cluster import missing
print(missing())
"""


def test_hosts_answer_over_ssh_with_their_names(ssh_pair: Cluster) -> None:
    """The hosts have the system's Python and the tests' own, without cloudtrain."""
    assert [ssh_pair.ssh(name, "hostname").stdout for name in ("h0", "h1")] == ["h0\n", "h1\n"]
    find = "from importlib.util import find_spec as f; print(bool(f('torch')), bool(f('cloudtrain')))"
    assert ssh_pair.ssh("h0", f'{PYTHON} -c "{find}"').stdout == "True False\n"
    assert ssh_pair.ssh("h0", "python3 -IS -c 'import os; print(os.getcwd())'").stdout == "/home/root\n"


def own(names: list[str]) -> list[str]:
    """Return the names without the folder below /tmp that has the test's Python and is visible on every host."""
    prefixes = [Path(prefix).parts[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")]
    return [name for name in names if name not in prefixes]


def test_hosts_have_separate_folders(ssh_pair: Cluster) -> None:
    """Files of a host are visible to the test but not on the second host; the machine's files are read-only."""
    one, other = ssh_pair.hosts
    told = ssh_pair.ssh("h0", "touch ~/a /tmp/of-host-h0 /dev/shm/c /data/d /run/e && touch /usr/f; ls /root /tmp")
    assert "Read-only file system" in told.stderr
    assert own(told.stdout.split()) == ["/root:", "/tmp:", "of-host-h0"]
    assert (one.home / "a").exists()
    places = ("/home/root/a", "/tmp/of-host-h0", "/dev/shm/c", "/data/d", "/run/e")
    assert [one.path(place).exists() for place in places] == [True] * 5
    assert [other.path(place).exists() for place in places] == [False] * 5
    assert not Path("/tmp/of-host-h0").exists()


def test_small_disks_have_the_requested_size(cluster: Callable[..., Cluster]) -> None:
    """The disks have the requested size, and a full disk refuses writes."""
    host = cluster(1, shm_mib=8, data_mib=2).hosts[0]
    assert host.run(["df", "--output=size", "/dev/shm", "/data"]).split()[1:] == ["8192", "2048"]
    with pytest.raises(OSError, match="No space left"):
        host.path("/data/fill").write_bytes(bytes(3 << 20))
    host.resize("/dev/shm", 4)
    assert host.run(["df", "--output=size", "/dev/shm"]).split()[1:] == ["4096"]


def test_home_folders_are_private(ssh_pair: Cluster) -> None:
    """Users share the Python, from any folder, but not their home folders."""
    done = ssh_pair.ssh("alice@h0", f"whoami; pwd; touch mine; {PYTHON} -c 'print(1)'; ls /home/bob")
    assert done.stdout.split() == ["alice", "/home/alice", "1"]
    assert "Permission denied" in done.stderr
    assert (ssh_pair.hosts[0].home_of("alice") / "mine").stat().st_uid == 2001


def test_power_off_kills_all_processes_and_boot_restores_the_disks(ssh_pair: Cluster) -> None:
    """A boot has a new boot id; memory is lost, disks stay."""
    host, boot_id = ssh_pair.hosts[0], "cat /proc/sys/kernel/random/boot_id"
    ssh_pair.ssh("h0", "touch ~/a /data/b /dev/shm/c; setsid sleep 6543 >/dev/null 2>&1 &")
    until(lambda: [line for _, line in host.processes()] == ["sleep 6543"])
    first, living = ssh_pair.ssh("h0", boot_id).stdout, _in_namespace(_namespaces(host.pid))
    host.power_off()
    assert not [pid for pid in living if Path(f"/proc/{pid}").exists()]
    assert ssh_pair.ssh("h0", "true", *QUICK).returncode == 255
    host.boot()
    assert host.processes() == []
    assert ssh_pair.ssh("h0", "ls ~ /data /dev/shm").stdout.split() == ["/data:", "b", "/dev/shm:", "/home/root:", "a"]
    second = ssh_pair.ssh("h0", boot_id).stdout
    assert len(first) == len(second) == 37
    assert first != second != Path("/proc/sys/kernel/random/boot_id").read_text()


def test_killed_sshd_refuses_connections_and_keeps_sessions(ssh_pair: Cluster) -> None:
    """Connections are refused until sshd is started again, but open sessions continue."""
    host = ssh_pair.hosts[0]
    with _cat(ssh_pair, "h0") as session:
        assert _echo(session, b"before\n", 20) == b"before\n"
        host.kill_sshd()
        assert "Connection refused" in ssh_pair.ssh("h0", "true").stderr
        assert _echo(session, b"after\n", 20) == b"after\n"
        host.start_sshd()
        assert ssh_pair.ssh("h0", "true").returncode == 0
        host.kill_sshd(with_sessions=True)
        assert session.wait(20) == 255


def test_host_behind_a_bastion_is_reachable_only_through_it(ssh_pair: Cluster) -> None:
    """Only the bastion can look up the host's name."""
    config = ssh_pair.jump_config()
    through = ssh_pair.ssh("h1", "hostname; echo $SSH_CLIENT", "-F", str(config))
    assert through.stdout.split()[:2] == ["h1", ssh_pair.hosts[0].address]
    direct = ssh_pair.ssh("h1", "true", "-F", str(config), "-o", "ProxyJump=none")
    assert "Could not resolve hostname h1" in direct.stderr


def test_slow_line_delays_until_it_joins(ssh_pair: Cluster) -> None:
    """The delay applies each way, and whole frames arrive unchanged."""
    host = ssh_pair.hosts[0]
    before = _connect_s(ssh_pair)
    host.slow(delay_ms=100)
    assert _connect_s(ssh_pair) > 0.2 > before
    host.slow(delay_ms=5)
    sent = os.urandom(300_000)
    (host.home / "blob").write_bytes(sent)
    argv = [*ssh_pair.inside, "ssh", "-F", str(ssh_pair.ssh_config), "h0", "cat blob"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == sent
    host.join()
    assert _connect_s(ssh_pair) < 0.2


@pytest.mark.slow
def test_slow_line_keeps_its_rate_and_loses_its_share(ssh_pair: Cluster) -> None:
    """A megabyte at 8 Mbit/s takes a second; of 200 datagrams, half are lost."""
    host = ssh_pair.hosts[0]
    (host.home / "blob").write_bytes(os.urandom(1_000_000))
    host.slow(rate_mbit_s=8)
    start = time.monotonic()
    argv = [*ssh_pair.inside, "ssh", "-F", str(ssh_pair.ssh_config), "h0", "cat blob"]
    assert len(subprocess.run(argv, capture_output=True, check=True).stdout) == 1_000_000
    assert time.monotonic() - start > 0.95
    host.slow(loss=0.5)
    send = "s = socket.socket(type=2); [s.sendto(b'x', ('10.214.0.10', 4000)) for _ in range(200)]"
    count = "import socket; s = socket.socket(type=2); s.bind(('', 4000)); s.settimeout(1); n = 0\n"
    count += "print('ready', flush=True)\ntry:\n  while True: s.recv(9); n += 1\nexcept TimeoutError: print(n)"
    argv = ["nsenter", "-t", str(host.pid), "-n", PYTHON, "-c", count]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as counter:
        assert counter.stdout.readline() == b"ready\n"
        subprocess.run([*ssh_pair.inside, PYTHON, "-c", f"import socket; {send}"], check=True)
        assert 50 < int(counter.stdout.readline()) < 150


def test_clock_moves_on_its_host_alone(cluster: Callable[..., Cluster]) -> None:
    """Programs see the moved clock; the other host keeps the machine's clock."""
    one = cluster(2)
    clocks.install(one)
    for seconds in (-3600, 3600, 0):
        clocks.move(one.hosts[0], seconds)
        moved, kept = (int(host.run(["date", "+%s"])) for host in one.hosts)
        assert abs(moved - kept - seconds) < 60


def test_reset_makes_hosts_new(ssh_pair: Cluster) -> None:
    """A reset removes files, processes, and faults of power and line."""
    one, other = ssh_pair.hosts
    ssh_pair.ssh("h0", "touch ~/a /tmp/b /data/c /opt/bin/d; setsid sleep 6543 >/dev/null 2>&1 &")
    (one.folder / "etc/hosts").write_text("")
    one.slow(delay_ms=500)
    other.power_off()
    ssh_pair.client.cut()
    ssh_pair.reset()
    assert own(ssh_pair.ssh("h0", "ls -A ~ /tmp /data /opt/bin | grep -v :").stdout.split()) == []
    assert one.processes() == []
    assert one.run([PYTHON, "-ISc", HELLO.format(10)]) == "SSH-2.0\n"
    assert ssh_pair.ssh("h1", "true").returncode == 0


def test_hosts_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killing the process that started the hosts ends the hosts."""
    env = {**os.environ, "PYTHONPATH": str(process.TESTS)}
    argv = [PYTHON, "-c", START, str(tmp_path / "hosts")]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as starter:
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        if len(pids) != 2:
            pytest.skip("hosts need root and the packages openssh-server and iproute2")
        with _held(pids) as spaces:
            assert len(_in_namespace(spaces)) >= 5  # two inits, two sshd, a sleep
            starter.send_signal(signal.SIGKILL)
            until(lambda: not _in_namespace(spaces))


def test_missing_rights_or_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is given to tests that must be skipped."""
    env = {**os.environ, "PYTHONPATH": str(process.TESTS)}
    done = subprocess.run([PYTHON, "-c", UNPRIVILEGED], env=env, capture_output=True, text=True)
    assert done.stdout.startswith(
        ("hosts in namespaces need the right to make them: ", "hosts in namespaces need root")
    )
    monkeypatch.setattr("doubles.sshhosts.cluster.SYSTEM_PATH", "/nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert missing() == "hosts in namespaces need the packages openssh-server openssh-client iproute2 util-linux"


@pytest.mark.slow
def test_sixteen_hosts_leave_nothing(cluster: Callable[..., Cluster]) -> None:
    """Sixteen hosts answer together, and leave no process, namespace, link or file."""
    links = os.listdir("/sys/class/net")
    many = cluster(16)
    argv = ["ssh", "-F", str(many.ssh_config)]
    env = {**os.environ, **many.environ}
    asked = [
        subprocess.Popen([*argv, host.name, "hostname"], env=env, stdout=subprocess.PIPE, text=True)
        for host in many.hosts
    ]
    assert [one.communicate()[0] for one in asked] == [f"h{number}\n" for number in range(16)]
    assert os.listdir("/sys/class/net") == links
    with _held([host.pid for host in many.hosts]) as spaces:
        assert len(spaces) == 3 * 16
        many.stop()
        assert not _in_namespace(spaces)
    assert not many.root.exists()
    assert os.listdir("/sys/class/net") == links


@contextlib.contextmanager
def _held(pids: Sequence[int | None]) -> Iterator[set[str]]:
    """Yield the namespaces of processes, and keep their numbers from being given to the hosts of other tests."""
    with contextlib.ExitStack() as stack:
        for pid in pids:
            for kind in KINDS:
                stack.enter_context(Path(f"/proc/{pid}/ns/{kind}").open("rb"))
        yield {space for pid in pids for space in _namespaces(pid)}


def _namespaces(pid: int | None) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in KINDS}


def _in_namespace(spaces: set[str]) -> list[int]:
    """Return the processes inside any of the namespaces."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if spaces & _namespaces(pid):
                found.append(pid)
    return found


def _cat(cluster: Cluster, host: str) -> subprocess.Popen[bytes]:
    """Return a session that echoes its input."""
    argv = ["ssh", "-F", str(cluster.ssh_config), host, "cat"]
    env = {**os.environ, **cluster.environ}
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def _echo(session: subprocess.Popen[bytes], sent: bytes, within_s: float) -> bytes:
    session.stdin.write(sent)
    return session.stdout.read(100) if select.select([session.stdout], [], [], within_s)[0] else b""


def _connect_s(cluster: Cluster) -> float:
    """Return the seconds for a TCP connection from the client to h0."""
    code = "import socket, time; t = time.monotonic(); socket.create_connection(('10.214.0.10', 22)).close()"
    argv = [*cluster.inside, PYTHON, "-IS", "-c", f"{code}; print(time.monotonic() - t)"]
    return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
