"""The log of an attempt: lines of all nodes and ranks in time order, as a single stream for display and for caching.

The stream starts with the cached lines and continues with the backend's. A stream that reads all ranks also writes the
cache, unless another process already does.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from cloudtrain.entrypoints import events

from .. import backend as backends
from ..backend import Cursor, LogLine, LogPage, Pace
from ..errors import ConfigError, UnreachableError
from ..job import ACTIVE, Attempt, Job
from ..store.registry import Registry
from . import cache
from .blocks import DamagedError
from .late_lines import CLEAN_PAGES, EndDetector, HoldBack
from .view import View

PATIENCE_S = 60.0  # how long to wait while existing lines cannot be read
SHOW_S, SMALL = 2.0, 500  # after SHOW_S, for a running job, a page with fewer lines ends the backlog
KEEP_S = 30.0  # most time for caching an ended log, at each call
FRESH_S = 60.0  # a cache used more recently is close enough to the log's end for a reader of the end


class LogStream:
    """The lines of an attempt, read by `read` until `is_over`; used by a single thread.

    Of the `view`, `ranks` selects the ranks, without the nodes' own lines; `hold_back_s` is how long a line waits for
    earlier lines of other nodes; `since_s` and `grep` (see Replay) are hints: lines that cannot match may be left out.
    `now`: the reader does not follow, so no line waits. `tell` receives messages about damage and a full disk.
    `rewrite`: ignore the cache and write a new copy, which `close` may commit. `is_over`: all lines were read after the
    job's end; `is_clean`: all existing lines could be read at the last poll.
    """

    def __init__(
        self,
        registry: Registry,
        job: Job,
        attempt: Attempt,
        view: View | None = None,
        *,
        now: bool = False,
        tell: Callable[[str], None] = lambda words: None,
        rewrite: bool = False,
    ) -> None:
        self._registry, self._job, self._attempt = registry, job, attempt
        self._view, self._now, self._tell, self._rewrite = view or View(), now, tell, rewrite
        self._has_begun = self.is_over = self._has_mended = False
        self.came = 0  # lines brought by the last poll, including unwanted lines; above 0 the next poll should not wait
        self.is_clean = True
        self._replay: cache.Replay | None = None
        self._keeper: cache.LogCacheWriter | None = None
        self._place = cache.CachePosition()
        self._cursor: Cursor | None = None
        self._hold_back = HoldBack(0.0)
        self._passed: Counter[tuple[int, int | None]] = Counter()  # lines already returned, which will be read again
        self._end_detector: EndDetector | None = None
        self.update(attempt)

    @property
    def is_keeping(self) -> bool:
        """Whether this stream writes the cache; known only after the first read."""
        return self._keeper is not None or not self._has_begun

    @property
    def is_waiting_s(self) -> float:
        """Seconds since the last line of the ended job; 0 while the job runs."""
        return 0.0 if self._end_detector is None or self.came else time.monotonic() - self._end_detector.quiet_since_s

    @property
    def pace(self) -> Pace:
        """How often the backend may be polled."""
        return self._backend.pace(self._attempt.ref) if self._attempt.ref else Pace()

    @property
    def _backend(self) -> backends.Backend:
        return backends.load(self._job.backend_of(self._attempt))

    def update(self, attempt: Attempt) -> None:
        """Store the attempt's current state; the end of the log is detected only after the attempt's end."""
        self._attempt = attempt
        self.is_over = self.is_over or (attempt.ref is None and attempt.state.state not in ACTIVE)

    def read(self) -> list[LogLine]:
        """Return the new lines, at most a page, possibly none; never waits. Raises UnreachableError."""
        self.came = 0
        if self.is_over or self._attempt.ref is None:
            return []
        self._begin(None)
        if self._replay is not None and (lines := self._replayed()) is not None:
            self.came = max(1, len(lines))
            return self._news(lines)
        if self._place.is_complete:
            self.is_over = True
            return []
        return self._news(self._read_on())

    def backlog(self, read: Callable[[], list[LogLine]] | None = None) -> Iterator[list[LogLine]]:
        """Yield the existing lines, by `read` or its part; a running job may write faster than the lines can be read.

        Waits if the backend returns no lines for a moment. Raises UnreachableError.
        """
        begin_s, read = time.monotonic(), read or self.read
        until_s, clean = begin_s + PATIENCE_S, 0
        while not self.is_over:
            lines = read()
            if lines:
                yield lines
            now_s, is_active = time.monotonic(), self._attempt.state.state in ACTIVE
            # A small page now holds lines that the job is just writing.
            is_past = 0 < self.came < SMALL and is_active and now_s - begin_s > SHOW_S
            clean = clean + 1 if self.is_clean and not self.came else 0
            if self.came and not is_past:
                until_s = now_s + PATIENCE_S
            elif is_past or clean >= (1 if is_active or self._keeper is None else CLEAN_PAGES) or now_s > until_s:
                return
            elif not clean:
                time.sleep(self.pace.lines_s)

    def tail(self, count: int, wants: Callable[[LogLine], bool] | None = None) -> list[LogLine]:
        """Return the last `count` existing lines that match `wants`; the stream then continues after these lines.

        States of progress bars do not count. If the backend does not answer, cached lines are returned, and the next
        `read` raises the error.
        """
        if self.is_over or self._attempt.ref is None:
            return []
        self._begin(count if wants is None else None)
        newest: deque[LogLine] = deque(maxlen=count)
        older, self._replay = self._replay, None
        if not self._place.is_complete:
            with contextlib.suppress(UnreachableError):
                for lines in self.backlog(self._read_on):
                    newest += [line for line in lines if line.text[-1:] != "\r" and (wants is None or wants(line))]
        self.is_over = self.is_over or self._place.is_complete
        return list(newest) if older is None else self._with_older(older, count, wants, list(newest))

    def close(self, *, commit: bool = True) -> None:
        """Commit the lines read so far, and close open files."""
        self._end_replay()
        if self._keeper is not None:
            try:
                if commit and not self._keeper.place.is_complete:
                    self._keeper.commit()
            except (OSError, ConfigError) as error:
                self._say_not_kept(error)
            self._drop_keeper()
        if self._place.is_complete and self._has_begun:
            cache.touch(self._registry.database, self._job.id, self._attempt.number, self._place)

    def skip_kept(self) -> None:
        """Skip the cached lines."""
        self._begin(None)
        self._end_replay()

    def _end_replay(self) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:
            replay.close()

    def _begin(self, tail: int | None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        database, key = self._registry.database, (self._job.id, self._attempt.number)
        found = None if self._rewrite else cache.place(database, *key)
        if (found is None or not found.is_complete) and (tail is not None or self._view.since_s is not None):
            is_fresh = found is not None and time.time() - found.used_s < FRESH_S
            if not is_fresh and self._skip_ahead(tail):
                return
        if self._search() or (found is not None and found.is_complete):
            self._place = found or cache.CachePosition()
        else:
            self._begin_keeping(found)
            self._place = self._keeper.place if self._keeper is not None else found or cache.CachePosition()
        self._cursor = self._place.cursor
        self._set_hold_back(self._place.held)
        if self._place.size:
            try:
                self._replay = cache.Replay(cache.folder_of(database, *key), self._place, self._view)
            except DamagedError:
                self._mend(None)

    def _search(self) -> Callable[..., LogPage] | None:
        """Return the backend's search for the view's lines; they are no whole log, and are not stored."""
        grep, backend = self._view.grep, self._backend
        if not self._now or grep is None or not (cache.is_of_blocks(grep) and grep.pattern.isascii()):
            return None
        if grep.pattern == events.MARK:  # this search may leave out steps
            return None
        return partial(backend.logs_with, grep.pattern) if isinstance(backend, backends.Searchable) else None

    def _begin_keeping(self, found: cache.CachePosition | None) -> None:
        """Start caching, unless this reader is filtered or another process already caches this attempt."""
        is_passing = self._now and self._attempt.state.state in ACTIVE
        if is_passing or (self._view.ranks is not None and found is None):
            return
        try:
            if cache.room_bytes():
                key = (self._job.id, self._attempt.number)
                self._keeper = cache.keeper(self._registry.database, *key, rewrite=self._rewrite)
                self._require_room()  # only now, so that the stream's own log is not dropped
        except DamagedError:
            pass  # the reader reports the damage
        except (OSError, ConfigError) as error:
            self._say_not_kept(error)

    def _skip_ahead(self, tail: int | None) -> bool:
        """Start near the log's end if the backend supports a seek; return whether it does."""
        backend = self._backend
        if not isinstance(backend, backends.Seekable):
            return False
        try:
            ref, since_s = self._attempt.ref or {}, self._view.since_s
            self._cursor = backend.logs_from(ref, self._view.ranks, lines=tail, since_s=since_s)
        except UnreachableError:
            return False
        self._set_hold_back(())
        return True

    def _set_hold_back(self, held: tuple[LogLine, ...]) -> None:
        seconds = self._view.hold_back_s
        if self._now or self._place.is_complete:
            seconds = 0.0
        elif seconds is None:
            ranks, plan = self._view.ranks, self._attempt.plan
            is_alone = plan.instances == 1 or len({rank // plan.nproc_per_node for rank in ranks or ()}) == 1
            seconds = 0.0 if is_alone else self.pace.hold_back_s
        self._hold_back = HoldBack(seconds, held)

    def _read_on(self) -> list[LogLine]:
        # The cache holds all ranks up to this cursor, so a filtered reader must continue unfiltered from here.
        narrow = None if self._place.cursor is not None else self._view.ranks
        assert self._attempt.ref is not None
        self.came = 0
        if self._end_detector is None and self._attempt.state.state not in ACTIVE:
            self._end_detector = EndDetector(self.pace, self._attempt.state)
        try:
            read = self._search() or self._backend.logs
            page = read(self._attempt.ref, self._cursor, narrow, now=self._now)
        except UnreachableError:
            self.is_clean = False
            if self._end_detector is None or not self._end_detector.is_out_of_patience():
                raise
            self.is_over = True
            held = self._hold_back.pass_on([], all_of_them=True)
            self._keep(held, is_complete=False)
            if not held:
                raise
            return self._wanted(held)
        self._cursor, self.is_clean = page.cursor, page.is_clean
        self.came = len(page.lines) + page.left_out
        if self._end_detector is not None and self._end_detector.is_last(page):
            self.is_over = True
        came = _single(page.lines)
        is_last = self.is_over or (self._now and not self.came)
        is_whole = page.is_whole and self._view.hold_back_s is None  # the user's own time holds
        lines = self._hold_back.pass_on(came, all_of_them=is_last, is_whole=is_whole)
        self._keep(lines, is_complete=self.is_over and page.is_clean)
        return self._wanted(lines)

    def _wanted(self, lines: list[LogLine]) -> list[LogLine]:
        if self._view.ranks is None or self._place.cursor is None:
            return lines
        return [line for line in lines if line.rank in self._view.ranks]

    def _keep(self, lines: list[LogLine], *, is_complete: bool) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.add(lines, self._cursor, self._hold_back.held, is_complete=is_complete)
            if self._rewrite:
                return  # the caller decides at the end whether the copy replaces the cache
            if is_complete:
                self._keeper.commit()
            elif self._keeper.is_due:
                self._keeper.commit()
                self._require_room()
        except (OSError, ConfigError) as error:
            self._say_not_kept(error)

    def _require_room(self) -> None:
        """Continue caching only if there is enough space, after dropping older logs."""
        if self._keeper is None or cache.make_room(self._registry.database, room := cache.room_bytes()):
            return
        self._drop_keeper()
        self._tell(f"the lines are not kept on this machine from here on: {cache.ROOM} is {room / 1e9:g}")

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    def _say_not_kept(self, error: OSError | ConfigError) -> None:
        self._drop_keeper()
        why = error.strerror if isinstance(error, OSError) else error.message
        self._tell(f"the lines are not kept on this machine from here on: {why}")

    def _replayed(self) -> list[LogLine] | None:
        """Return a block of cached lines, or None after the last block."""
        assert self._replay is not None
        try:
            lines = self._replay.next()
        except DamagedError:
            damaged = self._replay
            if not self._mend(damaged):
                self._replay = damaged  # continue after the damaged block
            return []
        if lines is None:
            self._end_replay()
        return lines

    def _mend(self, replay: cache.Replay | None) -> bool:
        """Read damaged lines from the backend again, up to the same position; if impossible, report the loss."""
        self._replay = None
        self._drop_keeper()  # no writer can append after a damaged block
        if not self._has_mended and _rewrite(self._registry, self._job, self._attempt, self._place.count):
            self._tell("what was kept of the lines was damaged, and has been read again")
            if replay is not None:
                self._passed = replay.before()
                replay.close()
            self._has_begun, self._has_mended = False, True
            # Lines left out by these hints would not be counted.
            self._view = replace(self._view, since_s=None, grep=None)
            self._begin(None)
            return True
        self._has_mended = True
        lost = self._place.count if replay is None else replay.lost
        self._tell(f"{lost} lines that were kept here are damaged, and cannot be read again now")
        return False

    def _with_older(
        self, older: cache.Replay, count: int, wants: Callable[[LogLine], bool] | None, newest: list[LogLine]
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
        """Return the lines without the lines returned before the log was read again."""
        if not self._passed:
            return lines
        found = []
        for line in lines:
            stream = line.node, line.rank
            if self._passed[stream] > 0:
                self._passed[stream] -= 1
                continue
            found.append(line)
        self._passed = +self._passed
        return found


def _single(lines: list[LogLine]) -> list[LogLine]:
    """Return the lines, splitting texts that a platform delivered with newlines."""
    texts = [line.text for line in lines]
    if "\n" not in "".join(texts):
        return lines
    return [line._replace(text=text) for line in lines for text in line.text.split("\n")]


def _rewrite(registry: Registry, job: Job, attempt: Attempt, least: int) -> bool:
    """Read the attempt's log from the beginning and replace the damaged cache; return whether the cache was replaced.

    The cache stays if the backend has fewer than `least` lines now, or if another process writes.
    """
    stream = LogStream(registry, job, attempt, rewrite=True)
    count = 0
    try:
        while not stream.is_over and stream.is_keeping:
            count += len(stream.read())
            if not stream.came:
                break
        is_whole = stream.is_keeping and count >= least
    except UnreachableError:
        is_whole = False
    stream.close(commit=is_whole)
    return is_whole


def keep_whole(registry: Registry, job: Job, attempt: Attempt) -> bool:
    """Read the log of an ended attempt to its end, and cache the lines.

    Return whether the whole log is cached. Returns False if KEEP_S or space ran out, the backend is unreachable,
    another process writes the cache, or the log was dropped for space. The lines read so far stay, and the next call
    continues after them. Raises ConfigError.
    """
    until_s, key = time.monotonic() + KEEP_S, (job.id, attempt.number)
    if attempt.ref is None or attempt.state.state in ACTIVE or not cache.room_bytes():
        return False
    found = cache.place(registry.database, *key)
    if found is not None and found.is_complete:
        return True
    if cache.is_dropped(registry.database, *key):
        return False
    with contextlib.suppress(UnreachableError), contextlib.closing(LogStream(registry, job, attempt)) as stream:
        stream.skip_kept()
        while not stream.is_over and stream.is_keeping and time.monotonic() < until_s:
            stream.read()
            if not stream.came and not stream.is_over:
                time.sleep(min(stream.pace.lines_s, max(0.0, until_s - time.monotonic())))
    found = cache.place(registry.database, *key)
    return found is not None and found.is_complete
