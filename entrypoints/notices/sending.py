"""One channel, one message, one try: sent within a time limit, or a word on why not and how to mend it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cloudtrain.entrypoints.notices.message import Notice

__all__ = ["ANSWER_S", "LIMIT_S", "TIMEOUT_S", "Channel", "Fault", "back_off_s", "masked", "send", "try_all"]

TIMEOUT_S = 5.0  # for a connection to a mail server, and for each answer on it: a letter twice is shown once
ANSWER_S = 20.0  # for a webhook's: a receiver that runs a flow first answers after that
LIMIT_S = 24.0  # for the whole of a try, whatever trickles in
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 300.0
_MENDED_S = 60.0  # what a person has to mend is not mended at once, and who may have been told is not told again soon
_MOST_UNSURE = 3  # tries that end in one which may have arrived: then it has, or never will


@dataclass(frozen=True)
class Channel:
    """Where to tell. `kind`: webhook, slack or email; `address`: a URL, or the mail address of who is told.

    `smtp` is the URL of the mail server, `sender` the address that mail comes from.
    """

    kind: str
    address: str = field(repr=False)
    smtp: str = field(default="", repr=False)
    sender: str = ""

    @property
    def shown(self) -> str:
        """The channel for people, without what would let anybody in."""
        return f"email to {self.address}" if self.kind == "email" else f"{self.kind} at {masked(self.address)}"


class Fault(Exception):
    """It was not delivered. `cure`: what a person can do; `after_s`: how long the receiver wants to be left alone.

    `may_have_arrived`: it was taken, and no answer came.
    """

    def __init__(
        self, message: str, cure: str = "", *, after_s: float | None = None, may_have_arrived: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cure = cure
        self.after_s = after_s
        self.may_have_arrived = may_have_arrived


def send(channel: Channel, notice: Notice) -> None:
    """Deliver the notice. Raises Fault, in whose words no address is told."""
    if channel.kind == "slack":
        from cloudtrain.entrypoints.notices import slack, webhook

        webhook.post(channel.address, slack.body(notice), notice.id, ANSWER_S)
    elif channel.kind == "webhook":
        from cloudtrain.entrypoints.notices import teams, webhook

        form = teams.body if teams.is_teams(channel.address) else webhook.body
        webhook.post(channel.address, form(notice), notice.id, ANSWER_S)
    elif channel.kind == "email":
        from cloudtrain.entrypoints.notices import mail

        mail.post(channel.smtp, mail.message(notice, channel.address, channel.sender, channel.smtp), TIMEOUT_S)
    else:
        raise Fault(f"there is no channel of the kind `{channel.kind}`")


def try_all(sends: Sequence[Callable[[], None]], limit_s: float = LIMIT_S) -> list[Fault | None]:
    """Run all at once; return for each None, or why it was not delivered: one that takes longer is given up.

    Each in a thread that nobody waits for any longer than that, nor at the end of the process.
    """
    found: list[Fault | None] = [Fault(f"no answer within {limit_s:.0f} s") for _ in sends]
    is_done = [threading.Event() for _ in sends]

    def run(number: int) -> None:
        try:
            sends[number]()
            told: Fault | None = None
        except Fault as fault:
            told = fault
        except Exception as error:  # a fault of ours, or of an extra, must not end what tells the others
            told = Fault(f"it cannot be sent: {type(error).__name__}")
        found[number] = told
        is_done[number].set()

    end_s = time.monotonic() + limit_s
    for number in range(len(sends)):
        threading.Thread(target=run, args=(number,), name="notice", daemon=True).start()
    for event in is_done:
        event.wait(max(0.0, end_s - time.monotonic()))
    return list(found)


def back_off_s(tries: int, fault: Fault | None = None) -> float:
    """Return how long to wait after so many tries that went wrong, for ever where a further one would repeat it."""
    if fault is not None and fault.may_have_arrived:
        return math.inf if tries >= _MOST_UNSURE else _MENDED_S
    wait_s = min(_FIRST_WAIT_S * 2.0 ** min(tries - 1, 20), _MOST_WAIT_S)
    asked_s = 0.0 if fault is None else fault.after_s or (_MENDED_S if fault.cure else 0.0)
    return max(wait_s, min(asked_s, _MOST_WAIT_S))


def masked(url: str) -> str:
    """Return the address without path, user and query, which may be all that it takes to get in."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "an address that cannot be read"
    if not host:
        return f"{parts.scheme}:..." if parts.scheme else "..."
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}/..."
