"""The host assignment of a job: the reachable, fit and free hosts, with each host's address, GPUs and folders."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudtrain.entrypoints.contract import JobSpec
from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.text.terminal import say

from ..channel.archives import Receiver
from ..channel.calls import Call, Fleet, HostAnswer
from ..channel.hosts import Host
from . import preflight
from .preflight.gpucheck import units_of
from .preflight.hostcheck import HostRequirements
from .preflight.reachcheck import dialled

FACTS_S = 30.0
PATIENCE_S = 15.0  # for each fact: a Python on a cold network home takes seconds to start
MOST_SPARES = 8  # that wait in a job: each host gets the code and the environment
ALL_DIAL = 16  # hosts: above, a submit tests connections only between node 0 and each host; doctor tests all pairs


@dataclass(frozen=True)
class Assignment(Receiver):
    """A host assigned to a job; `takes` are names of locks, `labels` the names for users."""

    name: str
    takes: tuple[str, ...]
    labels: Mapping[str, str]


def require_answers(body: Mapping[str, Any], fleet: Fleet) -> None:
    """Raise an error with the faults of all hosts if fewer hosts answer than the job needs."""
    hosts = [Host(**each) for each in body["hosts"]]
    answers = fleet.ask({host: Call("calls.clock", {}) for host in hosts}, FACTS_S, is_urgent=True)
    there = [host for host in hosts if answers[host].error is None]
    if len(there) < JobSpec.load(body["spec"]).nodes:
        answers |= _facts(fleet, there, body)
        raise _error(_checked(answers, hosts, body), list(answers.values()))


def assign_hosts(body: Mapping[str, Any], fleet: Fleet) -> list[Assignment]:
    """Return the job's host assignments in the config's order; with spare hosts, the first hosts that are fit.

    Hosts that wait as spares in the job follow; a spare is left out if a check of the whole job fails with it.
    Raises the reason for unusable hosts: CapacityError, ConfigError, CredentialError, UnreachableError.
    """
    hosts = [Host(**each) for each in body["hosts"]]
    count, needs = JobSpec.load(body["spec"]).nodes, requirements_of(body)
    answers = _facts(fleet, hosts, body)
    fit = [host for host in hosts if not _failed(_checked(answers, [host], body))]
    if body.get("queue"):
        fit.sort(key=lambda host: _crowd(answers[host].reply, needs))
    chosen = (fit if len(hosts) > count else hosts)[:count]
    seen = chosen if len(chosen) == count else hosts
    found = _checked(answers, seen, body)
    if _failed(found):
        raise _error(found, [answers[host] for host in seen])
    for host in set(hosts[: max(map(hosts.index, chosen))]) - set(chosen) - set(fit):
        first = _failed(_checked(answers, [host], body))[0]
        say(f"{host.name} is left out: {first.found.removesuffix(f': {host.name}')} (check `{first.name}`)")
    assignments = [_seat(fleet, host, answers[host].reply, body) for host in chosen]
    rest = [host for host in fit if host not in chosen] if body.get("swaps") else []
    rest = [host for host in rest if not _failed(_checked(answers, [*chosen, host], body))][:MOST_SPARES]
    spares = [_seat(fleet, host, answers[host].reply, body) for host in rest]
    reached = _dial(fleet, [*assignments, *spares], body, everybody=len(assignments) <= ALL_DIAL)
    if spares and _failed(reached):
        say(f"no spare host waits in the job: {_failed(reached)[0].found}")
        spares, reached = [], _dial(fleet, assignments, body, everybody=len(assignments) <= ALL_DIAL)
    found += reached
    if _failed(found):
        raise _error(found, [])
    for check in found:
        if check.verdict == "warn":
            say(f"{check.name}: {check.found}{f' ({check.cure})' if check.cure else ''}")
    return [*assignments, *spares]


def examine(body: Mapping[str, Any], fleet: Fleet) -> list[Check]:
    """Return all findings about the hosts, for `doctor`."""
    hosts = [Host(**each) for each in body["hosts"]]
    answers = _facts(fleet, hosts, body)
    found = _checked(answers, hosts, body)
    assignments = [_seat(fleet, host, answers[host].reply, body) for host in hosts if answers[host].error is None]
    return found + _dial(fleet, assignments, body, everybody=True)


def requirements_of(body: Mapping[str, Any]) -> HostRequirements:
    """Return the job's needs for each host."""
    return HostRequirements(
        ranks=JobSpec.load(body["spec"]).devices_per_node,
        gpus=body["gpus"],
        ranks_are_chosen=body["ranks_are_chosen"],
        allow_busy=body["allow_busy"],
        gpu_model=body["gpu_model"],
        has_own_torch=body["runs_in"]["kind"] != "none",
        can_wait=bool(body.get("queue")),
    )


def _facts(fleet: Fleet, hosts: Sequence[Host], body: Mapping[str, Any]) -> dict[Host, HostAnswer]:
    common = {"checkpoint": body["checkpoint_dir"], "lock_folder": body["gpu_locks"], "patience_s": PATIENCE_S}
    tmp = body.get("environment", {}).get("TMPDIR", "")
    common["tmp"] = tmp if tmp.startswith("/") and "$" not in tmp else None
    is_plain = body["runs_in"]["kind"] == "none"  # any other environment brings its own Python
    calls = {host: Call("survey.facts", {**common, "python": host.python if is_plain else None}) for host in hosts}
    answers = fleet.ask(calls, FACTS_S, is_urgent=True)
    for host, answer in answers.items():
        if answer.error is None:
            answer.reply["ahead_s"] = fleet.channel(host).ahead_s
            answer.reply["address"] = host.address or fleet.channel(host).about["address"]
    return answers


def _checked(answers: Mapping[Host, HostAnswer], hosts: Sequence[Host], body: Mapping[str, Any]) -> list[Check]:
    """Return the findings about the hosts."""
    given = {host.name: answers[host] for host in hosts}
    facts = {name: str(answer.error) if answer.error else answer.reply for name, answer in given.items()}
    return preflight.checks(facts, requirements_of(body))


def _failed(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.verdict == "fail"]


def _error(checks: Sequence[Check], answers: Sequence[HostAnswer]) -> CloudtrainError:
    """Return one error with all failures, of the class, and with the exit code, of the root cause."""
    errors = [answer.error for answer in answers if answer.error is not None]
    lines = [f"{check.name}: {check.found}" for check in _failed(checks)]
    hints = "; ".join(dict.fromkeys(check.cure for check in _failed(checks) if check.cure))
    message = "the hosts are not ready:\n  " + "\n  ".join(lines)
    for kind in (CredentialError, UnreachableError):
        if any(isinstance(error, kind) for error in errors):
            return kind(message, hint=hints)
    is_taken = all(check.name in preflight.TAKEN for check in _failed(checks))
    return CapacityError(message, hint=hints) if is_taken else ConfigError(message, hint=hints)


def _seat(fleet: Fleet, host: Host, facts: Mapping[str, Any], body: Mapping[str, Any]) -> Assignment:
    takes, labels = _free(facts, body["gpus"], is_queued=bool(body.get("queue")))
    about = fleet.channel(host).about
    return Assignment(host, about["workdir"], address_of(fleet, host), about["name"], takes, labels)


def _crowd(facts: Mapping[str, Any], needs: HostRequirements) -> tuple[int, bool]:
    """Return how many jobs wait for the host, and whether the host is in use: a queued job takes the emptiest hosts."""
    is_busy = bool(_failed(preflight.checks({"": facts}, replace(needs, can_wait=False))))
    return len(facts.get("waiting") or ()), is_busy


def _free(facts: Mapping[str, Any], count: int, *, is_queued: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the lock names of the GPUs that the job takes, free GPUs first. Without GPUs the job takes the machine.

    A queued job takes some of all GPUs without foreign processes, at its turn.
    """
    if not count:
        return ("machine",), {"machine": "the machine"}
    locked = {holder["name"] for holder in facts["holders"] or ()}
    held = {p["gpu"] for p in facts["gpu_processes"] or ()}
    held = held - locked if is_queued else held | locked
    found = units_of(facts)
    units = {uuid: f"GPU {gpu['index']} ({gpu['name']})" for uuid, gpu in found}
    held |= {uuid for uuid, gpu in found if gpu["uuid"] in held}
    best = sorted(units, key=lambda unit: unit in held)  # stable: the lowest index first
    best = best[: max(count, sum(unit not in held for unit in units)) if is_queued else count]
    return tuple(best), {unit: units[unit] for unit in best}


def path_on(fleet: Fleet, host: Host, path: str) -> str:
    """Return the path, which may begin with `~/`, as an absolute path on the host."""
    home = str(fleet.channel(host).about["home"])
    return f"{home}{path[1:]}" if path == "~" or path.startswith("~/") else path


def address_of(fleet: Fleet, host: Host) -> str:
    """Return the host's address for its peers: as configured, else as ssh reaches the host, else the outgoing one."""
    if host.address:
        return host.address
    came_in = str(fleet.channel(host).about["address"])
    # The agents and the rendezvous use IPv4.
    if host.interface or not came_in or ":" in came_in or came_in.startswith("127."):
        return str(fleet.call(host, "survey.address", {"interface": host.interface})["address"])
    return came_in


def _dial(fleet: Fleet, nodes: Sequence[Assignment], body: Mapping[str, Any], *, everybody: bool) -> list[Check]:
    """Return the findings about callers that cannot reach other hosts, and about hosts that could not be tested."""
    if len(nodes) < 2:
        return []
    token = secrets.token_hex(8)
    common = {"token": token, "ports": body["ports"]}
    calls = {s.host: Call("reachability.listen", {**common, "name": s.host.name, "address": s.address}) for s in nodes}
    listening = fleet.ask(calls, is_urgent=True)
    listeners = [{"name": host.name, **answer.reply} for host, answer in listening.items() if "port" in answer.reply]
    unheard = {host.name: answer.reply["error"] for host, answer in listening.items() if "error" in answer.reply}
    calls = {}
    for number, seat in enumerate(nodes):
        peers = [listener for listener in listeners if listener["name"] != seat.host.name]
        if not everybody and number:
            peers = [listener for listener in peers if listener["name"] == nodes[0].host.name]
        calls[seat.host] = Call("reachability.dial", {"token": token, "peers": peers})
    answers = fleet.ask(calls, is_urgent=True)
    fleet.ask({seat.host: Call("reachability.close_listener", {}) for seat in nodes})
    names = {listener["name"] for listener in listeners}
    failed = {h.name: [call for call in a.reply.get("failed", ()) if call["name"] in names] for h, a in answers.items()}
    return dialled(unheard, failed, body["ports"])
