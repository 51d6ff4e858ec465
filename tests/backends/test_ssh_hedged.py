"""Slow hosts: a call to several hosts does not wait for a cut connection, and gets the answer when the host is back.

All threads of a process share the channels: each call gets its own answer, and a long call delays no look at a job.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloudtrain.backends.channel import calls
from cloudtrain.backends.channel.calls import Call, HostAnswer
from cloudtrain.backends.channel.hosts import Host
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget
from doubles.waiting import until

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


def test_slow_host_delays_no_call(hosts: tuple[Host, Host], ssh_pair: Cluster) -> None:
    """The fast host's answers arrive repeatedly; the same call later returns the slow host's answer."""
    first, second = hosts
    ssh_pair.hosts[1].blackhole()
    begin_s = time.monotonic()
    for _ in range(3):
        answers = fleet().hedged({first: CLOCK, second: CLOCK}, has_one)
        assert (answers[first].error, "does not answer" in str(answers[second].error)) == (None, True)
    assert time.monotonic() - begin_s < 10
    ssh_pair.hosts[1].join()
    until(lambda: fleet().hedged({second: CLOCK}, has_one)[second].error is None)
    assert fleet().hedged({second: CLOCK}, has_one)[second].error is None


def test_insufficient_answers_are_awaited(hosts: tuple[Host, Host], ssh_pair: Cluster) -> None:
    """If the caller needs both hosts, the slow answer is awaited."""
    first, second = hosts
    ssh_pair.hosts[1].slow(delay_ms=500)
    answers = fleet().hedged({first: CLOCK, second: CLOCK}, lambda found: len(found) == 2)
    assert [answer.error for answer in answers.values()] == [None, None]


def test_threads_get_the_answers_to_their_own_calls(hosts: tuple[Host, Host], ssh_pair: Cluster) -> None:
    """Several jobs look at the same two hosts at once, one is late: each call has its own answer."""
    ssh_pair.hosts[1].slow(delay_ms=100)

    def look(size: int) -> set[int]:
        call = Call("files.get", {"path": "/etc/passwd", "offset": 0, "bytes": size})
        answers = [fleet().hedged(dict.fromkeys(hosts, call), has_one) for _ in range(3)]
        assert [each[hosts[0]].error for each in answers] == [None] * 3
        return {len(answer.data) for each in answers for answer in each.values() if answer.error is None}

    with ThreadPoolExecutor(8) as threads:
        sizes = list(threads.map(look, range(1, 17)))
    assert sizes == [{size} for size in range(1, 17)]


def test_host_with_many_calls_of_its_own_is_not_called_silent(hosts: tuple[Host, Host]) -> None:
    """Each of several jobs of one host gets an answer, even if calls of the others are under way."""
    with ThreadPoolExecutor(8) as threads:
        asked = [Call("files.get", {"path": "/etc/passwd", "offset": 0, "bytes": size}) for size in range(1, 41)]
        answers = list(threads.map(lambda call: fleet().hedged({hosts[0]: call}, bool), asked))
    assert [len(each[hosts[0]].data) for each in answers] == list(range(1, 41))


def test_long_call_delays_no_look(hosts: tuple[Host, Host]) -> None:
    """While a host builds an environment for one job, the states of other jobs on the host are known."""
    first, _ = hosts
    wait, end_it = (
        Call("slurm.run", {"argv": ["sh", "-c", line]})
        for line in ("until test -e ~/end; do sleep 0.05; done", "touch ~/end")
    )
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(fleet().call, first, *wait, limit_s=calls.CALL_S + 1)
        time.sleep(0.5)
        answer = fleet().hedged({first: CLOCK}, bool)[first]
        assert (answer.error, long.done()) == (None, False)
        fleet().hedged({first: end_it}, bool)
        assert long.result()["code"] == 0
