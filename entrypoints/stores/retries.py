"""The tries of a request and the pauses between, by the same rules in the launcher and on the nodes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator


def tries(most: int, pause_s: float, *, doubles: bool = True) -> Iterator[int]:
    """Yield the number of each try, from 1 to `most`, and pause before each further try.

    The pauses double from `pause_s` on, or without `doubles` each is longer by `pause_s` than the pause before. The
    caller leaves the loop after a success or an error that no retry mends, and raises the last error after the loop:

        for _ in tries(4, 0.5):
            try:
                return ask()
            except OSError as error:
                failure = error
        raise failure
    """
    for number in range(1, most + 1):
        if number > 1:
            time.sleep(pause_s * (2 ** (number - 2) if doubles else number - 1))
        yield number


def drawn_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after so many failures in a row, drawn from the upper half of a doubling limit.

    Many clients that a busy server has refused at once then come back at different times.
    """
    limit_s = min(longest_s, first_s * 2 ** (failures - 1))
    return random.uniform(limit_s / 2, limit_s)
