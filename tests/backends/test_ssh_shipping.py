"""The code's way to real hosts: sent once, gone on with after a cut, as a difference, and from host to host."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.ssh import masters, shipping
from cloudtrain.backends.ssh.crew import Assignment
from cloudtrain.backends.ssh.fleet import Fleet, _fleet, fleet
from cloudtrain.backends.ssh.hosts import Host
from cloudtrain.entrypoints import processes
from cloudtrain.launcher.backend import Bundle
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.planning.bundle import pack
from doubles.sshhosts.cluster import Cluster

DAY_S = 86_400


@pytest.fixture
def pair(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return two hosts that this very process reaches; its masters end with the test."""
    ssh_pair.apply(monkeypatch)
    _fleet.cache_clear()
    yield ssh_pair
    fleet().close()
    _fleet.cache_clear()
    for pid in processes.with_environment(CLOUDTRAIN_HOME=str(home)):
        processes.kill(pid, signal.SIGKILL)


@pytest.fixture
def code(tmp_path: Path) -> Callable[[int], Bundle]:
    """Return a function that packs so many MB of noise (0: a line), as `blob` of the code folder has them."""

    def make(size_mb: int = 0) -> Bundle:
        folder = tmp_path / "code"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("print('x')\n")
        if size_mb and not (folder / "blob").exists():
            (folder / "blob").write_bytes(random.Random(7).randbytes(size_mb * 1_000_000))
        return pack(folder, (), 10**9, tmp_path / "bundles")

    return make


def seats(cluster: Cluster, count: int = 2, workdir: str = "~/.cloudtrain") -> list[Assignment]:
    """Return the first hosts as seats of a job."""
    lines, found = fleet(), []
    for host in cluster.hosts[:count]:
        to = Host(host.name, python=sys.executable, ssh_config=str(cluster.ssh_config), workdir=workdir)
        lines.tell(to, "clock", {})
        found.append(Assignment(to, host.name, lines.channel(to).about["workdir"], host.address, (), {}))
    return found


def kept(cluster: Cluster, number: int) -> list[str]:
    """Return what lies in a host's cache, without ours to note when it was tidied."""
    folder = cluster.hosts[number].home / ".cloudtrain/cache"
    return sorted(path.name for path in folder.iterdir() if path.name != ".pruned") if folder.exists() else []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Return the calls that are made from here on: host, verb, bytes sent."""
    made: list[tuple[str, str, int]] = []
    plain = Fleet.ask

    def ask(self: Fleet, asked: Any, *args: Any, **more: Any) -> Any:
        made.extend((host.name, call.verb, len(call.payload)) for host, call in asked.items())
        return plain(self, asked, *args, **more)

    monkeypatch.setattr(Fleet, "ask", ask)
    return made


def sent_bytes(cluster: Cluster) -> int:
    """Return how many bytes the client's line has carried to the hosts."""
    words = [*cluster.inside, "ip", "-json", "-s", "link", "show", "eth0"]
    told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return int(told[0]["stats64"]["tx"]["bytes"])


# -- the cache -------------------------------------------------------------------------------------------------------


def test_code_is_sent_once(pair: Cluster, code: Callable[..., Bundle], calls: list[Any]) -> None:
    """A second submit of the same files asks, and sends nothing."""
    bundle, hosts = code(), seats(pair)
    paths = shipping.ship(fleet(), bundle, hosts)
    assert [kept(pair, 0), kept(pair, 1)] == [[f"{bundle.sha256}.tar.gz"]] * 2
    assert Path(paths["h0"]).name == f"{bundle.sha256}.tar.gz"
    calls.clear()
    shipping.ship(fleet(), bundle, hosts)
    assert sorted(calls) == [("h0", "has", 0), ("h1", "has", 0)]


def test_archive_that_is_damaged_on_the_disk_is_sent_again(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """As after a power cut: name and size are right, the bytes are not."""
    bundle, hosts = code(), seats(pair, 1)
    shipping.ship(fleet(), bundle, hosts)
    path = pair.hosts[0].home / ".cloudtrain/cache" / f"{bundle.sha256}.tar.gz"
    path.write_bytes(bytes(bundle.bytes))
    shipping.ship(fleet(), bundle, hosts)
    assert path.read_bytes() == bundle.path.read_bytes()


def test_upload_that_was_cut_goes_on_where_it_was(
    pair: Cluster, code: Callable[..., Bundle], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first submit is killed with two of three blocks there; the next one sends the third."""
    monkeypatch.setattr(shipping, "BLOCK", 1 << 20)
    bundle, hosts = code(3), seats(pair, 1)
    host, asked = hosts[0].host, shipping._asked(bundle)
    fleet().tell(host, "has", asked)
    first = bundle.path.read_bytes()[: 2 << 20]
    fleet().tell(host, "put", {**asked, "offset": 0}, first)
    fleet().run(fleet()._close())
    calls.clear()
    shipping.ship(fleet(), bundle, hosts)
    assert sum(size for _, verb, size in calls if verb == "put") == bundle.bytes - len(first)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_upload_goes_on_when_the_line_breaks_in_the_middle(
    pair: Cluster, code: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same submit connects anew."""
    monkeypatch.setattr(shipping, "BLOCK", 1 << 20)
    monkeypatch.setattr(shipping, "PAUSE_S", 0.1)
    bundle, hosts = code(3), seats(pair, 1)
    plain, broken = Fleet.tell, []

    def tell(self: Fleet, host: Host, verb: str, ask: dict[str, Any], *more: Any, **named: Any) -> Any:
        if verb == "put" and ask["offset"] and not broken:
            broken.append(ask["offset"])
            pair.hosts[0].kill_sshd(with_sessions=True)
            pair.hosts[0].start_sshd()
        return plain(self, host, verb, ask, *more, **named)

    monkeypatch.setattr(Fleet, "tell", tell)
    shipping.ship(fleet(), bundle, hosts)
    assert broken
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_upload_that_arrived_damaged_is_sent_again(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """What an earlier try has left is not the archive's beginning."""
    bundle, hosts = code(1), seats(pair, 1)
    host, asked = hosts[0].host, shipping._asked(bundle)
    fleet().tell(host, "has", asked)
    fleet().tell(host, "put", {**asked, "offset": 0}, b"something else" * 1000)
    shipping.ship(fleet(), bundle, hosts)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_two_submits_of_the_same_code_at_once(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """The second waits for the first one's upload, and finds it there; one that dies is taken over from."""
    bundle, hosts = code(2), seats(pair, 1)
    asked = shipping._asked(bundle)
    other = Fleet(fleet().loop, masters.Masters())
    assert other.tell(hosts[0].host, "has", asked)["arrived"] == 0
    assert fleet().tell(hosts[0].host, "has", asked)["busy"]
    done = threading.Event()

    def second() -> None:
        shipping.ship(fleet(), bundle, hosts)
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(1.0)
    other.run(other._close())
    thread.join(30)
    assert done.is_set()
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_disk_that_is_full_is_said_before_anything_is_sent(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """Which folder, how much is free, how to mend it; nothing is left there."""
    bundle = code(6)
    pair.hosts[0].resize("/data", 12)
    with pytest.raises(CloudtrainError, match=r"h0: the code does not fit: /data/ct/cache has 1\d MB left, 6 MB"):
        shipping.ship(fleet(), bundle, seats(pair, 1, workdir="/data/ct"))
    assert [path for path in pair.hosts[0].path("/data/ct/cache").iterdir() if path.stat().st_size] == []


def test_disk_that_becomes_full_meanwhile_is_said(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """Somebody else writes; what has arrived is taken away, for others need the room too."""
    bundle, hosts = code(20), seats(pair, 1, workdir="/data/ct")
    asked = shipping._asked(bundle)
    fleet().tell(hosts[0].host, "has", asked)
    pair.hosts[0].path("/data/filler").write_bytes(bytes(56_000_000))
    with pytest.raises(CloudtrainError, match="the code does not fit"):
        fleet().tell(hosts[0].host, "put", {**asked, "offset": 0}, bundle.path.read_bytes())
    assert list(pair.hosts[0].path("/data/ct/cache").iterdir()) == []


def test_nothing_is_kept_for_ever(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """What nobody has used for 30 days goes at a submit; the package in use stays."""
    bundle, hosts = code(), seats(pair, 1)
    shipping.ship(fleet(), bundle, hosts)
    workdir = pair.hosts[0].home / ".cloudtrain"
    old = [workdir / "cache" / f"{'0' * 64}.tar.gz", workdir / "cache" / ".dead.part", workdir / "runtime" / ("0" * 64)]
    old[2].mkdir()
    for path in old:
        path.touch()
        os.utime(path, (time.time() - 31 * DAY_S,) * 2)
    make = {"job": f"{workdir}/jobs/x", "root": f"{workdir}/jobs/x/attempt-1/node-0", "owner": "me"}
    make = {key: value.replace(str(pair.hosts[0].folder), "") for key, value in make.items()}
    fleet().tell(hosts[0].host, "make", {**make, "folders": [], "links": {}, "record": {}})
    assert not any(path.exists() for path in old)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]
    assert len(list((workdir / "runtime").iterdir())) == 1


# -- large code ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs the package rsync")
@pytest.mark.parametrize("there", [True, False])
def test_change_in_a_large_file_sends_the_difference(
    pair: Cluster, code: Callable[..., Bundle], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 bytes of 20 MB: the MiB that they are in travels where both ends have rsync, and all where one lacks it."""
    monkeypatch.setattr(shipping, "RSYNC_BYTES", 10 << 20)
    hosts = seats(pair, 1)
    shipping.ship(fleet(), code(20), hosts)
    blob = tmp_path / "code/blob"
    with blob.open("r+b") as file:
        file.seek(10_000_000)
        file.write(bytes(100))
    changed = code()
    if not there:
        pair.hosts[0].run(["mount", "--bind", "/dev/null", shutil.which("rsync") or ""])
    before = sent_bytes(pair)
    shipping.ship(fleet(), changed, hosts)
    travelled = sent_bytes(pair) - before
    assert f"{changed.sha256}.tar.gz" in kept(pair, 0)
    assert len(kept(pair, 0)) == 2
    if there:
        assert travelled < 1_600_000
    else:
        assert changed.bytes < travelled < 1.2 * changed.bytes


@pytest.mark.slow
@pytest.mark.parametrize("reached", [True, False])
def test_slow_uplink_is_used_once(
    pair: Cluster, code: Callable[..., Bundle], calls: list[Any], reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host fetches it from the first; where it cannot, it is sent."""
    monkeypatch.setattr(shipping, "SLOW_S", 0.3)
    monkeypatch.setattr(shipping, "FAN_OUT_S", 0.5)
    bundle, hosts = code(2), seats(pair, 2)
    if not reached:
        for host in pair.hosts:
            host.isolate()
    pair.client.slow(rate_mbit_s=12)
    shipping.ship(fleet(), bundle, hosts)
    pair.client.join()
    times = sum(size for _, verb, size in calls if verb == "put") / bundle.bytes
    assert times == (1 if reached else 2)
    assert [kept(pair, 0), kept(pair, 1)] == [[f"{bundle.sha256}.tar.gz"]] * 2
