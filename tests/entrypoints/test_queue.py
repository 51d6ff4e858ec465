"""The queue's decision over tickets, and the tickets' files held by real processes."""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cloudtrain.entrypoints.agent import gpulocks, queue_line
from cloudtrain.entrypoints.agent.queue_turns import Holding, HostLine, QueueTicket, Turn, decide, victims

HOSTS = ("h0", "h1", "h2", "h3")


def ticket(job: str, hosts: str, time_s: float = 0.0, cap_s: float = 100.0, priority: int = 50) -> QueueTicket:
    """Return a ticket for one lock on each of the hosts, given as numbers: `013`."""
    return QueueTicket(job, "alice", priority, time_s, cap_s, {f"h{number}": 1 for number in hosts})


def line(host: str, *tickets: QueueTicket, held: tuple[Holding, ...] = (), units: int = 1) -> HostLine:
    """Return a host's line with locks u0, u1 and so on."""
    return HostLine(host, tuple(f"u{number}" for number in range(units)), held, tickets, len(tickets) + 1)


def holding(job: str, until_s: float | None, priority: int = 50, unit: str = "u0", spared_s: float = 0) -> Holding:
    """Return the lock of a running job of alice."""
    return Holding(unit, job, "alice", until_s, priority, f"/jobs/{job}", spared_s)


def test_first_in_line_starts_on_free_hosts() -> None:
    """A job without jobs before it starts at once if all its hosts have room."""
    turn = decide(ticket("a", "01"), [line("h0"), line("h1")], 50.0)
    assert turn == Turn(True, 1, 1, 50.0, "")


def test_gang_waits_for_its_last_host() -> None:
    """One host in use is enough to wait; the reason names the holder, and the cap gives the expected start."""
    turn = decide(ticket("a", "01"), [line("h0"), line("h1", held=(holding("b", 80.0),))], 50.0)
    assert turn == Turn(False, 1, 1, 80.0, "alice's job b holds h1")


@pytest.mark.parametrize(("cap_s", "starts"), [(30.0, True), (30.1, False)])
def test_backfill_ends_before_the_reserved_start(cap_s: float, starts: bool) -> None:
    """A later job starts before the head only if it ends by its cap before the head's reserved start."""
    head = replace(ticket("head", "01"), start_s=80.0)
    turn = decide(ticket("small", "0", 1.0, cap_s), [line("h0", head)], 50.0)
    assert turn.starts is starts
    assert turn.place == 2


def test_backfill_uses_room_that_the_head_leaves() -> None:
    """A host with a second free GPU takes a long job beside the head's reserved place."""
    head = replace(ticket("head", "01"), start_s=80.0)
    assert decide(ticket("long", "0", 1.0, 1e6), [line("h0", head, units=2)], 50.0).starts


def test_ticket_without_a_known_start_blocks_later_tickets() -> None:
    """Before an earlier job has computed its start, no later job passes it."""
    turn = decide(ticket("late", "0", 1.0, 1.0), [line("h0", ticket("head", "01"))], 50.0)
    assert (turn.starts, turn.start_s, turn.reason) == (False, None, "alice's job head is first in line")


def test_early_release_gives_the_first_ticket_the_first_turn() -> None:
    """After a lock is free before its time, no later job passes before the first ticket has a new start."""
    head = replace(ticket("head", "0"), start_s=80.0, held=("u0 running",))
    assert not decide(ticket("small", "0", 1.0, 10.0), [line("h0", head)], 50.0).starts
    assert decide(ticket("small", "0", 1.0, 10.0), [line("h0", replace(head, held=()))], 50.0).starts


def test_higher_priority_is_first() -> None:
    """Priority decides before the time of the submit."""
    low, high = ticket("low", "0", 1.0, priority=25), ticket("high", "0", 2.0, priority=75)
    assert sorted([low, high], key=lambda each: each.key) == [high, low]
    assert sorted([low.name, high.name]) == [high.name, low.name]


def test_preemption_takes_the_lowest_own_jobs() -> None:
    """The first in line preempts own jobs of lower priority, if they suffice and are not spared."""
    mine, other = ticket("high", "0", priority=75), replace(holding("o", 900.0, 25), user="bob")
    low, mid = holding("low", 900.0, 25, "u0"), holding("mid", 900.0, 50, "u1")
    assert victims(mine, [line("h0", held=(mid, low), units=2)], 50.0) == [low]
    assert victims(mine, [line("h0", held=(other,))], 50.0) == []
    assert victims(mine, [line("h0", held=(holding("low", 900.0, 25, spared_s=60.0),))], 50.0) == []
    assert victims(mine, [line("h0", held=(holding("low", 900.0, 25, spared_s=1e4),))], 50.0)  # the clock was set back
    assert victims(mine, [line("h0", replace(mine, job="first", time_s=-1.0), held=(low,))], 50.0) == []
    assert victims(replace(mine, priority=25), [line("h0", held=(low,))], 50.0) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (replace(holding("low", 900.0, 25), root=None), ", and is not preempted: it cannot save (no `keep`), or was"),
        (holding("low", 900.0, 25, spared_s=60.0), ", and is not preempted in its first 10 minutes after"),
        (holding("low", 900.0, 75), ", and is not preempted: its `queue.priority` is not lower"),
        (replace(holding("low", 900.0, 25), user="bob"), ", and is not preempted: only your own jobs are"),
        (holding("low", 900.0, 25), ""),
    ],
)
def test_preempting_job_says_why_a_job_stays(held: Holding, why: str) -> None:
    """The reason of the wait names the cause for each holder that does not give way."""
    mine = ticket("high", "0", priority=75)
    reason = decide(mine, [line("h0", held=(held,))], 50.0, preempts=True).reason
    assert reason.startswith(f"{held.user}'s job low holds h0{why}")
    assert why or reason == f"{held.user}'s job low holds h0"
    assert decide(mine, [line("h0", held=(held,))], 50.0).reason == f"{held.user}'s job low holds h0"


@dataclass
class World:
    """Hosts with running jobs and a line, seen by all at once; `promised` has each head's first reserved start."""

    units: dict[str, int]
    waiting: dict[str, QueueTicket]
    running: dict[str, tuple[float, QueueTicket]]
    promised: dict[str, float]
    seen: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    def lines(self, mine: QueueTicket, now_s: float) -> list[HostLine]:
        """Return the lines of the job's hosts."""
        found = []
        for host in mine.needs:
            held = []
            for job, (start_s, each) in self.running.items():
                held += [Holding(f"u{len(held)}", job, "", start_s + each.cap_s)] * each.needs.get(host, 0)
            named = tuple(replace(each, name=f"u{number}") for number, each in enumerate(held))
            ahead = [
                replace(each, held=self.seen.get(each.job, {}).get(host, ()))
                for each in self.waiting.values()
                if each.key < mine.key and host in each.needs
            ]
            units = tuple(f"u{number}" for number in range(self.units[host]))
            found.append(HostLine(host, units, named, tuple(sorted(ahead, key=lambda each: each.key))))
        return found

    def decided(self, job: str, now_s: float) -> None:
        """Let the job decide: it starts, or writes its expected start."""
        mine = self.waiting[job]
        turn = decide(mine, self.lines(mine, now_s), now_s)
        if turn.starts:
            del self.waiting[job]
            self.running[job] = now_s, mine
            for host, count in self.units.items():
                assert sum(each.needs.get(host, 0) for _, each in self.running.values()) <= count, "a host used twice"
            if job in self.promised:
                assert now_s <= self.promised[job] + 1e-6, "a head started later than reserved"
        else:
            self.seen[job] = {line.host: line.holders for line in self.lines(mine, now_s)}
            self.waiting[job] = replace(mine, start_s=turn.start_s)
            if turn.place == 1 and turn.start_s is not None:
                self.promised.setdefault(job, turn.start_s)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_random_gangs_all_start_and_no_head_is_late(seed: int) -> None:
    """Random gangs on four hosts: no host is used twice, all jobs run, and no head starts after its reserved start."""
    draw = random.Random(seed)
    units = {host: draw.choice([1, 1, 4]) for host in HOSTS}
    arrivals, run_s = [], {}
    for number in range(40):
        hosts = draw.sample(HOSTS, draw.randint(1, 4))
        cap_s, name = draw.uniform(10, 100), f"job{number}"
        run_s[name] = cap_s * draw.choice([0.2, 0.7, 1.0])
        needs = {host: draw.randint(1, units[host]) for host in hosts}
        arrivals.append(QueueTicket(name, "alice", 50, draw.uniform(0, 400), cap_s, needs))
    arrivals.sort(key=lambda each: each.time_s)
    world, now_s = World(units, {}, {}, {}), 0.0
    while arrivals or world.waiting or world.running:
        times = [start_s + run_s[job] for job, (start_s, _) in world.running.items()]
        times += [each.time_s for each in arrivals[:1]] + [s for s in world.promised.values() if s > now_s]
        assert times, f"{len(world.waiting)} jobs wait for ever"
        now_s = min(times)
        while arrivals and arrivals[0].time_s <= now_s:
            new = arrivals.pop(0)
            world.waiting[new.job] = new
        for job in [job for job, (start_s, _) in world.running.items() if start_s + run_s[job] <= now_s]:
            del world.running[job]
        for _ in range(3):  # the agents look again and again, in any order
            order = list(world.waiting)
            draw.shuffle(order)
            for job in order:
                world.decided(job, now_s)
    assert len(world.promised) > 5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_random_priorities_never_deadlock(seed: int) -> None:
    """With late jobs of higher priority too, all jobs start and no host is used twice."""
    draw = random.Random(seed)
    world = World(dict.fromkeys(HOSTS, 1), {}, {}, {})
    for number in range(60):
        hosts = draw.sample(range(4), draw.randint(1, 4))
        each = ticket(f"job{number}", "".join(map(str, hosts)), number, draw.uniform(1, 9), draw.choice([25, 50, 75]))
        world.waiting[each.job] = each
        world.promised.clear()  # a later job of a higher priority may take a head's place
        for job in sorted(world.waiting, key=lambda _: draw.random()):
            world.decided(job, float(number))
        for job in [job for job, (start_s, its) in world.running.items() if start_s + its.cap_s <= number]:
            del world.running[job]
    for later_s in range(60, 4000, 10):
        world.promised.clear()
        for job in sorted(world.waiting, key=lambda _: draw.random()):
            world.decided(job, float(later_s))
        for job in [job for job, (start_s, its) in world.running.items() if start_s + its.cap_s <= later_s]:
            del world.running[job]
    assert world.waiting == {}


# Waits in line for the hosts, one folder each, in one process; then holds all for a moment, and notes both times.
GANG = """
import json, sys, time
from pathlib import Path
from cloudtrain.entrypoints.agent import gpulocks, queue_line
from cloudtrain.entrypoints.agent.queue_turns import QueueTicket, decide
folder, job, hosts, hold_s = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), float(sys.argv[4])
mine = QueueTicket(job, "", 50, time.time(), 60.0, {host: 1 for host in hosts})
placed = [queue_line.PlacedTicket(gpulocks.folder(str(folder / host)), mine, host, ("machine",)) for host in hosts]
while True:
    lines = [each.line() for each in placed]
    turn = decide(placed[0].ticket, lines, time.time())
    if turn.starts:
        taken = [each.take(line, {"job": job, "until_s": time.time() + 60}) for each, line in zip(placed, lines)]
        if all(taken):
            break
        for each in filter(None, taken):
            each.release()
    for each, line in zip(placed, lines):
        each.promise(turn.start_s, line)
    time.sleep(0.02)
for each in placed:
    each.close()
for host in hosts:
    (folder / host / "alone").mkdir()
time.sleep(hold_s)
for host in hosts:
    (folder / host / "alone").rmdir()
for each in taken:
    each.release()
print("done", flush=True)
"""


def test_many_processes_share_hosts_without_deadlock(tmp_path: Path) -> None:
    """24 gangs of real processes over 4 hosts, of which 4 are killed: the rest finishes, one at a time on a host."""
    draw = random.Random(1)
    for host in HOSTS:
        (tmp_path / host).mkdir()
    started = []
    for number in range(24):
        hosts = draw.sample(HOSTS, draw.randint(1, 4))
        argv = [sys.executable, "-c", GANG, str(tmp_path), f"job{number}", ",".join(hosts), "0.05"]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for each in started[20:]:
        each.kill()
    results = [each.communicate(timeout=120) for each in started]
    assert [out for out, _ in results[:20]] == ["done\n"] * 20, results
    assert [queue_line.held_by(tmp_path / host) for host in HOSTS] == [()] * 4
    assert [queue_line.tickets(tmp_path / host) for host in HOSTS] == [[]] * 4


def test_job_outside_the_line_leaves_the_locks(tmp_path: Path) -> None:
    """A start without a ticket is refused while a job waits for the lock, and the reason names the job."""
    locks = gpulocks.folder(str(tmp_path / "locks"))
    assert queue_line.why_not(locks, ["machine"], "other", 60.0) == ""
    placed = queue_line.PlacedTicket(locks, ticket("first", "0"), "h0", ("machine",))
    assert "job first waits in line" in queue_line.why_not(locks, ["machine"], "other", 60.0)
    placed.close()
    assert queue_line.why_not(locks, ["machine"], "other", 60.0) == ""
    assert sorted(os.listdir(locks / "queue")) == ["door.lock"]


def test_take_refuses_a_line_that_has_changed(tmp_path: Path) -> None:
    """Locks are taken only on the line that was decided on: an earlier ticket placed meanwhile counts."""
    locks = gpulocks.folder(str(tmp_path / "locks"))
    late = queue_line.PlacedTicket(locks, ticket("late", "0", 2.0), "h0", ("machine",))
    seen = late.line()
    early = queue_line.PlacedTicket(locks, ticket("early", "0", 1.0), "h0", ("machine",))
    assert late.take(seen, {"job": "late"}) is None
    early.close()
    taken = late.take(late.line(), {"job": "late", "until_s": time.time() + 5, "root": str(tmp_path)})
    assert [(each.name, each.job) for each in queue_line.held_by(locks)] == [("machine", "late")]
    taken.release()
    late.close()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 30_000, '{"pid": 1}', '{"pid": 1, "since_s": 1, "job": "x", "here": "many"}', '{"until_s": NaN}'],
)
def test_damaged_notes_of_others_do_no_harm(tmp_path: Path, text: str) -> None:
    """A ticket or a lock with an unusable note breaks no reader; control characters of names are replaced."""
    locks = gpulocks.folder(str(tmp_path / "locks"))
    placed = queue_line.PlacedTicket(locks, replace(ticket("a\x1b[2J", "0"), job="a"), "h0", ("machine",))
    bad = gpulocks.take(locks / "queue", ["050-1-bad"], {"job": "bad"})
    held = gpulocks.take(
        locks, ["machine"], {"job": "h\x1b[2J", "until_s": "soon", "priority": {}, "spared_until_s": []}
    )
    assert [(each.job, each.until_s) for each in queue_line.held_by(locks)] == [("h?[2J", None)]
    for folder, name in ((locks / "queue", "050-1-bad"), (locks, "machine")):
        (folder / f"{name}.{os.getuid()}.json").write_text(text)
    assert [each.job for each in queue_line.tickets(locks)] == ["a"]
    assert len(placed.line().held) == 1
    for each in (bad, held):
        each.release()
    placed.close()
