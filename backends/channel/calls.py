"""This process's channels to all hosts: one event loop on a thread of its own, calls to many hosts at once.

A failure at one host is the answer of that host; calls to the remaining hosts continue. An unreachable host is skipped
for a pause that doubles at each failure, so that a follower's polls of the reachable hosts stay fast. All threads share
the channels: a hedged call waits for no call that lasts minutes, and takes no answer to a different call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from cloudtrain.launcher.errors import CloudtrainError, UnreachableError

from .host_channel import CALL_S, HostChannel
from .hosts import Host
from .master import Masters

CLOSE_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
PATIENCE_S = 2.0  # of a hedged call, from the first answer on: long for a login, short for a follower
MOST_LATE = 16  # late calls under way to a host: until an answer comes, the host gets no further hedged call
STALE_S = 60.0  # from the begin of a late call: afterwards its answer is dropped
_T = TypeVar("_T")


class Call(NamedTuple):
    """A call to a host."""

    verb: str
    ask: dict[str, Any]
    payload: bytes = b""


class HostAnswer(NamedTuple):
    """A host's answer: JSON and bytes, or the error."""

    reply: dict[str, Any]
    data: bytes = b""
    error: CloudtrainError | None = None

    def required(self) -> HostAnswer:
        """Return the answer. Raises its error."""
        if self.error is not None:
            raise self.error
        return self


@dataclass
class _Pause:
    until_s: float
    seconds: float
    error: UnreachableError


class _Begun(NamedTuple):
    """A hedged call that is under way, or answered."""

    call: Call
    answer: Future[HostAnswer]
    begun_s: float


@dataclass
class Fleet:
    """The event loop, and the channels by host; a second channel of a host takes hedged calls only."""

    loop: asyncio.AbstractEventLoop
    masters: Masters
    _late: dict[Host, list[_Begun]] = field(default_factory=dict)  # calls whose callers have not waited for the answer
    _late_guard: threading.Lock = field(default_factory=threading.Lock)
    _channels: dict[tuple[Host, bool], HostChannel] = field(default_factory=dict)
    _pauses: dict[Host, _Pause] = field(default_factory=dict)

    def ask(
        self, calls: Mapping[Host, Call], limit_s: float = CALL_S, *, is_urgent: bool = False
    ) -> dict[Host, HostAnswer]:
        """Return every host's answer. `is_urgent`: also call the hosts that are in a pause."""
        return self.run(self._all(calls, limit_s, is_urgent))

    def hedged(
        self, calls: Mapping[Host, Call], is_enough: Callable[[Mapping[Host, HostAnswer]], bool]
    ) -> dict[Host, HostAnswer]:
        """Return every host's answer. A host late by PATIENCE_S gets an error, if the fast hosts' answers are enough.

        A broken connection shows after 15 s at the earliest. A call that is late continues, and the next equal call
        takes its answer.
        """
        now_s = time.monotonic()
        asked = {host: begun for host, call in calls.items() if (begun := self._begun(host, call))}
        until_s, has_answer, answers = now_s + PATIENCE_S, False, dict[Host, HostAnswer]()
        try:
            while True:
                answers = {host: begun.answer.result() for host, begun in asked.items() if begun.answer.done()}
                left = [begun for host, begun in asked.items() if host not in answers]
                if not has_answer and any(answer.error is None for answer in answers.values()):
                    has_answer, until_s = True, time.monotonic() + PATIENCE_S
                is_soon = any(begun.begun_s >= now_s for begun in left) and time.monotonic() < until_s
                if not left or (not is_soon and is_enough(answers)):
                    break
                timeout_s = until_s - time.monotonic() if is_soon else None
                wait_for([begun.answer for begun in left], timeout_s, FIRST_COMPLETED)
        finally:
            with self._late_guard:
                for host in asked.keys() - answers.keys():
                    self._late[host].append(asked[host])
        for host in calls.keys() - answers.keys():
            error = UnreachableError(f"{host.name} does not answer", hint="is it up, and the way to it open?")
            answers[host] = HostAnswer({}, error=error)
        return {host: answers[host] for host in calls}

    def call(self, host: Host, verb: str, ask: dict[str, Any], payload: bytes = b"", limit_s: float = CALL_S) -> Any:
        """Return a host's answer as JSON; raises the answer's error."""
        return self.ask({host: Call(verb, ask, payload)}, limit_s, is_urgent=True)[host].required().reply

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run the coroutine on the loop; Ctrl-C here cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def channel(self, host: Host, *, is_second: bool = False) -> HostChannel:
        """Return the host's channel, which opens on its first call."""
        return self._channels.setdefault((host, is_second), HostChannel(host, self.masters))

    def close(self) -> None:
        """End all calls under way and all channels; masters stay for the next command."""
        with self._late_guard:
            for begun in (begun for late in self._late.values() for begun in late):
                begun.answer.cancel()
        if self.loop.is_running():
            with contextlib.suppress(Exception):
                self.run(asyncio.wait_for(self._close(), CLOSE_S))
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _begun(self, host: Host, call: Call) -> _Begun | None:
        """Return the late equal call, else a new call; None for a host that is late with MOST_LATE calls."""
        with self._late_guard:
            fresh_s = time.monotonic() - STALE_S
            late = [begun for begun in self._late.get(host, ()) if begun.begun_s > fresh_s or not begun.answer.done()]
            known = next((begun for begun in late if begun.call == call), None)
            self._late[host] = [begun for begun in late if begun is not known]
            if known is not None or sum(not begun.answer.done() for begun in late) >= MOST_LATE:
                return known
        work = self._one(host, call, CALL_S, is_hedged=True)
        return _Begun(call, asyncio.run_coroutine_threadsafe(work, self.loop), time.monotonic())

    async def _all(self, calls: Mapping[Host, Call], limit_s: float, is_urgent: bool) -> dict[Host, HostAnswer]:
        work = (self._one(host, call, limit_s, is_urgent=is_urgent) for host, call in calls.items())
        answers = await asyncio.gather(*work)
        return dict(zip(calls, answers, strict=True))

    async def _one(
        self, host: Host, call: Call, limit_s: float, *, is_urgent: bool = False, is_hedged: bool = False
    ) -> HostAnswer:
        pause = self._pauses.get(host)
        if pause is not None and time.monotonic() < pause.until_s and not is_urgent:
            return HostAnswer({}, error=pause.error)
        first, is_long = self.channel(host), limit_s > CALL_S
        channel = self.channel(host, is_second=bool(is_hedged and first.long_calls and first.about))
        channel.long_calls += is_long
        try:
            reply, data = await channel.call(*call, limit_s=limit_s)
        except UnreachableError as error:
            seconds = min(LONGEST_PAUSE_S, 2 * pause.seconds if pause else FIRST_PAUSE_S) * random.uniform(0.8, 1.2)
            self._pauses[host] = _Pause(time.monotonic() + seconds, seconds, error)
            return HostAnswer({}, error=error)
        except CloudtrainError as error:
            return HostAnswer({}, error=error)
        finally:
            channel.long_calls -= is_long
        self._pauses.pop(host, None)
        return HostAnswer(reply, data)

    async def _close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), return_exceptions=True)


def open_fleet() -> Fleet:
    """Return a fleet with a running event loop, which ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ssh", daemon=True).start()
    found = Fleet(loop, Masters())
    atexit.register(found.close)
    return found
