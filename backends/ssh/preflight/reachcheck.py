"""Hosts that could not be asked, and hosts of a job that do not reach each other: the reason, and a command."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.launcher.backend import Check

from .folding import fold, groups, local, ranges, remote

Pairs = dict[tuple[str, str], Mapping[str, Any]]  # (caller, target) -> how the call failed

# Pattern in the message of ssh or our channel -> short reason, and command with `{}` for the host. First match wins.
_REASONS = (
    (r"python\S*: .*(not found|No such file)", "has no Python", "sudo apt install python3"),
    (r"IDENTIFICATION HAS CHANGED|host key has changed", "its host key has changed", "ssh-keygen -R {} && ssh {}"),
    (r"Host key verification failed|host key is (not )?known", "its host key is not known here", "ssh {}"),
    (r"Permission denied|Too many authentication|refuses this login", "it refuses this login", "ssh-copy-id {}"),
    (r"Could not resolve|Name or service not known", "its name cannot be resolved", "ssh -G {} | grep ^hostname"),
    (r"name cannot be resolved", "its name cannot be resolved", "ssh -G {} | grep ^hostname"),
    (r"Connection refused|nothing listens", "nothing listens on its port", "ssh -v {} true"),
    (r"timed out|not answer|no connection within", "it does not answer", "ping -c 3 {}"),
    (r"No route|Network is unreachable", "it does not answer", "ping -c 3 {}"),
    (r"Connection (closed|reset)|kex_exchange|banner exchange", "it closes the connection", "ssh -v {} true"),
)
# A host's answer to our first program is kept as the host's own message, whatever words the message has.
_OWN_WORDS = r"our first (program|call)|not Python 3|its folder|its Python"
_THERE = ("sudo ", "command -v ")  # commands to type on the host
_ADVICE = {
    "has no Python": "or name one that is there: --set ssh.python=/path/to/python",
    "has no interpreter": "name one that is there in ssh.python, or `python` of the host in ssh.hosts",
    "its host key has changed": "if the host was set up again; compare the fingerprint",
    "its host key is not known here": "once, to compare its fingerprint",
    "it refuses this login": (
        "or `ssh-add` the key, or set `user` in ssh.hosts; if the login asks a question (a second factor), log in once "
        "with ControlMaster, ControlPath and ControlPersist in ssh's configuration, or run cloudtrain on the login node"
    ),
    "its name cannot be resolved": "fix ssh.hosts, or add a `Host` entry to ssh's configuration",
    "nothing listens on its port": "start sshd there, `sudo systemctl start ssh`, or set `port` in ssh.hosts",
    "it does not answer": "is it up, and the way to it (VPN, bastion, firewall) open?",
    "it closes the connection": "is sshd's MaxStartups reached, or this address banned?",
}


def reached(facts: Mapping[str, Mapping[str, Any] | str]) -> Iterator[Check]:
    """Yield a line for each reason why hosts could not be asked, or a line for all if every host answered."""
    silent = {host: words for host, words in facts.items() if isinstance(words, str)}
    by_reason: dict[tuple[str, str], list[str]] = {}
    for host, words in silent.items():
        by_reason.setdefault(_reason(host, words), []).append(host)
    for (what, command), hosts in by_reason.items():
        typed = remote(hosts, command) if command.startswith(_THERE) else local(hosts, command)
        cure = f"{typed}: {advice}" if (advice := _ADVICE.get(what.partition(" `")[0])) else typed
        if "{}" not in command and not command.startswith(_THERE):
            cure = command
        yield Check("reachable", "fail", f"{what}: {ranges(hosts)}", cure)
    if not silent and facts:
        yield Check("reachable", "ok", fold(dict.fromkeys(facts, "answers"), len(facts)))


def _reason(host: str, words: str) -> tuple[str, str]:
    """Return the reason, and the command to type; for a message of the host itself, the message and its hint."""
    said, _, hint = words.partition("\n  hint: ")
    text = " ".join(said.removeprefix(f"{host}: ").removeprefix(f"{host} ").split())[:300]
    if hint and re.search(_OWN_WORDS, said):
        return text, hint
    if absent := re.search(r"no interpreter `([^`]+)`", words):
        command = "sudo apt install python3" if absent[1] == "python3" else "command -v python3"
        return f"has no interpreter `{absent[1]}`", command
    for pattern, what, command in _REASONS:
        if re.search(pattern, words, re.IGNORECASE):
            return what, command
    return text, "ssh -v {} true"


def dialled(
    unheard: Mapping[str, str], failed: Mapping[str, Sequence[Mapping[str, Any]]], ports: Sequence[int]
) -> list[Check]:
    """Return the findings of a round of test connections.

    `unheard` maps hosts that could not listen to the reason; `failed` maps each calling host to its failed calls, in
    the form of reachability.dial.
    """
    found = [
        Check("peers", "fail", f"{why}: {ranges(hosts)}", f"{local(hosts, 'ssh {} ip -4 addr')}; then set `address`")
        for why, hosts in groups(unheard).items()
    ]
    pairs = {(host, call["name"]): call for host, calls in failed.items() for call in calls}
    found += _folded(pairs, list(failed), ports)
    return found or [Check("peers", "ok", fold(dict.fromkeys(failed, "each is reached"), len(failed)))]


def _folded(pairs: Pairs, hosts: Sequence[str], ports: Sequence[int]) -> Iterator[Check]:
    """Yield a line for each host that explains all its failures, then a line for each group of remaining pairs."""
    left = dict(pairs)
    if len(hosts) > 2:
        for host in hosts:
            others = [other for other in hosts if other != host]
            is_deaf = all((other, host) in pairs for other in others)
            is_mute = all((host, other) in pairs for other in others)
            if not is_deaf and not is_mute:
                continue
            mine = {
                pair: left.pop(pair)
                for pair in list(left)
                if (is_deaf and pair[1] == host) or (is_mute and pair[0] == host)
            }
            if mine:  # else the failures of its pairs belong to an earlier host
                words = "and the others do not reach each other" if is_deaf and is_mute else "reaches no other host"
                words = "cannot be reached by all others" if not is_mute else words
                yield _check(f"{host} {words}", [host], mine, ports)
    for callers, targets in _sides(left, hosts):
        mine = {pair: left[pair] for pair in left if pair[0] in callers and pair[1] in targets}
        back = {pair: left[pair] for pair in left if pair[1] in callers and pair[0] in targets}
        is_mutual = len(back) == len(mine) and set(callers).isdisjoint(targets)
        if is_mutual and hosts.index(callers[0]) > hosts.index(targets[0]):
            continue  # the other direction has a line already
        words = f"{ranges(callers)} {'<->' if is_mutual else '->'} {ranges(targets)}"
        yield _check(words, [*callers, *targets] if is_mutual else targets, mine, ports)


def _sides(pairs: Pairs, hosts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Return groups of callers that fail to reach the same targets, with the targets."""
    targets = {host: tuple(target for source, target in pairs if source == host) for host in hosts}
    by_targets: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        if targets[host]:
            by_targets.setdefault(targets[host], []).append(host)
    return [(callers, list(missed)) for missed, callers in by_targets.items()]


def _check(words: str, blamed: Sequence[str], pairs: Pairs, ports: Sequence[int]) -> Check:
    how = Counter(str(call["how"]) for call in pairs.values()).most_common(1)[0][0]
    (caller, target), call = next((pair, call) for pair, call in pairs.items() if call["how"] == how)
    found = f"{words} ({how}: from {caller}, {call['text']})"
    if how == "timeout":
        allow = f"sudo ufw allow {ports[0]}:{ports[1]}/tcp"
        return Check("peers", "fail", found, f"open the ports of ssh.ports in the firewall: {remote(blamed, allow)}")
    if how == "unreachable":
        look = remote([caller], f"ip route get {str(call['text']).partition(' ')[0].rstrip(':')}")
        return Check("peers", "fail", found, f"look at the way there: {look}; or set `interface`")
    look = remote([target], "ip -4 addr")
    cure = f"that address is another machine's, or its firewall's: {look}; then set `address` of {target} in ssh.hosts"
    return Check("peers", "fail", found, cure)
