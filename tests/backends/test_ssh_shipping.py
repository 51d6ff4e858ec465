"""The transfer of code to real hosts: sent once, continued after a cut, as a difference, and from host to host."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.channel import archives, master
from cloudtrain.backends.channel.calls import Fleet
from cloudtrain.backends.channel.hosts import Host
from cloudtrain.backends.ssh.hosts_placement import Assignment
from cloudtrain.launcher.backend import Bundle
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.planning.bundle import pack
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget
from doubles.waiting import until

DAY_S = 86_400


@pytest.fixture
def pair(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return two hosts that this process reaches; its masters end with the test."""
    ssh_pair.apply(monkeypatch)
    forget()
    yield ssh_pair
    end(home)


@pytest.fixture
def code(tmp_path: Path) -> Callable[[int], Bundle]:
    """Return a function that packs this many MB of noise (0: a line), as the file `blob` of the code folder."""

    def make(size_mb: int = 0) -> Bundle:
        folder = tmp_path / "code"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("print('x')\n")
        if size_mb and not (folder / "blob").exists():
            (folder / "blob").write_bytes(random.Random(7).randbytes(size_mb * 1_000_000))
        return pack(folder, (), 10**9, tmp_path / "bundles")

    return make


def seats(cluster: Cluster, count: int = 2, workdir: str = "~/.cloudtrain") -> list[Assignment]:
    """Return assignments of a job to the first hosts."""
    lines, found = fleet(), []
    for host in cluster.hosts[:count]:
        to = Host(host.name, python=sys.executable, ssh_config=str(cluster.ssh_config), workdir=workdir)
        lines.call(to, "calls.clock", {})
        found.append(Assignment(to, lines.channel(to).about["workdir"], host.address, host.name, (), {}))
    return found


def kept(cluster: Cluster, number: int) -> list[str]:
    """Return the files in a host's cache, without our note on the last cleanup."""
    folder = cluster.hosts[number].home / ".cloudtrain/cache"
    return sorted(path.name for path in folder.iterdir() if path.name != ".pruned") if folder.exists() else []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Return the calls from now on: host, verb, bytes sent."""
    made: list[tuple[str, str, int]] = []
    plain = Fleet.ask

    def ask(self: Fleet, asked: Any, *args: Any, **more: Any) -> Any:
        made.extend((host.name, call.verb, len(call.payload)) for host, call in asked.items())
        return plain(self, asked, *args, **more)

    monkeypatch.setattr(Fleet, "ask", ask)
    return made


def sent_bytes(cluster: Cluster) -> int:
    """Return the number of bytes from the client to the hosts."""
    words = [*cluster.inside, "ip", "-json", "-s", "link", "show", "eth0"]
    told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return int(told[0]["stats64"]["tx"]["bytes"])


# -- the cache -------------------------------------------------------------------------------------------------------


def test_code_is_sent_once(pair: Cluster, code: Callable[..., Bundle], calls: list[Any]) -> None:
    """A second submit of the same files only asks, and sends no bytes."""
    bundle, hosts = code(), seats(pair)
    paths = archives.ship(fleet(), bundle, hosts)
    assert [kept(pair, 0), kept(pair, 1)] == [[f"{bundle.sha256}.tar.gz"]] * 2
    assert Path(paths["h0"]).name == f"{bundle.sha256}.tar.gz"
    calls.clear()
    archives.ship(fleet(), bundle, hosts)
    assert sorted(calls) == [("h0", "files.has", 0), ("h1", "files.has", 0)]


def test_archive_damaged_on_the_disk_is_sent_again(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """After a power cut name and size may be right, but the bytes wrong."""
    bundle, hosts = code(), seats(pair, 1)
    archives.ship(fleet(), bundle, hosts)
    path = pair.hosts[0].home / ".cloudtrain/cache" / f"{bundle.sha256}.tar.gz"
    path.write_bytes(bytes(bundle.bytes))
    archives.ship(fleet(), bundle, hosts)
    assert path.read_bytes() == bundle.path.read_bytes()


def test_interrupted_upload_continues_at_its_offset(
    pair: Cluster, code: Callable[..., Bundle], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first submit dies after two of three blocks; the next submit sends the third."""
    monkeypatch.setattr(archives, "BLOCK", 1 << 20)
    bundle, hosts = code(3), seats(pair, 1)
    host, asked = hosts[0].host, archives._asked(bundle)
    fleet().call(host, "files.has", {**asked, "bytes": bundle.bytes})
    first = bundle.path.read_bytes()[: 2 << 20]
    fleet().call(host, "files.put", {**asked, "offset": 0}, first)
    fleet().run(fleet()._close())
    calls.clear()
    archives.ship(fleet(), bundle, hosts)
    assert sum(size for _, verb, size in calls if verb == "files.put") == bundle.bytes - len(first)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_upload_continues_after_a_broken_connection(
    pair: Cluster, code: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same submit connects again."""
    monkeypatch.setattr(archives, "BLOCK", 1 << 20)
    monkeypatch.setattr(archives, "PAUSE_S", 0.1)
    bundle, hosts = code(3), seats(pair, 1)
    plain, broken = Fleet.call, []

    def tell(self: Fleet, host: Host, verb: str, ask: dict[str, Any], *more: Any, **named: Any) -> Any:
        if verb == "files.put" and ask["offset"] and not broken:
            broken.append(ask["offset"])
            pair.hosts[0].kill_sshd(with_sessions=True)
            pair.hosts[0].start_sshd()
        return plain(self, host, verb, ask, *more, **named)

    monkeypatch.setattr(Fleet, "call", tell)
    archives.ship(fleet(), bundle, hosts)
    assert broken
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_upload_that_arrived_damaged_is_sent_again(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """A partial file of an earlier try is not the archive's beginning."""
    bundle, hosts = code(1), seats(pair, 1)
    host, asked = hosts[0].host, archives._asked(bundle)
    fleet().call(host, "files.has", {**asked, "bytes": bundle.bytes})
    fleet().call(host, "files.put", {**asked, "offset": 0}, b"something else" * 1000)
    archives.ship(fleet(), bundle, hosts)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_two_simultaneous_submits_upload_once(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """The second submit waits for the first upload and uses the file; if the first dies, the second takes over."""
    bundle, hosts = code(2), seats(pair, 1)
    asked = archives._asked(bundle)
    other = Fleet(fleet().loop, master.Masters())
    assert other.call(hosts[0].host, "files.has", {**asked, "bytes": bundle.bytes})["arrived"] == 0
    assert fleet().call(hosts[0].host, "files.has", {**asked, "bytes": bundle.bytes})["busy"]
    done = threading.Event()

    def second() -> None:
        archives.ship(fleet(), bundle, hosts)
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not done.wait(1.0)
    other.run(other._close())
    thread.join(30)
    assert done.is_set()
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]


def test_submits_that_wait_for_each_other_both_end(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """A submit serves its free hosts before the wait for a busy host: a competing submit may need these free hosts."""
    bundle, hosts = code(), seats(pair)
    other = Fleet(fleet().loop, master.Masters())
    assert not other.call(hosts[0].host, "files.has", {**archives._asked(bundle), "bytes": bundle.bytes})["busy"]
    thread = threading.Thread(target=archives.ship, args=(fleet(), bundle, hosts))
    thread.start()
    until(lambda: kept(pair, 1) == [f"{bundle.sha256}.tar.gz"], 30)
    archives.ship(other, bundle, list(reversed(hosts)))
    thread.join(30)
    assert not thread.is_alive()
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]
    other.run(other._close())


def test_full_disk_is_reported_before_the_upload(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """The message has the folder, the free space and the remedy; no file remains."""
    bundle = code(6)
    pair.hosts[0].resize("/data", 12)
    with pytest.raises(
        CloudtrainError, match=r"h0: the archive of code or data does not fit: /data/ct/cache has 1\d MB left, [67] MB"
    ):
        archives.ship(fleet(), bundle, seats(pair, 1, workdir="/data/ct"))
    assert [path for path in pair.hosts[0].path("/data/ct/cache").iterdir() if path.stat().st_size] == []


def test_disk_that_fills_up_during_the_upload_is_reported(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """If a second program fills the disk, the partial upload is removed to free space."""
    bundle, hosts = code(20), seats(pair, 1, workdir="/data/ct")
    asked = archives._asked(bundle)
    fleet().call(hosts[0].host, "files.has", {**asked, "bytes": bundle.bytes})
    pair.hosts[0].path("/data/filler").write_bytes(bytes(56_000_000))
    with pytest.raises(CloudtrainError, match="the archive of code or data does not fit"):
        fleet().call(hosts[0].host, "files.put", {**asked, "offset": 0}, bundle.path.read_bytes())
    assert list(pair.hosts[0].path("/data/ct/cache").iterdir()) == []


def test_old_packages_are_removed(pair: Cluster, code: Callable[..., Bundle]) -> None:
    """A submit removes files without use for 30 days; the package in use stays."""
    bundle, hosts = code(), seats(pair, 1)
    archives.ship(fleet(), bundle, hosts)
    workdir = pair.hosts[0].home / ".cloudtrain"
    old = [workdir / "cache" / f"{'0' * 64}.tar.gz", workdir / "cache" / ".dead.part", workdir / "runtime" / ("0" * 64)]
    old[2].mkdir()
    for path in old:
        path.touch()
        os.utime(path, (time.time() - 31 * DAY_S,) * 2)
    make = {"job": f"{workdir}/jobs/x", "root": f"{workdir}/jobs/x/attempt-1/node-0", "owner": "me"}
    make = {key: value.replace(str(pair.hosts[0].folder), "") for key, value in make.items()}
    fleet().call(hosts[0].host, "verbs.make", {**make, "folders": [], "links": {}, "record": {}})
    assert not any(path.exists() for path in old)
    assert kept(pair, 0) == [f"{bundle.sha256}.tar.gz"]
    assert len(list((workdir / "runtime").iterdir())) == 1


# -- large code ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs the package rsync")
@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_change_in_a_large_file_sends_the_difference(
    pair: Cluster, code: Callable[..., Bundle], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of 100 bytes in 20 MB, one MiB travels if both ends have rsync, else the whole archive."""
    monkeypatch.setattr(archives, "RSYNC_BYTES", 10 << 20)
    hosts = seats(pair, 1)
    archives.ship(fleet(), code(20), hosts)
    blob = tmp_path / "code/blob"
    with blob.open("r+b") as file:
        file.seek(10_000_000)
        file.write(bytes(100))
    changed = code()
    if not there:
        pair.hosts[0].run(["mount", "--bind", "/dev/null", shutil.which("rsync") or ""])
    before = sent_bytes(pair)
    archives.ship(fleet(), changed, hosts)
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
    """The second host fetches the code from the first; without a connection between them, the client sends twice."""
    monkeypatch.setattr(archives, "SLOW_S", 0.3)
    monkeypatch.setattr(archives, "FAN_OUT_S", 0.5)
    bundle, hosts = code(2), seats(pair, 2)
    if not reached:
        for host in pair.hosts:
            host.isolate()
    pair.client.slow(rate_mbit_s=12)
    archives.ship(fleet(), bundle, hosts)
    pair.client.join()
    times = sum(size for _, verb, size in calls if verb == "files.put") / bundle.bytes
    assert times == (1 if reached else 2)
    assert [kept(pair, 0), kept(pair, 1)] == [[f"{bundle.sha256}.tar.gz"]] * 2
