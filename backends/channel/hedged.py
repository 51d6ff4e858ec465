"""Calls to hosts without waiting for slow hosts: a broken connection shows after 15 s at the earliest.

A call that is late continues, and the next equal call takes its answer. Until then the host gets no second call of the
same verb.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for

from cloudtrain.launcher.errors import UnreachableError

from .calls import Call, Fleet, HostAnswer
from .hosts import Host

PATIENCE_S = 2.0  # from the first answer on: long for a login, short for a follower


def ask(
    fleet: Fleet, calls: Mapping[Host, Call], is_enough: Callable[[Mapping[Host, HostAnswer]], bool]
) -> dict[Host, HostAnswer]:
    """Return every host's answer. A host late by PATIENCE_S gets an error, if the fast hosts' answers are enough."""
    fresh = {host for host, call in calls.items() if _begin(fleet, host, call)}
    asked = {host: fleet.late[host, call.verb] for host, call in calls.items()}
    mine = {host: future for host, (call, future) in asked.items() if call == calls[host]}
    until_s, has_answer = time.monotonic() + PATIENCE_S, False
    while True:
        answers = {host: future.result() for host, future in mine.items() if future.done()}
        left = [future for future in mine.values() if not future.done()]
        if not has_answer and any(answer.error is None for answer in answers.values()):
            has_answer, until_s = True, time.monotonic() + PATIENCE_S
        is_soon = any(not mine[host].done() for host in fresh) and time.monotonic() < until_s
        if not left or (not is_soon and is_enough(answers)):
            break
        wait_for(left, until_s - time.monotonic() if is_soon else None, FIRST_COMPLETED)
    for host in answers:
        del fleet.late[host, calls[host].verb]
    return {host: answers.get(host) or _late(host) for host in calls}


def _begin(fleet: Fleet, host: Host, call: Call) -> bool:
    """Call the host unless an earlier call is under way; return whether a call has begun now."""
    earlier = fleet.late.get((host, call.verb))
    if earlier is not None and (earlier[0] == call or not earlier[1].done()):
        return False
    fleet.late[host, call.verb] = call, fleet.begin(host, call)
    return True


def _late(host: Host) -> HostAnswer:
    return HostAnswer(
        {}, error=UnreachableError(f"{host.name} does not answer", hint="is it up, and the way to it open?")
    )
