"""Runs the checks of several backends at once: a slow cloud does not delay the answers of the remaining backends."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.errors import CloudtrainError

__all__ = ["LIMIT_S", "Ask", "answers"]

LIMIT_S = 60.0  # for all checks of a backend; ssh and the clouds' clients give up on a single call earlier

_AGAIN = re.compile(r"^cannot look( at the [\w ]+)?: ")  # the name and verdict of a check already imply these words

Ask = Callable[[], list[Check]]


def answers(asks: Mapping[str, Ask], limit_s: float = LIMIT_S) -> Iterator[tuple[str, list[Check]]]:
    """Yield each backend with its checks, in the given order, as soon as the backend and all earlier backends answered.

    An exception becomes a failed check of the backend. A backend without an answer after `limit_s` seconds in all gets
    a failed check `answer`; the backend's daemon thread ends with the process.
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
    except Exception as error:  # a bug of cloudtrain or a plug-in in a backend must not stop the remaining backends
        cure = f"report it, with what `cloudtrain doctor {name} --debug` prints"
        found[name] = [Check("answer", "fail", f"{type(error).__name__}: {error}", cure)]
