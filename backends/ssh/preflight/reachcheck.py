"""Hosts that could not be asked: a short reason, and the command that fixes or tests the cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.launcher.backend import Check

from .folding import fold, local, ranges, remote

NAME = "reachable"

# Pattern in the message of ssh or our channel -> short reason, and command with `{}` for the host. First match wins.
_REASONS = (
    (r"no interpreter|python\S*: .*(not found|No such file)", "has no Python", "sudo apt install python3"),
    (r"IDENTIFICATION HAS CHANGED|host key has changed", "its host key has changed", "ssh-keygen -R {} && ssh {}"),
    (r"Host key verification failed|host key is (not )?known", "its host key is not known here", "ssh {}"),
    (r"Permission denied|Too many authentication|refuses this login", "it refuses this login", "ssh-copy-id {}"),
    (
        r"Could not resolve|Name or service not known|name cannot be resolved",
        "its name cannot be resolved",
        "ssh -G {} | grep ^hostname",
    ),
    (r"Connection refused|nothing listens", "nothing listens on its port", "ssh -v {} true"),
    (
        r"timed out|No route|Network is unreachable|not answer|no connection within",
        "it does not answer",
        "ping -c 3 {}",
    ),
    (r"Connection (closed|reset)|kex_exchange|banner exchange", "it closes the connection", "ssh -v {} true"),
)
# A host's answer to our first program is kept as the host's own message, whatever words the message has.
_OWN_WORDS = r"our first (program|call)|not Python 3|its folder|its Python"
_ADVICE = {
    "has no Python": "or name one that is there: --set ssh.python=/path/to/python",
    "its host key has changed": "if the host was set up again; compare the fingerprint",
    "its host key is not known here": "once, to compare its fingerprint",
    "it refuses this login": "or `ssh-add` the key, or set `user` in ssh.hosts",
    "its name cannot be resolved": "fix ssh.hosts, or add a `Host` entry to ssh's configuration",
    "nothing listens on its port": "start sshd there, `sudo systemctl start ssh`, or set `port` in ssh.hosts",
    "it does not answer": "is it up, and the way to it (VPN, bastion, firewall) open?",
    "it closes the connection": "is sshd's MaxStartups reached, or this address banned?",
}


def reached(facts: Mapping[str, Mapping[str, Any] | str]) -> list[Check]:
    """Return a line for each reason why hosts could not be asked, or a line for all if every host answered."""
    silent = {host: words for host, words in facts.items() if isinstance(words, str)}
    by_reason: dict[tuple[str, str], list[str]] = {}
    for host, words in silent.items():
        by_reason.setdefault(_reason(host, words), []).append(host)
    found = []
    for (what, command), hosts in by_reason.items():
        typed = remote(hosts, command) if command.startswith("sudo") else local(hosts, command)
        cure = f"{typed}: {_ADVICE[what]}" if what in _ADVICE else typed
        if "{}" not in command and not command.startswith("sudo"):
            cure = command
        found.append(Check(NAME, "fail", f"{what}: {ranges(hosts)}", cure))
    if not silent and facts:
        found.append(Check(NAME, "ok", fold(dict.fromkeys(facts, "answers"), len(facts))))
    return found


def _reason(host: str, words: str) -> tuple[str, str]:
    """Return the reason, and the command to type; for a message of the host itself, the message and its hint."""
    said, _, hint = words.partition("\n  hint: ")
    text = " ".join(said.removeprefix(f"{host}: ").removeprefix(f"{host} ").split())[:300]
    if hint and re.search(_OWN_WORDS, said):
        return text, hint
    for pattern, what, command in _REASONS:
        if re.search(pattern, words, re.IGNORECASE):
            return what, command
    return text, "ssh -v {} true"
