"""A script's steps: the choice among the printed figures, and the machine's part of a line.

Each rank has one `Steps` for both streams. An event has the step and, where known, the number of all steps, the time of
a step and the time left (`eta_s`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import events
from ..rank import heartbeat
from . import forms, trackers
from .forms import LineFigures

BAR_EVERY_S = 1.0  # between two events of a bar
SILENCES = 20  # a rank may be silent for 20 times its longest earlier silence
_WINDOW = 50  # events for the mean time of a step
_LOOKS = 20  # events with a search for the number of steps in the script's variables
_OURS = str(Path(__file__).parents[1])
_HOLDERS = ("args", "self", "config", "cfg", "opt", "hparams")
_ALL_STEPS = ("max_iters", "max_steps", "total_steps", "num_steps", "num_training_steps", "max_train_steps")
_ALL_EPOCHS = ("epochs", "max_epochs", "num_epochs", "total_epochs", "num_train_epochs", "n_epochs")
_LOADERS = ("train_loader", "train_dataloader", "dataloader", "loader", "data_loader", "trainloader", "train_dl")


class Steps:
    """The steps of a rank. `library`, set by trainers.py: the newest figures of a Trainer in the process."""

    def __init__(self, rank: int, wanted: dict[str, Any], hang_timeout_s: float = math.inf) -> None:
        self.library: Callable[[], dict[str, Any]] = dict
        self.is_off = False  # the script prints event lines, or a library reports all steps
        self._step: int | None = None  # the newest step reported
        self._seen: int | None = None  # the newest step read
        self._is_head = rank == 0
        self._hang_timeout_s = hang_timeout_s
        self._wanted = {name: re.compile(wanted[name]) for name in ("step", "loss", "total") if name in wanted}
        self._metrics = {name: re.compile(text) for name, text in wanted.get("metrics", {}).items()}
        self._weight = 0  # of the form in use
        self._total: int | None = None  # by the user's expression
        self._searched: dict[tuple[str, ...], int] = {}
        self._looks = 0
        self._base, self._last, self._epoch = 0, -1, 0  # for counts within an epoch
        self._bar = self._newest_bar = ("", 0)  # name and total: of the bar in use, and of the newest
        self._bars_s: dict[tuple[str, int], float] = {}  # how long each has run
        self._bar_s = self._bar_reported_s = 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._is_warned = False
        self._output_s = self._silence_s = 0.0  # the time of the last line, and the longest silence

    def is_asked(self, line: str) -> bool:
        """Note a printed line as a sign of life; return whether the line may have a step."""
        if self._step is not None:  # a rank's silence counts from its first step
            now_s = time.monotonic()
            self._silence_s = max(self._silence_s, now_s - self._output_s)
            self._output_s = now_s
            heartbeat.beat()
        return bool(self._wanted or self._metrics) or forms.may_have_step(line) or trackers.SIGN in line

    def take(self, line: str, *, is_whole: bool = True) -> tuple[str, str]:
        """Return the machine's part of a line, and our own line to follow; both are empty for most lines.

        Without `is_whole` the line is a state of a bar, soon replaced by the next state.
        """
        if not self.is_asked(line) or len(line) > forms.MOST:
            return "", ""
        if self._is_head and trackers.SIGN in line and (tail := trackers.event_of(line)):
            return tail, ""
        is_event = events.MARK in line
        self.is_off = self.is_off or (is_event and not self._wanted)
        parsed = None if is_event or self.is_off else self._read(line)
        now_s = time.monotonic()
        if parsed is not None and parsed.name is not None:
            parsed = self._of_bars(parsed, now_s)
            is_due = parsed is not None and (now_s - self._bar_reported_s >= BAR_EVERY_S or parsed.step == parsed.total)
            if parsed is None or not is_whole or not is_due or (parsed.step == self._step and not parsed.fields):
                return "", ""
            self._bar_reported_s = now_s
        name, fields = self._event(parsed, now_s) if parsed is not None else ("", {})
        if parsed is None or not name or not self._is_head:
            return "", ""
        note = ""
        if name == "step" and parsed.weight == forms.EPOCH_FIGURES and parsed.fields and "loss" not in fields:
            # An epoch's figures without a loss, such as `epoch 0: {'accuracy': 0.7}`, are an evaluation's.
            figures = parsed.fields | parsed.scores
            step, words = fields["step"], " ".join(f"{name} {value:.4g}" for name, value in figures.items())
            about = {"step": step, "metrics": figures}
            note = events.format_line("eval", f"evaluated at {step}: {words}", about) + "\n"
        return events.format_line(name, "", fields), note + self._warning(fields)

    def line(self, step: int, total: int | None, figures: dict[str, float]) -> str:
        """Return the line of a step, for a library without output of its own."""
        fields = self._fields(step, total, figures, time.monotonic())
        words = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        text = f"step {step}{f'/{total}' if total else ''} {words}".rstrip()
        return f"{events.format_line('step', text, fields)}\n{self._warning(fields)}"

    def _read(self, line: str) -> LineFigures | None:
        """Read a line by the user's expressions, or by the built-in forms."""
        found = {name: _number(pattern, line) for name, pattern in (self._wanted | self._metrics).items()}
        extra = {name: value for name, value in found.items() if value is not None and name not in ("step", "total")}
        if (total := found.get("total")) is not None:
            self._total = int(total) if math.isfinite(total) else None
        if "step" not in self._wanted:
            parsed = forms.read(line)
        else:
            step = found["step"]
            parsed = None if step is None or not math.isfinite(step) else LineFigures(forms.FINE, int(step))
        loss = {"loss": extra.pop("loss")} if "loss" in extra else {}
        if parsed is None:
            return LineFigures(forms.FREE, scores=extra) if extra else None
        if parsed.weight == forms.FREE and parsed.fields and not parsed.scores:  # of a step of the library's
            return replace(parsed, fields=parsed.fields | loss | extra)
        return replace(parsed, fields=parsed.fields | loss, scores=parsed.scores | extra)  # of any other step, too

    def _of_bars(self, parsed: LineFigures, now_s: float) -> LineFigures | None:
        """Return the bar's state, with the step counted over all epochs; None if the bar does not count.

        Of several similar bars the longest is training's: the rest prepare, or evaluate.
        """
        assert parsed.total is not None
        assert parsed.step is not None
        bar, total = (parsed.name or "", parsed.total), self.library().get("total")
        if bar == self._newest_bar:
            self._bars_s[bar] = self._bars_s.get(bar, 0.0) + now_s - self._bar_s
        self._newest_bar, self._bar_s = bar, now_s
        if parsed.weight < self._weight or total not in (None, parsed.total):
            return None
        if bar != self._bar:
            is_longer = self._bars_s.get(bar, 0.0) > self._bars_s.get(self._bar, 0.0)
            if parsed.weight == self._weight and not is_longer:
                return None
            self._bar, self._base, self._last = bar, 0, -1
        if parsed.epoch is None and parsed.step < self._last:
            self._base += parsed.total
        self._last = parsed.step
        if parsed.step == 0 or parsed.epoch is not None:
            return parsed if parsed.step else None
        self._seen = self._base + parsed.step
        return replace(parsed, step=self._seen, total=None if self._base else parsed.total)

    def _event(self, parsed: LineFigures, now_s: float) -> tuple[str, dict[str, Any]]:
        """Return the event's name and fields; the name is empty if the figures do not count."""
        exact = self.library()
        if parsed.weight == forms.EPOCH_FIGURES < self._weight:  # what an epoch has beside the loss of the finer steps
            own = {name: value for name, value in parsed.fields.items() if name not in ("loss", "lr")}
            parsed = replace(parsed, scores=own | parsed.scores)
        if parsed.scores and (parsed.weight == forms.FREE or parsed.weight < self._weight):
            return "eval", {"step": exact.get("step", parsed.step or self._seen), "metrics": parsed.scores}
        if parsed.weight == forms.FREE:
            figures = parsed.fields | {name: value for name, value in exact.items() if name in parsed.fields}
            whole = parsed.epoch if parsed.epoch == parsed.fields.get("epoch") else None
            step = exact.get("step", self._seen if self._weight else whole)
            total = exact.get("total", self._total or (self._bar[1] if not self._base else 0) or None)
            return ("step", self._fields(step, total, figures, now_s)) if step is not None else ("", {})
        if parsed.weight < self._weight:
            return "", {}
        if parsed.weight > self._weight:  # a finer count
            self._weight = parsed.weight
            self._times.clear()
        step, total, epochs = self._place(parsed)
        epoch = {} if epochs is None else {"epoch": epochs}
        return "step", self._fields(step, self._total or total, epoch | parsed.fields | parsed.scores, now_s)

    def _place(self, parsed: LineFigures) -> tuple[int, int | None, float | None]:
        """Return the step over all epochs, the number of all steps, and the epochs trained, with the fraction."""
        if parsed.epoch is None:
            assert parsed.step is not None
            return parsed.step, parsed.total or self._search(_ALL_STEPS, parsed.step), None
        epochs = parsed.epochs or self._search(_ALL_EPOCHS, parsed.epoch)
        if parsed.step is None:
            return parsed.epoch, epochs, parsed.epoch
        epoch = parsed.epoch - 1 if parsed.epochs and parsed.epoch else parsed.epoch  # `Epoch 1/10` counts from 1
        length = parsed.total or self._search(_LOADERS, 0)
        if length:
            self._base = 0 if parsed.step > length else epoch * length  # a count above the length is the job's count
        elif parsed.epoch > self._epoch and parsed.step < self._last:
            self._base += self._last + 1
        self._last, self._epoch = parsed.step, parsed.epoch
        step = self._base + parsed.step
        return (step, epochs and epochs * length, round(step / length, 4)) if length else (step, None, None)

    def _search(self, names: tuple[str, ...], least: int) -> int | None:
        """Return the first number above `least` in a variable of the script with a name from the list."""
        if names not in self._searched and self._looks < _LOOKS:
            self._looks += 1
            with contextlib.closing(_scopes()) as scopes:
                values = (size for scope in scopes for name in names if (size := _size(_get(scope, name))) > least)
                if (value := next(values, None)) is not None:
                    self._searched[names] = value
        return self._searched.get(names)

    def _fields(self, step: int, total: int | None, figures: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Note the step, and return the fields of the event."""
        if self._step is None:
            self._output_s = now_s
            threading.Thread(target=self._beat_on, daemon=True).start()
        if self._times and step < self._times[-1][1]:
            self._times.clear()
        if not self._times or step > self._times[-1][1]:
            self._times.append((now_s, step))
        self._step = self._seen = step
        heartbeat.beat()
        heartbeat.at(step)
        fields: dict[str, Any] = {"step": step} | ({"max_steps": max(total, step)} if total else {})
        (begin_s, begin), (end_s, end) = self._times[0], self._times[-1]
        if end > begin:
            fields["step_s"] = step_s = float(f"{(end_s - begin_s) / (end - begin):.4g}")
            if total:
                fields["eta_s"] = round(max(0, total - step) * step_s, 1)
        return figures | fields

    def _warning(self, fields: dict[str, Any]) -> str:
        loss = fields.get("loss")
        if self._is_warned or not isinstance(loss, float) or math.isfinite(loss):
            return ""
        self._is_warned = True
        return f"cloudtrain: warning: the loss is {loss} at step {fields['step']}\n"

    def _beat_on(self) -> None:
        """Beat during a silence of the rank, as long as earlier silences make likely."""
        while True:
            time.sleep(heartbeat.EVERY_S)
            if time.monotonic() - self._output_s + self._hang_timeout_s < SILENCES * self._silence_s:
                heartbeat.beat()


def _number(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    try:
        return None if match is None else float(match[1].replace(",", ""))
    except (AttributeError, ValueError):  # an empty group, or text
        return None


def _scopes() -> Generator[Any, None, None]:
    """Yield holders of variables: the script's frames, the innermost first, and the `args` or `self` in each frame."""
    frame = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            scope = frame.f_locals
            try:
                yield scope
                holders = [_get(scope, name) for name in _HOLDERS]
                yield from holders
                yield from (_get(holder, name) for holder in holders for name in _HOLDERS)
            finally:
                # Before Python 3.13 a function's frame keeps this copy, and with it the tensors of the step.
                if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    scope.clear()
        frame = frame.f_back  # type: ignore[assignment]


def _get(scope: Any, name: str) -> Any:
    return scope.get(name) if isinstance(scope, dict) else getattr(scope, "__dict__", {}).get(name)


def _size(value: Any) -> int:
    """Return a whole number, or a loader's length; -1 for all other values."""
    try:
        return -1 if isinstance(value, bool) else value if isinstance(value, int) else len(value)
    except Exception:  # a class of the script's may raise any error
        return -1
