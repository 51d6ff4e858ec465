"""Slow hosts: a call to several hosts does not wait for a cut connection, and gets the answer when the host is back."""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel import calls
from cloudtrain.backends.channel.calls import Call, HostAnswer
from cloudtrain.backends.channel.hosts import Host
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget

CLOCK = Call("calls.clock", {})


@pytest.fixture
def hosts(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    """Return two hosts with open channels; masters and pending calls end with the test."""
    ssh_pair.apply(monkeypatch)
    forget()
    monkeypatch.setattr(calls, "PATIENCE_S", 0.3)
    first, second = (Host(name, ssh_config=str(ssh_pair.ssh_config), python=sys.executable) for name in ("h0", "h1"))
    assert all(answer.error is None for answer in fleet().ask({first: CLOCK, second: CLOCK}).values())
    yield first, second
    ssh_pair.hosts[1].join()
    end(home)


def has_one(answers: Mapping[Host, HostAnswer]) -> bool:
    """Return whether any host has answered."""
    return any(answer.error is None for answer in answers.values())


def test_slow_host_delays_no_call(hosts: tuple[Host, Host], ssh_pair: Cluster, wait_until: Any) -> None:
    """The fast host's answers arrive repeatedly; the same call later returns the slow host's answer."""
    first, second = hosts
    ssh_pair.hosts[1].blackhole()
    begin_s = time.monotonic()
    for _ in range(3):
        answers = fleet().hedged({first: CLOCK, second: CLOCK}, has_one)
        assert (answers[first].error, "does not answer" in str(answers[second].error)) == (None, True)
    assert time.monotonic() - begin_s < 10
    ssh_pair.hosts[1].join()
    wait_until(lambda: fleet().hedged({second: CLOCK}, has_one)[second].error is None)
    assert fleet().hedged({second: CLOCK}, has_one)[second].error is None


def test_insufficient_answers_are_awaited(hosts: tuple[Host, Host], ssh_pair: Cluster) -> None:
    """If the caller needs both hosts, the slow answer is awaited."""
    first, second = hosts
    ssh_pair.hosts[1].slow(delay_ms=500)
    answers = fleet().hedged({first: CLOCK, second: CLOCK}, lambda found: len(found) == 2)
    assert [answer.error for answer in answers.values()] == [None, None]
