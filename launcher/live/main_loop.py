"""The live view's main loop: read keys and draw, until the user quits, the jobs end, or the terminal is gone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.text import Text

from ..job import exit_code
from ..jobs.overview import as_line, as_lines
from ..logs.view import parse_ranks
from ..notices.notifier import MARK
from ..text.charts import Signs, signs_of
from ..text.terminal import print_text, say, say_each
from . import jobview, tableview
from .feed import JobFeed, LogTail
from .model import Scene, TailShot, with_log
from .screen import Renderer, Screen, SignalExit
from .view_state import ViewState, steer

FRAME_S = 0.25  # minimum seconds between two pictures
BYTES_PER_S = 8000  # assumed speed of a slow connection: after a large picture the next picture waits
LEAVE_S = 10.0  # after the end of all named jobs: the user may want to read
CLOSE_S, HURRY_S = 1.5, 0.5  # for deliveries: when the user quits, when a signal ends the view
STOP_S = 30.0  # for a stop request to reach its backend, when the user quits
NOTE_S = 30.0  # how long a message stays in a job's view
_KEYS_AT_ONCE = 64


@dataclass
class FrameState:
    """The view's state between two pictures."""

    choice: ViewState
    signs: Signs
    tail: LogTail | None = None
    over_s: float | None = None  # when all named jobs had ended
    stays: bool = False  # the user has pressed a key since
    said: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    page: int = 10


def show(names: Sequence[str], every_s: float = 0.0) -> int:
    """Show the named jobs, or all jobs without names, until the user quits; return the exit code.

    The exit code is that of the ended jobs, or 130 if a named job still runs. Raises NoSuchJobError.
    """
    feed = JobFeed(names, every_s)
    jobs = [watched.job.id for watched in feed.scene(time.time()).jobs]
    is_single = len(names) > 0 and len(jobs) == 1
    opened = jobs[0] if is_single else None
    state = FrameState(ViewState(chosen=jobs[0] if jobs else "", opened=opened, is_single=is_single), signs_of())
    code: int | None = None
    is_left = False  # by a key, or because all jobs have ended, so a longer wait is acceptable
    try:
        with Screen(feed.still) as screen:
            feed.watcher.start()
            _open(feed, state)
            code = _run(screen, feed, state, bool(names))
            is_left = True
    except SignalExit as ended:
        code = ended.exit_code
    except KeyboardInterrupt:
        code = 130
    finally:
        has_terminal = code != 129  # after SIGHUP (129) no terminal is left for messages
        with suppress(KeyboardInterrupt):  # the user does not wait for the polls to end
            feed.watcher.close(CLOSE_S if is_left else HURRY_S)
            if state.tail is not None:
                state.tail.close(HURRY_S)
        stops = _stops(feed, has_terminal=has_terminal)
        if has_terminal:
            _leave(feed, state, stops)
    return code


def _stops(feed: JobFeed, *, has_terminal: bool) -> list[str]:
    """Wait for the user's stop requests, since running jobs cost money; return the result of each request."""
    under_way = feed.stopping()
    if under_way and has_terminal:
        say(f"asking {', '.join(under_way)} to stop; Ctrl-C does not wait for the answer")
    with suppress(KeyboardInterrupt):
        feed.stops(STOP_S)
    found = feed.stops(0.0)
    if left := feed.stopping():
        found.append(f"ask again: cloudtrain stop {' '.join(left)}")
    return found


def _run(screen: Screen, feed: JobFeed, state: FrameState, is_named: bool) -> int:
    """Draw and read keys until the user quits; return the exit code."""
    renderer = Renderer(state.signs.encoding)
    next_s = 0.0
    while True:
        _take_in(screen, feed, state)
        scene = feed.scene(time.time())
        if (code := _ended(scene, state, is_named)) is not None:
            return code
        if screen.is_stale:
            screen.is_stale = False
            renderer.forget()
        if time.monotonic() >= next_s:
            began_s = time.monotonic()
            data = renderer.render(_picture(scene, state, screen.size))
            screen.write(data)
            next_s = began_s + max(FRAME_S, len(data) / BYTES_PER_S)
        for key in screen.keys(next_s - time.monotonic())[:_KEYS_AT_ONCE]:
            next_s = 0.0
            state.stays = state.stays or state.over_s is not None
            if _press(key, feed, state, screen) == "quit":
                return _code_of(feed.scene(time.time()), is_named)


def _take_in(screen: Screen, feed: JobFeed, state: FrameState) -> None:
    """Store captured messages as notes: of several lines the first; an alert also rings the bell."""
    for words in screen.said():
        state.said.append(words)
        text = words.removeprefix(MARK)
        if text.startswith("  ") or not text.strip():  # a detail of the line before
            continue
        feed.note(text.strip())
        if text != words:
            screen.write(b"\a")


def _press(key: str, feed: JobFeed, state: FrameState, screen: Screen) -> str:
    """Process a key; return the action that the view itself cannot take."""
    scene = feed.scene(time.time())
    ids = [watched.job.id for watched in scene.jobs]
    opened = scene.of(state.choice.opened or "")
    ranks = opened.job.attempt.plan.ranks if opened is not None else 0
    lines = state.tail.shot().lines if state.tail is not None else ()
    state.choice, action = steer(state.choice, key, ids, lines, state.page, ranks)
    feed.marked = state.choice.chosen
    if action is None:
        return ""
    if action.kind == "redraw":
        screen.is_stale = True
    elif action.kind == "open":
        _open(feed, state)
    elif action.kind == "stop":
        feed.note(f"asking {action.job} to stop")
        feed.stop(action.job)
    return action.kind


def _open(feed: JobFeed, state: FrameState) -> None:
    """Start to read the log of the job in view, and stop reading the previous log."""
    if state.tail is not None:
        state.tail.close()
        state.tail = None
    opened = state.choice.opened
    feed.opened = opened or ""
    if opened is not None:
        ranks = parse_ranks(state.choice.ranks) if state.choice.ranks else None
        state.tail = LogTail(feed.folder, opened, ranks)


def _picture(scene: Scene, state: FrameState, size: tuple[int, int]) -> list[Text]:
    choice = state.choice
    watched = scene.of(choice.opened) if choice.opened is not None else None
    note = _note(scene, state)
    if watched is None:
        words = "all jobs that are active or have ended recently" if not choice.is_single else ""
        return tableview.view(scene, choice, size, state.signs, note or words)
    shot = state.tail.shot() if state.tail is not None else TailShot()
    rows, state.page = jobview.view(with_log(watched, shot), shot, choice, size, state.signs, scene.now_s, note)
    return rows


def _note(scene: Scene, state: FrameState) -> str:
    """Return the newest message while recent; after the end of all jobs, the countdown to the view's end."""
    if state.over_s is not None and not state.stays:
        left_s = max(0, round(state.over_s + LEAVE_S - scene.now_s))
        return f"ended; this view leaves in {left_s} s, unless you press a key"
    since_s = scene.now_s - NOTE_S
    watched = scene.of(state.choice.opened or "")
    if watched is not None and not watched.job.active:  # messages from before the job's end are obsolete
        since_s = max(since_s, watched.job.attempt.state.ended_s or 0.0)
    return scene.notes[-1][1] if scene.notes and scene.notes[-1][0] > since_s else ""


def _ended(scene: Scene, state: FrameState, is_named: bool) -> int | None:
    """Return the exit code once all named jobs have ended, unless the user has asked to stay."""
    is_over = is_named and all(not watched.job.active and watched.seen_s is not None for watched in scene.jobs)
    if not is_over:
        state.over_s = None
        return None
    state.over_s = state.over_s or scene.now_s
    if state.stays or scene.now_s - state.over_s < LEAVE_S:
        return None
    return _code_of(scene, is_named)


def _code_of(scene: Scene, is_named: bool) -> int:
    """Return the first nonzero code of the named jobs; 130 while a named job runs."""
    if not is_named:
        return 0
    if any(watched.job.active for watched in scene.jobs):
        return 130
    return next((code for watched in scene.jobs if (code := exit_code(watched.job.attempt.state))), 0)


def _leave(feed: JobFeed, state: FrameState, stops: Sequence[str]) -> None:
    """Print the messages and the state of the jobs, after the picture has gone."""
    say_each((*state.said, *stops))
    scene = feed.scene(time.time())
    if state.choice.is_single and scene.jobs:
        print_text(as_lines(scene.jobs[0].view))
    else:
        print_text([as_line(watched.view) for watched in scene.jobs])
    asked = feed.asked()
    if any(watched.job.active and watched.job.id not in asked for watched in scene.jobs):
        say(f"no longer watching; the {'other ' if asked else ''}jobs continue")
