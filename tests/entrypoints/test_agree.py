"""The agreement between the ranks, by the clock of rank 0."""

import signal
import time
from collections.abc import Iterator

import pytest

from cloudtrain.entrypoints.rank import variables
from cloudtrain.entrypoints.rank.agree import Agreement

DAY_S = 86_400.0


@pytest.fixture
def signals() -> Iterator[None]:
    """Put the signal handlers back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_of(agreement: Agreement) -> str | None:
    """Return the stop that a vote finds."""
    agreement.begin(0.1)
    return agreement.finish().stop


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
@pytest.mark.usefixtures("signals")
def test_deadline_ignores_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """A jump of the wall clock by a day moves no deadline; elapsed time reaches the deadline."""
    wall_s, monotonic_s = time.time(), time.monotonic()
    deadline_s = variables.deadline_s({"CLOUDTRAIN_DEADLINE": f"{wall_s + 600}"})
    agreement = Agreement(deadline_s, is_alone=True)
    agreement.start(0, None, 1.0)
    monkeypatch.setattr(time, "time", lambda: wall_s + jump_s)
    assert stop_of(agreement) is None
    monkeypatch.setattr(time, "monotonic", lambda: monotonic_s + 599)
    assert stop_of(agreement) == "deadline"


def test_deadline_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call in a process decides; without the variable the process has no deadline."""
    told = {"CLOUDTRAIN_DEADLINE": f"{time.time() + 600:.3f}"}
    first_s = variables.deadline_s(told)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert variables.deadline_s(told) == first_s == pytest.approx(time.monotonic() + 600, abs=60)
    assert variables.deadline_s({}) is None
