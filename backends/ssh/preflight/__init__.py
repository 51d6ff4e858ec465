"""What stands between a job and its hosts: one line a finding, equal hosts folded, each with what to type against it.

Pure: from what the hosts have told (entrypoints/host/survey.py) and what the job wants. Looked at before every submit,
and in full by `doctor`. What is wrong with a single host says the module of its noun; here is their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cloudtrain.backends.ssh.preflight import gpucheck, hostcheck, pythoncheck
from cloudtrain.backends.ssh.preflight.peercheck import dialled
from cloudtrain.backends.ssh.preflight.reachcheck import reached
from cloudtrain.backends.ssh.preflight.wish import Facts, Wish
from cloudtrain.launcher.backend import Check

__all__ = ["TAKEN", "Wish", "checks", "dialled", "short"]

TAKEN = frozenset({gpucheck.FREE})  # names of checks that fail because somebody else was there first

_TOPICS: tuple[Callable[[Facts, Wish, int], Iterator[Check]], ...] = (
    hostcheck.same_machine,
    pythoncheck.interpreter,
    pythoncheck.torch,
    gpucheck.checks,
    hostcheck.system,
    hostcheck.own_name,
    hostcheck.disk,
    hostcheck.write,
    hostcheck.shm,
    hostcheck.limits,
    hostcheck.clock,
    hostcheck.mtu,
    hostcheck.leftovers,
    hostcheck.logind,
    hostcheck.unknown,
)


def checks(facts: Mapping[str, Mapping[str, Any] | str], wish: Wish) -> list[Check]:
    """Return what is to be said of the hosts; a text in place of facts is why a host could not be asked.

    A host's facts may also hold `ahead_s`, its clock ahead of ours, and `address`, where the others reach it.
    """
    good = {host: fact for host, fact in facts.items() if not isinstance(fact, str)}
    found = reached(facts)
    for topic in _TOPICS:
        found += topic(good, wish, len(facts))
    return [replace(check, found=_plain(check.found), cure=_plain(check.cure)) for check in found]


def short(found: Iterable[Check]) -> list[Check]:
    """Return what a submit says: all but what is well."""
    return [check for check in found if check.verdict != "ok"]


def _plain(text: str) -> str:
    """Return the text without what a terminal would obey: names of strangers' processes are in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
