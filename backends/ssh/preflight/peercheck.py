"""The connections between a job's hosts: which pairs fail, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.launcher.backend import Check

from .folding import fold, groups, local, ranges, remote

NAME = "peers"

Pairs = dict[tuple[str, str], Mapping[str, Any]]  # (caller, target) -> how the call failed


def dialled(report: Mapping[str, Any], ports: Sequence[int] | None = None) -> list[Check]:
    """Return the findings of a round of test connections; an empty list if no host was tested.

    `report["unheard"]` maps hosts that could not listen to the reason; `report["failed"]` maps each calling host to its
    failed calls, in the form of reachability.dial.
    """
    if not report:
        return []
    unheard: Mapping[str, str] = report.get("unheard") or {}
    failed: Mapping[str, Sequence[Mapping[str, Any]]] = report.get("failed") or {}
    found = [
        Check(NAME, "fail", f"{why}: {ranges(hosts)}", f"{local(hosts, 'ssh {} ip -4 addr')}; then set `address`")
        for why, hosts in groups(unheard).items()
    ]
    pairs = {(host, call["name"]): call for host, calls in failed.items() for call in calls}
    found += _folded(pairs, list(failed), ports)
    return found or [Check(NAME, "ok", fold(dict.fromkeys(failed, "each is reached"), len(failed)))]


def _folded(pairs: Pairs, hosts: Sequence[str], ports: Sequence[int] | None) -> Iterator[Check]:
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


def _check(words: str, blamed: Sequence[str], pairs: Pairs, ports: Sequence[int] | None) -> Check:
    how = Counter(str(call["how"]) for call in pairs.values()).most_common(1)[0][0]
    (caller, target), call = next((pair, call) for pair, call in pairs.items() if call["how"] == how)
    found = f"{words} ({how}: from {caller}, {call['text']})"
    return Check(NAME, "fail", found, _cure(how, blamed, caller, target, str(call["text"]), ports))


def _cure(how: str, blamed: Sequence[str], caller: str, target: str, text: str, ports: Sequence[int] | None) -> str:
    span = f"{ports[0]}:{ports[1]}" if ports else "20000:27999"
    if how == "timeout":
        return f"open the ports of ssh.ports in the firewall: {remote(blamed, f'sudo ufw allow {span}/tcp')}"
    if how == "unreachable":
        address = text.partition(" ")[0].rstrip(":")
        return f"look at the way there: {remote([caller], f'ip route get {address}')}; or set `interface`"
    look = remote([target], "ip -4 addr")
    return f"that address is another machine's, or its firewall's: {look}; then set `address` of {target} in ssh.hosts"
