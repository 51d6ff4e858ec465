"""The delivery of notices: by each channel, in a thread, so that a command that follows a job waits for no receiver."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cloudtrain.entrypoints.notices.message import DeliveryError, Notice
from cloudtrain.entrypoints.notices.sending import TIMEOUT_S, Channel, back_off_s, send, try_all

from ..channels import ChannelEntry, is_variable
from ..errors import CloudtrainError
from ..store.database import Database
from ..text.extras import install
from . import outbox

EXIT_S = 2.5  # the most seconds that the end of a command waits for deliveries


@dataclass(frozen=True)
class Delivery:
    """A notice for a channel. `hold_s`: the job itself may send within this time; `is_sent`: the job has sent."""

    job_id: str
    entry: ChannelEntry
    notice: Notice
    hold_s: float = 0.0
    is_sent: bool = False

    @property
    def id(self) -> tuple[str, str, str]:
        """The key of the delivery."""
        return self.job_id, self.entry.id, self.notice.key


class DeliveryThread:
    """The thread, which starts with the first delivery. `say` receives each message for the user once."""

    def __init__(self, folder: Path, say: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
        self._folder = folder
        self._say = say
        self._environ = environ
        self._name = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._deliveries: dict[tuple[str, str, str], Delivery] = {}
        self._over: set[tuple[str, str, str]] = set()
        self._said: set[tuple[str, str]] = set()
        self._news = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def offer(self, deliveries: Sequence[Delivery]) -> None:
        """Queue due notices, without notices already delivered."""
        with self._lock:
            fresh = [delivery for delivery in deliveries if delivery.id not in self._over]
            self._drop_lower(fresh)
            is_new = any(delivery.id not in self._deliveries or delivery.is_sent for delivery in fresh)
            self._deliveries |= {delivery.id: delivery for delivery in fresh}
        if fresh and self._thread is None:
            self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="notices", daemon=True)
            self._thread.start()
        if is_new:
            self._news.set()

    def close(self, wait_s: float = EXIT_S) -> None:
        """Wait up to `wait_s` for deliveries; report the rest, which any later process may deliver."""
        if self._thread is None:
            return
        self._is_closing = True
        self._news.set()
        self._thread.join(wait_s)
        with self._lock:
            left = {delivery.entry.shown for delivery in self._deliveries.values() if not delivery.hold_s}
        if left:
            self._say(f"alerts not delivered yet: {', '.join(sorted(left))}; later, `cloudtrain watch` tries again")

    def _drop_lower(self, fresh: list[Delivery]) -> None:
        """Drop a budget's queued thresholds if a higher threshold is now due."""
        higher = {(each.job_id, each.entry.id): each.id for each in fresh if each.notice.event == "budget"}
        for key, each in list(self._deliveries.items()):
            if each.notice.event == "budget" and higher.get(key[:2], key) != key:
                del self._deliveries[key]

    def _run(self) -> None:
        end_s = None
        while True:
            wait_s = self._round()
            if self._news.is_set():  # more notices arrived meanwhile
                self._news.clear()
            elif self._is_closing:
                end_s = end_s or time.monotonic() + EXIT_S
                if wait_s is None or time.monotonic() + wait_s > end_s:
                    return
                time.sleep(wait_s)
            else:
                self._news.wait(wait_s)

    def _round(self) -> float | None:
        """Send the ready notices; return the seconds until the next attempt, None if the queue is empty."""
        with self._lock:
            queued = list(self._deliveries.values())
        try:
            next_s = self._tell(queued)
        except CloudtrainError as error:  # from the registry, for example a full disk
            self._say_once("registry", f"the list of delivered alerts cannot be saved: {error.message}")
            next_s = time.time() + 10.0
        return min(max(0.05, next_s - time.time()), outbox.LONGEST_S) if self._deliveries else None

    def _tell(self, queued: list[Delivery]) -> float:
        """Send the claimed notices; return the time of the next attempt, infinite without further attempts."""
        claimed, next_s = self._claimed(queued)
        if not claimed:
            return next_s
        faults = try_all([partial(self._deliver, delivery) for delivery, _ in claimed])
        now_s = time.time()
        with closing(Database(self._folder)) as database:
            for (delivery, tries), fault in zip(claimed, faults, strict=True):
                if fault is None or delivery.id in self._over:
                    continue
                again_s = now_s + back_off_s(tries, fault)
                next_s = min(next_s, again_s)
                outbox.mark_failed(database, delivery.id, self._name, again_s, fault.message)
                if again_s == math.inf:
                    self._is_over(delivery)
                    self._say_given_up(delivery.entry)
                    continue
                hint = f"\n  hint: {fault.cure}" if fault.cure else ""
                words = f"alert not delivered, next try follows: {delivery.entry.shown}: {fault.message}{hint}"
                self._say_once(delivery.entry.id, words)
        return next_s

    def _deliver(self, delivery: Delivery) -> None:
        """Send the notice and mark the delivery at once, without waiting for slower channels. Raises DeliveryError."""
        deliver(delivery.entry, delivery.notice, self._environ)
        self._is_over(delivery)  # before the mark, so that this process never sends a notice twice
        try:
            with closing(Database(self._folder)) as database:
                outbox.mark_sent(database, delivery.job_id, delivery.entry.id, delivery.notice, time.time())
        except CloudtrainError as error:
            self._say_once("registry", f"the list of delivered alerts cannot be saved: {error.message}")

    def _claimed(self, queued: list[Delivery]) -> tuple[list[tuple[Delivery, int]], float]:
        """Return the deliveries claimed by this process, each with its number of tries; and when the next is ready."""
        found: list[tuple[Delivery, int]] = []
        if not queued:
            return found, math.inf
        now_s, next_s = time.time(), math.inf
        with closing(Database(self._folder)) as database:
            for delivery in queued:
                where = (database, delivery.job_id, delivery.entry.id, delivery.notice)
                if delivery.is_sent:
                    outbox.mark_sent(*where, now_s)
                    self._is_over(delivery)
                    continue
                made = outbox.claim(*where, self._name, now_s, delivery.hold_s)
                if made.verdict == "claimed":
                    found.append((delivery, made.tries))
                elif made.verdict == "later":
                    next_s = min(next_s, made.next_s)
                else:
                    self._is_over(delivery)
                    if made.verdict == "given_up":
                        self._say_given_up(delivery.entry)
        return found, next_s

    def _is_over(self, delivery: Delivery) -> None:
        with self._lock:
            self._over.add(delivery.id)
            self._deliveries.pop(delivery.id, None)

    def _say_given_up(self, entry: ChannelEntry) -> None:
        self._say_once(entry.id, f"given up: {entry.shown}; `cloudtrain notify` shows what it answers")

    def _say_once(self, about: str, words: str) -> None:
        if (about, words) not in self._said:
            self._said.add((about, words))
            self._say(words)


def deliver(entry: ChannelEntry, notice: Notice, environ: Mapping[str, str] = os.environ) -> None:
    """Send the notice. Raises DeliveryError with a message without addresses."""
    if entry.kind == "desktop":
        _show(notice)
    elif entry.kind == "apprise":
        _send_by_apprise(_resolved(entry.place, environ), notice)
    elif entry.kind == "email":
        smtp = _resolved(entry.smtp, environ)
        send(Channel("email", entry.place, smtp, entry.sender), notice)
    else:
        send(Channel(entry.kind, _resolved(entry.place, environ)), notice)


def _show(notice: Notice) -> None:
    """Show the notice on the desktop. Raises DeliveryError."""
    urgency = "normal" if notice.event in ("succeeded", "started") else "critical"
    body = "\n".join(notice.lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    command = ["notify-send", "--app-name=cloudtrain", f"--urgency={urgency}", "--", notice.title, body]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeliveryError(f"notify-send: {type(error).__name__}") from None
    if done.returncode != 0:
        raise DeliveryError(f"notify-send ended with code {done.returncode}")


def _send_by_apprise(url: str, notice: Notice) -> None:
    """Deliver the notice to an address in Apprise's form. Raises DeliveryError."""
    try:
        import apprise
    except ModuleNotFoundError as error:
        if error.name != "apprise":
            raise
        raise DeliveryError("`apprise` is not installed", install("apprise")) from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # Apprise would log addresses
    services = apprise.Apprise(asset=apprise.AppriseAsset(async_mode=False))
    if not services.add(url):
        raise DeliveryError("Apprise knows no service of that address", "its forms: github.com/caronc/apprise/wiki")
    body = "\n".join(notice.lines) or notice.title
    if not services.notify(body=body, title=notice.title, body_format=apprise.NotifyFormat.TEXT):
        message = f"Apprise could not deliver it ({url.partition(':')[0]})"
        raise DeliveryError(message, "check the address: `apprise -vv -b test ADDRESS`")


def _resolved(place: str, environ: Mapping[str, str]) -> str:
    if not is_variable(place):
        return place
    name = place.removeprefix("env:")
    value = environ.get(name, "").strip()
    if not value:
        raise DeliveryError(f"the variable {name}, which has its address, is not set here", f"export {name}=...")
    return value
