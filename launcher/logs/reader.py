"""Reads the log of an attempt until its end, for `logs -f`, the live view and the page; survives outages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..backend import LogLine
from ..errors import CloudtrainError, NoSuchJobError, UnreachableError
from ..job import Attempt
from .stream import LogStream

BACK_OFF_S = 5.0  # after a failed poll


@dataclass(frozen=True)
class LogNews:
    """The result of a poll: new lines, or the reason why the log cannot be read for now."""

    lines: list[LogLine]
    fault: CloudtrainError | None = None

    @property
    def outage(self) -> str:
        """The fault as a sentence, empty without a fault."""
        if self.fault is None:
            return ""
        hint = f" ({self.fault.hint})" if self.fault.hint else ""
        return f"the log cannot be read for now, the job is unaffected: {self.fault.message}{hint}"


def read_on(
    stream: LogStream,
    update: Callable[[], Attempt | None],
    pause: Callable[[float], object],
    *,
    tail: int | None = None,
    wants: Callable[[LogLine], bool] | None = None,
    survives: type[CloudtrainError] = UnreachableError,
    many: int = 1,
) -> Iterator[LogNews]:
    """Yield the result of each poll, until all lines were read after the job's end, or `update` returns None.

    `update` returns the attempt's current state, and is called before each poll: the last page then has all lines
    written before the end. The first result has the last `tail` existing lines that match `wants`, if given. `pause`
    waits between two polls, unless a poll brought `many` lines. Errors of the type `survives` are yielded.
    """
    while True:
        try:
            if (attempt := update()) is None:
                return
            stream.update(attempt)
            if tail is not None:
                lines, tail = stream.tail(tail, wants), None
            else:
                lines = stream.read()
            news = LogNews(lines)
        except NoSuchJobError:
            raise
        except survives as error:
            news = LogNews([], error)
        yield news
        if stream.is_over:
            return
        if news.fault is not None:
            pause(BACK_OFF_S)
        elif stream.came < many:
            pause(stream.pace.lines_s)
