"""One channel, one message, one try: sent within a time limit, or a DeliveryError with the reason and the cure."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .message import LIMIT_S, DeliveryError, Notice, masked
from .receivers import RECEIVERS

TIMEOUT_S = 5.0  # for a connection to a mail server, and for each answer; mail programs show a repeated mail once
ANSWER_S = 20.0  # for a webhook's answer: some receivers run a flow first and answer later
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 300.0
_MENDED_S = 60.0  # pause if a person must fix the fault, or if the message may have arrived
_MOST_UNSURE = 3  # tries that may have arrived: after so many, a further try does not help


@dataclass(frozen=True)
class Channel:
    """The receiver. `kind`: one of RECEIVERS, or email; `address`: a URL, or the receiver's mail address.

    `smtp` is the URL of the mail server, `sender` the sender's mail address.
    """

    kind: str
    address: str = field(repr=False)
    smtp: str = field(default="", repr=False)
    sender: str = ""

    @property
    def shown(self) -> str:
        """The channel for people, without the secret parts of the address."""
        return f"email to {self.address}" if self.kind == "email" else f"{self.kind} at {masked(self.address)}"


def send(channel: Channel, notice: Notice) -> None:
    """Deliver the notice. Raises DeliveryError; its text holds no address."""
    from . import transports  # its libraries are imported for a first delivery

    if receiver := RECEIVERS.get(channel.kind):
        transports.post(channel.address, receiver.body(channel.address, notice), notice.id, ANSWER_S)
    elif channel.kind == "email":
        transports.post_mail(channel.smtp, notice, channel.address, channel.sender, TIMEOUT_S)
    else:
        raise DeliveryError(f"there is no channel of the kind `{channel.kind}`")


def try_all(sends: Sequence[Callable[[], None]], limit_s: float = LIMIT_S) -> list[DeliveryError | None]:
    """Run all at once; return for each None or the reason of the failure, also for a send that takes too long.

    Each send has a daemon thread; neither this call nor the end of the process waits longer for the thread.
    """
    found: list[DeliveryError | None] = [DeliveryError(f"no answer within {limit_s:.0f} s") for _ in sends]

    def run(number: int) -> None:
        try:
            sends[number]()
            found[number] = None
        except DeliveryError as fault:
            found[number] = fault
        except Exception as error:  # a bug of ours or of a package must not stop the other sends
            found[number] = DeliveryError(f"it cannot be sent: {type(error).__name__}")

    end_s = time.monotonic() + limit_s
    threads = [threading.Thread(target=run, args=(i,), name="notice", daemon=True) for i in range(len(sends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    return list(found)


def back_off_s(tries: int, fault: DeliveryError | None = None) -> float:
    """Return the pause after so many failed tries; infinite if a retry would only repeat the message."""
    if fault is not None and fault.may_have_arrived:
        return math.inf if tries >= _MOST_UNSURE else _MENDED_S
    wait_s = min(_FIRST_WAIT_S * 2.0 ** min(tries - 1, 20), _MOST_WAIT_S)
    asked_s = 0.0 if fault is None else fault.after_s or (_MENDED_S if fault.cure else 0.0)
    return max(wait_s, min(asked_s, _MOST_WAIT_S))
