"""The connections that our ssh processes share: one master for each host, kept for ten minutes, and one for a bastion.

A master saves the key exchange, which is 86 % of the time of an ssh call. All hosts behind a bastion share one master:
63 jumps at once by ssh's own ProxyJump met sshd's limits 58 times, over one master never (OpenSSH 9.2, stock limits).
The sockets are in a private folder of ours, never in the user's own. A master listens under a temporary name and is
then renamed: a master whose socket is taken, by a master of a killed command, would never be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import random
import re
import secrets
import shlex
import signal
import socket as socketlib
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.store.home import home

from .hosts import Host

WIDTH = 16  # parallel connection attempts: sshd drops some beyond 10 that are not yet logged in
TRIES = 5
CONNECT_S = 60.0  # a whole try: ssh's own limit of 10 s covers only the socket
PERSIST_S = 600  # without a session
LONGEST_BASE = 24  # bytes: a socket's path has at most 103 (macOS), and ssh adds 17 while it creates the socket
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "EscapeChar=none",
    "LogLevel=ERROR",
)
BROKEN = "the connection broke"
REFUSED = "it refuses this login"

# The messages of a busy sshd, or of its limit on connections that are not yet logged in.
_PASSING = re.compile(
    r"kex_exchange_identification|ssh_exchange_identification|banner exchange|Connection reset by"
    rf"|Connection closed by|Broken pipe|session open refused|stdio forwarding failed|{BROKEN}",
)
_CHANGED, _UNSEEN = "its host key has changed", "its host key is not known here"
_REJECTED = "ssh rejects this name or its configuration"
_FAULTS: tuple[tuple[str, type[CloudtrainError], str], ...] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", CredentialError, _CHANGED),
    ("Host key verification failed|No .* host key is known", CredentialError, _UNSEEN),
    ("Permission denied|Too many authentication failures", CredentialError, REFUSED),
    ("Temporary failure in name resolution", UnreachableError, "its name cannot be looked up now"),
    ("Could not resolve hostname", ConfigError, "the name cannot be resolved"),
    ("hostname contains invalid characters|Bad configuration option", ConfigError, _REJECTED),
    ("Can't open user config file|terminating, .* bad", ConfigError, _REJECTED),
    ("Connection refused", UnreachableError, "nothing listens there"),
    ("timed out|No route to host|Network is unreachable|no connection within", UnreachableError, "it does not answer"),
)
_CURES = {
    _CHANGED: "ask whether the host was set up again; then `ssh-keygen -R {name}`, `{by_hand}`, and compare the key",
    _UNSEEN: "connect once by hand, `{by_hand}`, and compare the key's fingerprint (or ssh.accept_new_host_keys: true)",
    REFUSED: (
        "`{by_hand}` must work without a question: `ssh-add` your key, or `ssh-copy-id {name}`; if the login asks "
        "a question (a second factor), log in once with ControlMaster, ControlPath and ControlPersist in ssh's "
        "configuration, or run cloudtrain on the login node (a slurm block without `login`)"
    ),
    "its name cannot be looked up now": "is this machine on the network?",
    "the name cannot be resolved": "fix ssh.hosts, or give the name an address: a `Host` entry in ssh's configuration",
    _REJECTED: "fix ssh.hosts or ssh's configuration",
    "nothing listens there": "is sshd running, and on this port?",
    "it does not answer": "is it up, and is the way to it (VPN, bastion) open?",
}


def argv(host: Host, socket: Path, *more: str, is_terminal: bool = False) -> list[str]:
    """Return the ssh command that reaches the host over its master's socket; the remote command follows."""
    trust = "accept-new" if host.accepts_new_keys else "yes"
    options = (*_OPTIONS, f"StrictHostKeyChecking={trust}", f"RequestTTY={'yes' if is_terminal else 'no'}")
    # ssh reads % in a socket's path as a token.
    return ["ssh", "-S", str(socket).replace("%", "%%"), *(word for each in options for word in ("-o", each)), *more]


@dataclass
class Masters:
    """The masters of one process; all processes of this user share the sockets."""

    folder: Path = field(default_factory=lambda: _folder())
    _width: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WIDTH))
    _jumps: dict[str, asyncio.Lock] = field(default_factory=dict)

    def socket(self, host: Host) -> Path:
        """Return the path of the host's master socket; a master need not listen yet."""
        return self.folder / host.key

    async def connected(self, host: Host) -> Path:
        """Return the socket of the host's master, started if needed. Raises the error of `fault_of`."""
        socket = self.socket(host)
        if _is_served(socket):
            return socket
        async with self._width, _locked(socket.with_suffix(".lock")):
            if not _is_served(socket):
                await _started(host, socket, await self._way(host), host.target, host.name)
        return socket

    def forget(self, host: Host) -> None:
        """Remove a socket without a listening master."""
        self.socket(host).unlink(missing_ok=True)

    async def _way(self, host: Host) -> list[str]:
        """Return the options for ssh to use our master of the bastion, if ssh's configuration names a bastion."""
        code, out, complaint = await _asked("-G", *host.target)
        if code != 0:
            raise fault_of(complaint, host.name, host.by_hand)
        jump = _settings(out).get("proxyjump", "none")
        if jump == "none":
            return []
        before, _, last = jump.rpartition(",")
        target = last if last.startswith("ssh://") else f"ssh://{last}"
        config = list(host.config)
        key = hashlib.sha256(repr((jump, config)).encode()).hexdigest()[:16]
        socket = self.folder / f"jump-{key}"
        async with self._jumps.setdefault(key, asyncio.Lock()), _locked(socket.with_suffix(".lock")):
            if not _is_served(socket):
                over = ["-J", before] if before else []
                await _started(host, socket, [], (*config, *over, "--", target), last)
        through = [*argv(host, socket), "-o", "ControlMaster=no", *config, "-W", "[%h]:%p", "--", target]
        # A shell here reads the words after ssh has replaced %; zsh and csh would expand [..]:22 as a file pattern.
        words = " ".join(f"'{word}'" if word == "[%h]:%p" else shlex.quote(word).replace("%", "%%") for word in through)
        return ["-o", "ProxyJump=none", "-o", f"ProxyCommand={words}"]


async def _borrowed(socket: Path, target: Sequence[str]) -> bool:
    """Let the socket lead to the user's own open master of the target, where a login needs a question.

    Only a link is made and removed: the user's master is never ended. Our own master comes first, since it ends when
    the host is gone, which the user's may not notice for hours.
    """
    path = _settings((await _asked("-G", *target))[1]).get("controlpath", "none")
    if path == "none" or (await _asked("-O", "check", *target))[0] != 0:
        return False
    begun = socket.with_suffix(f".{secrets.token_hex(3)}")
    begun.symlink_to(path)
    begun.replace(socket)
    return True


async def _asked(*words: str) -> tuple[int | None, str, str]:
    """Return the exit code, the output and the errors of an ssh command that calls no host."""
    try:
        process = await asyncio.create_subprocess_exec(
            *("ssh", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError as error:
        raise no_ssh() from error
    out, complaint = await process.communicate()
    return process.returncode, out.decode(errors="replace"), complaint.decode(errors="replace")


def _settings(out: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in out.splitlines() if " " in line)


async def _started(host: Host, socket: Path, way: list[str], target: Sequence[str], name: str) -> None:
    """Start a master that listens at the socket; retry temporary failures. `name` is the host's or the bastion's.

    If the login needs a question, the user's own master serves. Raises the error that `fault_of` returns.
    """
    begun = socket.with_suffix(f".{secrets.token_hex(3)}")
    # With ControlPersist the master ends by itself, even if this process is killed before the rename.
    persist = ("-o", "ControlMaster=yes", "-o", f"ControlPersist={PERSIST_S}")
    command = [*argv(host, begun), *persist, "-fN", *way, *target]
    by_hand = host.by_hand if name == host.name else f"ssh {name}"
    for number in range(TRIES):
        # A file: the master keeps its standard error, so a pipe would not end.
        with tempfile.TemporaryFile() as complaint:
            code = await _run(command, complaint.fileno(), name, by_hand)
            if code == 0:
                begun.replace(socket)
                return
            complaint.seek(0)
            words = complaint.read().decode(errors="replace")
        if not is_passing(words) or number == TRIES - 1:
            error = fault_of(words, name, by_hand)
            if REFUSED in error.message and await _borrowed(socket, target):
                return
            raise error
        await asyncio.sleep(random.uniform(0.3, 1.0) * (number + 1))


async def _run(command: list[str], complaint: int, name: str, by_hand: str) -> int:
    """Return the exit code of the ssh process that starts a master in the background. Raises UnreachableError."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=complaint,
        start_new_session=True,  # Ctrl-C here must not end a master
    )
    try:
        return await asyncio.wait_for(process.wait(), CONNECT_S)
    except BaseException as error:
        await killed(process)
        if not isinstance(error, asyncio.TimeoutError):
            raise
        raise fault_of(f"no connection within {CONNECT_S:.0f} s", name, by_hand) from error


async def killed(process: asyncio.subprocess.Process) -> None:
    """Kill and await the process; its own `kill` can lose the exit code of one that has just ended (Python 3.11)."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()


def _is_served(path: Path) -> bool:
    """Return whether a master listens: a killed master's socket stays until the next master is renamed."""
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold the lock that this user's processes share, so that each socket gets only one master."""
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.05)
        yield


def _folder() -> Path:
    """Return the private folder of the sockets. Raises ConfigError if the folder cannot be made private."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_BASE or not os.access(base, os.W_OK | os.X_OK):  # as after `su`
        base = "/tmp"
    of_home = hashlib.sha256(str(home()).encode(errors="surrogateescape")).hexdigest()[:8]
    folder = Path(base) / f"cloudtrain-{os.getuid()}-{of_home}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        message = f"the sockets of ssh cannot be kept: {error.strerror}"
        raise ConfigError(message, where=folder, hint="set TMPDIR to a folder that you can write") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        message = "another user could listen there"
        raise ConfigError(message, where=folder, hint="remove it; it is for ssh's own sockets")
    return folder


def fault_of(words: str, name: str, by_hand: str) -> CloudtrainError:
    """Return the error for ssh's output about the host; `by_hand` is the command that a user types to log in."""
    last = last_words(words) or "ssh ended without a message"
    for pattern, kind, what in _FAULTS:
        if re.search(pattern, words, re.IGNORECASE):
            return kind(f"{name}: {what}: {last}", hint=_CURES[what].format(name=name, by_hand=by_hand))
    return UnreachableError(f"{name} cannot be reached: {last}", hint=f"try it by hand: {by_hand}")


def is_passing(words: str) -> bool:
    """Return whether a retry, a moment later, may succeed."""
    return bool(_PASSING.search(words))


def last_words(words: str) -> str:
    """Return the last output of a host or of ssh as one line without control characters; "" if the output is empty."""
    lines = [line for line in words.splitlines() if line.strip("@ \r") and not line.startswith("debug")]
    return one_line("".join(letter if letter.isprintable() else " " for letter in " ".join(lines[-2:])), 300)


def no_ssh() -> ConfigError:
    """Return the error for a machine without the ssh program."""
    return ConfigError("there is no `ssh` here", hint="install OpenSSH's client")
