"""An attempt's lines from all its nodes and ranks, in time order, one stream for whoever shows them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend import LogLine, LogPage, Pace
from cloudtrain.launcher.errors import UnreachableError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job
from cloudtrain.launcher.lastword import LastWord
from cloudtrain.launcher.logs.holdback import HoldBack

if TYPE_CHECKING:
    from cloudtrain.launcher.registry import Registry

__all__ = ["Stream"]


class Stream:
    """The lines of one attempt, read on by `read` until `is_over`; used by one thread.

    `ranks`: only theirs, without what the nodes themselves say. `hold_back_s`: how long a line waits for earlier ones
    of other nodes, by default as long as the backend says. `now`: the reader will not stay, so none is held back.
    """

    def __init__(
        self,
        registry: Registry,
        job: Job,
        attempt: Attempt,
        *,
        ranks: frozenset[int] | None = None,
        hold_back_s: float | None = None,
        now: bool = False,
    ) -> None:
        self._registry, self._job, self._attempt = registry, job, attempt
        self._ranks, self._now = ranks, now
        self._cursor: dict[str, Any] | None = None
        self._asked_s = hold_back_s
        self._hold_back: HoldBack | None = None
        self._last_word: LastWord | None = None
        self._is_over = False
        self._had_lines = False
        self.update(attempt)

    @property
    def is_over(self) -> bool:
        """Whether all lines were read after the job's end."""
        return self._is_over

    @property
    def is_behind(self) -> bool:
        """Whether the last look brought something, so that the next one should not wait."""
        return self._had_lines

    @property
    def pace(self) -> Pace:
        """How often the backend may be asked."""
        return backends.load(self._job.backend).pace(self._attempt.ref) if self._attempt.ref else Pace()

    def update(self, attempt: Attempt) -> None:
        """Take in how the attempt is now: only who knows of its end looks for its last line."""
        self._attempt = attempt
        if attempt.state.state not in ACTIVE and self._last_word is None:
            self._last_word = LastWord(self.pace, attempt.state)
            self._is_over = attempt.ref is None

    def read(self) -> list[LogLine]:
        """Return the lines that have come since, at most a page of them, none where there are none; it does not wait.

        Raises UnreachableError.
        """
        self._had_lines = False
        if self._is_over or self._attempt.ref is None:
            return []
        try:
            page = backends.load(self._job.backend).logs(self._attempt.ref, self._cursor, self._ranks, now=self._now)
        except UnreachableError:
            self._is_over = self._last_word is not None and self._last_word.is_out_of_patience()
            raise
        self._cursor = page.cursor
        self._had_lines = bool(page.lines or page.left_out)
        self._is_over = self._last_word is not None and self._last_word.has_come(page)
        return self._pass_on(page)

    def tail(self, count: int) -> list[LogLine]:
        """Return the last lines that are there now; the stream then stands behind them. Raises UnreachableError."""
        last: deque[LogLine] = deque(maxlen=count)
        while True:
            last.extend(self.read())
            if not self._had_lines:
                return list(last)

    def close(self) -> None:
        """Let go of what is open."""

    def _pass_on(self, page: LogPage) -> list[LogLine]:
        if self._hold_back is None:
            is_alone = self._attempt.plan["instances"] == 1
            default_s = 0.0 if self._now or is_alone else self.pace.hold_back_s
            self._hold_back = HoldBack(default_s if self._asked_s is None else self._asked_s)
        return self._hold_back.pass_on(page.lines, all_of_them=self._is_over)
