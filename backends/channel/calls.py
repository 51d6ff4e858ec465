"""This process's channels to all hosts: one event loop on a thread of its own, calls to many hosts at once.

A failure at one host is the answer of that host; calls to the remaining hosts continue. An unreachable host is skipped
for a pause that doubles at each failure, so that a follower's polls of the reachable hosts stay fast.
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


@dataclass
class _Pause:
    until_s: float
    seconds: float
    error: UnreachableError


@dataclass
class Fleet:
    """The event loop, and the channels by host. `late`: calls that are still under way, by host and verb."""

    loop: asyncio.AbstractEventLoop
    masters: Masters
    late: dict[tuple[Host, str], tuple[Call, Future[HostAnswer]]] = field(default_factory=dict)
    _channels: dict[Host, HostChannel] = field(default_factory=dict)
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
        takes its answer. Until then the host gets no second call of the same verb.
        """
        fresh = {host for host, call in calls.items() if self._begin(host, call)}
        asked = {host: self.late[host, call.verb] for host, call in calls.items()}
        mine = {host: future for host, (call, future) in asked.items() if call == calls[host]}
        until_s, has_answer = time.monotonic() + PATIENCE_S, False
        while True:
            answers = {host: future.result() for host, future in mine.items() if future.done()}
            left = [future for future in mine.values() if not future.done()]
            if not has_answer and any(answer.error is None for answer in answers.values()):
                has_answer, until_s = True, time.monotonic() + PATIENCE_S
            is_soon = any(not mine[host].done() for host in fresh) and time.monotonic() < until_s
            if not left or (not is_soon and is_enough(answers)):
                break
            wait_for(left, until_s - time.monotonic() if is_soon else None, FIRST_COMPLETED)
        for host in answers:
            del self.late[host, calls[host].verb]
        for host in calls.keys() - answers.keys():
            error = UnreachableError(f"{host.name} does not answer", hint="is it up, and the way to it open?")
            answers[host] = HostAnswer({}, error=error)
        return {host: answers[host] for host in calls}

    def call(self, host: Host, verb: str, ask: dict[str, Any], payload: bytes = b"", limit_s: float = CALL_S) -> Any:
        """Return a host's answer as JSON; raises the answer's error."""
        answer = self.ask({host: Call(verb, ask, payload)}, limit_s, is_urgent=True)[host]
        if answer.error is not None:
            raise answer.error
        return answer.reply

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run the coroutine on the loop; Ctrl-C here cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def channel(self, host: Host) -> HostChannel:
        """Return the host's channel, which opens on its first call."""
        return self._channels.setdefault(host, HostChannel(host, self.masters))

    def close(self) -> None:
        """End all calls under way and all channels; masters stay for the next command."""
        for _, future in self.late.values():
            future.cancel()
        if self.loop.is_running():
            with contextlib.suppress(Exception):
                self.run(asyncio.wait_for(self._close(), CLOSE_S))
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _begin(self, host: Host, call: Call) -> bool:
        """Call the host unless an earlier call is under way; return whether a call has begun now."""
        earlier = self.late.get((host, call.verb))
        if earlier is not None and (earlier[0] == call or not earlier[1].done()):
            return False
        work = self._one(host, call, CALL_S, False)
        self.late[host, call.verb] = call, asyncio.run_coroutine_threadsafe(work, self.loop)
        return True

    async def _all(self, calls: Mapping[Host, Call], limit_s: float, is_urgent: bool) -> dict[Host, HostAnswer]:
        answers = await asyncio.gather(*(self._one(host, call, limit_s, is_urgent) for host, call in calls.items()))
        return dict(zip(calls, answers, strict=True))

    async def _one(self, host: Host, call: Call, limit_s: float, is_urgent: bool) -> HostAnswer:
        pause = self._pauses.get(host)
        if pause is not None and time.monotonic() < pause.until_s and not is_urgent:
            return HostAnswer({}, error=pause.error)
        try:
            reply, data = await self.channel(host).call(*call, limit_s=limit_s)
        except UnreachableError as error:
            seconds = min(LONGEST_PAUSE_S, 2 * pause.seconds if pause else FIRST_PAUSE_S) * random.uniform(0.8, 1.2)
            self._pauses[host] = _Pause(time.monotonic() + seconds, seconds, error)
            return HostAnswer({}, error=error)
        except CloudtrainError as error:
            return HostAnswer({}, error=error)
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
