"""The transfer of code and data to the hosts: once to each, by hash; from host to host if our uplink is slow."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cloudtrain.entrypoints import foreign, processes
from cloudtrain.entrypoints.format import counted
from cloudtrain.launcher.backend import Bundle, Shipment
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, ConfigError, UnreachableError
from cloudtrain.launcher.planning import local_data
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.terminal import meter, say

from . import master
from .calls import Call, Fleet, HostAnswer
from .hosts import Host

BLOCK = 4 << 20
LIMIT_S = 600.0  # for a block, on the slowest uplink that is worth waiting for
EXPLAIN_BYTES = 20 << 20  # from this size on a message explains the wait
# Hosts fetch the archive from the first host if an upload takes longer than SLOW_S, and all further uploads FAN_OUT_S.
SLOW_S, FAN_OUT_S = 1.0, 5.0
FETCH_S = 3600.0
RSYNC_BYTES = 50 << 20
TRIES, PAUSE_S = 4, 2.0  # of an upload over a breaking connection, which resumes at the last byte
BUSY_S, LOOK_S = 1800.0, 0.5  # while a competing submit sends the same code


@dataclass(frozen=True)
class Receiver:
    """A host that gets the archive."""

    host: Host
    workdir: str
    """The folder for jobs and caches, an absolute path."""
    address: str
    """For the other hosts."""


class DataArchive(Bundle, checks=True):
    """An archive of data of `inputs`."""

    what: ClassVar[str] = "data"


def ship(fleet: Fleet, bundle: Bundle, seats: Sequence[Receiver], ports: Sequence[int] | None = None) -> dict[str, str]:
    """Ensure that every host has the archive; return the archive's path by the host's name. Raises the hosts' errors.

    `ports`: the lowest and the highest port for transfers of the archive between hosts.
    A host is busy while a competing submit sends the same archive. The free hosts get the archive before the wait for
    busy hosts: otherwise two submits could each wait for a host of the competitor, without end.
    """
    paths, left = dict[str, str](), list(seats)
    end_s, is_first = time.monotonic() + BUSY_S, True
    while True:
        reply = _ask(fleet, bundle, [seat.host for seat in left])
        paths |= {seat.host.name: reply[seat.host]["path"] for seat in left}
        busy = [seat for seat in left if reply[seat.host]["busy"]]
        _ship_to_free(fleet, bundle, [seat for seat in left if seat not in busy], reply, ports)
        if not busy:
            return paths
        _pause(bundle.what, [seat.host.name for seat in busy], end_s, is_first=is_first)
        left, is_first = busy, False


def data_place(workdir: str, uri: str, absolute: Callable[[str], str]) -> str:
    """Return the path of an input on a host; `absolute` makes a path of the config absolute."""
    return addresses.placed(workdir, uri).rstrip("/") if addresses.is_beside(uri) else absolute(uri)


def ship_data(fleet: Fleet, shipment: Shipment, seats: Sequence[Receiver], ports: Sequence[int] | None = None) -> None:
    """Ensure that every host has the data that goes along. Raises the hosts' errors, ConfigError for changed data."""
    wanted = {pin["digest"]: name for name, uri in shipment.data.items() if (pin := addresses.PINNED.fullmatch(uri))}
    if not wanted:
        return
    asked = dict.fromkeys((seat.host for seat in seats), Call("files.has_data", {"digests": [*wanted]}))
    answers = fleet.ask(asked, LIMIT_S, is_urgent=True)
    for digest, name in wanted.items():
        missing = [seat for seat in seats if digest not in answers[seat.host].required().reply["kept"]]
        if missing:
            with _packed(shipment, name) as archive:
                ship(fleet, archive, missing, ports)
                call = Call("files.unfold_data", {"sha256": archive.sha256, "digest": digest})
                for answer in fleet.ask({seat.host: call for seat in missing}, FETCH_S).values():
                    answer.required()


def _ship_to_free(
    fleet: Fleet,
    bundle: Bundle,
    seats: Sequence[Receiver],
    reply: Mapping[Host, Mapping[str, Any]],
    ports: Sequence[int] | None,
) -> None:
    """Send the archive to the hosts without the archive; `reply` has their answers to `has`."""
    missing = [seat for seat in seats if not reply[seat.host]["kept"]]
    if not missing:
        return
    if bundle.bytes > EXPLAIN_BYTES:
        say(f"sending {bundle.bytes / 1e6:.0f} MB of {bundle.what} to {counted(len(missing), 'host')}")
    with_it = [seat for seat in seats if reply[seat.host]["kept"]]
    seconds = FETCH_S if bundle.bytes > EXPLAIN_BYTES else 0.0
    if not with_it:
        begin_s = time.monotonic()
        _upload(fleet, bundle, missing[0].host, reply[missing[0].host]["arrived"])
        seconds, with_it = time.monotonic() - begin_s, missing[:1]
        reply = _ask(fleet, bundle, [seat.host for seat in missing[1:]]) if missing[1:] else {}  # a shared disk
        missing = [seat for seat in missing[1:] if not reply[seat.host]["kept"]]
    if seconds > SLOW_S and seconds * len(missing) > FAN_OUT_S:
        missing = _fan_out(fleet, bundle, with_it[0], missing, ports)
    _upload_all(fleet, bundle, {seat.host: reply[seat.host]["arrived"] for seat in missing})


def _ask(fleet: Fleet, bundle: Bundle, hosts: Sequence[Host]) -> dict[Host, dict[str, Any]]:
    """Return each host's part of the archive. A free host then accepts the archive from this process."""
    call = Call("files.has", {**_asked(bundle), "bytes": bundle.bytes})
    return _all(fleet.ask(dict.fromkeys(hosts, call), LIMIT_S, is_urgent=True))


def _pause(what: str, busy: Sequence[str], end_s: float, *, is_first: bool) -> None:
    """Wait LOOK_S for competing submits; the first time, print the hosts. Raises CapacityError after `end_s`."""
    if time.monotonic() > end_s:
        hint = f"end it, or change a file of the {what}"
        raise CapacityError(f"another submit is still sending the same {what} to {', '.join(busy)}", hint=hint)
    if is_first:
        say(f"another submit is sending the same {what} to {', '.join(busy)}: waiting for it")
    time.sleep(LOOK_S)


def _asked(bundle: Bundle) -> dict[str, Any]:
    """Return the archive's hash, and an identifier of this machine and user, as several may send the archive."""
    name = "".join(letter for letter in socket.gethostname() if letter.isalnum() or letter == "-")
    return {"sha256": bundle.sha256, "sender": f"{name}-{os.getuid()}"}


def _all(answers: Mapping[Host, HostAnswer]) -> dict[Host, dict[str, Any]]:
    return {host: answer.required().reply for host, answer in answers.items()}


def _upload_all(fleet: Fleet, bundle: Bundle, arrived: Mapping[Host, int]) -> None:
    """Send a small archive to all hosts at once, a large archive to the hosts in turn: they share our uplink."""
    if bundle.bytes > BLOCK or any(arrived.values()):
        for host, begin in arrived.items():
            _upload(fleet, bundle, host, begin)
        return
    put = Call("files.put", {**_asked(bundle), "offset": 0}, bundle.path.read_bytes())
    _all(fleet.ask(dict.fromkeys(arrived, put), LIMIT_S, is_urgent=True))
    kept = _all(fleet.ask(dict.fromkeys(arrived, Call("files.keep", _asked(bundle))), LIMIT_S, is_urgent=True))
    for host, reply in kept.items():
        if not reply["kept"]:
            _upload(fleet, bundle, host, 0)


def _upload(fleet: Fleet, bundle: Bundle, host: Host, arrived: int) -> None:
    """Send the archive to a host, from the end of an earlier try; a large archive by rsync from an older archive."""
    end_s = time.monotonic() + BUSY_S
    for number in range(TRIES):
        try:
            if number:
                while (reply := _ask(fleet, bundle, [host])[host])["busy"]:
                    _pause(bundle.what, [host.name], end_s, is_first=False)
                if reply["kept"]:
                    return
                arrived = reply["arrived"]
            if _sent(fleet, bundle, host, arrived):
                return
        except UnreachableError:
            if number == TRIES - 1:
                raise
            time.sleep(PAUSE_S)
    message = f"{host.name}: the {bundle.what} has arrived damaged {TRIES} times"
    raise ConfigError(message, hint="look at its memory and its disk")


def _sent(fleet: Fleet, bundle: Bundle, host: Host, arrived: int) -> bool:
    """Return whether the host keeps the archive; False if the archive arrived damaged, or the channel was reopened."""
    asked = _asked(bundle)
    has_older = bundle.what == Bundle.what  # archives of data do not stay
    changed = _changed(fleet, bundle, host) if has_older and bundle.bytes > RSYNC_BYTES and not arrived else ""
    if changed and fleet.call(host, "files.keep", {**asked, "changed": changed}, limit_s=LIMIT_S)["kept"]:
        return True
    label = f"{bundle.what} to {host.name}"
    with bundle.path.open("rb") as file, meter(label, bundle.bytes) as sent:
        sent(file.seek(min(arrived, bundle.bytes)))
        while block := file.read(BLOCK):
            where = {**asked, "offset": file.tell() - len(block)}
            if not fleet.call(host, "files.put", where, block, LIMIT_S)["taken"]:
                return False  # the connection has broken, and a new channel took the call
            sent(len(block))
    return bool(fleet.call(host, "files.keep", asked, limit_s=LIMIT_S)["kept"])


def _changed(fleet: Fleet, bundle: Bundle, host: Host) -> str:
    """Update an older archive on the host by rsync, since most bytes are equal; return the path, "" without rsync."""
    if host.is_here or shutil.which("rsync") is None:
        return ""
    path = str(fleet.call(host, "files.basis", _asked(bundle))["path"])
    over = [*master.argv(host, fleet.masters.socket(host), "-o", "ControlMaster=no"), *host.target[:-2]]
    if not path or any(set(" \"'") & set(word) for word in over):  # rsync splits its remote shell command at blanks
        return ""
    command = ["rsync", "--inplace", "--no-whole-file", "--protect-args", "--timeout=60", "-e", " ".join(over)]
    name = f"[{host.name}]" if ":" in host.name else host.name
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [*command, "--", str(bundle.path), f"{name}:{path}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=FETCH_S,
        )
        return path
    return ""


def _fan_out(
    fleet: Fleet, bundle: Bundle, source: Receiver, targets: Sequence[Receiver], ports: Sequence[int] | None
) -> list[Receiver]:
    """Have the hosts fetch the archive from `source`; return the hosts without success."""
    try:
        about = {"folder": f"{source.workdir}/cache", "address": source.address, "ports": ports}
        offer = fleet.call(source.host, "copying.offer", about)
    except CloudtrainError:
        return list(targets)
    asked = {**offer, "name": f"{bundle.sha256}.tar.gz"}
    calls = {seat.host: Call("copying.fetch", {**asked, "into": f"{seat.workdir}/cache"}) for seat in targets}
    fetched = fleet.ask(calls, FETCH_S, is_urgent=True)
    kept = fleet.ask({host: Call("files.keep", _asked(bundle)) for host, answer in fetched.items() if not answer.error})
    return [seat for seat in targets if seat.host not in kept or not kept[seat.host].reply.get("kept")]


@contextlib.contextmanager
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
                if not _is_added(tar, each, data.sizes[each], data.folder / each, hashes[each]):
                    raise local_data.changed(name, each)
        file.flush()
        path = Path(file.name)
        yield DataArchive(foreign.sha256_of(path), path, path.stat().st_size, len(hashes), data.bytes)


def _is_added(tar: tarfile.TarFile, name: str, size: int, path: Path, sha256: str) -> bool:
    """Add the file; return False if it has another content or size, also if it changes meanwhile."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    with contextlib.suppress(OSError), foreign.opened(path) as source:  # also of a file that has become shorter
        tar.addfile(member, source)
        return foreign.sha256_of(path) == sha256  # after the packing: also a change before
    return False
