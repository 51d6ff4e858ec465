"""Answers that a broken or hostile host may give: a sentence with the host's name, in bounded memory and time."""

import asyncio
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel import copies
from cloudtrain.backends.channel.calls import Fleet, open_fleet
from cloudtrain.backends.channel.host_channel import HostChannel
from cloudtrain.backends.channel.hosts import HERE, Host
from cloudtrain.backends.channel.master import Masters
from cloudtrain.backends.slurm import jobs as slurm_jobs
from cloudtrain.backends.slurm.channel import Login
from cloudtrain.backends.slurm.records import SlurmRef
from cloudtrain.backends.ssh import hosts_placement, jobs, models, preflight
from cloudtrain.backends.ssh.preflight.hostcheck import HostRequirements
from cloudtrain.backends.ssh.records import SshNode, SshRef
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
CLOCKS: tuple[Any, ...] = (
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


NOW_S = time.time()
STATUS = {"state": {"pid": 7, "phase": "running", "started_s": NOW_S, "gone_s": {"1": 2.0}}, "alive": True}
ENDED = {"exit": {"state": "failed", "reason": "error", "ended_s": NOW_S}, "saved": True, "last_s": NOW_S}
CHUNK = {"name": "rank-0.log", "offset": 0, "size": 6, "times": [[0, NOW_S]], "has_more": True}
SEARCHED = {**CHUNK, "times": [], "ends": [5, 6, 6], "left_out": 2, "counts": [3, 0]}
READ = {"chunks": [CHUNK, SEARCHED], "ended": True}
DISK = {"path": "/w", "free_mb": 5, "size_mb": 9, "inodes": 5}
GPU = {"index": 0, "uuid": "g", "name": "A100", "driver": "550.1", "mig": True, "slices": ["m"], "fault": None}
FACTS = {
    **dict.fromkeys(("name", "kernel", "machine", "boot_id", "user", "workdir"), "h"),
    "cores": 4,
    "errors": {"shm": "slow"},
    "own_name": {"name": "h", "addresses": ["10.0.0.1"]},
    "interfaces": [{"name": "eth0", "address": "10.0.0.1", "mtu": 9}],
    "disk": DISK,
    "shm": DISK,
    "write": {"error": None},
    "logind": {"kills": False},
    "python": {"version": "3.11", "executable": "/p", "torch": "2.1", "cuda": "12.1"},
    "limits": {"nofile": [9, 9], "memlock": [-1, -1]},
    "leftovers": [{"pid": 1, "job": "j"}],
    "infiniband": ["m"],
    "holders": [{"name": "m", "job": "x", "since_s": NOW_S}],
    "gpus": {"gpus": [GPU, GPU], "fault": {"kind": "lost", "text": "t"}},
    "gpu_processes": [{"gpu": "g", "name": "p", "pid": 1, "owner": None}],
}
SLURM = {"program": "scontrol", "text": "JobId=5 JobState=RUNNING StartTime=5"}
HOSTS = [Host("h0"), Host("h1")]
REF = SshRef([SshNode(host, "/r", "/c", "/o") for host in HOSTS], 1, False).dump()
CLUSTER = SlurmRef(HOSTS[0], "/f", "/c", "/o", 2, 1, number=5, sent_s=1.0).dump()
BODY = {"checkpoint_dir": None, "gpu_locks": None, "runs_in": {"kind": "none"}}
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**18,
    10**400,
    1e300,
    "",
    "\ud800",
    "9" * 5000,
    [],
    {},
    [[]],
    {"a": None},
    [None],
    1.5,
)


def changed(value: Any) -> Iterator[Any]:
    """Yield the JSON value with an odd value in each place in turn, and without each field."""
    yield from VALUES
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        places = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        for odd in changed(places[key]):
            made = {**places, key: odd}
            yield made if isinstance(value, dict) else list(made.values())
        if isinstance(value, dict):
            yield {name: each for name, each in value.items() if name != key}


def look_at_facts(fleet: Fleet) -> None:
    """Use all facts as a submit does."""
    for host, answer in hosts_placement._facts(fleet, HOSTS[:1], BODY).items():
        preflight.checks({host.name: answer.required().reply}, HostRequirements(ranks=2, gpus=2))
        hosts_placement._free(answer.reply, 2, is_queued=True)


ASKED: dict[str, tuple[Callable[[Fleet, Path], object], Any]] = {
    "verbs.look": (lambda fleet, _: jobs.state(fleet, REF), STATUS),
    "files.logs": (lambda fleet, _: jobs.logs(fleet, REF, None, now=True), {"nodes": {"/r": READ}}),
    "files.log_ends": (
        lambda fleet, _: jobs.logs_from(fleet, REF, None, lines=5, since_s=None),
        {"offsets": {"/r": {"a": 5}}},
    ),
    "files.tree": (lambda fleet, path: copies.brought(fleet, [(HOSTS[0], "/o")], path), {"files": [["a/b", 6]]}),
    "models.back": (lambda fleet, _: models.restore(fleet, None, ["h0"], "/p"), {"version": "v"}),
    "survey.facts": (lambda fleet, _: look_at_facts(fleet), FACTS),
    "slurm.look": (lambda fleet, _: slurm_jobs.state(fleet, CLUSTER), {"nodes": [STATUS, ENDED]}),
    "files.logs slurm": (lambda fleet, _: slurm_jobs.logs(fleet, CLUSTER, None), {"nodes": {"0": READ, "1": READ}}),
    "slurm.run": (lambda fleet, _: Login(fleet, HOSTS[0]).run(["x"]), {"code": 0, "stdout": "", "stderr": ""}),
}


@pytest.mark.parametrize("case", ASKED)
def test_lie_of_a_host_is_told_with_its_name(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed value at any place of an answer is taken, or an error names the host; never an internal error."""
    (ask, sound), verb = ASKED[case], case.partition(" ")[0]
    answers, left = {verb: sound, "slurm.ask": SLURM}, [0]

    async def exchange(channel: HostChannel, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        left[0] -= 1
        return {"told": answers.get(message["verb"], {})}, b"line\n\n" * 2 if left[0] > 0 else b""

    async def opened(channel: HostChannel) -> None:
        channel.about = ABOUT

    monkeypatch.setattr(HostChannel, "_open", opened)
    monkeypatch.setattr(HostChannel, "_exchange", exchange)
    fleet, nameless = open_fleet(), list[str]()
    ask(fleet, tmp_path)
    for answers[verb] in changed(sound):
        left[0] = 9
        try:
            ask(fleet, tmp_path)
        except CloudtrainError as error:
            nameless += [] if "h0" in str(error) or "too long" in str(error) else [str(error)]
    fleet.close()
    assert nameless == []
