"""The cost of attempts, compared with an exact count per node."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints.contract import NodeStatus
from cloudtrain.launcher.backend import agent_state
from cloudtrain.launcher.job import Attempt, State
from cloudtrain.launcher.metering import meter
from doubles.plans import plan_of

HOUR = 3600
HOUR_MS = HOUR * 1000


def attempt(number: int = 1, state: State | None = None, phase: str = "sent", **plan: Any) -> Attempt:
    """Return an attempt on two instances of 36 USD an hour, a cent a second each."""
    planned = plan_of(**{"instances": 2, "hourly_usd": 72.0, **plan})
    return Attempt("j", number, phase, planned, {}, 0.0, {}, state=state or State("pending"))


def spent(*attempts: Attempt, now_s: float = 10_000.0) -> int | None:
    """Return the cost of the attempts."""
    return meter.spent_micro(meter.legs_of(attempts), now_s)


# -- the exact cost ----------------------------------------------------------------------------------------------


class Clock:
    """The local clock: off by up to 30 s, and with jumps."""

    def __init__(self, rnd: random.Random) -> None:
        self.rnd, self.off_s = rnd, rnd.uniform(-30, 30)

    def at(self, true_s: float) -> float:
        """Return the shown time; the clock may have been set before."""
        if self.rnd.random() < 0.2:
            self.off_s = self.rnd.choice([self.rnd.uniform(-30, 30), self.rnd.uniform(-2 * HOUR, 2 * HOUR)])
        return true_s + self.off_s


def some(rnd: random.Random, least: float, most: float) -> float:
    """Return a time in whole milliseconds."""
    return rnd.randrange(round(least * 1000), round(most * 1000) + 1) / 1000


def ms(seconds: float) -> int:
    """Return a span in milliseconds."""
    return round(seconds * 1000)


def polled(
    rnd: random.Random,
    clock: Clock,
    begun_s: float,
    over_s: float,
    report: Callable[[float, bool], State],
    *,
    ends: bool,
) -> tuple[State, float, float]:
    """Return the state that up to four polls store in the registry, the local time, and the true time of the last."""
    state, now_s, look_s = State("pending"), 0.0, over_s
    times = sorted(some(rnd, begun_s, over_s) for _ in range(rnd.randrange(4)))
    for look_s in times:
        now_s = clock.at(look_s)
        state = meter.steady(state, report(look_s, False), now_s)
    if not ends and times:
        return state, now_s, look_s
    now_s = clock.at(over_s + 5)
    return meter.steady(state, report(over_s, True), now_s), now_s, over_s


def cloud(rnd: random.Random, clock: Clock, at_s: float, price: int, nodes: int, *, ends: bool) -> tuple[Any, ...]:
    """Return a cloud attempt: the platform bills all nodes while they run, with gaps, and reports the seconds."""
    pieces, when_s = [], at_s + some(rnd, 0, 3000)
    for _ in range(rnd.choice([1, 1, 1, 2, 3])):
        pieces.append((when_s, when_s + rnd.choice([some(rnd, 1, 100), some(rnd, 100, 20_000)])))
        when_s = pieces[-1][1] + some(rnd, 1, 900)
    begun_s, over_s = pieces[0][0], pieces[-1][1]

    def billed_s(true_s: float) -> float:
        return sum(max(0.0, min(true_s, end) - begin) for begin, end in pieces)

    def report(true_s: float, is_over: bool) -> State:
        if is_over:
            return State("succeeded", started_s=begun_s, ended_s=over_s, billed_s=float(round(billed_s(over_s))))
        running = any(begin <= true_s <= end for begin, end in pieces)
        return State("running" if running else "pending", started_s=begun_s, billed_s=billed_s(true_s))

    state, now_s, look_s = polled(rnd, clock, begun_s, over_s, report, ends=ends)
    return state, now_s, over_s, nodes * price * ms(billed_s(look_s))


def own(rnd: random.Random, clock: Clock, at_s: float, price: int, nodes: int, *, ends: bool) -> tuple[Any, ...]:
    """Return an attempt on own machines; some are lost, given up after up to 15 s, and spares replace some of these."""
    wall_off_s = some(rnd, -2 * HOUR, 2 * HOUR)  # the nodes' clock is set once during the run
    begun_s, over_s = at_s, at_s + rnd.choice([some(rnd, 5, 200), some(rnd, 200, 20_000)])
    lost = {node: some(rnd, begun_s, over_s) for node in range(1, nodes) if rnd.random() < 0.2}
    given_up = {node: min(true_s + some(rnd, 10, 15), over_s) for node, true_s in lost.items()}
    joined = {nodes + number: up_s for number, up_s in enumerate(given_up.values()) if rnd.random() < 0.5}
    verdict = {"state": "succeeded", "reason": None, "error": None, "restarts": 0, "resumable": False}

    def report(true_s: float, is_over: bool) -> State:
        gone_s = {str(node): up_s - begun_s for node, up_s in given_up.items() if up_s <= true_s}
        state = {"pid": 1, "started_s": begun_s, "generation": 1 + len(gone_s), "detail": None, "zero_s": 1000.0}
        joined_s = {str(node): up_s - begun_s for node, up_s in joined.items() if up_s <= true_s} or None
        changed = {"gone_s": gone_s, "joined_s": joined_s}
        told = {"state": {**state, **changed}, "exit": None, "alive": not is_over, "asked": None}
        if is_over:
            held_s = sum(gone_s.get(str(node), true_s - begun_s) for node in range(nodes)) / nodes
            held_s += sum(true_s - begun_s - each_s for each_s in (joined_s or {}).values()) / nodes
            told |= {"exit": {**verdict, **changed, "ended_s": over_s + wall_off_s, "held_s": held_s}}
        more = {"ended_ago_s": 40.0} if is_over else {"held_s": true_s - begun_s}
        state_now = agent_state.fold({0: NodeStatus.load({**told, **more})}, nodes)
        assert state_now is not None
        return state_now

    state, now_s, look_s = polled(rnd, clock, begun_s, over_s, report, ends=ends)
    used_ms = sum(ms(min(lost.get(node, over_s), look_s)) - ms(begun_s) for node in range(nodes))
    used_ms += sum(max(0, ms(look_s) - ms(up_s)) for up_s in joined.values())
    return state, now_s, over_s, price * used_ms


def history(rnd: random.Random) -> tuple[list[Attempt], float, int, int]:
    """Return a job of up to four attempts, the local time of the last poll, and exact costs: of all nodes, of a minute.

    The exact costs are micro-dollars times the milliseconds of an hour; the minute is the most expensive attempt's.
    """
    clock, when_s, now_s, attempts, truth, minute = Clock(rnd), 1_790_000_000.0, 0.0, [], 0, 0
    kind, last = rnd.choice([cloud, own]), rnd.randrange(1, 5)
    for number in range(1, last + 1):
        nodes = rnd.choice([1, 2, 3, 8, 64])
        price = rnd.choice([100_000, 3_060_000, 63_296_000, rnd.randrange(1, 10**8)])
        ends = number < last or rnd.random() < 0.7
        state, now_s, when_s, cost = kind(rnd, clock, when_s, price, nodes, ends=ends)
        # The cap is after the end, and never cuts an attempt.
        attempts.append(attempt(number, state, instances=nodes, price_micro=price, cap_s=200_000, hourly_usd=None))
        truth, minute = truth + cost, max(minute, 60_000 * nodes * price)
        when_s += some(rnd, 0, 8 * HOUR)
    return attempts, now_s, truth, minute


@pytest.mark.parametrize("histories", [4000, pytest.param(40_000, marks=pytest.mark.soak)])
def test_meter_holds_on_random_histories(histories: int) -> None:
    """The error is at most 0.5 % or a node-minute, with restarts, resizes, lost nodes, gaps, and clock changes."""
    rnd = random.Random(8)
    for number in range(histories):
        attempts, now_s, truth, minute = history(rnd)
        found = spent(*attempts, now_s=now_s)
        assert found is not None
        assert abs(found * HOUR_MS - truth) <= max(truth // 200, minute), number


# -- individual rules --------------------------------------------------------------------------------------------


def ran(start_s: float, end_s: float | None, **more: Any) -> State:
    """Return the state of an attempt that ran in the period, or still runs."""
    return State("running" if end_s is None else "succeeded", started_s=start_s, ended_s=end_s, **more)


def test_legs_are_added_exactly_and_rounded_up() -> None:
    """Half a second of a micro-dollar an hour is 1; a thousand nodes for ten years at a million dollars are exact."""
    assert spent(attempt(state=ran(100, 200))) == 2_000_000
    assert spent(attempt(state=ran(100, 100.5), instances=1, price_micro=1)) == 1
    assert spent(attempt(1, ran(0, 100)), attempt(2, ran(900, 1000), instances=1, price_micro=72_000_000)) == 4_000_000
    end_s = 87_600 * HOUR + 0.000_001
    legs = meter.legs_of([attempt(state=ran(0, end_s), instances=1000, price_micro=10**12, hourly_usd=None)])
    assert meter.spent_micro(legs, end_s) == 87_600 * 1000 * 10**12 + -(-1000 * 10**12 // (HOUR * 10**6))


def test_end_before_a_start_is_free() -> None:
    """Times of two clocks may contradict each other."""
    assert spent(attempt(state=ran(200, 100))) == 0
    assert spent(attempt(state=ran(20_000, None)), now_s=100.0) == 0


def test_unknown_price_is_not_zero() -> None:
    """Only an attempt that was never sent, or has not started, costs 0; a planned price overrides the platform's."""
    free = {"hourly_usd": None}
    assert spent(attempt(1, ran(0, 10)), attempt(2, ran(20, 30), **free)) is None
    assert spent(attempt(state=State("pending"), **free)) == 0
    assert spent(attempt(state=State("failed", ended_s=10.0), **free)) == 0
    assert spent(attempt(phase="never_sent", state=State("failed", ended_s=10.0), **free)) == 0
    assert meter.burn_micro_h(meter.legs_of([attempt(state=ran(0, None), **free)])) is None
    told = ran(0, HOUR, hourly_usd=10.0)
    assert spent(attempt(state=told, price_micro=3_000_000)) == 6_000_000
    assert spent(attempt(state=told)) == 72_000_000
    assert spent(attempt(state=told, hourly_usd=None)) == 10_000_000


def test_unreachable_job_costs_up_to_its_cap() -> None:
    """The platform ends the job at the cap, even if the launcher cannot see the end."""
    state = meter.steady(State("pending"), ran(0, None, billed_s=90.0), now_s=100.0)
    away = attempt(state=state, cap_s=600, terms={"tail_s": 60})
    assert spent(away, now_s=200.0) == 2 * 190 * 10_000
    assert spent(away, now_s=9e9) == 2 * 660 * 10_000
    assert spent(attempt(state=state, cap_s=600, terms={"starts": 4}), now_s=9e9) == 2 * 2400 * 10_000


def test_state_changes_only_with_new_information() -> None:
    """A job keeps its state for a minute, unless a clock was set; a wait for nodes is billed by the nodes' clock."""
    known = meter.steady(State("pending"), ran(0, None, billed_s=10.0), now_s=100.0)
    assert meter.steady(known, ran(0, None, billed_s=70.4), now_s=160.0) == known
    assert meter.steady(known, ran(0, None, billed_s=40.0), now_s=160.0).told_s == 160.0
    assert meter.steady(known, ran(0, None, billed_s=70.0), now_s=4000.0).told_s == 4000.0
    assert meter.steady(known, ran(0, 80.0, billed_s=70.0), now_s=160.0) == ran(0, 80.0, billed_s=70.0)
    waits = State("pending", started_s=86_500.0, billed_s=9.0)
    known = meter.steady(State("pending"), waits, now_s=100.0)
    assert spent(attempt(state=known), now_s=130.0) == 2 * 39 * 10_000
    assert meter.steady(known, replace(waits, billed_s=39.4), now_s=130.0) == known


def test_lost_nodes_cost_until_their_loss() -> None:
    """Of four nodes a node is lost after 100 s and a node after 200 s; the nodes report the mean of all."""
    gone = {"2": 100.0, "3": 200.0}
    state = ran(0, None, billed_s=(2 * 400 + 300) / 4, gone_s=gone, told_s=1000.0)
    shrunk = attempt(state=state, instances=4, price_micro=36_000_000)
    assert spent(shrunk, now_s=1000.0) == 11_000_000
    assert spent(shrunk, now_s=1010.0) == 11_200_000
    assert meter.burn_micro_h(meter.legs_of([shrunk])) == 72_000_000
    assert [leg.instances for leg in meter.legs_of([shrunk])] == [2, 1, 1]


def test_spare_costs_from_its_begin_in_place_of_a_lost_node() -> None:
    """Of two nodes a node is lost after 100 s, and a spare joins at once: two nodes at any time, and two still run."""
    state = ran(0, None, billed_s=400.0, gone_s={"1": 100.0}, joined_s={"2": 100.0}, told_s=1000.0)
    swapped = attempt(state=state, price_micro=36_000_000)
    assert spent(swapped, now_s=1000.0) == 8_000_000
    assert spent(swapped, now_s=1010.0) == 8_200_000
    assert [leg.instances for leg in meter.legs_of([swapped])] == [2, 1]
    odd = attempt(state=replace(state, joined_s={str(node): 1.0 for node in range(2, 900)}), price_micro=36_000_000)
    assert spent(odd, now_s=1000.0) == 8_000_000, "a report of more spares than lost nodes adds no node"


def test_parts_add_up_to_the_whole() -> None:
    """The sum is right for any cuts of a leg, even if the platform billed less than the span."""
    rnd = random.Random(1)
    for _ in range(200):
        start_s, span_s = rnd.uniform(0, 1e6), rnd.uniform(0, 1e6)
        leg = meter.Leg("j", 1, 3, rnd.randrange(1, 10**8), start_s, start_s + span_s, rnd.choice([None, span_s / 3]))
        cuts = sorted([0.0, *(rnd.uniform(0, 2e6) for _ in range(5)), 3e6])
        parts = [meter.part_micro(leg, *pair, 3e6) or 0 for pair in itertools.pairwise(cuts)]
        assert sum(parts) == meter.cost_micro(leg, 3e6)
