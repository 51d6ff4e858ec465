"""The tries of a job with several candidates (`capacity` in the config): where, when, how each ended, which is next.

A try that the platform refused has created nothing: the attempt's row has the refusal, and goes on to the next
candidate under the same number. The last try of an attempt has the attempt's own state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..job import Attempt, Job, State
from ..text.units import moment

HEAD = ("CANDIDATE", "ROUND", "PLACE", "WHEN (UTC)", "RESULT")
MOST = 10  # the newest tries in a table


@dataclass(frozen=True)
class Try:
    """A request for the machines of one candidate, or the request that is next."""

    attempt: int
    candidate: int
    """The number of its entry in `capacity.try`, from 0, as in plans and errors."""
    round: int
    backend: str
    region: str
    machine: str
    spot: bool
    state: str
    """The attempt's state; `refused`, or `next` for a try that is due at `at_s`."""
    reason: str | None
    detail: str
    """The platform's answer, if it gave no machines."""
    at_s: float
    """The time of the answer, of the start, of the send, or of the next try, in unix seconds."""

    @property
    def place(self) -> str:
        """The backend, the region, the machine, and `spot`."""
        return " ".join(filter(None, (self.backend, self.region, self.machine, "spot" if self.spot else "")))

    @property
    def result(self) -> str:
        """The result in words."""
        if self.reason == "no_machines":
            return f"no machines: {self.detail}"
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of HEAD."""
        return str(self.candidate), str(self.round), self.place, moment(self.at_s), self.result


def name_of(place: Sequence[Any]) -> str:
    """Return the name of a candidate of `places`: `candidate 2 (us-west-2, ml.p5.48xlarge, spot)`."""
    entry, backend, _, region, machine, is_spot = place
    return f"candidate {entry} ({', '.join(filter(None, (region or backend, machine, 'spot' if is_spot else '')))})"


def next_words(job: Job) -> str:
    """Return the next candidate and its time: `candidate 2 (us-west-2, ml.p5.48xlarge), next try 14:03 UTC`; or ""."""
    queue = job.attempt.state.queue if job.attempt.word == "queued" else None
    if not queue or "next" not in queue:
        return ""
    return f"{queue['next']}, next try {moment(queue.get('start_s'))[-8:-3]} UTC"


def tries_of(attempts: Sequence[Attempt]) -> tuple[Try, ...]:
    """Return all known tries in order; empty for a job without several candidates."""
    return tuple(each for attempt in attempts if "places" in attempt.submitter for each in _of(attempt))


def saved_store(attempts: Sequence[Attempt]) -> str | None:
    """Return the store of the newest checkpoint; None without a checkpoint of a job with candidates."""
    saved = next((each for each in reversed(attempts) if each.progress.get("checkpoint") or each.state.resumable), None)
    if saved is None or "stores" not in saved.submitter:
        return None
    numbers = [place[0] for place in saved.submitter["places"]]
    return str(saved.submitter["stores"][numbers.index(saved.submitter["candidate"])])


def out_of_reach(attempts: Sequence[Attempt]) -> list[str]:
    """Return the names of the candidates that cannot read the job's newest checkpoint."""
    saved, newest = saved_store(attempts), attempts[-1].submitter
    if saved is None:
        return []
    return [
        name_of(place)
        for place, store in zip(newest.get("places", ()), newest.get("stores", ()), strict=True)
        if store != saved
    ]


def with_machines(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts without those of a search that got no machines; the newest in any case."""
    *earlier, newest = attempts
    return [each for each in earlier if "places" not in each.submitter or _had_machines(each.state)] + [newest]


def moved(attempts: Sequence[Attempt]) -> tuple[int, str]:
    """Return a number of the move, unique within the newest attempt, and the move in words; "" without a move.

    The words name the last candidate, why the job has left the candidate, and the present or next candidate.
    """
    *_, newest = attempts
    if not newest.submitter.get("queued") or len(known := tries_of(attempts)) < 2:
        return 0, ""
    before, now = known[-2:]
    names = [name_of((each.candidate, each.backend, "", each.region, each.machine, each.spot)) for each in known[-2:]]
    due = f" at {moment(now.at_s)} UTC" if now.state == "next" else ""
    words = f"{names[0]}: {before.result}; next: {names[1]}{due}"
    return 1000 * now.round + now.candidate, words


def why(state: State) -> str:
    """Return why the attempt has ended, in words."""
    return str(state.detail or (state.error or {}).get("message") or state.reason).rstrip(".")


def _had_machines(state: State) -> bool:
    return state.reason != "no_machines" or state.started_s is not None


def _of(attempt: Attempt) -> Iterator[Try]:
    known, state = attempt.submitter, attempt.state
    for each in known.get("tries", ()):
        yield _try(attempt, each["candidate"], each["round"], "refused", "no_machines", each["reason"], each["at_s"])
    words, reason = attempt.word, state.reason
    times = (state.ended_s, state.started_s, attempt.created_s)
    at_s = next(time_s for time_s in times if time_s is not None)
    if words == "queued" and (queue := state.queue or {}):
        words, at_s = "next", queue.get("start_s") or at_s
    detail = why(state) if reason == "no_machines" else ""
    yield _try(attempt, known.get("candidate"), known.get("round", 1), words, reason, detail, at_s)


def _try(attempt: Attempt, entry: Any, number: int, state: str, reason: str | None, detail: str, at_s: float) -> Try:
    _, backend, _, region, machine, is_spot = next(each for each in attempt.submitter["places"] if each[0] == entry)
    return Try(attempt.number, entry, number, backend, region, machine, is_spot, state, reason, detail, at_s)
