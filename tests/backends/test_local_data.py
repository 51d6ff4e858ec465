"""The transfer of data that goes along: once, continued after a cut, and refused if the data change meanwhile."""

import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from wholejobs import SETTINGS, STAND_INS

from cloudtrain.backends.channel import archives
from cloudtrain.backends.channel.calls import Fleet
from cloudtrain.backends.channel.hosts import Host
from cloudtrain.backends.job_folder import JobFolder
from cloudtrain.backends.ssh.hosts_placement import Assignment
from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import files
from cloudtrain.entrypoints.host.calls import Here
from cloudtrain.entrypoints.stores.folder import FolderStore
from cloudtrain.launcher.backend import Bundle, Shipment
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import local_data
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget

DAY_S = 86_400
FILES = {"a.bin": "x" * 3000, "empty": "", "sub dir/b.txt": "bb", "sub dir/ü +#%?&=;@.txt": "odd"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a script and three files of data."""
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / name).write_text(text)
    (folder / "loop.py").write_text("print('x')\n")
    return folder


def pinned(base: Path) -> str:
    """Return the input with the hash of its files."""
    return f"data/@sha256:{local_data.data_at(base / 'data').digest()}"


# -- buckets ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sagemaker", "azureml", "vertex"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """Return the backend and its stand-in, which starts no container."""
    double = request.getfixturevalue(STAND_INS[request.param])
    for name, value in double.environ.items():
        monkeypatch.setenv(name, value)
    if request.param == "sagemaker":
        double.role()
        double.bucket()
    double.settings(execute=False)
    return request.param, double


def objects(double: Any) -> list[str]:
    """Return the names of the data in the store."""
    if hasattr(double, "blobs"):
        names = double.blobs()
    elif hasattr(double, "objects"):
        names = double.objects()
    else:
        listed = double.client("s3").list_objects_v2(Bucket="cloudtrain-tests")
        names = [each["Key"] for each in listed.get("Contents", ())]
    return sorted(name.partition("/data/")[2] for name in names if "/data/" in name)


def put(double: Any, name: str, text: str) -> None:
    """Store an object below data/, as a submit that was cut has done."""
    if hasattr(double, "put_blob"):
        double.put_blob(f"cloudtrain/data/{name}", text)
    elif hasattr(double, "put_object"):
        double.put_object(f"cloudtrain/data/{name}", text)
    else:
        double.client("s3").put_object(Bucket="cloudtrain-tests", Key=f"cloudtrain/data/{name}", Body=text.encode())


def test_bucket_gets_the_data_once(cli: Any, base: Path, cloud: tuple[str, Any]) -> None:
    """An upload that was cut is continued; a second submit sends nothing, by its hash also without the local files."""
    backend, double = cloud
    where = SETTINGS[backend].replace("role: ", "bucket: cloudtrain-tests, role: ")
    (base / "cloudtrain.yaml").write_text(f"name: j\nscript: loop.py\n{where}inputs: {{train: data}}\n")
    digest = pinned(base).rpartition(":")[2]
    put(double, f"{digest}/a.bin", FILES["a.bin"])
    put(double, f"{digest}/sub dir/b.txt", "b")  # of another size
    first = cli.ok("submit", "-d", "-y", "--name", "one", cwd=base)
    assert "uploading 3 files, 0.0 kB, of inputs.train to" in first.stderr, first.stderr
    assert "; 1 file of an earlier upload stay" in first.stderr
    assert objects(double) == sorted([f"{digest}.json", *(f"{digest}/{name}" for name in FILES)])
    text = pinned(base)
    for name in ("two", "three"):
        again = cli.ok("submit", "-d", "-y", "--name", name, "--set", f"inputs.train={text}", cwd=base)
        assert "uploading" not in again.stderr
        shutil.rmtree(base / "data", ignore_errors=True)


@pytest.mark.parametrize("cloud", ["sagemaker"], indirect=True)
def test_only_changed_data_are_named_as_a_change(cli: Any, base: Path, cloud: tuple[str, Any]) -> None:
    """A resume compares the data with the data of the submit, and not the path with the path and its hash."""
    where = SETTINGS[cloud[0]].replace("role: ", "bucket: cloudtrain-tests, role: ")
    file = base / "cloudtrain.yaml"
    file.write_text(f"name: j\nscript: loop.py\n{where}inputs: {{train: ./data}}\nlimits: {{max_duration: 1h}}\n")
    cli.ok("submit", "-d", "-y", "--name", "one", cwd=base)
    cli.ok("stop", "--now", "-y", "one")
    file.write_text(file.read_text().replace("1h", "2h"))
    assert "since the submit (limits.max_duration: 1h -> 2h);" in cli.ok("resume", "--dry-run", "one").stderr
    update = ("resume", "--dry-run", "--update-config", "one")
    assert "config: limits.max_duration: 1h -> 2h" in cli.ok(*update).stderr.splitlines()
    (base / "data" / "a.bin").write_text("other")
    said, known = cli.ok(*update).stderr, "./data/@sha256:[0-9a-f]{64}"
    assert re.search(f"config: inputs.train: {known} -> {known}, limits.max_duration", said), said


REFUSED = {
    "sagemaker": ("PutObject", "error", {"code": "AccessDenied", "message": "no", "status": 403}),
    "azureml": ("blob.put", "error", {"code": "AuthorizationPermissionMismatch", "message": "no", "status": 403}),
    "vertex": ("storage.insert", "PERMISSION_DENIED", {}),
}


def test_upload_without_the_right_to_write_is_refused(cli: Any, base: Path, cloud: tuple[str, Any]) -> None:
    """The error names the right, also in the middle of the files; no job exists."""
    backend, double = cloud
    operation, kind, more = REFUSED[backend]
    (base / "cloudtrain.yaml").write_text(f"name: j\nscript: loop.py\n{SETTINGS[backend]}inputs: {{train: data}}\n")
    double.fault(operation, kind, after=2, **more)
    done = cli("submit", "-d", "-y", cwd=base)
    assert (done.code, "not allowed" in done.stderr, "hint: " in done.stderr) == (4, True, True), done.stderr
    assert cli("list", "--json").json["jobs"] == []
    double.clear_faults()
    cli.ok("submit", "-d", "-y", cwd=base)


class _ChangingStore(FolderStore):
    """A store during whose first upload a program writes to the data."""

    def __init__(self, root: Path, source: Path, when: str) -> None:
        super().__init__(root)
        self._source, self._when = source, when

    def put(self, source: Path | bytes, name: str) -> None:
        if self._when == "gone" and source == self._source:
            self._source.unlink()
        if self._when == "before" and source == self._source:
            self._source.write_text("y" * 3000)
        super().put(source, name)
        if self._when == "after" and source == self._source:
            self._source.write_text("y" * 3000)
        if self._when == "cut" and source == self._source:
            self._when = ""
            raise ConnectionError("the network is gone")


@pytest.mark.parametrize("when", ["before", "after", "gone"])
def test_data_that_change_while_they_are_uploaded_are_refused(base: Path, tmp_path: Path, when: str) -> None:
    """The job never reads a mixture: the changed file and the list of the files are not in the bucket."""
    (tmp_path / "store").mkdir()
    text, place = pinned(base), f"file://x/{pinned(base).rpartition(':')[2]}/"
    store = _ChangingStore(tmp_path / "store", base / "data" / "a.bin", when)
    with pytest.raises(ConfigError, match=r"`a.bin` changed while it was sent"):
        JobFolder(lambda uri: store).fill("train", text, place, base)
    left = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert "a.bin" not in left
    assert not any(name.endswith(".json") for name in left)


def test_upload_that_was_cut_is_continued(base: Path, tmp_path: Path) -> None:
    """The next submit sends the missing files; a complete place needs no local files."""
    (tmp_path / "store").mkdir()
    text, place = pinned(base), f"file://x/{pinned(base).rpartition(':')[2]}/"
    store = _ChangingStore(tmp_path / "store", base / "data" / "a.bin", "cut")
    with pytest.raises(ConnectionError):
        JobFolder(lambda uri: store, workers=1).fill("train", text, place, base)
    JobFolder(lambda uri: store).fill("train", text, place, base)
    shutil.rmtree(base / "data")
    JobFolder(lambda uri: store).fill("train", text, place, base)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with pytest.raises(ConfigError, match="the job's place has no copy of the data"):
        JobFolder(lambda uri: store).fill("train", text, place, base)


# -- hosts -----------------------------------------------------------------------------------------------------------


@dataclass
class _Hosts:
    """Two hosts, and the calls to them: host, verb, bytes sent."""

    cluster: Cluster
    seats: list[Assignment]
    calls: list[tuple[str, str, int]]

    def ship(self, base: Path, home: Path, count: int = 2) -> None:
        """Send the data to the first hosts."""
        bundle = Bundle("0" * 64, base, 0, 0, 0)
        shipment = Shipment(bundle, home, base, data={"train": pinned(base)})
        self.calls.clear()
        archives.ship_data(fleet(), shipment, self.seats[:count])

    def place(self, number: int, digest: str) -> Path:
        """Return the folder of the data on a host, as this machine sees it."""
        return self.cluster.hosts[number].home / ".cloudtrain" / "data" / digest


@pytest.fixture
def hosts(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hosts]:
    """Return two hosts that this process reaches; its masters end with the test."""
    ssh_pair.apply(monkeypatch)
    forget()
    lines, seats = fleet(), []
    for host in ssh_pair.hosts[:2]:
        to = Host(host.name, python=sys.executable, ssh_config=str(ssh_pair.ssh_config))
        lines.call(to, "calls.clock", {})
        seats.append(Assignment(to, lines.channel(to).about["workdir"], host.address, host.name, (), {}))
    calls: list[tuple[str, str, int]] = []
    plain = Fleet.ask

    def ask(self: Fleet, asked: Any, *args: Any, **more: Any) -> Any:
        calls.extend((host.name, call.verb, len(call.payload)) for host, call in asked.items())
        return plain(self, asked, *args, **more)

    monkeypatch.setattr(Fleet, "ask", ask)
    yield _Hosts(ssh_pair, seats, calls)
    end(home)


def test_hosts_get_the_data_once(hosts: _Hosts, base: Path, home: Path) -> None:
    """Each host has the files, read-only and without an archive; a second submit only asks."""
    hosts.ship(base, home, 1)
    hosts.ship(base, home)
    digest = pinned(base).rpartition(":")[2]
    for number in range(2):
        place = hosts.place(number, digest)
        found = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
        assert found == FILES
        assert {stat.S_IMODE((place / name).stat().st_mode) for name in FILES} == {0o444}
        assert not list((place.parents[1] / "cache").glob("*.gz"))
        assert [each.name for each in place.parent.iterdir()] == [digest]
    hosts.ship(base, home)
    assert sorted(hosts.calls) == [("h0", "files.has_data", 0), ("h1", "files.has_data", 0)]
    assert not list((home / "cache").glob("partial-*"))


def test_data_that_change_on_the_way_to_hosts_are_refused(
    hosts: _Hosts, base: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that became shorter, longer or other since the submit was prepared is not sent under the old hash."""
    text, file = pinned(base), base / "data" / "a.bin"
    shipment = Shipment(Bundle("0" * 64, base, 0, 0, 0), home, base, data={"train": text})
    plain = local_data.as_submitted

    def changing(content: str) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            found = plain(*args)
            file.write_text(content)
            return found

        return look

    for content in ("x", "y" * 3000, "z" * 4000):
        file.write_text(FILES["a.bin"])
        monkeypatch.setattr(local_data, "as_submitted", changing(content))
        with pytest.raises(ConfigError, match="changed while it was sent"):
            archives.ship_data(fleet(), shipment, hosts.seats)
    assert not hosts.place(0, text.rpartition(":")[2]).exists()


def test_unused_data_are_removed_from_hosts(hosts: _Hosts, base: Path, home: Path) -> None:
    """After 30 days without a submit that uses the data, a later submit removes them; data in use stay."""
    hosts.ship(base, home, 1)
    used = hosts.place(0, pinned(base).rpartition(":")[2])
    old = used.with_name("0" * 64)
    old.mkdir()
    for each in (used, old):
        os.utime(each, (time.time() - 40 * DAY_S,) * 2)
    hosts.ship(base, home, 1)
    made = {"job": str(used.parents[1] / "jobs/x"), "root": str(used.parents[1] / "jobs/x/attempt-1/node-0")}
    made |= {"folders": [], "links": {}, "owner": "me", "record": {}}
    fleet().call(hosts.seats[0].host, "verbs.make", made)
    assert [used.exists(), old.exists()] == [True, False]


def test_second_host_of_a_shared_disk_finds_the_data(base: Path, home: Path, tmp_path: Path) -> None:
    """The host that comes later needs no archive; an archive that is gone without the data is reported."""
    here = Here(tmp_path / "work", "", 0o022, "h0")
    (tmp_path / "work" / "cache").mkdir(parents=True)
    shipment = Shipment(Bundle("0" * 64, base, 0, 0, 0), home, base, data={"train": pinned(base)})
    with archives._packed(shipment, "train") as archive:
        shutil.copy(archive.path, tmp_path / "work" / "cache" / f"{archive.sha256}.tar.gz")
    digest = pinned(base).rpartition(":")[2]
    for _ in range(2):
        files.unfold_data(here, sha256=archive.sha256, digest=digest)
    assert files.has_data(here, digests=[digest, "0" * 64]) == {"kept": [digest]}
    with pytest.raises(Refused, match="the data cannot be unpacked"):
        files.unfold_data(here, sha256=archive.sha256, digest="0" * 64)
