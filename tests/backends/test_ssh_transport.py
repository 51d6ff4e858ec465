"""Faulty connections to a host: the message with its place and remedy; and unusual connections that work."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel import host_channel, master
from cloudtrain.backends.channel.calls import Call, HostAnswer
from cloudtrain.backends.channel.hosts import Host
from cloudtrain.entrypoints import processes
from cloudtrain.launcher.errors import CloudtrainError
from doubles.sshhosts import host as sshhost
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget
from doubles.waiting import until

CONFIG, LOGIN, UNREACHABLE = 3, 4, 7


@pytest.fixture
def pair(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return two hosts that this process reaches; its masters end with the test."""
    ssh_pair.apply(monkeypatch)
    forget()
    yield ssh_pair
    end(home)


def to(cluster: Cluster, name: str = "h0", **more: Any) -> Host:
    """Return a host of the cluster, as a config would name the host."""
    return Host(**{"name": name, "ssh_config": str(cluster.ssh_config), "python": sys.executable, **more})


def ask(target: Host) -> HostAnswer:
    """Call for the time."""
    return fleet().ask({target: Call("calls.clock", {})}, is_urgent=True)[target]


def error_of(target: Host) -> CloudtrainError:
    """Return the error of a host that does not answer."""
    answer = ask(target)
    assert answer.error is not None, f"it answers: {answer.reply}"
    assert answer.error.hint or "; set " in answer.error.message or "name one" in answer.error.message, answer.error
    return answer.error


def new_command() -> None:
    """End the channels but not the masters, as at the end of a command."""
    fleet().run(fleet()._close())


def master_of(target: Host) -> int:
    """Return the process of the host's master."""
    socket = fleet().masters.socket(target)
    argv = ["ssh", "-S", str(socket), "-O", "check", *target.target]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=30).stderr
    found = re.search(r"pid=(\d+)", said)
    assert found, said
    return int(found[1])


def configure(host: sshhost.Host, lines: str) -> None:
    """Put lines first in the server's configuration, where they take precedence."""
    path = host.folder / "etc/ssh/sshd_config"
    path.write_text(lines + path.read_text())
    host.kill_sshd()
    host.start_sshd()


def script(host: sshhost.Host, name: str, text: str) -> None:
    """Put a program into the PATH of the host's sessions."""
    (host.bin / name).write_text(text)
    (host.bin / name).chmod(0o755)


# -- ssh's own errors -------------------------------------------------------------------------------------------------


def test_refused_login_is_reported_with_a_command(pair: Cluster) -> None:
    """Exit code 4, with the exact command to try."""
    error = error_of(to(pair, user="carol"))
    assert (error.exit_code, "Permission denied" in error.message) == (LOGIN, True)
    assert f"ssh -F {pair.ssh_config} -l carol h0" in str(error.hint)


def test_open_master_of_the_user_serves_where_the_login_needs_a_question(pair: Cluster, tmp_path: Path) -> None:
    """The user has logged in once with a second factor: our calls use that master, and never end it."""
    config, sockets = tmp_path / "config", Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path has at most 103 bytes
    config.write_text(f"ControlPath {sockets}/%h\nInclude {pair.ssh_config}\n")
    by_hand, target = ["ssh", "-F", str(config)], to(pair, ssh_config=str(config))
    subprocess.run(
        [*by_hand, "-o", "ControlMaster=yes", "-fN", "h0"], check=True, timeout=30, stderr=subprocess.DEVNULL
    )
    try:
        configure(pair.hosts[0], "PubkeyAuthentication no\n")
        assert ask(target).error is None
        fleet().masters.forget(target)  # as after a call that was not answered
        new_command()
        assert ask(target).error is None
    finally:
        told = subprocess.run([*by_hand, "-O", "exit", "h0"], capture_output=True, text=True, timeout=30).stderr
    assert "Exit request sent" in told  # the master was still there
    new_command()
    until(lambda: not list(sockets.iterdir()))
    sockets.rmdir()
    error = error_of(target)
    assert (error.exit_code, "log in once with ControlMaster" in str(error.hint)) == (LOGIN, True)


def test_unknown_or_changed_host_key_is_not_trusted(pair: Cluster) -> None:
    """Exit code 4; a changed key is refused even if new keys are accepted."""
    known = pair.client_folder / "known_hosts"
    before = known.read_text()
    first, second = (line.split() for line in before.splitlines()[:2])
    try:
        known.write_text("")
        unknown = error_of(to(pair))
        known.write_text(f"{first[0]} {first[1]} {second[2]}\n")
        changed = [error_of(to(pair)), error_of(to(pair, accepts_new_keys=True))]
    finally:
        known.write_text(before)
    assert (unknown.exit_code, "fingerprint" in str(unknown.hint)) == (LOGIN, True)
    assert {(error.exit_code, "host key has changed" in error.message) for error in changed} == {(LOGIN, True)}
    assert ask(to(pair)).error is None


def test_wrong_port_and_wrong_name_have_different_codes(pair: Cluster) -> None:
    """A port without a server gives code 7; an unknown name is the config's fault, if a resolver answers."""
    unknown = error_of(to(pair, name="nosuch"))
    assert error_of(to(pair, port=2222)).exit_code == UNREACHABLE
    assert unknown.exit_code == (UNREACHABLE if "Temporary failure" in unknown.message else CONFIG)
    assert error_of(to(pair, ssh_config="/no/such/config")).exit_code == CONFIG


def test_machine_without_ssh_is_reported(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the package to install."""
    monkeypatch.setenv("PATH", "/nonexistent")
    error = error_of(to(pair))
    assert (error.exit_code, "OpenSSH" in str(error.hint)) == (CONFIG, True)


def test_path_of_ssh_config_may_begin_with_a_tilde(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is expanded as the shell would expand `ssh -F ~/config`."""
    monkeypatch.setenv("HOME", str(pair.client_folder))
    assert ask(to(pair, ssh_config="~/ssh_config")).error is None


# -- the host's side --------------------------------------------------------------------------------------------------

NOISE = {
    "a banner": "echo welcome; printf 'and no newline'",
    "much": "head -c 300000 /dev/zero | tr '\\0' x; echo",
    "a complaint": "echo 'bash: /opt/x: Permission denied' >&2",
    "our own words": 'echo ::cloudtrain; echo \'{"refused": "x"}\'',
}


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISE)
def test_start_up_files_may_print(pair: Cluster, noise: str) -> None:
    """Output of start-up files is common and harmless."""
    (pair.hosts[0].home_of("alice") / ".bashrc").write_text(NOISE[noise] + "\n")
    target = to(pair, user="alice")
    for _ in range(2):
        assert ask(target).error is None
        new_command()


LOGINS = {
    "exec cat /etc/hostname": "code 0: h0",
    "echo no jobs here; echo Permission denied >&2; exit 3": "code 3: Permission denied",
    "yes": "y y",
}


@pytest.mark.slow
@pytest.mark.parametrize("login", LOGINS)
def test_login_with_a_foreign_program_is_reported(pair: Cluster, login: str) -> None:
    """The error shows output and exit code, and never counts as a refused login, despite its words."""
    (pair.hosts[0].home_of("alice") / ".bashrc").write_text(f"{login}\n")
    error = error_of(to(pair, user="alice"))
    assert (error.exit_code, "ForceCommand" in str(error.hint)) == (3, True)
    assert LOGINS[login] in error.message


def test_login_that_hangs_is_reported_in_limited_time(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a start-up file that asks a question."""
    monkeypatch.setattr(host_channel, "CALL_S", 1.0)
    (pair.hosts[0].home_of("alice") / ".bashrc").write_text("echo which project?; sleep 30 < /dev/null\n")
    error = error_of(to(pair, user="alice"))
    assert (error.exit_code, "within 1 s, after `which project?`" in error.message) == (UNREACHABLE, True)


@pytest.mark.slow
def test_forced_command_is_named_as_the_cause(pair: Cluster) -> None:
    """`ForceCommand` gives exit code 3 and the place to examine."""
    configure(pair.hosts[0], "ForceCommand echo this account is for backups\n")
    error = error_of(to(pair))
    assert (error.exit_code, "this account is for backups" in error.message) == (CONFIG, True)


PYTHONS = {
    "absent": ("nosuch-python", "has no interpreter `nosuch-python`"),
    "not to be run": ("/etc/passwd", "has no interpreter `/etc/passwd`"),
    "3.8": ("old", "its Python is 3.8"),
    "2.7": ("two", "`two` is not Python 3.10 or newer"),
    "no Python": ("true", "does not run our first program"),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", PYTHONS)
def test_unusable_interpreter_is_named(pair: Cluster, which: str) -> None:
    """Each unusable interpreter gives exit code 3."""
    name, said = PYTHONS[which]
    as_old = "import sys; sys.version_info = (3, 8, 10, 'final', 0); exec(sys.argv[1])"
    script(pair.hosts[0], "old", f'#!/bin/sh\nshift 3\nexec {sys.executable} -IS -c "{as_old}" "$1"\n')
    script(pair.hosts[0], "two", "#!/bin/sh\necho 'Unknown option: -I' >&2\nexit 2\n")
    error = error_of(to(pair, python=name))
    assert (error.exit_code, said in error.message) == (CONFIG, True), error


@pytest.mark.slow
def test_unwritable_or_full_workdir_is_reported(pair: Cluster) -> None:
    """The error has the folder, the system's message and the config's key; exit code 3."""
    (pair.hosts[0].folder / "home/bob").chmod(0o700)
    pair.hosts[0].run(["sh", "-c", "cat /dev/zero > /data/fill || true"])
    errors = {
        "Permission denied": error_of(to(pair, user="alice", workdir="/home/bob/jobs")),
        "Read-only": error_of(to(pair, workdir="/etc/jobs")),
        "No space left": error_of(to(pair, workdir="/data/jobs")),
        "Not a directory": error_of(to(pair, workdir="/etc/hostname/jobs")),
    }
    for said, error in errors.items():
        assert (error.exit_code, said in error.message, "ssh.workdir" in str(error)) == (CONFIG, True, True), error


@pytest.mark.slow
def test_server_with_one_session_and_no_terminal_works(pair: Cluster) -> None:
    """With `MaxSessions 1` and `PermitTTY no` parallel commands get their own connections."""
    configure(pair.hosts[0], "MaxSessions 1\nPermitTTY no\n")
    targets = [to(pair, workdir=f"~/w{number}") for number in range(4)]
    answers = fleet().ask({target: Call("calls.clock", {}) for target in targets}, is_urgent=True)
    assert [answer.error for answer in answers.values()] == [None] * 4
    command = [*master.argv(targets[0], fleet().masters.socket(targets[0]), is_terminal=True), *targets[0].target]
    done = subprocess.run([*command, "echo here"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr


# -- masters ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_master_that_was_killed_is_replaced(pair: Cluster) -> None:
    """The socket of a killed master remains; the next command makes a new master."""
    target = to(pair)
    assert ask(target).error is None
    new_command()
    first = master_of(target)
    os.kill(first, signal.SIGKILL)
    until(lambda: (fields := processes._stat(first)) is None or fields[0] == "Z", 10)
    assert fleet().masters.socket(target).exists()
    assert ask(target).error is None
    assert master_of(target) != first


@pytest.mark.slow
def test_master_that_hangs_is_replaced(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that exists but does not answer is not used again."""
    target = to(pair)
    assert ask(target).error is None
    new_command()
    stopped = master_of(target)
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(host_channel, "CALL_S", 2.0)
    monkeypatch.setattr("cloudtrain.backends.channel.mux.OPEN_S", 2.0)
    try:
        answers = [ask(target) for _ in range(2)]
    finally:
        os.kill(stopped, signal.SIGKILL)
    assert answers[-1].error is None, answers


@pytest.mark.slow
def test_masters_of_killed_commands_do_not_pile_up(pair: Cluster, home: Path) -> None:
    """A new master takes over the socket; every master listens, and all masters end by themselves."""
    target = to(pair)
    socket = fleet().masters.socket(target)
    for _ in range(3):
        assert ask(target).error is None
        new_command()
        socket.unlink()  # as if its process had died before the rename
    found = processes.with_environment(CLOUDTRAIN_HOME=str(home))
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in found]
    waiting = [line for line in lines if b"ControlMaster=yes" in line]
    assert len(waiting) == 3
    assert all(f"ControlPersist={master.PERSIST_S}".encode() in line for line in waiting)
    assert len({line[line.index(b"-S") + 1] for line in waiting}) == 3


@pytest.mark.slow
def test_recovered_connection_is_used_by_the_same_command(pair: Cluster) -> None:
    """A new session over a master whose connection is silent for some seconds works."""
    target = to(pair)
    assert ask(target).error is None
    new_command()
    pair.client.blackhole()
    back = threading.Timer(4.0, pair.client.join)
    back.start()
    begin_s = time.monotonic()
    answer = ask(target)
    back.join()
    assert answer.error is None
    assert time.monotonic() - begin_s < 20


@pytest.mark.slow
def test_half_open_connection_is_reported_within_35_s(pair: Cluster) -> None:
    """A master that seems connected gives exit code 7; after the recovery, the next command works."""
    target = to(pair)
    assert ask(target).error is None
    new_command()
    pair.client.blackhole()
    begin_s = time.monotonic()
    error = error_of(target)
    seconds = time.monotonic() - begin_s
    pair.client.join()
    assert (error.exit_code, seconds < 35) == (UNREACHABLE, True), (error, seconds)
    assert ask(target).error is None


@pytest.mark.soak  # a link that is cut in a call: the test above
@pytest.mark.slow
def test_host_that_dies_during_a_call_is_unreachable(pair: Cluster) -> None:
    """A broken connection always gives code 7; the second host is still called."""
    both = [to(pair), to(pair, "h1")]
    assert all(ask(target).error is None for target in both)
    off = threading.Timer(0.2, pair.hosts[1].power_off)
    off.start()
    begin_s = time.monotonic()
    answers = fleet().ask({target: Call("calls.clock", {}) for target in both}, is_urgent=True)
    off.join()
    while answers[both[1]].error is None and time.monotonic() - begin_s < 30:
        answers = fleet().ask({target: Call("calls.clock", {}) for target in both}, is_urgent=True)
    error = answers[both[1]].error
    assert error.exit_code == UNREACHABLE
    assert answers[both[0]].error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell", ["csh", *(pytest.param(shell, marks=pytest.mark.soak) for shell in ("sh", "fish", "zsh"))]
)
def test_sixteen_hosts_through_a_bastion(
    cluster: Callable[..., Cluster], home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str
) -> None:
    """All hosts answer at sshd's stock limits; the ProxyCommand works in any shell of this machine.

    The configuration is in a folder whose name has special characters of shells and ssh.
    """
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    many = cluster(17 if shell == "sh" else 3)
    many.apply(monkeypatch)
    monkeypatch.setenv("SHELL", path)
    folder = tmp_path / "a b%h'$(touch pwned)"
    folder.mkdir()
    config = folder / "config"
    config.write_text(many.jump_config().read_text())
    forget()
    targets = [Host(host.name, ssh_config=str(config), python=sys.executable) for host in many.hosts]
    answers = fleet().ask({target: Call("calls.clock", {}) for target in targets}, is_urgent=True)
    errors = {target.name: str(answer.error) for target, answer in answers.items() if answer.error is not None}
    end(home)
    assert errors == {}
    assert not Path("pwned").exists()


@pytest.mark.parametrize(("path", "is_good"), [("~/.ssh/config", True), ("/x/config", True), ("config", False)])
def test_path_of_ssh_config_must_be_absolute(cli: Any, project: Callable[..., Path], path: str, is_good: bool) -> None:
    """Later commands from different folders read the same file."""
    done = cli("validate", cwd=project(f"backend: ssh\nssh: {{hosts: [h0], ssh_config: {path}}}\n"))
    assert (done.code == 0, "ssh.ssh_config" in done.stderr) == (is_good, not is_good), done.stderr
