"""The decision of the queue: whether a waiting job may start now. Pure functions of tickets, locks and the time.

A waiting job has a ticket on each of the job's hosts. Tickets have the same order on all hosts: priority, then the time
of the submit, then the job's name. A job starts only if all hosts have room at once. Every job has an enforced time
cap, and therefore backfill is exact: a job starts before an earlier ticket only if the job leaves room for the earlier
ticket's start, by the caps of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..records import Record

SPARED_S = 600.0  # a preempted job runs at least this time before the next preemption
OVERDUE_S = 10.0  # the expected time to the end of a job beyond the job's cap, always from now

_Span = tuple[float, float, int]  # from, until (unix seconds), and the number of locks in use


@dataclass(frozen=True)
class QueueTicket(Record, checks=True):
    """A waiting job: the place in the order, the cap in seconds, and the number of locks needed on each host.

    `time_s` is the submit's time by the submitter's clock. `start_s` is the start by the computation of the job's node
    0, None before the first computation; later jobs leave room for the job from then on. `held` names the host's locks
    and their jobs at the time of the computation.
    """

    job: str
    user: str
    priority: int
    time_s: float
    cap_s: float
    needs: Mapping[str, int]
    start_s: float | None = None
    held: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, float, str]:
        """The place in the order: a smaller key is earlier."""
        return -self.priority, self.time_s, self.job

    @property
    def name(self) -> str:
        """The ticket's name in a folder; names sort in the order of the keys."""
        return f"{100 - self.priority:03d}-{int(self.time_s * 1000):015d}-{self.job}"


@dataclass(frozen=True)
class Holding(Record):
    """A lock of a running job. `until_s`: the latest end by the job's cap, in unix seconds; None if unknown.

    `root`: the agent's folder, None if the job cannot be preempted; `spared_until_s`: not to be preempted before.
    """

    name: str
    job: str
    user: str
    until_s: float | None = None
    priority: int = 50
    root: str | None = None
    spared_until_s: float = 0.0


@dataclass(frozen=True)
class HostLine(Record):
    """A host as seen by an agent on the host: usable locks, held locks, and the waiting jobs' tickets.

    `tickets` may leave out the tickets after the own job's; `waiting` counts all tickets.
    """

    host: str
    units: tuple[str, ...]
    held: tuple[Holding, ...]
    tickets: tuple[QueueTicket, ...]
    waiting: int = 1

    @property
    def holders(self) -> tuple[str, ...]:
        """The held locks with their jobs."""
        return tuple(sorted(f"{each.name} {each.job}" for each in self.held))


@dataclass(frozen=True)
class Turn:
    """The decision for a ticket. `place` in a line of `of` waiting jobs, counted over the job's hosts.

    `start_s`: the latest start by the caps; None if unknown. `reason` names the jobs that hold or wait.
    """

    starts: bool
    place: int
    of: int
    start_s: float | None
    reason: str


def decide(ticket: QueueTicket, lines: Sequence[HostLine], now_s: float, *, preempts: bool = False) -> Turn:
    """Return whether the ticket's job may take locks now on all hosts of the job, and otherwise the reason.

    `lines` has a line for each host of the ticket. `now_s` is in unix seconds. `preempts`: the job may end own jobs of
    lower priority, so the reason says why each holder stays.
    """
    ahead = {each.key: each for line in lines for each in line.tickets if each.key < ticket.key}
    of = max(len(ahead) + 1, *(line.waiting for line in lines))
    start_s = _earliest(ticket, lines, now_s)
    starts = start_s is not None and start_s <= now_s
    reason = "" if starts else _reason(ticket, lines, list(ahead.values()), now_s if preempts else None)
    return Turn(starts, len(ahead) + 1, of, start_s, reason)


def victims(ticket: QueueTicket, lines: Sequence[HostLine], now_s: float) -> list[Holding]:
    """Return the locks of own jobs of lower priority to end, so that the ticket's job starts; empty if too few.

    Only the first in line preempts. On each host the jobs of the lowest priority go first.
    """
    found: list[Holding] = []
    for line in lines:
        if any(each.key < ticket.key for each in line.tickets):
            return []
        lacking = ticket.needs[line.host] - (len(line.units) - len(_held(line)))
        below = [each for each in _held(line) if each.user == ticket.user and each.priority < ticket.priority]
        may_go = [each for each in below if each.root is not None and not _is_spared(each, now_s)]
        chosen = sorted(may_go, key=lambda each: (each.priority, each.job, each.name))[: max(0, lacking)]
        if len(chosen) < lacking:
            return []
        found += chosen
    return found


def _held(line: HostLine) -> list[Holding]:
    return [each for each in line.held if each.name in line.units]


def _earliest(ticket: QueueTicket, lines: Sequence[HostLine], now_s: float) -> float | None:
    """Return the earliest time from now on at which all hosts have room for the whole cap, None if unknown."""
    room, spans = {}, {}
    for line in lines:
        room[line.host] = len(line.units) - ticket.needs[line.host]
        spans[line.host] = [*_in_use(line, now_s), *_promised(ticket, line, now_s)]
        endless = sum(count for _, until_s, count in spans[line.host] if until_s == float("inf"))
        if room[line.host] < endless:
            return None
    times = {until_s for found in spans.values() for _, until_s, _ in found if now_s < until_s < float("inf")}
    for start_s in sorted({now_s, *times}):
        if all(_fits(spans[host], room[host], start_s, start_s + ticket.cap_s) for host in spans):
            return start_s
    return None


def _in_use(line: HostLine, now_s: float) -> list[_Span]:
    known = (float("inf") if held.until_s is None else held.until_s for held in _held(line))
    return [(float("-inf"), until_s if until_s > now_s else now_s + OVERDUE_S, 1) for until_s in known]


def _promised(ticket: QueueTicket, line: HostLine, now_s: float) -> Iterator[_Span]:
    """Yield the locks that earlier tickets need; a ticket without a current start blocks all later tickets.

    A start is not current if a lock has been released since: the earlier job may be able to start at once.
    """
    held = set(line.holders)
    for each in line.tickets:
        if each.key < ticket.key:
            is_current = each.start_s is not None and held.issuperset(each.held)
            start_s = max(each.start_s or now_s, now_s) if is_current else now_s
            until_s = start_s + each.cap_s if is_current else float("inf")
            yield start_s, until_s, each.needs.get(line.host, 0)


def _fits(spans: Sequence[_Span], room: int, start_s: float, end_s: float) -> bool:
    """Return whether at most `room` locks are in use at each time from start to end; use rises at a span's start."""
    rises = [start_s, *(from_s for from_s, _, _ in spans if start_s < from_s < end_s)]
    return all(sum(count for from_s, until_s, count in spans if from_s <= at < until_s) <= room for at in rises)


def _reason(
    ticket: QueueTicket, lines: Sequence[HostLine], ahead: Sequence[QueueTicket], preempting_s: float | None
) -> str:
    """Return the jobs that hold the missing locks, by host, else the first job in line.

    `preempting_s`: the time at which the job may preempt; None for a job that preempts no job.
    """
    holders, stays = dict[str, list[str]](), dict[str, str]()
    for line in lines:
        if len(line.units) - len(_held(line)) < ticket.needs[line.host]:
            for each in _held(line):
                who = f"{each.user}'s job {each.job}"
                hosts = holders.setdefault(who, [])
                hosts += [] if line.host in hosts else [line.host]
                if preempting_s is not None:
                    stays[who] = _why_it_stays(each, ticket, preempting_s)
    if holders:
        return "; ".join(f"{who} holds {', '.join(hosts)}{stays.get(who, '')}" for who, hosts in holders.items())
    first = min(ahead, key=lambda each: each.key, default=None)
    return f"{first.user}'s job {first.job} is first in line" if first else "its hosts are being taken"


def _why_it_stays(held: Holding, ticket: QueueTicket, now_s: float) -> str:
    """Return why the job is not preempted now; empty for a job that may be."""
    if held.user != ticket.user:
        return ", and is not preempted: only your own jobs are"
    if held.priority >= ticket.priority:
        return ", and is not preempted: its `queue.priority` is not lower"
    if held.root is None:
        return ", and is not preempted: it cannot save (no `keep`), or was sent without --queue"
    return ", and is not preempted in its first 10 minutes after a preemption" if _is_spared(held, now_s) else ""


def _is_spared(held: Holding, now_s: float) -> bool:
    return now_s < held.spared_until_s <= now_s + SPARED_S  # further ahead: by a clock that was set back since
