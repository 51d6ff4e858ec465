"""ssh's error messages as errors of ours, with a hint for the fix."""

from __future__ import annotations

import re

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, CredentialError, UnreachableError

BROKEN = "the connection broke"

# The messages of a busy sshd, or of its limit on connections that are not yet logged in.
_PASSING = re.compile(
    r"kex_exchange_identification|ssh_exchange_identification|banner exchange|Connection reset by"
    rf"|Connection closed by|Broken pipe|session open refused|stdio forwarding failed|{BROKEN}",
)
_FAULTS: tuple[tuple[str, type[CloudtrainError], str, str], ...] = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        CredentialError,
        "its host key has changed",
        "ask whether the host was set up again; then `ssh-keygen -R {name}`, `{by_hand}`, and compare the key",
    ),
    (
        "Host key verification failed|No .* host key is known",
        CredentialError,
        "its host key is not known here",
        "connect once by hand, `{by_hand}`, and compare the key's fingerprint (or ssh.accept_new_host_keys: true)",
    ),
    (
        "Permission denied|Too many authentication failures",
        CredentialError,
        "it refuses this login",
        "`{by_hand}` must work without a question: `ssh-add` your key, or `ssh-copy-id {name}`",
    ),
    (
        "Temporary failure in name resolution",
        UnreachableError,
        "its name cannot be looked up now",
        "is this machine on the network?",
    ),
    (
        "Could not resolve hostname",
        ConfigError,
        "the name cannot be resolved",
        "fix ssh.hosts, or give the name an address: a `Host` entry in ssh's configuration",
    ),
    (
        "hostname contains invalid characters|Bad configuration option|Can't open user config file|terminating, .* bad",
        ConfigError,
        "ssh rejects this name or its configuration",
        "fix ssh.hosts or ssh's configuration",
    ),
    ("Connection refused", UnreachableError, "nothing listens there", "is sshd running, and on this port?"),
    (
        "timed out|No route to host|Network is unreachable|no connection within",
        UnreachableError,
        "it does not answer",
        "is it up, and is the way to it (VPN, bastion) open?",
    ),
)


def fault_of(words: str, name: str, by_hand: str) -> CloudtrainError:
    """Return the error for ssh's output about the host; `by_hand` is the command that a user types to log in."""
    last = last_words(words) or "ssh ended without a message"
    for pattern, kind, what, cure in _FAULTS:
        if re.search(pattern, words, re.IGNORECASE):
            return kind(f"{name}: {what}: {last}", hint=cure.format(name=name, by_hand=by_hand))
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
