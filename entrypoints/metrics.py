"""How fast it goes and how long it will take, in numbers that people read at a glance."""

from __future__ import annotations

import time

__all__ = ["Meter", "duration", "quantity"]


class Meter:
    """Counts optimizer steps between log lines. Saving and evaluating do not count as stepping."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._since_s = time.perf_counter()
        self._steps = 0
        self.step_s = 0.0  # of the last window; 0 until the first is done

    def tick(self) -> None:
        """Count one optimizer step."""
        self._steps += 1
        if self.step_s == 0.0:  # a first figure at once: the deadline's margin needs one before the first log line
            self.step_s = time.perf_counter() - self._since_s

    def skip(self, seconds: float) -> None:
        """Leave out time that went into saving or evaluating."""
        self._since_s += seconds

    def read(self) -> float:
        """Return samples per second since the last reading, over all ranks, and begin a new window."""
        now_s = time.perf_counter()
        self.step_s = max(now_s - self._since_s, 1e-9) / max(self._steps, 1)
        self._since_s, self._steps = now_s, 0
        return self._samples_per_step / self.step_s


def quantity(value: float) -> str:
    """Return the number in three digits: 8.1k, 12.3M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return the time in one or two units: 45s, 12m, 3h20m, 2d4h."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{max(seconds, 0):.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 60 * 24:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60}h"
