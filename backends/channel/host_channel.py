"""A channel to a host: Python serves cloudtrain's calls there, without installation and without shell quoting.

ssh runs one constant command under any login shell, and all data go over the standard input. The channel sends our
package once, identified by its hash, and then answers calls (entrypoints/host/calls.py) until the channel is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from cloudtrain.entrypoints.contract import ContractError, NodeStatus
from cloudtrain.entrypoints.records import is_number
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, UnreachableError

from . import master as masters
from . import mux
from .hosts import Host
from .master import BROKEN, Masters, fault_of, is_passing, last_words, no_ssh

CALL_S = 60.0
MAX_LINE = 64 << 20  # bytes of an answer, and of the data behind it
MOST_AHEAD_S = 10 * 365 * 86_400.0  # of a host's clock
MAX_NOISE = 1 << 20  # bytes that a login may print before our first program answers
END_S = 5.0  # for ssh's exit code and standard error, after the end of the host's output
PAUSES_S = (0.3, 0.6, 1.2)  # before each retry of a temporary failure
_ODD, _ODD_HINT = "its answer is not as cloudtrain gives it", "is another program in the place of ours?"
# The interpreter's path comes first, on a line of its own. The command has no quote, `$` or `!` that fish or csh read.
MARK = b"::cloudtrain::\n"  # as in entrypoints/host/bootstrap.py
SHELL_HINT = "`{} echo hello` must print hello: see the login's shell and start-up files there, and sshd's ForceCommand"
COMMAND = (
    'exec sh -c \'IFS= read -r p; case "$p" in "~/"*) p="$HOME/${p#??}";; esac; '
    'exec "$p" -I -S -c "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"\''
)

_LARGEST = 1 << 63
_TYPES: dict[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": lambda value: isinstance(value, str),
    "text or null": lambda value: value is None or isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "whole": lambda value: type(value) is int and abs(value) <= _LARGEST,
    "count": lambda value: type(value) is int and 0 <= value < _LARGEST,
    "time": is_number,
}


@dataclass
class HostChannel:
    """One process's channel to a host: opens on the first call, runs one call at a time, reopens after a break."""

    host: Host
    masters: Masters
    about: dict[str, Any] = field(default_factory=dict)  # the host's report about itself: workdir, address, ...
    ahead_s: float = 0.0  # the host's clock minus ours
    long_calls: int = 0  # under way or waiting, counted by the caller
    _process: asyncio.subprocess.Process | mux.Session | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _words: bytearray = field(default_factory=bytearray)
    _reader: asyncio.Task[None] | None = None
    _failure: tuple[float, UnreachableError] | None = None  # of the last try to open: when, and the error

    async def call(
        self, verb: str, ask: dict[str, Any], payload: bytes = b"", limit_s: float = CALL_S
    ) -> tuple[dict[str, Any], bytes]:
        """Return the verb's result as JSON, and the bytes that follow.

        Raises UnreachableError, CredentialError, ConfigError, also with the host's own words. If the connection breaks
        during a call, the call raises, because the host may or may not have run the call. A failed try to open is the
        answer to all calls that have waited for it.
        """
        asked_s = time.monotonic()
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                if self._failure is not None and self._failure[0] > asked_s:
                    raise self._failure[1]
                try:
                    await self._open()
                except UnreachableError as error:
                    self._failure = time.monotonic(), error
                    raise
            message = {"verb": verb, "ask": ask, "size": len(payload)}
            try:
                reply, data = await asyncio.wait_for(self._exchange(message, payload), limit_s)
            except (asyncio.TimeoutError, asyncio.CancelledError, OSError, EOFError, ValueError) as error:
                words = await self._closed()
                if isinstance(error, asyncio.CancelledError):
                    raise
                if isinstance(error, asyncio.TimeoutError):
                    raise UnreachableError(f"{self.host.name} has not answered for {limit_s:.0f} s") from error
                odd = str(error) if isinstance(error, ValueError) else ""
                said = odd or last_words(words) or "its line is cut, or it went down"
                raise UnreachableError(f"{self.host.name}: {BROKEN}: {said}") from error
        if "refused" in reply:
            raise ConfigError(f"{self.host.name}: {reply['refused']}")
        if "failed" in reply:
            raise ConfigError(f"{self.host.name}: {verb.partition('.')[2]} failed: {reply['failed']}")
        form, told = _forms().get(verb, {"*": "any"}), reply["told"]  # a verb without a form: not used, or a record
        form = _forms()[form] if isinstance(form, str) else form
        if not _fits(told, form):
            raise ConfigError(f"{self.host.name}: {_ODD}", hint=_ODD_HINT)
        # Some answers go on to other hosts: no field that we do not know.
        known = {name: told[name] for name in told if not {"*", name, f"{name}?"}.isdisjoint(form)}
        return Told(self.host.name, known), data

    async def close(self) -> None:
        """End the channel; the master stays."""
        async with self._lock:
            await self._closed()

    async def _open(self) -> None:
        for pause_s in (*PAUSES_S, None):
            # `connected` has retries of its own.
            socket = None if self.host.is_here else await self.masters.connected(self.host)
            try:
                await self._open_once(socket)
            except UnreachableError as error:  # a master may lose its connection while it opens a session
                if pause_s is None or not is_passing(error.message):
                    raise
                await asyncio.sleep(pause_s)
            else:
                return

    async def _open_once(self, socket: Path | None) -> None:
        await self._closed()  # a process that has ended since the last call
        self._words.clear()
        try:
            session = await mux.opened(socket, COMMAND, MAX_LINE) if socket else None
            self._process = session or await self._own_process(socket)
        except asyncio.TimeoutError as error:  # the next try starts a new master, if the host is reachable
            self.masters.forget(self.host)
            raise UnreachableError(f"{self.host.name}: {BROKEN}: its line is cut, or it went down") from error
        self._reader = asyncio.create_task(self._keep_words(self._process))
        noise = bytearray()
        try:
            self.about = await asyncio.wait_for(self._greet(noise), CALL_S)
        except asyncio.TimeoutError as error:
            await self._closed()
            self.masters.forget(self.host)  # the master itself may hang
            said = last_words(noise.decode(errors="replace"))
            message = f"{self.host.name} has not answered our first call within {CALL_S:.0f} s"
            hint = SHELL_HINT.format(self.host.by_hand)
            raise UnreachableError(f"{message}{f', after `{said}`' * bool(said)}", hint=hint) from error
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, OSError):  # the process ended during our write; read its remaining output
                noise += await self._rest()
            raise await self._unserved(noise.decode(errors="replace")) from error
        except BaseException:
            await self._closed()
            raise

    async def _own_process(self, socket: Path | None) -> asyncio.subprocess.Process:
        """Return a shell's process here, or an ssh process: with a new connection if the master is out of sessions."""
        command = ["sh", "-c", COMMAND]
        if socket is not None:
            command = [*masters.argv(self.host, socket), "-o", "ControlMaster=no", *self.host.target, COMMAND]
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise no_ssh() from error

    async def _rest(self) -> bytes:
        """Return the host's output until its end, or until END_S passes without output."""
        rest = bytearray()
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            while len(rest) < MAX_NOISE and (data := await asyncio.wait_for(self._answers().read(4096), END_S)):
                rest += data
        return bytes(rest)

    async def _unserved(self, noise: str) -> CloudtrainError:
        """Return the error for a first program that does not answer, by ssh's exit code and the host's output."""
        code = None
        if self._process is not None and self._answers().at_eof():
            with contextlib.suppress(asyncio.TimeoutError):
                code = await asyncio.wait_for(self._process.wait(), END_S)
        words = await self._closed()
        name = self.host.name
        if code == 255:  # ssh's own code; with any other code, `words` comes from the host
            return fault_of(words or BROKEN, name, self.host.by_hand)
        said = last_words(words) or last_words(noise) or "no reason given"
        if code in (126, 127):
            hint = "name one that is there: ssh.python, or `python` of this host"
            return ConfigError(f"{name} has no interpreter `{self.host.python}`: {said}", hint=hint)
        if "SyntaxError" in words or "Unknown option: -I" in words:
            hint = "name a newer one: ssh.python, or `python` of this host"
            return ConfigError(f"{name}: `{self.host.python}` is not Python 3.10 or newer: {said}", hint=hint)
        how = "without an end" if code is None else f"with code {code}"
        message = f"{name} does not run our first program; its login has ended {how}: {said}"
        return ConfigError(message, hint=SHELL_HINT.format(self.host.by_hand))

    async def _greet(self, noise: bytearray) -> dict[str, Any]:
        hello, sha256, whole = _shipped()
        first = json.dumps({"workdir": self.host.workdir, "sha256": sha256}).encode()
        await self._write(b"%s\n%d\n%s%s\n" % (self.host.python.encode(), len(hello), hello, first))
        # Start-up files that print are common; their output comes before the mark.
        while not (line := await self._answers().readline()).endswith(MARK):
            noise += line
            if not line or len(noise) > MAX_NOISE:
                raise EOFError
        reply = _object(await self._line())
        if reply.get("need"):
            packed = _packed(whole)
            await self._write(b"%d\n%s" % (len(packed), packed))
            reply = _object(await self._line())
        if "refused" in reply:
            raise ConfigError(f"{self.host.name}: {reply['refused']}")
        begin_s = time.time()
        clock, _ = await self._exchange({"verb": "calls.clock", "ask": {}}, b"")
        if not isinstance(told := clock.get("told"), dict):
            raise ConfigError(f"{self.host.name}: {clock.get('refused') or clock.get('failed')}")
        now_s = told.get("now_s")
        if type(now_s) is not float or not abs(now_s - begin_s) < MOST_AHEAD_S:
            raise ConfigError(f"{self.host.name}: its clock is wrong by years", hint="set the clock of the host")
        self.ahead_s = now_s - (begin_s + time.time()) / 2
        if not _fits(reply, "greeting"):
            raise ConfigError(f"{self.host.name}: {_ODD}", hint=_ODD_HINT)
        return Told(self.host.name, reply)

    async def _exchange(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        await self._write(json.dumps(message).encode() + b"\n" + payload)
        reply = _object(await self._line())
        size, told = reply.get("size", 0), reply.get("told")
        is_whole = isinstance(told, dict) or not {"refused", "failed"}.isdisjoint(reply)
        if not is_whole or type(size) is not int or not 0 <= size <= MAX_LINE:
            raise ValueError("no answer of cloudtrain's")
        return reply, await self._answers().readexactly(size) if size else b""

    async def _write(self, data: bytes) -> None:
        calls = self._process.stdin if self._process else None
        assert calls is not None
        calls.write(data)
        await calls.drain()

    def _answers(self) -> asyncio.StreamReader:
        answers = self._process.stdout if self._process else None
        assert answers is not None
        return answers

    async def _line(self) -> bytes:
        line = await self._answers().readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    async def _keep_words(self, process: asyncio.subprocess.Process | mux.Session) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(4096):
            self._words += data
            del self._words[:-4096]

    async def _closed(self) -> str:
        """End the process; return its standard error."""
        process, self._process = self._process, None
        if process is None:
            return ""
        if self._reader is not None and process.stdout is not None and process.stdout.at_eof():
            await asyncio.wait([self._reader], timeout=END_S)  # a close drops unread output
        if isinstance(process, mux.Session):
            process.close()
        else:
            await masters.killed(process)
        if self._reader is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reader), 1.0)
        return self._words.decode(errors="replace")


class Told(dict[str, Any]):
    """A host's answer to a call. A missing field is the host's fault, and said so."""

    def __init__(self, host: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.host = host

    def __missing__(self, field: str) -> Any:
        raise ConfigError(f"{self.host}: {_ODD}: it lacks `{field}`", hint=_ODD_HINT)


def status_of(host: Host, found: Any) -> NodeStatus:
    """Return a node's status in a host's answer. Raises ConfigError with the host's name."""
    try:
        return NodeStatus.load(found)
    except ContractError as error:
        raise ConfigError(f"{host.name}: {_ODD}: {error}", hint=_ODD_HINT) from error


def _object(line: bytes) -> dict[str, Any]:
    """Return the JSON object in the line, with finite numbers. Raises ValueError."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        if isinstance(found, dict):
            return found
    raise ValueError("no answer of cloudtrain's")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _no_number(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _fits(value: Any, form: Any) -> bool:
    """Return whether the JSON value has the form, one of answers.json: no lie of a host reaches our arithmetic.

    A form is a type, the name of another form, an object of forms by field, a list with the form of its items, or a
    list of several forms, one for each item. A field with `?` may be missing or null; `*` is the form of all fields.
    """
    if isinstance(form, str):
        return _TYPES[form](value) if form in _TYPES else _fits(value, _forms()[form])
    if isinstance(form, list):
        forms = form if len(form) > 1 else form * len(value) if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) == len(forms) and all(map(_fits, value, forms))
    if not isinstance(value, dict) or "*" in form:
        return isinstance(value, dict) and all(_fits(each, form["*"]) for each in value.values())
    present = {name: each for name, each in form.items() if name[-1] != "?" or value.get(name[:-1]) is not None}
    return all(_fits(value.get(name.rstrip("?"), _fits), each) for name, each in present.items())


@functools.cache
def _forms() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("cloudtrain.backends").joinpath("channel/answers.json").read_text())
    return table


@functools.lru_cache(maxsize=1)
def _shipped() -> tuple[bytes, str, bytes]:
    """Return the first program, and our package's hash and text."""
    folder = Path(str(files("cloudtrain.entrypoints")))
    paths = [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "strategies"]
    texts = {f"cloudtrain/entrypoints/{path.relative_to(folder).as_posix()}": path.read_text() for path in paths}
    whole = json.dumps(texts).encode()
    return (folder / "host" / "bootstrap.py").read_bytes(), hashlib.sha256(whole).hexdigest(), whole


@functools.lru_cache(maxsize=1)
def _packed(whole: bytes) -> bytes:
    """Return our package, compressed: 20 ms, only for a host that lacks the package."""
    return zlib.compress(whole, 1)
