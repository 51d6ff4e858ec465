"""Asks several backends what stands in the way, all at once: a slow cloud holds up no other's answer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.errors import CloudtrainError

__all__ = ["LIMIT_S", "Ask", "answers"]

LIMIT_S = 60.0  # for a backend's checks together; ssh and the clouds' clients give up on a call long before

_AGAIN = re.compile(r"^cannot look( at the [\w ]+)?: ")  # the check's name and its verdict say so already

Ask = Callable[[], list[Check]]


def answers(asks: Mapping[str, Ask], limit_s: float = LIMIT_S) -> Iterator[tuple[str, list[Check]]]:
    """Yield each backend with its checks, in the order given, as soon as it and those before it have answered.

    What a backend raises is a failed check of its own; one that has not answered within `limit_s` is told as such, and
    its thread is left behind, for the process to take with it.
    """
    found: dict[str, list[Check]] = {}
    threads = {
        name: threading.Thread(target=_asked, args=(name, ask, found), name=f"doctor-{name}", daemon=True)
        for name, ask in asks.items()
    }
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        late = Check("answer", "fail", f"none within {limit_s:.0f} s", "look at the network, then ask again")
        yield name, found.get(name, [late])


def _asked(name: str, ask: Ask, found: dict[str, list[Check]]) -> None:
    try:
        found[name] = [replace(check, found=_AGAIN.sub("", check.found)) for check in ask()]
    except CloudtrainError as error:
        found[name] = [Check("answer", "fail", error.message, error.hint)]
    except Exception as error:  # a fault of ours, or of a plug-in, in one backend says nothing of the others
        cure = f"report it, with what `cloudtrain doctor {name} --debug` prints"
        found[name] = [Check("answer", "fail", f"{type(error).__name__}: {error}", cure)]
