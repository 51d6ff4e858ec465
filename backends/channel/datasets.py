"""The transfer of data of `inputs` to the hosts: once to each work folder, by content, as an archive of the channel."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar

from cloudtrain.entrypoints import foreign, processes
from cloudtrain.launcher.backend import Bundle, Shipment
from cloudtrain.launcher.planning import local_data
from cloudtrain.launcher.text import addresses

from . import archives
from .calls import Call, Fleet


class DataArchive(Bundle, checks=True):
    """An archive of data."""

    what: ClassVar[str] = "data"


def place(workdir: str, uri: str, absolute: Callable[[str], str]) -> str:
    """Return the path of an input on a host; `absolute` makes a path of the config absolute."""
    return addresses.placed(workdir, uri).rstrip("/") if addresses.is_beside(uri) else absolute(uri)


def ship(
    fleet: Fleet, shipment: Shipment, receivers: Sequence[archives.Receiver], ports: Sequence[int] | None = None
) -> None:
    """Ensure that every host has the data that goes along. Raises the hosts' errors, ConfigError for changed data."""
    wanted = {
        found["digest"]: name for name, uri in shipment.data.items() if (found := addresses.PINNED.fullmatch(uri))
    }
    if not wanted:
        return
    asked = dict.fromkeys((seat.host for seat in receivers), Call("datasets.there", {"digests": [*wanted]}))
    answers = fleet.ask(asked, archives.LIMIT_S, is_urgent=True)
    for digest, name in wanted.items():
        missing = [seat for seat in receivers if digest not in answers[seat.host].required().reply["kept"]]
        if missing:
            with _packed(shipment, name) as archive:
                archives.ship(fleet, archive, missing, ports)
                call = Call("datasets.unfold", {"sha256": archive.sha256, "digest": digest})
                for answer in fleet.ask({seat.host: call for seat in missing}, archives.FETCH_S).values():
                    answer.required()


@contextmanager
def _packed(shipment: Shipment, name: str) -> Iterator[DataArchive]:
    """Yield an archive of the input, the same bytes for the same files. Raises ConfigError if a file has changed."""
    data, hashes = local_data.as_submitted(shipment.base, name, shipment.data[name])
    processes.make_private(cache := shipment.home / "cache")
    with tempfile.NamedTemporaryFile(dir=cache, prefix="partial-", suffix=".tar.gz") as file:
        with (
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for each in data.sizes:
                _add(tar, data.folder / each, each, data.sizes[each], hashes[each], name)
        file.flush()
        path = Path(file.name)
        yield DataArchive(foreign.sha256_of(path), path, path.stat().st_size, len(hashes), data.bytes)


def _add(tar: tarfile.TarFile, path: Path, name: str, size: int, sha256: str, of: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    try:
        with foreign.opened(path) as source:
            reader = _HashedReader(source)
            tar.addfile(member, reader)  # type: ignore[arg-type]  # tarfile only reads
    except OSError as error:  # also a file that has become shorter
        raise local_data.changed(of, name) from error
    if reader.sha256.hexdigest() != sha256:
        raise local_data.changed(of, name)


class _HashedReader:
    """A file that hashes what is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        data = self._file.read(size)
        self.sha256.update(data)
        return data
