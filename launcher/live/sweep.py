"""The live view of a sweep: threads drive the sweep and read the registry, the main thread draws and reads keys.

`view` is pure: the sweep's money, its rungs, the best trials and the running trials.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.text import Text

from cloudtrain.entrypoints.format import dollars

from ..jobs.poller import as_fault
from ..store import sweeps
from ..store.registry import Registry
from ..store.sweeps import SweepRecord
from ..sweeps import driving, overview
from ..sweeps.overview import figure, place_of, values_text
from ..text import charts
from ..text.charts import Signs, signs_of
from ..text.terminal import print_lines, say
from ..text.visible import cleaned
from .rows import BAD, GOOD, QUIET, WARNS, labelled, row, sides
from .screen import ESCAPE, Renderer, Screen, SignalExit

FRAME_S = 0.25  # minimum seconds between two pictures
READ_S = 1.0  # between two reads of the registry
BACK_OFF_S = 5.0  # after an error
CLOSE_S = 2.0  # for a send to end, when the user leaves; a killed driver loses no segment, but a send in progress waits
MOST_NOTES = 20
_BAR = 24  # columns
_RUNG_HEADS = ("RUNG", "STEP", "DONE", "RUNNING", "FAILED", "BEST")
_STYLES = {"running": "bold cyan", "ended": "bold green", "stopped": "bold magenta", "failed": "bold red"}


# A sweep as last read: the JSON of `status`, and the newest messages of the driver.
SweepShot = tuple[dict[str, Any], Sequence[str]]


class SweepFeed:
    """Drives the sweep and reads its rows, each in a thread.

    Call `start` once the view has the terminal, because a send may print; call `close` at the end.
    """

    def __init__(self, folder: Path, sweep: SweepRecord, every_s: float) -> None:
        self._folder, self._id, self._every_s = folder, sweep.id, every_s
        self._notes = deque[str](maxlen=MOST_NOTES)
        self._busy = threading.Lock()  # held while the driver works, so that a suspension waits
        self._closing = threading.Event()
        self.shot: SweepShot | None = None  # None before the first read
        self.code: int | None = None
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._drive, self._read)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def note(self, words: str) -> None:
        """Store a message for the view."""
        self._notes.append(words)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Run the block while no segment is being sent, after at most CLOSE_S seconds."""
        is_still = self._busy.acquire(timeout=CLOSE_S)
        try:
            yield
        finally:
            if is_still:
                self._busy.release()

    def close(self) -> None:
        """End the threads, waiting at most CLOSE_S seconds for a send in progress."""
        self._closing.set()
        end_s = time.monotonic() + CLOSE_S
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(max(0.0, end_s - time.monotonic()))

    def _drive(self) -> None:
        while not self._closing.is_set():
            wait_s = self._every_s
            try:
                with self._busy, closing(Registry(self._folder)) as registry:
                    sweep = sweeps.find(registry.database, self._id)
                    for line in driving.advance(registry, sweep):
                        self.note(line)
            except Exception as error:  # a busy registry or a full disk: the view goes on
                self.note(as_fault(error).message)
                wait_s = BACK_OFF_S
            self._closing.wait(wait_s)

    def _read(self) -> None:
        while not self._closing.is_set():
            try:
                with closing(Registry(self._folder)) as registry:
                    sweep = sweeps.find(registry.database, self._id)
                    self.shot = overview.as_json(registry.database, sweep), tuple(self._notes)
                    if not driving.is_going_on(registry.database, sweep):
                        self.code = driving.exit_code(registry.database, sweep)
            except Exception as error:
                self.note(as_fault(error).message)
            self._closing.wait(READ_S)


def show(registry: Registry, sweep: SweepRecord, every_s: float = 0.0) -> int:
    """Show the sweep until its end, or until the user leaves; return the exit code, 130 if the sweep goes on."""
    feed, code, has_terminal = SweepFeed(registry.folder, sweep, every_s or driving.LOOK_S), 130, True
    try:
        with Screen(feed.still) as screen:
            feed.start()
            code = _run(screen, feed)
    except SignalExit as ended:
        code = ended.exit_code
        has_terminal = code != 129  # after SIGHUP (129) no terminal is left for messages
    except KeyboardInterrupt:
        code = 130
    finally:
        with suppress(KeyboardInterrupt):
            feed.close()
    if has_terminal:
        now = sweeps.find(registry.database, sweep.id)
        print_lines(overview.as_lines(registry.database, now, overview.cause_of(registry, now)))
        if code == 130:
            say(f"no longer watching; the running trials go on, and cloudtrain advance {sweep.id} sends the next ones")
    return code


def _run(screen: Screen, feed: SweepFeed) -> int:
    """Draw and read keys until the sweep ends or the user leaves; return the exit code."""
    signs = signs_of()
    renderer, next_s = Renderer(signs.encoding), 0.0
    while feed.code is None:
        for words in screen.said():
            if words.strip():
                feed.note(words.strip())
        if screen.is_stale:
            screen.is_stale = False
            renderer.forget()
        if (shot := feed.shot) is not None and time.monotonic() >= next_s:
            screen.write(renderer.render(view(shot, screen.size, signs, time.time())))
            next_s = time.monotonic() + FRAME_S
        keys = screen.keys(max(0.05, next_s - time.monotonic()))
        if "q" in keys or ESCAPE in keys:
            return 130
        screen.is_stale = screen.is_stale or "redraw" in keys
    return feed.code


def view(shot: SweepShot, size: tuple[int, int], signs: Signs, now_s: float) -> list[Text]:
    """Return the screen's rows, `size` columns wide and rows high. Trials that do not fit are left out."""
    width, height = size
    told, messages = shot
    about = f"  {told['algorithm']}, {told['trials']} of {told['planned']} trials began"
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    state = (told["state"], _STYLES[told["state"]])
    rows = [
        sides(width, signs, [(told["sweep"], "bold"), "  ", state, (about, QUIET)], [(clock, QUIET)]),
        _money(told, width, signs),
        Text(""),
        *_rungs(told, width, signs),
    ]
    keys = row(
        width, signs, ("q", "bold"), (" leave; the running trials go on   ", QUIET), ("^L", "bold"), " draw again"
    )
    notes = [row(width, signs, (cleaned(words), WARNS)) for words in messages[-3:]]
    room = height - len(rows) - len(notes) - 1
    trials = [*_running(told, width, signs), *_best(told, width, signs)]
    rows += trials[: max(0, room)]
    rows += [Text("")] * (height - len(rows) - len(notes) - 1)
    return [*rows[: max(0, height - len(notes) - 1)], *notes, keys][:height]


def _money(told: dict[str, Any], width: int, signs: Signs) -> Text:
    spent, held = dollars(told["spend_usd"] * 1e6), dollars(told["held_usd"] * 1e6)
    if told["limit_usd"] is None:
        return labelled(width, signs, "money", f"{spent} spent, {held} held", (", no budget", QUIET))
    share = min(1.0, told["spend_usd"] / told["limit_usd"]) if told["limit_usd"] else 1.0
    drawn = charts.bar(share, _BAR, signs)
    words = f"  {spent} of {dollars(told['limit_usd'] * 1e6)} spent, {held} held"
    return labelled(width, signs, "money", (drawn, GOOD if share < 0.8 else WARNS), words)


def _rungs(told: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [row(width, signs, ("".join(f"{head:>10}" for head in _RUNG_HEADS), QUIET))]
    for rung in told["rungs"]:
        cells = [rung["rung"], rung["step"], rung["done"], rung["running"]]
        best = "-" if rung["best"] is None else figure(rung["best"])
        failed = (f"{rung['failed']:>10}", BAD if rung["failed"] else "")
        rows.append(row(width, signs, "".join(f"{cell:>10}" for cell in cells), failed, f"{best:>10}"))
    return rows


def _running(told: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [Text(""), row(width, signs, ("RUNNING", QUIET))]
    for segment in told["running"]:
        words = f"  {segment['trial']:>5}  rung {segment['rung']}  "
        if segment["step"] is None or not segment["until_step"]:
            rows.append(row(width, signs, words, (cleaned(segment["state"]), QUIET)))
            continue
        drawn = charts.bar(min(1.0, segment["step"] / segment["until_step"]), _BAR, signs)
        loss = "" if segment["loss"] is None else f", loss {figure(segment['loss'])}"
        rows.append(row(width, signs, words, (drawn, GOOD), f"  step {segment['step']}/{segment['until_step']}{loss}"))
    if len(rows) == 2:
        rows.append(row(width, signs, ("  no trial runs", QUIET)))
    return rows


def _best(told: dict[str, Any], width: int, signs: Signs) -> list[Text]:
    rows = [Text(""), row(width, signs, ("BEST", QUIET))]
    for winner in told["best"]:
        value = f"{told['metric']} {figure(winner['value'])}"
        words = f"  {winner['trial']:>5}  {cleaned(value)} at {place_of(told, winner)}  "
        rows.append(row(width, signs, words, (cleaned(values_text(winner["values"])), QUIET)))
    if len(rows) == 2:
        rows.append(row(width, signs, ("  no result yet", QUIET)))
    return rows
