"""Answers that a broken or hostile host may give: a sentence with the host's name, in bounded memory and time."""

import asyncio
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel.host_channel import HostChannel
from cloudtrain.backends.channel.hosts import HERE, Host
from cloudtrain.backends.channel.master import Masters
from cloudtrain.launcher.errors import CloudtrainError

ABOUT = {"workdir": "/w", "home": "/h", "name": "h", "address": "127.0.0.1"}
CLOCK: dict[str, Any] = {"told": {"now_s": time.time()}}
# In place of the host's interpreter: our first program is read and not run.
FAKE = """\
#!{python} -IS
import os, sys
sys.stdin.buffer.readline()
sys.stdout.buffer.write(b"::cloudtrain::\\n" + open({answers!r}, "rb").read())
sys.stdout.flush()
os.close(1), os.close(2)
sys.stdin.buffer.read()
"""


@pytest.fixture
def told(tmp_path: Path) -> Callable[..., list[Any]]:
    """Return a function that calls hosts which give these bytes as their answers, and returns each result or error."""

    async def ask(folder: Path, answers: bytes) -> Any:
        folder.mkdir()
        (folder / "answers").write_bytes(answers)
        (folder / "python").write_text(FAKE.format(python=sys.executable, answers=str(folder / "answers")))
        (folder / "python").chmod(0o755)
        channel = HostChannel(Host(HERE, python=str(folder / "python")), Masters())
        try:
            reply, _ = await channel.call("survey.address", {}, limit_s=20.0)
            return reply["address"]
        except CloudtrainError as error:
            return error
        finally:
            await channel.close()

    async def all_of(hosts: Iterable[bytes]) -> list[Any]:
        count = next(numbers)
        return await asyncio.gather(*(ask(tmp_path / f"{count}-{at}", each) for at, each in enumerate(hosts)))

    numbers = itertools.count()
    return lambda *hosts: asyncio.run(all_of(hosts))


def lines(*answers: Any) -> bytes:
    """Return the answers as a host sends them; bytes are sent as they are."""
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in answers)


ODD: tuple[Any, ...] = (
    *([1, 2], None, "x", 7, {}, {"told": None}, {"told": [1]}, {"told": {}, "size": "abc"}, {"told": {}, "size": -1}),
    *({"told": {}, "size": True}, {"told": {}, "size": 10**13}, {"told": {}, "size": 1.5}, {"told": {"other": 1}}),
    *(
        b"[" * 100_000 + b"\n",
        *(b'{"told": {"address": NaN}}\n', b'{"told": {"address": 1e999}}\n', b'{"a":' * 50_000 + b"\n"),
        *(b"\xff\xfe\n", b"no\n"),
    ),
)
CLOCKS = (
    *({"told": {"now_s": "noon"}}, {"told": {"now_s": 1e300}}, {"told": {"now_s": None}}),
    *({"told": {}}, {"told": {"now_s": 10**400}}),
)


@pytest.mark.parametrize("before", [(), (ABOUT,), (ABOUT, CLOCK)], ids=["greeting", "clock", "call"])
def test_odd_answer_is_the_hosts_fault(before: tuple[Any, ...], told: Callable[..., list[Any]]) -> None:
    """At each place of the exchange; never an error of our own, never a wait for what does not come."""
    odd = [each for each in ODD if before or not isinstance(each, dict)]  # an object is a greeting
    found = told(*(lines(*before, each) for each in odd))
    assert [each for each, result in zip(odd, found, strict=True) if HERE not in str(result)] == []


def test_clock_that_is_no_time_is_refused(told: Callable[..., list[Any]]) -> None:
    """A budget counts by the host's clock: text, and a time in another age, is refused with the cure."""
    for error in told(*(lines(ABOUT, clock) for clock in CLOCKS)):
        assert "clock is wrong" in error.message
        assert error.hint == "set the clock of the host"


def test_sound_answer_is_returned(told: Callable[..., list[Any]]) -> None:
    """The exchange of the tests above is the real one."""
    assert told(lines(ABOUT, CLOCK, {"told": {"address": "here"}})) == ["here"]


def test_endless_bytes_take_bounded_memory(told: Callable[..., list[Any]]) -> None:
    """A line without an end is cut at the bound of an answer."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert isinstance(told(lines(ABOUT, CLOCK, b"x" * (80 << 20)))[0], CloudtrainError)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 400


def _mutated(rng: random.Random) -> bytes:
    """Return a random change of sound answers."""
    data = bytearray(lines(ABOUT, CLOCK, {"told": {"address": "here", "more": [1, {"a": None}]}, "size": 3}) + b"abc")
    pieces = [b"{", b"}", b"[", b"null", b"1e999", b"-", b'"', b"\n", b"\x00", b"\xff", b",", b":", b'"size": 9, ']
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.choice((0, 0, 1, 5, 40))] = rng.choice(pieces) * rng.choice((1, 1, 1, 300))
    return bytes(data)


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.soak)])
def test_random_answers_are_the_hosts_fault(count: int, told: Callable[..., list[Any]]) -> None:
    """Changed bytes give an answer or a sentence with the host's name."""
    rng = random.Random(count)
    for _ in range(count // 20):
        found = told(*(_mutated(rng) for _ in range(20)))
        assert [each for each in found if isinstance(each, CloudtrainError) and HERE not in each.message] == []
