"""An attempt's lines from all its nodes and ranks, in time order: one stream for whoever shows or keeps them.

It begins with what is kept here, goes on with what the backend has, and keeps that, where it reads everything and no
other process does so already.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend import LogLine, LogPage, Pace
from cloudtrain.launcher.errors import ConfigError, UnreachableError
from cloudtrain.launcher.job import ACTIVE, Attempt, Job
from cloudtrain.launcher.lastword import CLEAN_PAGES, LastWord
from cloudtrain.launcher.logs import keeping, kept
from cloudtrain.launcher.logs.blocks import DamagedError
from cloudtrain.launcher.logs.holdback import HoldBack
from cloudtrain.launcher.logs.replay import Replay

if TYPE_CHECKING:
    from cloudtrain.launcher.registry import Registry

__all__ = ["Stream"]

PATIENCE_S = 60.0  # with lines that are there and cannot be read
SHOW_S, SMALL = 2.0, 500  # after so long, of a job that runs, a page of fewer lines is the last
FRESH_S = 60.0  # since when what is kept is close enough to the log's end, for who wants that end alone


class Stream:
    """The lines of one attempt, read on by `read` until `is_over`; used by one thread.

    `ranks`: only theirs, without what the nodes themselves say. `hold_back_s`: how long a line waits for earlier ones
    of other nodes, by default as long as the backend says. `now`: the reader will not stay, so none is held back.
    `since_s` and `find` (see Replay) are hints: what is certainly not wanted by them may be left out. `tell` is told of
    damage, and of a disk that is full. `anew`: nothing that is kept is believed, and it stays until `close` commits.
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
        since_s: float | None = None,
        find: re.Pattern[str] | None = None,
        tell: Callable[[str], None] | None = None,
        anew: bool = False,
    ) -> None:
        self._registry, self._job, self._attempt = registry, job, attempt
        self._ranks, self._asked_s, self._now = ranks, hold_back_s, now
        self._since_s, self._find, self._tell, self._anew = since_s, find, tell or _say_nothing, anew
        self._has_begun = self._is_over = self._has_mended = False
        self.came = 0  # how many lines the last look has brought, those that are not wanted among them
        self._is_clean = True
        self._replay: Replay | None = None
        self._keeper: kept.Keeper | None = None
        self._place = kept.Place()
        self._cursor: dict[str, Any] | None = None
        self._hold_back = HoldBack(0.0)
        self._passed: Counter[tuple[int, int | None]] = Counter()  # lines that were shown, and come once more
        self._last_word: LastWord | None = None
        self.update(attempt)

    @property
    def is_over(self) -> bool:
        """Whether all lines were read after the job's end."""
        return self._is_over

    @property
    def is_behind(self) -> bool:
        """Whether the last look brought something, so that the next one should not wait."""
        return self.came > 0

    @property
    def is_keeping(self) -> bool:
        """Whether this stream is the one that keeps the lines here; known once something was read."""
        return self._keeper is not None or not self._has_begun

    @property
    def is_waiting_s(self) -> float:
        """For how many seconds the job's last lines have been waited for, 0 while it runs."""
        return 0.0 if self._last_word is None or self.came else time.monotonic() - self._last_word.quiet_since_s

    @property
    def is_clean(self) -> bool:
        """Whether all that was there at the last look could be read."""
        return self._is_clean

    @property
    def pace(self) -> Pace:
        """How often the backend may be asked."""
        return backends.load(self._job.backend).pace(self._attempt.ref) if self._attempt.ref else Pace()

    def update(self, attempt: Attempt) -> None:
        """Take in how the attempt is now: only who knows of its end looks for its last line."""
        self._attempt = attempt
        self._is_over = self._is_over or (attempt.ref is None and attempt.state.state not in ACTIVE)

    def read(self) -> list[LogLine]:
        """Return the lines that have come since, at most a page of them, none where there are none; it does not wait.

        Raises UnreachableError.
        """
        self.came = 0
        if self._is_over or self._attempt.ref is None:
            return []
        self._begin(None)
        if self._replay is not None:
            lines = self._replayed()
            if lines is not None:
                self.came = max(1, len(lines))
                return self._news(lines)
        if self._place.is_complete:
            self._is_over = True
            return []
        return self._news(self._read_on())

    def backlog(self) -> Iterator[list[LogLine]]:
        """Yield the lines that are there now; of a job that runs they may come faster than they can be read.

        It waits where the backend gives no more for a moment. Raises UnreachableError.
        """
        return self._up_to_now(self.read)

    def tail(self, count: int, wants: Callable[[LogLine], bool] | None = None) -> list[LogLine]:
        """Return the last lines that are there now, of those that are wanted; the stream then stands behind them.

        States of progress bars do not count. Where the backend does not answer, they are those that are kept, and the
        next `read` tells.
        """
        if self._is_over or self._attempt.ref is None:
            return []
        self._begin(count if wants is None else None)
        newest: deque[LogLine] = deque(maxlen=count)
        older, self._replay = self._replay, None
        if not self._place.is_complete:
            with contextlib.suppress(UnreachableError):
                for lines in self._up_to_now(self._read_on):
                    newest += _counted(lines, wants)
        self._is_over = self._is_over or self._place.is_complete
        return list(newest) if older is None else self._with_older(older, count, wants, list(newest))

    def close(self, *, commit: bool = True) -> None:
        """Keep what was read, and let go of what is open."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        if self._keeper is not None:
            try:
                if commit and not self._keeper.place.is_complete:
                    self._keeper.commit()
            except (OSError, ConfigError) as error:
                self._say_not_kept(error)
            self._drop_keeper()
        if self._place.is_complete and self._has_begun:
            kept.touch(self._registry.database, self._job.id, self._attempt.number, self._place)

    def skip_kept(self) -> None:
        """Pass over what is kept."""
        self._begin(None)
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _up_to_now(self, read: Callable[[], list[LogLine]]) -> Iterator[list[LogLine]]:
        begin_s = time.monotonic()
        until_s, clean = begin_s + PATIENCE_S, 0
        while not self._is_over:
            lines = read()
            if lines:
                yield lines
            now_s, is_active = time.monotonic(), self._attempt.state.state in ACTIVE
            # What comes now in small pieces is being written now.
            is_past = 0 < self.came < SMALL and is_active and now_s - begin_s > SHOW_S
            clean = clean + 1 if self._is_clean and not self.came else 0
            if self.came and not is_past:
                until_s = now_s + PATIENCE_S
            elif is_past or clean >= (1 if is_active or self._keeper is None else CLEAN_PAGES) or now_s > until_s:
                return
            elif not clean:
                time.sleep(self.pace.lines_s)

    # -- where it begins -----------------------------------------------------------------------------------------------

    def _begin(self, tail: int | None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        database, key = self._registry.database, (self._job.id, self._attempt.number)
        found = None if self._anew else kept.place(database, *key)
        if (found is None or not found.is_complete) and (tail is not None or self._since_s is not None):
            is_fresh = found is not None and time.time() - found.used_s < FRESH_S
            if not is_fresh and self._skip_ahead(tail):
                return
        if found is not None and found.is_complete:
            self._place = found
        else:
            self._begin_keeping(found)
            self._place = self._keeper.place if self._keeper is not None else found or kept.Place()
        self._cursor = self._place.cursor
        self._set_hold_back(self._place.held)
        if self._place.size:
            try:
                folder = kept.folder_of(database, *key)
                self._replay = Replay(kept.Reader(folder, self._place), self._ranks, self._since_s, self._find)
            except DamagedError:
                self._mend(None)

    def _begin_keeping(self, found: kept.Place | None) -> None:
        """Become the one who keeps the lines, if everything is read, to the end, and nobody else is."""
        is_passing = self._now and self._attempt.state.state in ACTIVE
        if is_passing or (self._ranks is not None and found is None):
            return
        try:
            if keeping.room_bytes():
                key = (self._job.id, self._attempt.number)
                self._keeper = kept.keeper(self._registry.database, *key, anew=self._anew)
                self._require_room()  # by now: its own log is not what is dropped
        except DamagedError:
            pass  # who reads it finds out
        except (OSError, ConfigError) as error:
            self._say_not_kept(error)

    def _skip_ahead(self, tail: int | None) -> bool:
        """Begin near the log's end, if the backend can; return whether it could."""
        backend = backends.load(self._job.backend)
        if not hasattr(backend, "logs_from"):
            return False
        near = cast("backends.Seekable", backend)
        try:
            self._cursor = near.logs_from(self._attempt.ref or {}, self._ranks, lines=tail, since_s=self._since_s)
        except UnreachableError:
            return False
        self._set_hold_back(())
        return True

    def _set_hold_back(self, held: tuple[LogLine, ...]) -> None:
        seconds = self._asked_s
        if self._now or self._place.is_complete:
            seconds = 0.0
        elif seconds is None:
            nodes = backends.nodes_of(self._ranks, self._attempt.plan["nproc_per_node"])
            is_alone = self._attempt.plan["instances"] == 1 or (nodes is not None and len(nodes) == 1)
            seconds = 0.0 if is_alone else self.pace.hold_back_s
        self._hold_back = HoldBack(seconds, held)

    # -- what the backend has ------------------------------------------------------------------------------------------

    def _read_on(self) -> list[LogLine]:
        # What is kept has everybody's lines before that cursor; a narrower reader of it goes on like those before.
        narrow = None if self._place.cursor is not None else self._ranks
        assert self._attempt.ref is not None
        self.came = 0
        if self._last_word is None and self._attempt.state.state not in ACTIVE:
            self._last_word = LastWord(self.pace, self._attempt.state)
        try:
            page = backends.load(self._job.backend).logs(self._attempt.ref, self._cursor, narrow, now=self._now)
        except UnreachableError:
            self._is_clean = False
            if self._last_word is None or not self._last_word.is_out_of_patience():
                raise
            self._is_over = True
            held = self._hold_back.pass_on([], all_of_them=True)
            self._keep(held, is_complete=False)
            if not held:
                raise
            return self._wanted(held)
        return self._take(page)

    def _take(self, page: LogPage) -> list[LogLine]:
        self._cursor, self._is_clean = page.cursor, page.is_clean
        self.came = len(page.lines) + page.left_out
        if self._last_word is not None and self._last_word.has_come(page):
            self._is_over = True
        came = _single(page.lines)
        lines = self._hold_back.pass_on(came, all_of_them=self._is_over or (self._now and not self.came))
        self._keep(lines, is_complete=self._is_over and page.is_clean)
        return self._wanted(lines)

    def _wanted(self, lines: list[LogLine]) -> list[LogLine]:
        if self._ranks is None or self._place.cursor is None:
            return lines
        return [line for line in lines if line[2] in self._ranks]

    def _keep(self, lines: list[LogLine], *, is_complete: bool) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.add(lines, self._cursor, self._hold_back.held, is_complete=is_complete)
            if self._anew:
                return  # whether it takes the place of what is kept is decided at the end
            if is_complete:
                self._keeper.commit()
            elif self._keeper.is_due:
                self._keeper.commit()
                self._require_room()
        except (OSError, ConfigError) as error:
            self._say_not_kept(error)

    def _require_room(self) -> None:
        """Go on keeping only if there is room for it, once others made room."""
        if self._keeper is None or keeping.make_room(self._registry.database, room := keeping.room_bytes()):
            return
        self._drop_keeper()
        self._tell(f"the lines are not kept on this machine from here on: {keeping.ROOM} is {room / 1e9:g}")

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def _say_not_kept(self, error: OSError | ConfigError) -> None:
        self._drop_keeper()
        why = error.strerror if isinstance(error, OSError) else error.message
        self._tell(f"the lines are not kept on this machine from here on: {why}")

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _replayed(self) -> list[LogLine] | None:
        """Return a block of what is kept, None behind the last."""
        assert self._replay is not None
        try:
            lines = self._replay.next()
        except DamagedError:
            damaged = self._replay
            if self._mend(damaged):
                return []
            self._replay = damaged  # on behind that block
            return []
        if lines is None:
            self._replay.close()
            self._replay = None
        return lines

    def _mend(self, replay: Replay | None) -> bool:
        """Read what is damaged from the backend again, and stand where the reader stood; else say what is lost."""
        self._replay = None
        self._drop_keeper()  # nobody can write behind what is damaged
        if not self._has_mended and keeping.anew(self._registry, self._job, self._attempt, self._place.count):
            self._tell("what was kept of the lines was damaged, and has been read again")
            if replay is not None:
                self._passed = replay.before()
                replay.close()
            self._has_begun, self._has_mended = False, True
            self._since_s = self._find = None  # what they leave out would not be counted off
            self._begin(None)
            return True
        self._has_mended = True
        lost = self._place.count if replay is None else replay.lost
        self._tell(f"{lost} lines that were kept here are damaged, and cannot be read again now")
        return False

    def _with_older(
        self, older: Replay, count: int, wants: Callable[[LogLine], bool] | None, newest: list[LogLine]
    ) -> list[LogLine]:
        try:
            return [*older.last(count - len(newest), wants), *newest]
        except DamagedError:
            if not self._mend(None):
                return [*older.last(count - len(newest), wants, patient=True), *newest]
            older.close()
            again, self._replay = self._replay, None
            if again is None:
                return newest
            older = again
            return older.last(count, wants)
        finally:
            older.close()

    def _news(self, lines: list[LogLine]) -> list[LogLine]:
        """Return the lines without those that were given out before the log was read anew."""
        if not self._passed:
            return lines
        found = []
        for line in lines:
            stream = line[1], line[2]
            if self._passed[stream] > 0:
                self._passed[stream] -= 1
                continue
            found.append(line)
        self._passed = +self._passed
        return found


def _counted(lines: list[LogLine], wants: Callable[[LogLine], bool] | None) -> list[LogLine]:
    if wants is None:
        return [line for line in lines if line[0][-1:] != "\r"]
    return [line for line in lines if line[0][-1:] != "\r" and wants(line)]


def _single(lines: list[LogLine]) -> list[LogLine]:
    """Return the lines with those apart that a platform gave as one."""
    texts = [line[0] for line in lines]
    if "\n" not in "".join(texts):
        return lines
    return [line._replace(text=text) for line in lines for text in line[0].split("\n")]


def _say_nothing(words: str) -> None:
    """Say nothing: of readers that have no place for it."""
