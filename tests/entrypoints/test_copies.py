"""Copies from node to node, over real sockets on loopback: complete copies, hostile peers and faults."""

import contextlib
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import savedentries

from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import copying, files
from cloudtrain.entrypoints.replication import copies, entries, partial_files
from cloudtrain.entrypoints.replication import wire as copywire
from cloudtrain.entrypoints.replication.copies import CopyError
from cloudtrain.entrypoints.replication.wire import Seal, Wire
from doubles.waiting import until

TOKEN = "a" * 64
MIB = 1 << 20
HOST = "127.0.0.1"
Serve = Callable[..., int]
Talk = Callable[[Callable[[Wire], None]], int]
checkpoint = functools.partial(savedentries.checkpoint, size=3 * MIB)  # more than the buffers of a connection


class Relay:
    """A connection to the server with a fault after a number of bytes from the server, counted per connection.

    `flip`: the next byte is altered; `cut`: the connection ends; `hold`: no further bytes before `let_go`.
    """

    def __init__(self, port: int, after: int, then: str) -> None:
        self.port_there, self.after, self.then = port, after, then
        self.let_go = threading.Event()
        self.listening = socket.create_server((HOST, 0))
        self.port = self.listening.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self.listening.accept()[0]
                there = socket.create_connection((HOST, self.port_there))
                for sock in (here, there):  # keep held bytes out of the buffers
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                self.open += [here, there]
                threading.Thread(target=self._pass, args=(here, there, None), daemon=True).start()
                threading.Thread(target=self._pass, args=(there, here, self.after), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16 if left is None else max(min(left, 1 << 16), 1))):
                if left == 0:
                    if self.then == "cut":
                        break
                    if self.then == "hold":
                        self.let_go.wait(20)
                    data[0] ^= self.then == "flip"
                    left = None
                left = None if left is None else left - len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        self.let_go.set()
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        for sock in [self.listening, *self.open]:
            sock.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return the target folder, which does not exist yet."""
    return tmp_path / "here"


@pytest.fixture
def serve(there: Path) -> Iterator[Serve]:
    """Return a function that offers a folder and returns the port."""
    made: list[copies.Server] = []

    def serve(folder: Path = there) -> int:
        made.append(copies.Server(folder, HOST, 0, TOKEN))
        return made[-1].address[1]

    yield serve
    for server in made:
        server.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Return a function that puts a relay before a server."""
    made: list[Relay] = []

    def put(port: int, after: int, then: str) -> Relay:
        made.append(Relay(port, after, then))
        return made[-1]

    yield put
    for each in made:
        each.close()


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[socket.socket], object]], int]]:
    """Return a function that starts a server of another program, which handles one connection; it returns the port."""
    made: list[tuple[socket.socket, threading.Thread]] = []

    def start(handle: Callable[[socket.socket], object]) -> int:
        listening = socket.create_server((HOST, 0))

        def run() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as sock:
                handle(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        made.append((listening, thread))
        return listening.getsockname()[1]

    yield start
    for listening, thread in made:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


@pytest.fixture
def talk(listen: Any) -> Talk:
    """Return a function that starts a server with the token, which runs the given dialogue with one client."""

    def start(say: Callable[[Wire], None]) -> int:
        def handle(sock: socket.socket) -> None:
            wire = Wire(sock, 10)
            wire.meet(seal(is_server=True))
            wire.receive()
            say(wire)
            sock.recv(1)

        port: int = listen(handle)
        return port

    return start


def seal(*, is_server: bool = False, purpose: str = copies.PURPOSE) -> Seal:
    """Return one end of the protocol."""
    return Seal(TOKEN, purpose, is_server=is_server)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files by path."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))} if folder.exists() else {}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


def fetch(port: int, name: str, into: Path, **options: Any) -> copies.Fetched:
    """Fetch with the right token."""
    return copies.fetch(HOST, port, TOKEN, name, into, **options)


def started(port: int, name: str, into: Path, **options: Any) -> tuple[threading.Thread, list[CopyError], list[float]]:
    """Fetch in a thread; return the thread, its fault, and the time of its end."""
    faults: list[CopyError] = []
    ended: list[float] = []

    def run() -> None:
        try:
            fetch(port, name, into, **options)
        except CopyError as error:
            faults.append(error)
        ended.append(time.monotonic())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, faults, ended


def hostile_entry(**changes: Any) -> dict[str, Any]:
    """Return an entry as a server would describe one."""
    usual = {"name": "x", "fingerprint": "f", "bytes": 3, "files": 1, "written_ns": 1, "step": None}
    return {**usual, "is_folder": True, "is_ours": False, **changes}


def test_folders_and_files_arrive_unchanged(serve: Serve, there: Path, here: Path) -> None:
    """Bytes, names, times and fingerprints are equal; unfinished and set-aside entries are not offered."""
    checkpoint(there, 120)
    (there / "run" / "deep" / "er").mkdir(parents=True)
    (there / "run" / "deep" / "er" / "ä \udc80").write_bytes(b"")
    (there / "run" / "large").write_bytes(os.urandom(2 * MIB + 17))
    (there / "best.json").write_text("{}")
    os.utime(there / "best.json", ns=(1, 123456789123456789))
    for name in ("step-00000121.tmp", ".hidden", "first-start.json", "step-00000001.old-1"):
        (there / name).write_text("no")
    port = serve()
    found = copies.entries(HOST, port, TOKEN)
    assert [entry.name for entry in found] == ["step-00000120", "run", "best.json"]
    assert [fetch(port, entry.name, here).bytes for entry in found] == [entry.bytes for entry in found]
    assert contents(here) == {
        name: data
        for name, data in contents(there).items()
        if name[:3] in ("ste", "run", "bes") and "." not in name.partition("/")[0].removesuffix(".json")
    }
    assert entries.list_entries(here) == found


def test_copy_that_exists_is_not_fetched_again(serve: Serve, there: Path, here: Path, tmp_path: Path) -> None:
    """An equal copy costs no bytes; a newer one replaces a fetched copy, or sets an entry aside if requested."""
    note = tmp_path / "fetched.json"
    checkpoint(there, 120)
    port = serve()
    assert fetch(port, "step-00000120", here, note=note).bytes > 3 * MIB
    assert fetch(port, "step-00000120", here, note=note).bytes == 0
    checkpoint(there, 120)
    assert fetch(port, "step-00000120", here, note=note).bytes > 3 * MIB
    assert os.listdir(here) == ["step-00000120"]
    checkpoint(there, 120)
    fetch(port, "step-00000120", here, sets_aside=True)
    assert sorted(name[:17] for name in os.listdir(here)) == ["step-00000120", "step-00000120.old"]
    assert contents(here / "step-00000120") == contents(there / "step-00000120")


def test_entry_saved_on_this_host_stays(serve: Serve, there: Path, here: Path, tmp_path: Path) -> None:
    """An entry of the host's own, a modified copy and a link all stay, and the error says so."""
    port, options = serve(), {"note": tmp_path / "fetched.json"}
    here.mkdir()
    for name in ("own", "written", "link"):
        (there / name).write_text("theirs")
    fetch(port, "written", here, **options)
    for name in ("own", "written"):
        (here / name).write_text("mine")
    (here / "link").symlink_to("own")
    (there / "written").write_text("theirs, later")
    for name in ("own", "written", "link"):
        with pytest.raises(copies.AlreadySaved, match="a different entry has that name here, and stays unchanged"):
            fetch(port, name, here, **options)
    assert contents(here) == dict.fromkeys(("own", "written", "link"), b"mine")


def test_copy_stays_replaceable_after_a_failed_successor(
    serve: Serve, there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between note and rename does not turn the old copy into a saved entry."""
    port, options = serve(), {"note": tmp_path / "fetched.json"}

    def end(*args: Any, **options: Any) -> None:
        raise OSError("killed")

    (there / "run").write_text("old")
    fetch(port, "run", here, **options)
    (there / "run").write_text("newer")
    with monkeypatch.context() as patch:
        patch.setattr(partial_files, "place", end)
        with pytest.raises(CopyError, match="killed"):
            fetch(port, "run", here, **options)
    assert contents(here) == {"run": b"old"}
    fetch(port, "run", here, **options)
    assert contents(here) == {"run": b"newer"}


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "instead of a copy"])
def test_entry_saved_during_a_copy_stays(
    serve: Serve, there: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A slow copy never replaces an entry that was written during the copy."""
    entry, mine = there / "run" / "x" if "folder" in kind else there / "run", here / entry_path(kind)
    port, options = serve(), {"note": tmp_path / "fetched.json"}

    def save() -> None:
        entry.parent.mkdir(exist_ok=True)
        entry.write_bytes(os.urandom(10))

    save()
    if kind == "instead of a copy":
        fetch(port, "run", here, **options)
        save()
    plain = partial_files.sync

    def sync(*args: Any) -> None:
        plain(*args)
        mine.parent.mkdir(exist_ok=True)
        mine.mkdir() if kind == "empty folder" else mine.write_text("mine")

    monkeypatch.setattr(partial_files, "sync", sync)
    with pytest.raises(copies.AlreadySaved, match="stays unchanged"):
        fetch(port, "run", here, **options)
    assert contents(here) == ({} if kind == "empty folder" else {entry_path(kind): b"mine"})
    assert os.listdir(here) == ["run"]


def entry_path(kind: str) -> str:
    """Return the path that a rank writes."""
    return "run/y" if kind == "folder" else "run"


@pytest.mark.parametrize("is_folder", [True, False])
def test_name_taken_at_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    """An entry that gets the name after the last check keeps the name."""
    partial, final = tmp_path / ".x.tmp", tmp_path / "x"
    for path, text in ((partial, "copy"), (final, "mine")):
        if is_folder:
            path.mkdir()
        (path / "f" if is_folder else path).write_text(text)
    before = contents(tmp_path)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(partial_files.NameTaken):
        partial_files.place(partial, final)
    assert contents(tmp_path) == before


def test_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets its name without a hard link, and an existing entry keeps its name."""

    def link(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / ".x.tmp").write_text("copy")
    partial_files.place(tmp_path / ".x.tmp", tmp_path / "x")
    (tmp_path / ".x.tmp").write_text("another")
    with pytest.raises(partial_files.NameTaken):
        partial_files.place(tmp_path / ".x.tmp", tmp_path / "x")
    assert contents(tmp_path) == {".x.tmp": b"another", "x": b"copy"}


def test_thousand_small_files(serve: Serve, there: Path, here: Path) -> None:
    """A folder with a thousand files is copied whole."""
    (there / "many").mkdir()
    for number in range(1000):
        (there / "many" / str(number)).write_text(f"{number}")
    fetch(serve(), "many", here)
    assert contents(here) == contents(there)


def test_many_at_once(serve: Serve, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients above the server's limit wait for their turn."""
    checkpoint(there, 1)
    monkeypatch.setattr(copies, "CONNECTIONS", 3)
    port = serve()
    for thread, faults, _ in [started(port, "step-00000001", tmp_path / f"host-{number}") for number in range(12)]:
        thread.join()
        assert faults == []
    assert all(contents(tmp_path / f"host-{number}") == contents(there) for number in range(12))


def test_second_copy_of_one_entry_is_delayed(serve: Serve, there: Path, here: Path, relay: Any) -> None:
    """Two copies of an entry to one folder would collide: the second waits and uses the first."""
    checkpoint(there, 1)
    line, done = relay(serve(), MIB, "hold"), list[int]()
    threads = [
        threading.Thread(target=lambda: done.append(fetch(line.port, "step-00000001", here).bytes)) for _ in range(2)
    ]
    threads[0].start()
    until(lambda: list(here.glob(".*.tmp/model*")))
    threads[1].start()
    stop = threading.Event()
    stop.set()
    with pytest.raises(copies.Halted):
        fetch(line.port, "step-00000001", here, stop=stop)
    line.let_go.set()
    for thread in threads:
        thread.join()
    assert sorted(done)[0] == 0 < sorted(done)[1]
    assert contents(here) == contents(there)


def test_wrong_token_learns_nothing(serve: Serve, there: Path, here: Path) -> None:
    """A client with a wrong token gets neither a list nor an entry; the error gives the reason."""
    checkpoint(there, 1)
    port = serve()
    with pytest.raises(CopyError, match=rf"cannot learn what {HOST}:{port} has: the peer has a different token"):
        copies.entries(HOST, port, "b" * 64)
    with pytest.raises(CopyError, match="has a different token"):
        copies.fetch(HOST, port, "", "step-00000001", here)
    assert contents(here) == {}
    with pytest.raises(ValueError, match="token"):
        copies.Server(there, HOST, 0, "")


def test_token_is_never_sent(serve: Serve, there: Path) -> None:
    """Neither end ever writes the token to the connection."""
    checkpoint(there, 1)
    port = serve()
    sent: list[bytes] = []
    plain = Wire.write

    def listen(wire: Wire, block: memoryview) -> None:
        sent.append(bytes(block))
        plain(wire, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "write", listen)
        assert copies.entries(HOST, port, TOKEN)
    assert len(sent) >= 5
    assert TOKEN.encode() not in b"".join(sent)


@pytest.mark.parametrize("purpose", ["copies", "agents", None])
def test_key_is_derived_for_copies_alone(serve: Serve, purpose: str | None) -> None:
    """A client with a key for a different purpose, or with the token as the key, is rejected."""
    mine = seal(purpose=purpose or copies.PURPOSE)
    if purpose is None:
        mine._key = TOKEN.encode()
    with socket.create_connection((HOST, serve())) as sock:
        wire, is_accepted = Wire(sock, 5), False
        with contextlib.suppress(copywire.WireError):
            wire.meet(mine)
            is_accepted = True
    assert is_accepted == (purpose == copies.PURPOSE)


def test_client_without_the_token_gets_no_answer(serve: Serve) -> None:
    """The server closes the connection after a wrong proof, and reads no request."""
    with socket.create_connection((HOST, serve())) as sock:
        mine = seal()
        head = sock.recv(4)
        mine.meet(sock.recv(int.from_bytes(head, "big")))
        proof = mine.pack({})
        sock.sendall(mine.hello() + proof[:-1] + bytes([proof[-1] ^ 1]) + mine.pack({"want": "list"}))
        with contextlib.suppress(ConnectionResetError):
            assert len(sock.recv(1 << 10)) == len(proof)
            assert sock.recv(1 << 10) == b""


def test_server_without_the_token_is_not_trusted(listen: Any, here: Path) -> None:
    """A process that took over the port does not know the token, so its data is rejected."""
    port = listen(lambda sock: Wire(sock, 5).meet(Seal("guess", copies.PURPOSE, is_server=True)))
    with pytest.raises(CopyError, match="the peer has a different token: the peer belongs to another job"):
        fetch(port, "x", here)


STRANGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0\0\0\2{]",
    b"\0\0\0\2[]",
    b"\0\0\0\1\xff",
    b"\0\0\4\0" + b"[" * 1024,
    b"\0\0\4\0" + b'{"nonce":%s}' % (b"9" * 1014),
    b"\0\1\0\0" + b" " * 65536,
    b'\0\0\0\x0c{"nonce":""}',
]


@pytest.mark.parametrize("said", STRANGE, ids=range(len(STRANGE)))
def test_foreign_server_is_reported(listen: Any, said: bytes, here: Path) -> None:
    """A different program that listens on the port is called that."""
    with pytest.raises(CopyError, match="the peer is not cloudtrain"):
        fetch(listen(lambda sock: (sock.sendall(said), sock.recv(1))), "x", here)


def test_refused_connection_is_reported(here: Path) -> None:
    """The message of a refused connection has the address and the purpose."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CopyError, match=rf"cannot copy x from {HOST}:{port} to .* on .*: Connection refused"):
        fetch(port, "x", here)


HOSTILE = [
    *("..", ".", "", "/etc/passwd", "../secret", "x/../../secret", "a/b", ".hidden", "x\0y", "step-1.tmp"),
    *(None, 7, ["x"]),
]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("want", ["get", "sees", "put"])
def test_hostile_client_gets_nothing(serve: Serve, there: Path, want: str, name: Any) -> None:
    """A client with the token that asks for an invalid name gets no entry, and the server continues."""
    (there.parent / "secret").write_text("secret")
    (there / ".hidden").write_text("secret")
    port = serve()
    with socket.create_connection((HOST, port)) as sock:
        wire = Wire(sock, 5)
        wire.meet(seal())
        wire.send({"want": want, "name": name})
        assert wire.receive() == {"fault": "it offers nothing of that name"}
    assert copies.entries(HOST, port, TOKEN) == []


@pytest.mark.parametrize("garbage", [b"", b"\0\0\0\0", b"\xff" * 100, *STRANGE], ids=range(3 + len(STRANGE)))
def test_garbage_does_not_end_the_server(serve: Serve, garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes foreign connections and still serves real clients."""
    monkeypatch.setattr(copies, "CONNECTIONS", 1)
    port = serve()
    for _ in range(3):
        with socket.create_connection((HOST, port)) as sock:
            sock.sendall(garbage)
    assert copies.entries(HOST, port, TOKEN) == []


def test_link_to_a_place_of_the_entry_is_copied(serve: Serve, there: Path, here: Path) -> None:
    """A script's `latest -> step-20` leads to the copy on the other node, also if the files of it come later."""
    (there / "run/sub").mkdir(parents=True)
    (there / "run/a.pt").write_text("a")
    links = {"last.pt": "a.pt", "sub/last.pt": "../a.pt", "latest": "sub", "later": "sub/later"}
    for name, target in links.items():
        (there / "run" / name).symlink_to(target)
    for name, target in (("all", "."), ("up", ".."), ("round", "sub/../../run"), ("abs", str(there / "run/a.pt"))):
        (there / "run" / name).symlink_to(target)
    fetch(serve(), "run", here)
    assert {name: str((here / "run" / name).readlink()) for name in links} == links
    assert sorted(os.listdir(here / "run")) == ["a.pt", "last.pt", "later", "latest", "sub"]


@pytest.mark.parametrize(
    "links", [{"x": ["../y", 1]}, {"../x": ["y", 1]}, {"x": ["/y", 1]}, {"x": 3}, {"x": [3, 1]}, 4]
)
def test_hostile_links_end_the_copy(links: Any, tmp_path: Path) -> None:
    """A link that leads elsewhere, or a message of another form, leaves no link."""
    with pytest.raises(copywire.WireError):
        partial_files.link(tmp_path, links)
    assert os.listdir(tmp_path) == []


def test_links_are_not_followed(serve: Serve, there: Path, here: Path) -> None:
    """Neither linked entries, nor links inside an entry, nor a link that replaces a file are offered."""
    (there.parent / "secret").write_text("secret")
    (there / "out").symlink_to(there.parent / "secret")
    (there / "up").symlink_to(there.parent)
    (there / "run").mkdir()
    (there / "run" / "plain").write_text("plain")
    (there / "run" / "out").symlink_to(there.parent / "secret")
    (there / "run" / "up").symlink_to("../..")
    os.mkfifo(there / "run" / "pipe")
    port = serve()
    assert [entry.name for entry in copies.entries(HOST, port, TOKEN)] == ["run"]
    for name in ("out", "up"):
        with pytest.raises(copies.Gone):
            fetch(port, name, here)
    fetch(port, "run", here)
    assert contents(here) == {"run/plain": b"plain"}
    with entries.open_root(there) as root:
        for path in ("out", "up/secret", "pipe"):
            with pytest.raises(OSError):  # noqa: PT011  # the system's message
                entries.open_file(root, "run", path)


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out", "", ".", "a//b", "a/./b", "a\0b", 3])
def test_hostile_server_cannot_leave_the_folder(talk: Talk, here: Path, path: Any) -> None:
    """A path that leads elsewhere ends the copy, and no file remains."""

    def say(wire: Wire) -> None:
        wire.send({"entry": hostile_entry()})
        wire.send({"file": {"path": path, "size": 3, "written_ns": 1}})
        wire.write(memoryview(b"bad"))
        wire.send({"sha256": hashlib.sha256(b"bad").hexdigest()})

    with pytest.raises(CopyError, match=r"not a valid file of x|protocol version"):
        fetch(talk(say), "x", here)
    assert sorted(path.name for path in here.parent.rglob("*")) == ["here", "there"][: len(os.listdir(here.parent))]


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": "y"}, {"name": "../x"}, {"bytes": -1}, {"bytes": 2}, {"bytes": 4}, {"bytes": 1 << 70}, {"step": 5}),
        *({"files": 2}, {"files": "1"}, {"more": 1}, {"is_folder": False}, {"is_ours": True}, {"fingerprint": "other"}),
    ],
)
def test_hostile_server_must_send_as_announced(
    talk: Talk, here: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content that differs from the announcement, or is invalid, never gets a name."""

    def say(wire: Wire) -> None:
        file = entries.File("f", 3, 1)
        wire.send({"entry": {**hostile_entry(fingerprint=entries.fingerprint_of([file], None)), **changes}})
        wire.send({"file": {"path": "f", "size": 3, "written_ns": 1}})
        wire.write(memoryview(b"bad"))
        wire.send({"sha256": hashlib.sha256(b"bad").hexdigest()})
        wire.send({"end": entries.fingerprint_of([file], None)})

    monkeypatch.setattr(copywire, "STALL_S", 2.0)
    with pytest.raises(CopyError):
        fetch(talk(say), "x", here)
    assert contents(here) == {}


def test_files_with_one_name_are_refused(talk: Talk, here: Path) -> None:
    """No file is written twice, and no file is also a folder."""

    def say(wire: Wire) -> None:
        wire.send({"entry": hostile_entry(files=2, bytes=6)})
        for path in ("f", "f/g"):
            wire.send({"file": {"path": path, "size": 3, "written_ns": 1}})
            wire.write(memoryview(b"bad"))
            wire.send({"sha256": hashlib.sha256(b"bad").hexdigest()})

    with pytest.raises(CopyError, match="File exists"):
        fetch(talk(say), "x", here)
    assert contents(here) == {}


def test_links_here_are_not_written_through(serve: Serve, there: Path, here: Path) -> None:
    """A local link with the entry's name stays, and so does the link's target."""
    checkpoint(there, 1)
    elsewhere = checkpoint(here.parent / "elsewhere", 1)
    before = contents(elsewhere)
    here.mkdir()
    (here / "step-00000001").symlink_to(elsewhere)
    with pytest.raises(copies.AlreadySaved):
        fetch(serve(), "step-00000001", here, sets_aside=True)
    assert contents(elsewhere) == before
    assert (here / "step-00000001").readlink() == elsewhere


@pytest.mark.parametrize("fate", ["altered", "repeated", "left out", "sent back", "of a connection before"])
def test_manipulated_message_is_refused(fate: str) -> None:
    """An attacker on the network cannot write, repeat, drop, reflect or record a message."""
    (server, client), (before, _) = met(), met()
    client.open(server.pack({})[4:])
    frames = [server.pack({"sha256": "00"})[4:], server.pack({"end": 1})[4:]]
    before.pack({})
    if fate == "repeated":
        assert client.open(frames[0]) == {"sha256": "00"}
    sent = {
        "altered": frames[0].replace(b"00", b"01"),
        "repeated": frames[0],
        "left out": frames[1],
        "sent back": client.pack({"sha256": "00"})[4:],
        "of a connection before": before.pack({"sha256": "00"})[4:],
    }[fate]
    with pytest.raises(copywire.WireError, match="altered in transit"):
        client.open(sent)


def met() -> tuple[Seal, Seal]:
    """Return both ends of a new connection, after the exchange of nonces."""
    server, client = seal(is_server=True), seal()
    client.meet(server.hello()[4:])
    server.meet(client.hello()[4:])
    return server, client


@pytest.mark.parametrize(
    ("after", "how", "words"),
    [
        (MIB, "flip", r"model-0-of-1\.pt was altered in transit"),
        *((after, "flip", None) for after in (20, 400, 3 * MIB + 1500)),  # in messages
        *((after, "cut", r"closed the connection|reset") for after in (0, 10, 300, MIB)),
        *((after, "hold", "has stalled") for after in (0, 300, MIB)),
    ],
)
def test_damaged_connection_leaves_nothing(
    serve: Serve, there: Path, here: Path, relay: Any, after: int, how: str, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Altered content is reported with the file's name; a cut or stalled connection ends the copy in time.

    The next try copies all.
    """
    checkpoint(there, 1)
    port = serve()
    line = relay(port, after, how)
    monkeypatch.setattr(copywire, "STALL_S", 0.3 if how == "hold" else 3.0)
    begin_s = time.monotonic()
    with pytest.raises(CopyError, match=words):
        fetch(line.port, "step-00000001", here)
    assert how != "hold" or 0.3 <= time.monotonic() - begin_s < 5
    assert contents(here) == {}
    monkeypatch.undo()
    fetch(port, "step-00000001", here)
    assert contents(here) == contents(there)


def test_slow_drip_is_given_up(talk: Talk, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends a byte now and then cannot hold a copy open."""
    over = threading.Event()

    def drip(wire: Wire) -> None:
        wire.send({"entry": hostile_entry(bytes=MIB)})
        wire.send({"file": {"path": "f", "size": MIB, "written_ns": 1}})
        while not over.wait(0.05):
            wire.write(memoryview(b"x"))

    monkeypatch.setattr(copywire, "STALL_S", 0.4)
    with pytest.raises(CopyError, match="has stalled"):
        fetch(talk(drip), "x", here)
    over.set()


def test_stalled_client_is_disconnected(serve: Serve, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that neither reads nor writes does not keep its place."""
    checkpoint(there, 1, size=12 * MIB)
    monkeypatch.setattr(copies, "CONNECTIONS", 1)
    monkeypatch.setattr(copywire, "STALL_S", 0.3)
    port = serve()
    with socket.create_connection((HOST, port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire = Wire(sock, 5)
        wire.meet(seal())
        wire.send({"want": "get", "name": "step-00000001"})
        assert until(lambda: copies.entries(HOST, port, TOKEN))


def test_stop_ends_a_copy_at_once(serve: Serve, there: Path, here: Path, relay: Any) -> None:
    """A running copy ends, and no files remain."""
    checkpoint(there, 1)
    stop = threading.Event()
    thread, faults, ended = started(relay(serve(), MIB, "hold").port, "step-00000001", here, stop=stop)
    until(lambda: list(here.glob(".*.tmp/model*")))
    begin_s = time.monotonic()
    stop.set()
    thread.join()
    assert isinstance(faults[0], copies.Halted)
    assert ended[0] - begin_s < 1
    assert contents(here) == {}


def test_closed_server_ends_its_copies(there: Path, here: Path, relay: Any) -> None:
    """A closed server releases its port and its connections."""
    checkpoint(there, 1, size=12 * MIB)
    server = copies.Server(there, HOST, 0, TOKEN)
    line = relay(server.address[1], MIB, "hold")
    thread, faults, _ = started(line.port, "step-00000001", here)
    until(lambda: list(here.glob(".*.tmp/model*")))
    server.close()
    with contextlib.closing(socket.create_server((HOST, server.address[1]))):
        line.let_go.set()
        thread.join()
    assert len(faults) == 1
    assert contents(here) == {}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk needs the right to mount: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_is_reported_beforehand(
    serve: Serve, there: Path, full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that does not fit does not start; the message gives both figures and the folder."""
    checkpoint(there, 1, size=6 * MIB)
    monkeypatch.setattr(copies, "MARGIN_BYTES", 0)
    with pytest.raises(copies.NoRoom, match=rf"to {full} on .*: 0.01 GB are needed there, and 0.00 GB are free"):
        fetch(serve(), "step-00000001", full)
    assert os.listdir(full) == []


def test_disk_that_fills_up_meanwhile(serve: Serve, there: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is reported, and the disk is left without partial files."""
    checkpoint(there, 1, size=6 * MIB)
    monkeypatch.setattr(partial_files, "check_room", lambda into, needed: None)
    with pytest.raises(copies.NoRoom, match="No space left on device"):
        fetch(serve(), "step-00000001", full)
    assert os.listdir(full) == []
    checkpoint(there, 2, size=MIB)
    fetch(serve(), "step-00000002", full)
    assert contents(full / "step-00000002") == contents(there / "step-00000002")


@pytest.fixture
def run_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a process of ours and ends the process with the test."""
    made: list[subprocess.Popen[str]] = []

    def run(text: str, *args: str | Path) -> subprocess.Popen[str]:
        text = f"import sys; from pathlib import Path; from cloudtrain.entrypoints.replication import copies; {text}"
        command = [sys.executable, "-c", text, *map(str, args)]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield run
    for process in made:
        process.kill()
        process.communicate()


def test_killed_server_leaves_nothing(there: Path, here: Path, relay: Any, run_python: Any) -> None:
    """After kill -9 of the server during a copy, no entry exists, and the error is reported."""
    checkpoint(there, 1, size=12 * MIB)
    text = "s = copies.Server(Path(sys.argv[1]), '127.0.0.1', 0, 'a' * 64); print(s.address[1], flush=True); input()"
    process = run_python(text, there)
    line = relay(int(process.stdout.readline()), 2 * MIB, "hold")
    thread, faults, _ = started(line.port, "step-00000001", here)
    until(lambda: list(here.glob(".*.tmp/model*")))
    process.kill()
    process.wait()
    line.let_go.set()
    thread.join()
    assert len(faults) == 1
    assert "step-00000001" in str(faults[0])
    assert contents(here) == {}


def test_killed_client_leaves_a_partial_copy_for_cleanup(
    serve: Serve, there: Path, here: Path, relay: Any, run_python: Any
) -> None:
    """kill -9 of the client leaves only an unfinished copy, which the next copy removes."""
    checkpoint(there, 1)
    (there / "other").write_text("other")
    port = serve()
    line = relay(port, 2 * MIB, "hold")
    text = "copies.fetch('127.0.0.1', int(sys.argv[1]), 'a' * 64, 'step-00000001', Path(sys.argv[2]))"
    process = run_python(text, str(line.port), here)
    until(lambda: list(here.glob(".*.tmp/model*")))
    process.kill()
    process.wait()
    assert os.listdir(here) == [f".step-00000001.{socket.gethostname()}-{process.pid}.tmp"]
    assert entries.list_entries(here) == []
    (here / ".step-00000001.another-host-1.tmp").mkdir()
    fetch(port, "other", here)
    assert sorted(os.listdir(here)) == [".step-00000001.another-host-1.tmp", "other"]


def test_changing_entry_is_not_copied(serve: Serve, there: Path, here: Path, relay: Any) -> None:
    """A file that changes during the copy raises Gone, and old and new bytes are never mixed."""
    (there / "last.ckpt").write_bytes(os.urandom(12 * MIB))
    line = relay(serve(), MIB, "hold")
    thread, faults, _ = started(line.port, "last.ckpt", here)
    until(lambda: list(here.glob(".*.tmp")))
    with (there / "last.ckpt").open("r+b") as file:  # at no moment shorter: that ends the connection
        file.write(os.urandom(12 * MIB))
    line.let_go.set()
    thread.join()
    assert [type(fault) for fault in faults] == [copies.Gone]
    assert contents(here) == {}


def test_shared_folder_is_recognised(serve: Serve, there: Path, here: Path) -> None:
    """A folder that both ends see differs from a folder with equal entries; no probe file remains."""
    port = serve()
    assert copies.shares(HOST, port, TOKEN, there)
    assert not copies.shares(HOST, port, TOKEN, here)
    assert os.listdir(there) == os.listdir(here) == []


def test_newest_entry_is_complete(there: Path) -> None:
    """`newest` gives the highest complete step; without steps, the entry written last."""
    assert copying.newest(folder=str(there / "none")) == {}
    (there / "a.pt").write_text("a")
    (there / "b.pt").write_text("b")
    os.utime(there / "a.pt", (3e9, 3e9))
    assert copying.newest(folder=str(there))["name"] == "a.pt"
    checkpoint(there, 2, size=10)
    checkpoint(there, 30, size=10)
    (checkpoint(there, 40, size=10) / "plain.pt").unlink()
    told = copying.newest(folder=str(there))
    assert (told["name"], told["step"]) == ("step-00000030", 30)
    assert abs(told["mtime"] - time.time()) < 60
    assert json.loads(json.dumps(told)) == told


def test_linked_folder_is_listed_after_the_real_one(there: Path) -> None:
    """Of `latest -> step-20` a download has the files of step-20, wherever the link stands; a link back is no loop."""
    (there / "z/step-20").mkdir(parents=True)
    (there / "z/step-20/m.pt").write_text("m")
    (there / "z/again").symlink_to("..")
    (there / "a").mkdir()
    (there / "a/latest").symlink_to("../z/step-20")
    outside = there.parent / "outside"
    outside.mkdir()
    (outside / "x.pt").write_text("x")
    (there / "far").symlink_to(outside)
    assert files.tree(folder=str(there)) == {"files": [["far/x.pt", 1], ["z/step-20/m.pt", 1]]}


def test_verbs_offer_and_fetch(there: Path, here: Path) -> None:
    """A host offers its folder with a fresh token; a second host fetches one entry, or all."""
    checkpoint(there, 1)
    (there / "last.ckpt").write_text("last")
    told = copying.offer(folder=str(there), address=HOST)
    assert len(told["token"]) == 64
    asked = {**told, "name": "step-00000001", "into": str(here)}
    copying.fetch(**asked)
    assert os.listdir(here) == ["step-00000001"]
    copying.fetch(**{**asked, "name": None})
    assert contents(here) == contents(there)
    with pytest.raises(Refused, match="cannot copy none from"):
        copying.fetch(**{**asked, "name": "none"})
    copying._offers.pop().close()


def test_fetch_of_all_entries_keeps_local_ones(there: Path, here: Path, tmp_path: Path) -> None:
    """Missing entries arrive and fetched ones are updated; local and newer entries stay."""
    for name in ("lacking", "fetched", "own", "later"):
        (there / name).write_text("old")
    told = copying.offer(folder=str(there), address=HOST)
    asked = {**told, "name": None, "into": str(here), "note": str(tmp_path / "fetched.json")}
    copying.fetch(**asked)
    (here / "lacking").unlink()
    (here / "own").write_text("mine")
    for name in ("fetched", "own"):
        (there / name).write_text("theirs")
        os.utime(there / name, (3e9, 3e9))
    os.utime(there / "later", (1, 1))
    copying.fetch(**asked)
    kept = {"lacking": b"old", "fetched": b"theirs", "own": b"mine", "later": b"old"}
    assert contents(here) == kept
    copying.fetch(**{**asked, "note": None})
    assert contents(here) == kept
    copying._offers.pop().close()


def test_offer_uses_its_port_range(there: Path) -> None:
    """An offer takes a port of the range; a full range, or a foreign address, is reported."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"all ports from {port} to {port} are taken; allow others"):
            copying.offer(folder=str(there), address=HOST, ports=[port, port])
    assert copying.offer(folder=str(there), address=HOST, ports=[port, port])["port"] == port
    copying._offers.pop().close()
    with pytest.raises(Refused, match="is it an address of this host"):
        copying.offer(folder=str(there), address="192.0.2.1", ports=[port, port])


def test_import_loads_no_heavy_package() -> None:
    """Agents keep these modules during the whole job: no torch and no third-party packages."""
    modules = "cloudtrain.entrypoints.replication.replicas, cloudtrain.entrypoints.host.copying"
    text = f"import {modules}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
