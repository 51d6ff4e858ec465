"""The live view itself: keys in, pictures out, until the user leaves, the jobs have ended, or the terminal goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.text import Text

from cloudtrain.launcher.job import exit_code
from cloudtrain.launcher.live import jobview, tableview
from cloudtrain.launcher.live.choice import Choice, steer
from cloudtrain.launcher.live.feed import Feed
from cloudtrain.launcher.live.painter import Painter
from cloudtrain.launcher.live.screen import Ended, Screen
from cloudtrain.launcher.live.sight import Scene, TailShot
from cloudtrain.launcher.live.tail import Tail
from cloudtrain.launcher.logs.view import parse_ranks
from cloudtrain.launcher.notices import alarm
from cloudtrain.launcher.overview import as_lines
from cloudtrain.launcher.signs import Signs, signs_of
from cloudtrain.launcher.terminal import print_text, say
from cloudtrain.launcher.watch import Seen
from cloudtrain.launcher.watch import line as plain_line

__all__ = ["show"]

FRAME_S = 0.25  # between two pictures, at the least
BYTES_PER_S = 8000  # that a slow line has for them: after a large picture the next one waits
LEAVE_S = 10.0  # after the end of all that was named: somebody may want to read on
CLOSE_S, HURRY_S = 1.5, 0.5  # for what is being told or sent: when the user leaves, when the watch is ended
STOP_S = 30.0  # that a stop which was asked for has to reach its backend, when the user leaves
NOTE_S = 30.0  # that a word of ours stays in a job's view
_KEYS_AT_ONCE = 64


@dataclass
class State:
    """What the view holds between two pictures."""

    choice: Choice
    signs: Signs
    tail: Tail | None = None
    over_s: float | None = None  # since when all that was named has ended
    stays: bool = False  # somebody has pressed a key since
    said: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    page: int = 10


def show(names: Sequence[str], least_s: float = 0.0) -> int:
    """Show the jobs of these names, without any all, until the user leaves; return the exit code.

    That of jobs that have ended is theirs; 130 where some that were named still run. Raises NoSuchJobError.
    """
    feed = Feed(names, least_s)
    jobs = [sight.job.id for sight in feed.scene(time.time()).sights]
    is_single = len(names) > 0 and len(jobs) == 1
    opened = jobs[0] if is_single else None
    state = State(Choice(chosen=jobs[0] if jobs else "", opened=opened, is_single=is_single), signs_of())
    code: int | None = None
    is_left = False  # by a key, or because all is over: then nobody is in a hurry
    try:
        with Screen(feed.still) as screen:
            _open(feed, state)
            code = _run(screen, feed, state, bool(names))
            is_left = True
    except Ended as ended:
        code = ended.exit_code
    except KeyboardInterrupt:
        code = 130
    finally:
        is_told = code != 129  # then there is no terminal to tell it to
        with suppress(KeyboardInterrupt):  # who cannot wait for the looks to end
            feed.close(CLOSE_S if is_left else HURRY_S)
            if state.tail is not None:
                state.tail.close(HURRY_S)
        stops = _stops(feed, is_told=is_told)
        if is_told:
            _leave(feed, state, stops)
    return code


def _stops(feed: Feed, *, is_told: bool) -> list[str]:
    """Wait for what the user has asked for and money hangs on; return what came of each stop."""
    under_way = feed.stopping()
    if under_way and is_told:
        say(f"asking {', '.join(under_way)} to stop; Ctrl-C does not wait for the answer")
    with suppress(KeyboardInterrupt):
        feed.stops(STOP_S)
    found = feed.stops(0.0)
    if left := feed.stopping():
        found.append(f"ask again: cloudtrain stop {' '.join(left)}")
    return found


def _run(screen: Screen, feed: Feed, state: State, is_named: bool) -> int:
    """Paint and read keys until the user leaves; return the exit code."""
    painter = Painter(state.signs.encoding)
    next_s = 0.0
    while True:
        _take_in(screen, feed, state)
        scene = feed.scene(time.time())
        code = _ended(scene, state, is_named)
        if code is not None:
            return code
        if screen.is_stale:
            screen.is_stale = False
            painter.forget()
        if time.monotonic() >= next_s:
            began_s = time.monotonic()
            data = painter.paint(_picture(scene, state, screen.size))
            screen.write(data)
            next_s = began_s + max(FRAME_S, len(data) / BYTES_PER_S)
        for key in screen.keys(next_s - time.monotonic())[:_KEYS_AT_ONCE]:
            next_s = 0.0
            state.stays = state.stays or state.over_s is not None
            if _press(key, feed, state, screen) == "quit":
                return _code_of(feed.scene(time.time()), is_named)


def _take_in(screen: Screen, feed: Feed, state: State) -> None:
    """Note what something has said meanwhile: of several lines the first; an alert rings the bell, too."""
    for words in screen.said():
        state.said.append(words)
        text = words.removeprefix(alarm.MARK)
        is_alert = text != words
        if text.startswith("  ") or not text.strip():  # says more about the line before it
            continue
        feed.note(text.strip())
        if is_alert:
            screen.write(b"\a")


def _press(key: str, feed: Feed, state: State, screen: Screen) -> str:
    """Take one key in; return what is to be done that the view cannot do by itself."""
    scene = feed.scene(time.time())
    ids = [sight.job.id for sight in scene.sights]
    opened = scene.of(state.choice.opened or "")
    ranks = opened.job.attempt.plan["ranks"] if opened is not None else 0
    lines = state.tail.shot().lines if state.tail is not None else ()
    state.choice, action = steer(state.choice, key, ids, lines, state.page, ranks)
    feed.mark(state.choice.chosen)
    kind = action.kind if action is not None else ""
    if kind == "redraw":
        screen.is_stale = True
    elif action is not None and kind == "open":
        _open(feed, state)
    elif action is not None and kind == "stop":
        feed.note(f"asking {action.job} to stop")
        feed.stop(action.job)
    return kind


def _open(feed: Feed, state: State) -> None:
    """Begin to read the log of the job in view, and end with that of another."""
    if state.tail is not None:
        state.tail.close()
        state.tail = None
    opened = state.choice.opened
    feed.open(opened or "")
    if opened is not None:
        ranks = parse_ranks(state.choice.ranks) if state.choice.ranks else None
        state.tail = Tail(feed.folder, opened, ranks)


def _picture(scene: Scene, state: State, size: tuple[int, int]) -> list[Text]:
    choice = state.choice
    sight = scene.of(choice.opened) if choice.opened is not None else None
    note = _note(scene, state)
    if sight is None:
        words = "all jobs that are active or have ended of late" if not choice.is_single else ""
        rows = tableview.view(scene, choice, size, state.signs, note or words)
    else:
        shot = state.tail.shot() if state.tail is not None else TailShot()
        state.page = jobview.log_page(sight, choice, size, state.signs, scene.now_s, note)
        rows = jobview.view(sight, shot, choice, size, state.signs, scene.now_s, note)
    return rows


def _note(scene: Scene, state: State) -> str:
    """Return the newest word of ours, as long as it is new; at the end of all, that the view is about to leave."""
    if state.over_s is not None and not state.stays:
        left_s = max(0, round(state.over_s + LEAVE_S - scene.now_s))
        return f"ended; this view leaves in {left_s} s, unless you press a key"
    since_s = scene.now_s - NOTE_S
    sight = scene.of(state.choice.opened or "")
    if sight is not None and not sight.job.active:  # what was said of it while it ran is over with it
        since_s = max(since_s, sight.job.attempt.state.ended_s or 0.0)
    return scene.notes[-1][1] if scene.notes and scene.notes[-1][0] > since_s else ""


def _ended(scene: Scene, state: State, is_named: bool) -> int | None:
    """Return the exit code once all that was named has ended, and nobody has asked to stay."""
    is_over = is_named and all(not sight.job.active and sight.seen_s is not None for sight in scene.sights)
    if not is_over:
        state.over_s = None
        return None
    state.over_s = state.over_s or scene.now_s
    if state.stays or scene.now_s - state.over_s < LEAVE_S:
        return None
    return _code_of(scene, is_named)


def _code_of(scene: Scene, is_named: bool) -> int:
    """Return the first bad code of those that were named; 130 while one of them runs."""
    if not is_named:
        return 0
    if any(sight.job.active for sight in scene.sights):
        return 130
    return next((code for sight in scene.sights if (code := exit_code(sight.job.attempt.state))), 0)


def _leave(feed: Feed, state: State, stops: Sequence[str]) -> None:
    """Print what is to be read after the picture has gone: what was said meanwhile, and how the jobs are."""
    for words in (*state.said, *stops):
        say(words)
    scene = feed.scene(time.time())
    if state.choice.is_single and scene.sights:
        sight = scene.sights[0]
        print_text(as_lines(sight.job, sight.attempts))
    else:
        print_text([plain_line(Seen(sight.job, sight.outlook)) for sight in scene.sights])
    asked = feed.asked()
    if any(sight.job.active and sight.job.id not in asked for sight in scene.sights):
        say(f"no longer watching; the {'other ' if asked else ''}jobs run on")
