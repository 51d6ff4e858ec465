"""A script's steps: which of the printed figures count, and what the machine's part of a line tells of them.

One `Steps` a rank, for both of its streams. Each event has the step, and where they are known the number of all steps,
the time of a step and the time that is left (`eta_s`).
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from cloudtrain.entrypoints import events, heartbeat
from cloudtrain.entrypoints.scripts import forms
from cloudtrain.entrypoints.scripts.forms import Told

__all__ = ["Steps"]

BAR_EVERY_S = 1.0  # between two events of a bar
SILENCES = 20  # a rank may be silent for so many times its longest silence before
_WINDOW = 50  # events by which the time of a step is measured
_LOOKS = 20  # events in which the script's variables are searched for the number of steps
_ALL_STEPS = ("max_iters", "max_steps", "total_steps", "num_steps", "num_training_steps", "max_train_steps")
_ALL_EPOCHS = ("epochs", "max_epochs", "num_epochs", "total_epochs", "num_train_epochs", "n_epochs")
_HOLDERS = ("args", "self", "config", "cfg", "opt", "hparams")


class Steps:
    """What a rank has told. `library`, set by hooks.py: the newest figures of a Trainer that runs in this process."""

    def __init__(self, rank: int, wanted: dict[str, Any], hang_timeout_s: float = math.inf) -> None:
        self.library: Callable[[], dict[str, Any]] = dict
        self.is_told_by_library = False
        self.step: int | None = None  # the newest that was told
        self._at: int | None = None  # the newest that was seen, in a bar too
        self._is_head = rank == 0
        self._hang_timeout_s = hang_timeout_s
        self._wanted = {name: re.compile(wanted[name]) for name in ("step", "loss", "total") if wanted.get(name)}
        self._metrics = {name: re.compile(text) for name, text in (wanted.get("metrics") or {}).items()}
        self._has_patterns = bool(self._wanted or self._metrics)
        self._is_off = False  # the script prints event lines of its own
        self._weight = 0
        self._total: int | None = None
        self._found: dict[tuple[str, ...], int] = {}
        self._looks = 0
        self._base, self._last, self._epoch = 0, -1, 0  # of counts that begin anew with each epoch
        self._bar: tuple[str, int] | None = None  # name and total of the bar that counts, and of the newest
        self._newest_bar: tuple[str, int] | None = None
        self._bars_s: dict[tuple[str, int], float] = {}  # how long each has run
        self._bar_s = self._bar_told_s = 0.0
        self._times: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._is_warned = False
        self._output_s = self._silence_s = 0.0  # the newest output's time, and the longest time between two

    def is_asked(self, line: str) -> bool:
        """Note that the rank has printed a line, and return whether the line has to be taken."""
        if self.step is not None:
            self.output()
        return self._has_patterns or forms.may_tell(line)

    def output(self) -> None:
        """Note that the rank has printed: once a step was told, any output says that the rank lives."""
        if self.step is None:
            return
        now_s = time.monotonic()
        self._silence_s = max(self._silence_s, now_s - self._output_s)
        self._output_s = now_s
        heartbeat.beat()

    def take(self, line: str, *, is_whole: bool = True) -> tuple[str, str]:
        """Return the machine's part of a line, and a line of ours to follow; both are empty for most lines.

        Without `is_whole` the line is a bar's state that another one will replace.
        """
        self.output()
        if not self._has_patterns and not forms.may_tell(line):
            return "", ""
        if events.MARK in line:
            self._is_off = not self._wanted
        if self._is_off or self.is_told_by_library or len(line) > forms.MOST or events.MARK in line:
            return "", ""
        told = self._find(line)
        if told is None:
            return "", ""
        now_s = time.monotonic()
        if told.name is not None:
            told = self._of_bars(told, now_s)
            is_due = is_whole and (now_s - self._bar_told_s >= BAR_EVERY_S or told is None or told.step == told.total)
            if told is None or not is_due or (told.step == self.step and not told.fields):
                return "", ""
            self._bar_told_s = now_s
        event, fields = self._event(told, now_s)
        if not event or not self._is_head:
            return "", ""
        return events.format_line(event, "", fields), self._warning(fields)

    def tell(self, step: int, total: int | None, fields: dict[str, float]) -> str:
        """Return the line of a step that no output tells."""
        self.output()
        told = self._fields(step, total, fields, time.monotonic())
        of = f"/{total}" if total else ""
        words = [f"step {step}{of}", *(f"{name} {value:.4g}" for name, value in fields.items())]
        return f"{events.format_line('step', ' '.join(words), told)}\n{self._warning(told)}"

    def _find(self, line: str) -> Told | None:
        """Read a line by the user's expressions, or by the forms that are built in."""
        numbers = {name: _number(pattern, line) for name, pattern in self._wanted.items()}
        if (total := numbers.get("total")) is not None and math.isfinite(total):
            self._total = int(total)
        extra = {
            name: value for name, pattern in self._metrics.items() if (value := _number(pattern, line)) is not None
        }
        if "step" in self._wanted:
            step = numbers["step"]
            told = None if step is None or not math.isfinite(step) else Told(forms.FINE, int(step))
        else:
            told = forms.read(line)
        if told is None:
            return Told(forms.FREE, scores=extra) if extra else None
        if (loss := numbers.get("loss")) is not None:
            extra["loss"] = loss
        return replace(told, fields=told.fields | extra)

    def _of_bars(self, told: Told, now_s: float) -> Told | None:
        """Return the bar's state with its step counted on over all epochs; None of a bar that does not count.

        Of several bars without a name the longest one is training's: others prepare, or evaluate.
        """
        assert told.total is not None
        assert told.step is not None
        bar = (told.name or "", told.total)
        if self._newest_bar == bar:
            self._bars_s[bar] = self._bars_s.get(bar, 0.0) + now_s - self._bar_s
        self._newest_bar, self._bar_s = bar, now_s
        total = self.library().get("total")
        if told.weight < self._weight or (total is not None and total != told.total):
            return None
        if bar != self._bar:
            is_heavier = self._bar is None or told.weight > self._weight
            if not is_heavier and self._bars_s.get(bar, 0.0) <= self._bars_s.get(self._bar or bar, 0.0):
                return None
            self._bar, self._base, self._last = bar, 0, -1
        if told.epoch is None and told.step < self._last:
            self._base += told.total
        self._last = told.step
        if told.step == 0:
            return None
        if told.epoch is not None:
            return told
        self._at = self._base + told.step
        return replace(told, step=self._at, total=told.total if self._base == 0 else None)

    def _event(self, told: Told, now_s: float) -> tuple[str, dict[str, Any]]:
        """Return the event's name and fields; no name for figures that do not count."""
        exact = self.library()
        if told.scores and (told.weight == forms.FREE or told.weight < self._weight):
            step = exact.get("step", self._at if told.step is None else told.step)
            return "eval", {"step": step, "metrics": told.scores}
        if told.weight == forms.FREE:
            given = {name: value for name, value in exact.items() if name in told.fields}
            step = exact.get("step", self._at if self._weight else None)
            if step is None and told.fields.get("epoch") == told.epoch:  # whole epochs
                step = told.epoch
            if step is None:
                return "", {}
            total = exact.get("total", self._total or (self._bar[1] if self._bar and not self._base else None))
            return "step", self._fields(step, total, told.fields | given, now_s)
        if told.weight < self._weight:
            return "", {}
        if told.weight > self._weight:  # a finer count
            self._weight = told.weight
            self._times.clear()
        step, total = self._place(told)
        epoch = {} if told.epoch is None else {"epoch": told.epoch}
        return "step", self._fields(step, total, epoch | told.fields | told.scores, now_s)

    def _place(self, told: Told) -> tuple[int, int | None]:
        """Return the step as counted over all epochs, and the number of all steps."""
        if told.step is None:
            assert told.epoch is not None
            return told.epoch, told.epochs or self._total or self._searched(_ALL_EPOCHS, told.epoch)
        if not told.of_epoch or told.epoch is None:
            total = told.total if told.name is not None or not told.of_epoch else None
            return told.step, self._total or total or self._searched(_ALL_STEPS, told.step)
        epochs = told.epochs or self._searched(_ALL_EPOCHS, told.epoch)
        epoch = told.epoch - 1 if told.epochs and told.epoch else told.epoch  # `Epoch 1/10` counts from 1
        length = told.total or _length(sys._getframe())
        if length:
            self._base = 0 if told.step > length else epoch * length  # a count that passes the epoch's is the job's
        elif told.epoch > self._epoch and told.step < self._last:
            self._base += self._last + 1
        self._last, self._epoch = told.step, told.epoch
        total = epochs * length if epochs and length else None
        return self._base + told.step, self._total or total

    def _searched(self, names: tuple[str, ...], least: int) -> int | None:
        """Return the number of all steps or epochs, as a variable of the script's names it."""
        if names not in self._found and self._looks < _LOOKS:
            self._looks += 1
            if (value := _variable(sys._getframe(), names, least)) is not None:
                self._found[names] = value
        return self._found.get(names)

    def _fields(self, step: int, total: int | None, figures: dict[str, Any], now_s: float) -> dict[str, Any]:
        if self.step is None:
            self._output_s = now_s
            threading.Thread(target=self._beat_on, daemon=True).start()
        if self._times and step < self._times[-1][1]:
            self._times.clear()
        if not self._times or step > self._times[-1][1]:
            self._times.append((now_s, step))
        self.step = self._at = step
        heartbeat.beat()
        fields: dict[str, Any] = {"step": step}
        if total is not None:
            fields["max_steps"] = max(total, step)
        (begin_s, begin), (end_s, end) = self._times[0], self._times[-1]
        if end > begin and end_s > begin_s:
            step_s = (end_s - begin_s) / (end - begin)
            fields["step_s"] = float(f"{step_s:.4g}")
            if total is not None:
                fields["eta_s"] = round(max(0, total - step) * step_s, 1)
        return fields | {name: value for name, value in figures.items() if name not in fields}

    def _warning(self, fields: dict[str, Any]) -> str:
        loss = fields.get("loss")
        if self._is_warned or not isinstance(loss, float) or math.isfinite(loss):
            return ""
        self._is_warned = True
        return f"cloudtrain: warning: the loss is {loss} at step {fields['step']}\n"

    def _beat_on(self) -> None:
        """Beat for a rank that is silent no longer than its silences before let expect."""
        while True:
            time.sleep(heartbeat.EVERY_S)
            if time.monotonic() - self._output_s + self._hang_timeout_s < SILENCES * self._silence_s:
                heartbeat.beat()


def _number(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    try:
        return None if match is None else float(match[1].replace(",", ""))
    except (AttributeError, ValueError):
        return None


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return the script's frames, the innermost first, without ours."""
    ours = str(Path(__file__).parents[1])
    found = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(ours):
            found.append(frame)
        frame = frame.f_back
    return found


def _variable(frame: FrameType, names: tuple[str, ...], least: int) -> int | None:
    """Return the first whole number over `least` with one of these names: a variable, or a field of `args` or so."""
    for each in _frames(frame):
        scopes: list[Any] = [each.f_locals]
        scopes += [each.f_locals[name] for name in _HOLDERS if name in each.f_locals]
        scopes += [inner for holder in scopes[1:] for name in _HOLDERS if (inner := _get(holder, name)) is not None]
        for scope in scopes:
            for name in names:
                value = _get(scope, name)
                if isinstance(value, int) and not isinstance(value, bool) and value > least:
                    return value
    return None


def _get(scope: Any, name: str) -> Any:
    return scope.get(name) if isinstance(scope, dict) else getattr(scope, "__dict__", {}).get(name)


def _length(frame: FrameType) -> int | None:
    """Return the number of batches in the loader that the innermost of the script's frames goes through."""
    for each in _frames(frame)[:3]:
        for name, value in each.f_locals.items():
            if name.endswith(("loader", "dataloader")) and not re.search("val|eval|test", name):
                try:
                    return len(value) or None
                except Exception:
                    return None
    return None
