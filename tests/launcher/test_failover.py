"""A job with several candidates: never two jobs, never over the hold, and the first candidate with machines runs it.

Random tables of scarce machines (doubles/scarce.py) meet two drivers, which die at any statement or call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.errors import BudgetError, CloudtrainError, UnreachableError
from cloudtrain.launcher.job import Job, exit_code
from cloudtrain.launcher.jobs import failover, queue, retry, stopping, submit
from cloudtrain.launcher.jobs.refresh import NEVER_SENT, refresh
from cloudtrain.launcher.money import shared_ledger, shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.registry import Registry
from doubles.scarce import TERMS, ScarcePlatform
from doubles.twohomes import JOB, Killed, World, two_homes

REGIONS, TYPES = ("us-east-1", "us-west-2"), ("ml.g5.xlarge", "ml.p4d.24xlarge")
PLACES = list(itertools.product(REGIONS, TYPES, (False, True)))
BUDGET_MICRO = 60_000_000


class ScarceWorld(World):
    """One home with one job, and two drivers; `weights`: how often the table has each answer."""

    platform: ScarcePlatform  # type: ignore[assignment]
    kills = 0.4, 150

    def __init__(self, seed: int, top: Path) -> None:
        super().__init__(seed, top)
        self.platform = ScarcePlatform(self.rnd, lambda: self.now_s, self.event)  # type: ignore[assignment]
        self.platform.prices = {place: self.rnd.randrange(1_000_000, 100_000_000) for place in PLACES}
        self.home, self.held_micro, self.deaths = self.homes[0], 0, 0
        self.dies_after: int | None = None
        self.search = {"rounds": 2}

    def event(self, call: str) -> None:
        """Die if it is time to; now and then let the second driver act before a call."""
        self.now_s += 1 / 64
        if not self.running:
            return
        number = max(self.running)
        self.running[number] -= 1
        self.dies_after = None if self.dies_after is None else self.dies_after - 1
        if self.running[number] < 0 or (self.dies_after is not None and self.dies_after < 0):
            self.deaths += 1
            raise Killed
        if not self.is_well or call == "statement":
            return
        if len(self.running) == 1 and self.rnd.random() < 0.1:
            audit(self)
            self.command(self.home, self.advance)
        if call in ("upload", "find", "state", "stop") and self.rnd.random() < 0.05:
            raise UnreachableError(f"no answer to {call}")

    def config(self, entries: list[dict[str, Any]], **capacity: Any) -> Any:
        """Return the checked config of a job with these candidates."""
        resources = {"instance_type": TYPES[0]}
        data = JOB | {"backend": "sagemaker", "sagemaker": {"region": REGIONS[0], "role": "r", "bucket": "b"}}
        data |= {"resources": resources, "budget": {"limit": f"{BUDGET_MICRO / 1e6}USD"}, "project": "vision"}
        data |= {"limits": {"max_duration": "1h"}, "capacity": {"try": entries, **capacity}}
        return configs.load(self.file, data=data)

    def prepared(self, config: Any) -> Any:
        """Return the prepared submit."""
        bundle = backends.Bundle("0" * 64, self.file, 1, 1, 1)
        return prepare(config, self.file, self.home, dry=False, shipped=bundle)

    def send(self, registry: Registry, config: Any) -> None:
        """Submit the job, and move on while a candidate is due."""
        prepared = self.prepared(config)
        worst = [each.plan.worst_case_micro or 0 for each in prepared.candidates]
        hourly_micro = max((each.plan.price_micro or 0) * each.plan.instances for each in prepared.candidates)
        self.held_micro = max(worst) - (-hourly_micro * TERMS.lead_s // 3600)  # rounded up
        answers = [*itertools.chain(*self.platform.table.values())]
        is_more = "taken" in answers or answers.count("late") > 1  # the fee pays for one late start
        exact_micro = 10 * BUDGET_MICRO if is_more else self.held_micro
        limit = LedgerBudget("vision", "all", exact_micro)
        ledger.set_budget(registry.database, limit)
        shared_ledger_sync.set_budget(registry.database, limit, self.place, may_make=True)
        job, _ = submit.send(registry, prepared, name="j1")
        queue.drive(registry, job)

    def advance(self, registry: Registry) -> None:
        """Drive the job as `advance` or as `watch` does."""
        if self.rnd.random() < 0.5:
            queue.advance_queue(registry)
            return
        for job in registry.jobs():
            found = queue.drive(registry, refresh(registry, job))
            if not found.active:
                retry.send_if_due(registry, found)

    def job(self) -> Job | None:
        """Return the job, or None if no submit has left one."""
        return next(iter(self.opened(self.home).jobs()), None)


@contextmanager
def scarce(seed: int) -> Iterator[ScarceWorld]:
    """Yield a world with scarce machines."""
    with two_homes(seed, ScarceWorld) as world:
        assert isinstance(world, ScarceWorld)
        yield world


def entry(place: tuple[str, str, bool]) -> dict[str, Any]:
    """Return the entry of `try` for a place."""
    return {"sagemaker.region": place[0], "resources.instance_type": place[1], "resources.spot": place[2]}


def audit(world: ScarceWorld) -> None:
    """Check what holds after each command: one live job, one reservation that covers the bills, in both ledgers."""
    platform, registry = world.platform, world.opened(world.home)
    assert len(platform.live()) <= 1
    assert platform.bill_micro() <= BUDGET_MICRO
    rows = registry.database.execute("SELECT * FROM reservations")
    held = [row for row in rows if row["state"] == "held"]
    spent_micro = sum(row["spent_micro"] or 0 for row in rows if row["state"] == "settled")
    assert len(held) <= 1
    total_micro = spent_micro + sum(row["amount_micro"] for row in held)
    assert total_micro >= int(platform.bill_micro())
    has_begun = any(job.runs for job in platform.jobs.values())
    job = world.job()
    if job is not None and job.active and not has_begun:
        assert total_micro == world.held_micro
    answers = [answer for _, _, answer in platform.tries]
    if "taken" not in answers and answers.count("late") <= 1:
        assert total_micro <= world.held_micro
    book = shared_ledger.read(ConditionalObject(world.place))
    assert book is None or len(book.held) <= 1


def audit_end(world: ScarceWorld) -> None:
    """Check the end of the job: nothing is held, and both ledgers have the same cost, which covers the bill."""
    world.is_well = False
    world.command(world.home, world.advance)
    registry = world.opened(world.home)
    assert shared_ledger_sync.push(registry.database, patient=True) == []
    rows = registry.database.execute("SELECT * FROM reservations WHERE state != 'released'")
    assert {row["state"] for row in rows} <= {"settled"}
    book = shared_ledger.read(ConditionalObject(world.place))
    assert book is None or not book.held
    spent_micro = sum(row["spent_micro"] for row in rows)
    assert spent_micro == sum(sum(end.months.values()) for end in (book.closed.values() if book else ()))
    assert spent_micro >= int(world.platform.bill_micro())


def audit_places(world: ScarceWorld) -> None:
    """Check that no place without machines was asked again before its time."""
    last: dict[Any, tuple[float, str]] = {}
    for at_s, place, answer in world.platform.tries:
        asked_s, before = last.get(place, (0.0, "runs"))
        least_s = {"quota": 3600.0, "taken": 0.0, "lost before": 0.0}.get(before, 600.0)
        assert at_s - asked_s >= least_s, (place, world.platform.tries)
        last[place] = at_s, answer


def play(world: ScarceWorld, entries: list[tuple[str, str, bool]], **capacity: Any) -> Job | None:
    """Submit the job and drive it to its end, with kills if the world is not well; return the job at the end."""
    config = world.config([entry(place) for place in entries], **capacity)
    world.is_well = True
    world.command(world.home, lambda registry: world.send(registry, config))
    for _ in range(400):
        audit(world)
        job = world.job()
        if job is None or not job.active:
            return job
        world.now_s += world.rnd.choice([1, 20, 200, 900]) * world.rnd.random()
        world.command(world.home, world.advance)
    raise AssertionError(("no end", world.job(), world.platform.tries))


def drawn(world: ScarceWorld) -> tuple[list[tuple[str, str, bool]], dict[str, Any]]:
    """Draw the table, the candidates, and the rules of the search."""
    rnd = world.rnd
    usual = ["quota", "stock", "failed", "pending", "late", "taken", "lost before", "lost after", "runs"]
    for place in PLACES:
        answers = [rnd.choice(usual) for _ in range(rnd.randint(1, 3))]
        answers = [each if place[2] or each != "taken" else "stock" for each in answers]
        world.platform.table[place] = answers if answers[-1] != "lost before" else [*answers, "stock"]
    limits = rnd.choice([{"rounds": 1}, {"rounds": 2}, {"until": "2h"}, {"rounds": 3, "until": "1h"}])
    entries = rnd.sample(PLACES, rnd.randint(1, 5))
    return entries, {"wait": "10m", "limits": limits, "order": rnd.choice(["given", "given", "price"])}


def check_table(seed: int) -> None:
    """Play a table to its end, and compare the end with the table."""
    with scarce(seed) as world:
        entries, rules = drawn(world)
        job = play(world, entries, **rules)
        platform = world.platform
        assert not platform.live()
        audit_end(world)
        if not world.deaths:  # an answer that a dead process got is not known
            audit_places(world)
        had = [each for each in platform.jobs.values() if each.runs and each.answer == "runs"]
        if job is not None and job.attempt.ref is not None and job.attempt.state.state == "succeeded":
            assert len(had) == 1
        elif job is not None:
            assert not had, (job.attempt.state, platform.tries)
            state, detail = job.attempt.state, str(job.attempt.state.detail)
            answers = [each for _, _, each in platform.tries]
            is_poor = "may have been billed so far" in detail and "taken" in answers
            is_poor |= "does not hold" in detail and answers.count("late") > 1  # the fee pays for one late start
            is_unsent = detail == NEVER_SENT or (detail == "not sent: no answer to upload" and not platform.tries)
            is_over = state.reason in ("no_machines", "preempted") or is_unsent
            assert is_over or is_poor, (state, platform.tries)
        if "until" in rules["limits"] and job is not None:
            end_s = job.created_s + {"2h": 7200, "1h": 3600}[rules["limits"]["until"]]
            assert all(at_s <= end_s + 1 for at_s, _, _ in platform.tries)


def test_search_ends_where_no_place_can_read_the_checkpoints() -> None:
    """An infinite time of the next send would be no time at all."""
    assert failover.choose(0, 1, [math.inf, math.inf], 9, None, 100.0) is None
    assert failover.choose(0, 1, [math.inf, 0.0], 9, None, 100.0) == failover.NextTry(100.0, 1, 1)


@pytest.mark.parametrize("block", range(10))
def test_random_table_never_runs_two_jobs_and_never_bills_beyond_the_hold(block: int) -> None:
    """20 tables: at most one live job at any time, one reservation, and an end at the first candidate with machines."""
    for seed in range(block * 20, block * 20 + 20):
        check_table(seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(100))
def test_ten_thousand_random_tables(block: int) -> None:
    """100 tables of 10,000."""
    for seed in range(1000 + block * 100, 1100 + block * 100):
        check_table(seed)


SPOT, DEMAND, WEST = (REGIONS[0], TYPES[1], True), (REGIONS[0], TYPES[1], False), (REGIONS[1], TYPES[1], False)


@contextmanager
def scripted(table: dict[tuple[str, str, bool], list[str]], seed: int = 1, **capacity: Any) -> Iterator[ScarceWorld]:
    """Yield a calm world after the submit of a job with the table's places as candidates."""
    with scarce(seed) as world:
        world.platform.table = table
        config = world.config([entry(place) for place in table], **capacity)
        with suppress(CloudtrainError):  # of the submit's user
            world.command(world.home, lambda registry: world.send(registry, config))
        yield world


def pass_time(world: ScarceWorld, seconds: float, steps: int = 1) -> Job:
    """Let time pass with a driver at each step; return the job."""
    for _ in range(steps):
        world.now_s += seconds / steps
        world.command(world.home, queue.advance_queue)
        world.command(world.home, lambda registry: refresh(registry, registry.find("j1")))
        audit(world)
    job = world.job()
    assert job is not None
    return job


def tried(world: ScarceWorld) -> list[tuple[str, str, bool]]:
    """Return the places in the order of the tries."""
    return [place for _, place, _ in world.platform.tries]


def test_choose_takes_the_next_place_that_may_be_asked() -> None:
    """Places without machines are left out, in this round and in later ones."""
    assert failover.choose(0, 1, [0, 900, 0], 3, None, 100) == failover.NextTry(100, 1, 2)
    found = failover.choose(2, 1, [700, 900, 0], 3, None, 100)
    assert found is not None
    assert (found.position, found.round) == (2, 2)
    assert failover.choose(2, 1, [700, 900, 800], 3, None, 100) == failover.NextTry(700, 2, 0)
    assert failover.choose(-1, 1, [700, 900], 1, None, 100) == failover.NextTry(700, 1, 0)


def test_choose_waits_for_the_rest_of_a_round_unless_the_next_begins_before() -> None:
    """A place that was refused some minutes later is asked again in the same round; no quota is waited for."""
    assert failover.choose(0, 2, [1800, 710], 2, None, 600) == failover.NextTry(710, 2, 1)
    assert failover.choose(0, 2, [1800, 3600], 3, None, 600) == failover.NextTry(1800, 3, 0)


@pytest.mark.parametrize(("number", "pause_s"), [(1, 30), (2, 60), (5, 480), (6, 600), (900, 600)])
def test_pause_between_rounds_doubles_up_to_ten_minutes(number: int, pause_s: float) -> None:
    """The pause differs by up to 20 % from job to job."""
    found = [failover.choose(0, number, [0], None, None, 0) for _ in range(50)]
    pauses = [each.due_s for each in found if each is not None]
    assert 0.8 * pause_s <= min(pauses) < max(pauses) <= 1.2 * pause_s


def test_choose_ends_at_the_limits() -> None:
    """No round after the last, and no send after `until`."""
    assert failover.choose(0, 3, [0], 3, None, 0) is None
    assert failover.choose(0, 1, [0, 0], 1, 10, 11) is None
    assert failover.choose(0, 1, [0], None, 10, 0) is None


def test_refused_candidates_are_left_at_once_and_keep_the_attempts_number() -> None:
    """The submit itself reaches the third candidate, within 2 s, as attempt 1 of one reservation."""
    with scripted({SPOT: ["quota"], DEMAND: ["stock"], WEST: ["runs"]}) as world:
        assert tried(world) == [SPOT, DEMAND, WEST]
        times = [at_s for at_s, _, _ in world.platform.tries]
        assert times[-1] - times[0] <= 2
        job = pass_time(world, 2 * 3600, 4)
        assert (job.attempt.number, job.attempt.state.state) == (1, "succeeded")
        assert (job.attempt.submitter["candidate"], job.config["sagemaker"]["region"]) == (2, REGIONS[1])
        reasons = [each["reason"] for each in job.attempt.submitter["tries"]]
        assert reasons == ["the quota is used up", "no machines of this type"]


def test_accepted_try_without_machines_becomes_an_attempt_and_the_next_has_its_reservation() -> None:
    """The end of attempt 1 and the journal of attempt 2 are one transaction: the hold is there at any time."""
    with scripted({DEMAND: ["failed"], WEST: ["runs"]}) as world:
        pass_time(world, 400, 8)
        registry = world.opened(world.home)
        job = registry.find("j1")
        ends = [(each.number, each.state.reason, each.submitter["candidate"]) for each in registry.attempts(job)]
        assert ends == [(1, "no_machines", 0), (2, None, 1)]
        rows = registry.database.execute("SELECT attempt, state FROM reservations")
        assert [tuple(row) for row in rows] == [(2, "held")]


def test_hold_shrinks_to_the_candidate_that_runs_in_both_ledgers() -> None:
    """Once machines are billed, the project has the rest of its money back."""
    with scripted({SPOT: ["stock"], WEST: ["runs"]}) as world:
        worst = {place: price for place, price in world.platform.prices.items() if place in (SPOT, WEST)}
        job = pass_time(world, 400, 4)
        row = ledger.reservation(world.opened(world.home).database, "j1", job.attempt.number)
        assert row is not None
        assert row["amount_micro"] == job.attempt.plan.worst_case_micro < world.held_micro, worst
        book = shared_ledger.read(ConditionalObject(world.place))
        assert book is not None
        assert [held.amount_micro for held in book.held.values()] == [row["amount_micro"]]


def test_wait_that_is_over_ends_with_a_stop_before_the_next_candidate() -> None:
    """The next is sent only after the platform has said that the first has ended."""
    with scripted({DEMAND: ["pending"], WEST: ["runs"]}, wait="10m") as world:
        pass_time(world, 590, 5)
        assert tried(world) == [DEMAND]
        pass_time(world, 400, 10)
        assert tried(world) == [DEMAND, WEST]
        first = next(iter(world.platform.jobs.values()))
        assert first.over_s is not None
        assert world.platform.tries[1][0] >= first.over_s


def test_machines_that_come_too_late_are_paid_from_the_fee() -> None:
    """The bill of the late start and the next candidate fit into what was held from the beginning."""
    with scripted({DEMAND: ["late"], WEST: ["runs"]}, wait="10m") as world:
        job = pass_time(world, 3 * 3600, 60)
        assert job.attempt.state.state == "succeeded"
        late, _ = world.platform.jobs.values()
        assert late.bill_micro(world.now_s) > 0
        audit_end(world)


def test_spot_taken_is_asked_for_once_more_then_left() -> None:
    """The same candidate once, then the next."""
    with scripted({SPOT: ["taken", "taken"], DEMAND: ["runs"]}, seed=3) as world:
        world.platform.prices = dict.fromkeys(PLACES, 1_000_000)
        job = pass_time(world, 6 * 3600, 60)
        assert tried(world) == [SPOT, SPOT, DEMAND]
        assert job.attempt.state.state == "succeeded"


def test_error_that_is_no_lack_of_machines_ends_the_search_with_its_cause() -> None:
    """A broken image is broken at the next place too."""
    with scripted({DEMAND: ["stock"], WEST: ["broken"], SPOT: ["runs"]}) as world:
        job = world.job()
        assert job is not None
        assert tried(world) == [DEMAND, WEST]
        assert (job.attempt.state.reason, job.attempt.state.detail) == ("error", "not sent: no such image")
        audit_end(world)


def test_lost_answer_stops_the_search_until_the_platform_is_asked() -> None:
    """No candidate is sent while it is not known whether the first exists; the search is made in its region."""
    with scripted({WEST: ["lost after"], DEMAND: ["runs"]}) as world:
        assert tried(world) == [WEST]
        job = pass_time(world, 200, 2)
        assert (job.attempt.number, job.attempt.state.state) == (1, "running")
        assert tried(world) == [WEST]


def test_stop_by_the_user_ends_the_search() -> None:
    """A stop while a candidate waits is no end of its wait: nothing else is sent."""
    with scripted({DEMAND: ["pending"], WEST: ["runs"]}, wait="10m") as world:
        world.command(world.home, lambda registry: stopping.ask(registry, "j1"))
        job = pass_time(world, 3600, 12)
        assert (job.attempt.state.state, job.attempt.state.reason) == ("stopped", "user")
        assert tried(world) == [DEMAND]
        audit_end(world)


def test_stop_by_the_user_between_two_tries_ends_the_search() -> None:
    """A job in line for its next candidate leaves the line."""
    with scripted({DEMAND: ["stock"], WEST: ["quota"]}, limits={"rounds": 3}) as world:
        world.command(world.home, lambda registry: stopping.ask(registry, "j1"))
        job = pass_time(world, 4 * 3600, 12)
        assert (job.attempt.state.state, len(tried(world))) == ("stopped", 2)
        audit_end(world)


def test_places_without_machines_are_left_out_by_all_jobs_of_the_home() -> None:
    """A second job does not ask a place that the first has found without machines ten minutes ago."""
    with scripted({DEMAND: ["failed"], WEST: ["runs"]}) as world:
        pass_time(world, 200, 4)
        assert tried(world) == [DEMAND, WEST]
        world.platform.jobs.clear()
        prepared = world.prepared(world.config([entry(DEMAND), entry(WEST)]))
        first, course, in_line = failover.begin(world.opened(world.home), prepared)
        assert (first.config.sagemaker.region, course["candidate"], in_line) == (REGIONS[1], 1, {})


def test_block_of_a_place_doubles_to_two_hours_and_a_quota_blocks_for_one() -> None:
    """Tries in a row without machines: 10, 20, 40, 80, 120, 120 minutes."""
    with scripted({DEMAND: ["stock"], WEST: ["quota"]}, limits={"until": "1d"}) as world:
        pass_time(world, 10 * 3600, 600)
        asked = [[at_s for at_s, place, _ in world.platform.tries if place == each] for each in (DEMAND, WEST)]
        gaps = [[round((later - at_s) / 60) for at_s, later in itertools.pairwise(each)] for each in asked]
        assert gaps[0][:6] == pytest.approx([10, 20, 40, 80, 120, 120], abs=2)
        assert min(gaps[1]) >= 59


def test_limits_end_the_search_with_exit_code_5() -> None:
    """After the rounds the job has failed for want of machines, and nothing is held."""
    with scripted({DEMAND: ["stock"], WEST: ["failed"]}, limits={"rounds": 2}) as world:
        job = pass_time(world, 4 * 3600, 240)
        assert (job.attempt.state.reason, exit_code(job.attempt.state)) == ("no_machines", 5)
        assert tried(world) == [DEMAND, WEST, DEMAND, WEST]
        audit_end(world)


def test_killed_submit_is_carried_on_at_every_step() -> None:
    """Whatever statement or call is the last of the submit, a later driver ends the search at the first machines."""
    for effects in range(0, 400, 13):
        with scarce(effects) as world:
            world.platform.table = {SPOT: ["quota"], DEMAND: ["failed"], WEST: ["runs"]}
            config = world.config([entry(place) for place in world.platform.table])
            world.dies_after = effects
            world.command(world.home, lambda registry, config=config: world.send(registry, config))
            world.dies_after = None
            world.platform.table = {place: answers[-1:] for place, answers in world.platform.table.items()}
            if (job := world.job()) is None:
                continue
            job = pass_time(world, 3 * 3600, 60)
            is_known = job.attempt.state.detail != NEVER_SENT
            assert job.attempt.state.state == ("succeeded" if is_known else "failed"), (effects, job.attempt)
            audit_end(world)


def resumed(world: ScarceWorld, *settings: str) -> Job:
    """Resume the job as a user does; return the job."""

    def resume(registry: Registry) -> None:
        job = registry.find("j1")
        prepared = retry.prepare_next(registry, job, settings)
        queue.drive(registry, submit.resend(registry, job, prepared))

    world.command(world.home, resume)
    job = world.job()
    assert job is not None
    return job


def held_micro(world: ScarceWorld) -> int:
    """Return what is reserved for the job."""
    return sum(each.amount_micro or 0 for each in ledger.held(world.opened(world.home).database))


def test_resume_after_a_search_without_machines_searches_all_candidates_again() -> None:
    """The search begins anew, with the hold of all candidates, though the last candidate was the last one tried."""
    with scripted({SPOT: ["stock", "runs"], DEMAND: ["failed", "stock"]}, limits={"rounds": 1}) as world:
        pass_time(world, 600, 6)
        world.now_s += 3 * 3600
        job = resumed(world)
        assert tried(world) == [SPOT, DEMAND, SPOT]
        assert (job.attempt.phase, job.attempt.submitter["candidate"]) == ("sent", 0)
        assert held_micro(world) == world.held_micro


def test_resume_of_a_stopped_job_holds_for_all_candidates() -> None:
    """A job that its user stopped searches again; a dearer candidate later needs no more than is held."""
    with scripted({SPOT: ["pending", "failed"], WEST: ["runs"]}) as world:
        world.command(world.home, lambda registry: stopping.ask(registry, "j1"))
        pass_time(world, 600, 3)
        resumed(world)
        assert held_micro(world) == world.held_micro
        job = pass_time(world, 400, 4)
        assert (job.attempt.number, job.attempt.state.state) == (3, "running")
        assert tried(world) == [SPOT, SPOT, WEST]


def test_setting_of_a_resume_holds_for_all_candidates() -> None:
    """A key that the entries change has the typed value, at once and after each move."""
    with scripted({SPOT: ["pending", "stock"], DEMAND: ["runs"], WEST: ["runs"]}) as world:
        world.command(world.home, lambda registry: stopping.ask(registry, "j1"))
        pass_time(world, 600, 3)
        west_spot = REGIONS[1], TYPES[1], True
        world.platform.table = {west_spot: ["stock"], WEST: ["runs"]}
        job = resumed(world, f"sagemaker.region={REGIONS[1]}")
        assert tried(world)[1:] == [west_spot, WEST]
        assert {place[3] for place in job.attempt.submitter["places"]} == {REGIONS[1]}


def test_candidate_that_the_rest_of_the_money_cannot_pay_is_left_out_of_a_resume() -> None:
    """The other candidates go on with what is left of the job's budget."""
    with scripted({SPOT: ["runs"], WEST: ["runs"]}) as world:
        world.platform.prices = {SPOT: 3_000_000, WEST: 59_000_000}
        pass_time(world, 400, 4)
        world.command(world.home, lambda registry: stopping.ask(registry, "j1"))
        pass_time(world, 600, 3)
        registry = world.opened(world.home)
        prepared = retry.prepare_next(registry, registry.find("j1"), ["budget.limit=8USD"])
        assert [each.config.resources.spot for each in prepared.candidates] == [True]


@pytest.mark.parametrize("call", ["read", "write"])
def test_ledger_that_does_not_answer_at_a_move_ends_no_search(call: str) -> None:
    """The candidate stays in line, with the money held, and is sent once the ledger answers again."""
    with scripted({DEMAND: ["failed"], WEST: ["runs"]}) as world:
        world.now_s += 200
        with pytest.MonkeyPatch.context() as patch:

            def away(name: str, event: Any = world.event) -> None:
                event(name)
                if name == call and world.running:
                    raise UnreachableError("the ledger is away")

            patch.setattr(world, "event", away)
            world.command(world.home, queue.advance_queue)
        assert held_micro(world) == world.held_micro
        assert (job := world.job()) is not None
        assert (job.attempt.number, job.attempt.phase, tried(world)) == (2, "queued", [DEMAND])
        assert pass_time(world, 400, 4).attempt.state.state == "running"


def test_ctrl_c_in_a_follower_ends_no_search() -> None:
    """Whatever step of `advance` a Ctrl-C meets, the next command goes on."""
    for at in range(1, 90, 4):
        with scripted({DEMAND: ["failed"], WEST: ["runs"]}) as world, pytest.MonkeyPatch.context() as patch:
            world.now_s += 200
            steps = itertools.count(1)

            def event(name: str, at: int = at, steps: Any = steps, event: Any = world.event) -> None:
                if world.running and next(steps) == at:
                    raise KeyboardInterrupt
                event(name)

            patch.setattr(world, "event", event)
            world.command(world.home, queue.advance_queue)
            assert pass_time(world, 400, 4).attempt.state.state == "running", at


def test_clock_that_is_set_back_holds_up_no_search() -> None:
    """No block, and no pause, is longer than two hours."""
    with scripted({DEMAND: ["stock"], WEST: ["stock", "runs"]}) as world:
        world.now_s -= 24 * 3600
        job = pass_time(world, 3 * 3600, 30)
        assert job.attempt.state.state in ("running", "succeeded")


def test_running_job_does_not_free_its_place_again() -> None:
    """A later refusal for want of quota, which the running job uses up, holds for other jobs."""
    with scripted({DEMAND: ["runs"]}) as world:
        pass_time(world, 200, 2)
        registry = world.opened(world.home)
        attempt = registry.find("j1").attempt
        world.command(
            world.home, lambda registry: failover._block(registry, failover._place_of(attempt), is_quota=True)
        )
        registry.set_unreachable(attempt)
        pass_time(world, 200, 2)
        assert failover._free_s(registry, attempt.submitter["places"])[0] > world.now_s


def test_candidate_without_a_price_fits_into_no_budget_of_a_project() -> None:
    """The hold of the other candidates says nothing about the cost of this one."""
    with scarce(1) as world, pytest.MonkeyPatch.context() as patch:
        world.platform.table = {DEMAND: ["stock"], WEST: ["runs"]}
        priced = world.platform.capacity

        def capacity(config: Any) -> backends.Capacity:
            found = priced(config)
            return replace(found, hourly_usd=None) if config.sagemaker.region == REGIONS[1] else found

        patch.setattr(world.platform, "capacity", capacity)
        prepared = world.prepared(world.config([entry(DEMAND), entry(WEST)]).model_copy(update={"budget": None}))
        registry = world.opened(world.home)
        ledger.set_budget(registry.database, LedgerBudget("vision", "all", BUDGET_MICRO))
        with pytest.raises(BudgetError, match="price of this job is unknown"):
            submit.send(registry, prepared, name="j1")
        assert tried(world) == []


def test_stop_of_a_candidate_that_is_just_being_sent_waits_for_the_send() -> None:
    """The user is never told that nothing was sent while another process sends."""
    with scripted({DEMAND: ["stock"], WEST: ["stock"]}) as world:
        registry = world.opened(world.home)
        seen = registry.find("j1")

        def claimed(_: Any) -> bool:
            assert registry.claim(seen.attempt)  # by another process, between the look and the stop
            return True

        world.running[99] = float("inf")
        assert stopping.ask(registry, "j1", agrees=claimed).verdict == "unsent"
        assert registry.find("j1").attempt.phase == "intent"
        del world.running[99]


def test_list_of_types_is_tried_again_without_the_type_whose_quota_is_short() -> None:
    """SageMaker refuses a whole list for one type: the others may have machines."""
    listed = REGIONS[0], ",".join(TYPES), False
    with scarce(1) as world:
        world.platform.prices[listed] = 40_000_000
        world.platform.table = {listed: ["quota"], DEMAND: ["stock"], WEST: ["runs"]}
        config = world.config([entry(listed), entry(WEST)])
        world.command(world.home, lambda registry: world.send(registry, config))
        assert tried(world) == [listed, DEMAND, WEST]
        registry = world.opened(world.home)
        blocked = [row["place"] for row in registry.database.execute("SELECT place FROM blocked")]
        assert blocked == ['["sagemaker", "1", "us-east-1", "ml.p4d.24xlarge", false]']
        assert (job := world.job()) is not None
        assert (job.attempt.number, job.attempt.phase) == (1, "sent")
        assert held_micro(world) == world.held_micro


def test_resume_after_until_searches_for_as_long_again() -> None:
    """The time of `until` begins with the submit, and anew with a resume."""
    with scripted({DEMAND: ["failed"], WEST: ["failed", "runs"]}, limits={"until": "10m"}) as world:
        assert pass_time(world, 3600, 24).attempt.state.reason == "no_machines"
        world.now_s += 3 * 3600
        resumed(world)
        job = pass_time(world, 280, 4)
        assert tried(world) == [DEMAND, WEST, DEMAND, WEST]
        assert job.attempt.state.state in ("pending", "running")


@pytest.mark.parametrize("is_full", [False, True])
def test_job_that_begins_in_line_is_held_in_the_shared_ledger_too(is_full: bool) -> None:
    """All places are blocked: nobody else may take the money of the search; a full ledger refuses the submit."""
    with scripted({DEMAND: ["failed"], WEST: ["failed"]}, limits={"rounds": 1}) as world:
        pass_time(world, 400, 4)
        registry = world.opened(world.home)
        limit = LedgerBudget("vision", "all", world.held_micro - is_full)
        shared_ledger_sync.set_budget(registry.database, limit, world.place, may_make=True)
        prepared = world.prepared(world.config([entry(DEMAND), entry(WEST)]))
        with pytest.raises(BudgetError, match="does not hold") if is_full else nullcontext():
            job, _ = submit.send(registry, prepared, name="j2")
            assert job.attempt.phase == "queued"
        book = shared_ledger.read(ConditionalObject(world.place))
        assert book is not None
        assert [each.amount_micro for each in book.held.values()] == [world.held_micro] * (not is_full)
        assert len(registry.jobs()) == 2 - is_full
