"""The checks of a job's hosts before a start: a line for each finding, equal hosts folded, with a command as the fix.

Pure functions of the hosts' facts (entrypoints/host/survey.py) and the job's requirements. A submit shows the problems,
and `doctor` shows all findings. The modules of this folder hold the checks by topic; this module sets their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cloudtrain.launcher.backend import Check

from . import gpucheck, hostcheck, pythoncheck
from .hostcheck import Facts, HostRequirements
from .reachcheck import reached

TAKEN = frozenset({gpucheck.FREE})  # names of checks that fail because a job or a user already has the GPUs

_TOPICS: tuple[Callable[[Facts, HostRequirements, int], Iterator[Check]], ...] = (
    hostcheck.same_machine,
    pythoncheck.interpreter,
    pythoncheck.torch,
    gpucheck.checks,
    hostcheck.system,
    hostcheck.load,
    hostcheck.own_name,
    hostcheck.disk,
    hostcheck.write,
    hostcheck.temporary,
    hostcheck.shm,
    hostcheck.limits,
    hostcheck.clock,
    hostcheck.mtu,
    hostcheck.leftovers,
    hostcheck.logind,
    hostcheck.unknown,
)


def checks(facts: Mapping[str, Mapping[str, Any] | str], needs: HostRequirements) -> list[Check]:
    """Return the findings about the hosts; a host that could not be asked has a text, the reason, in place of facts.

    A host's facts may also hold `ahead_s`, its clock minus ours, and `address`, its address for its peers.
    """
    good = {host: fact for host, fact in facts.items() if not isinstance(fact, str)}
    found = list(reached(facts))
    for topic in _TOPICS:
        found += topic(good, needs, len(facts))
    return [replace(check, found=_plain(check.found), cure=_plain(check.cure)) for check in found]


def _plain(text: str) -> str:
    """Return the text without control characters: process names of other users are untrusted input."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
