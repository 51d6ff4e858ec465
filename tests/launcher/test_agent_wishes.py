"""A scripted agent with wrong wishes never passes its owner's limit: random command lines from several homes.

The commands run in this process, on the platform that bills by its own code (doubles/billing.py), with kills, lost
answers, and commands beside commands (doubles/twohomes.py).
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import cli
from cloudtrain.launcher.money import shared_ledger
from cloudtrain.launcher.money.conditional import ConditionalObject
from cloudtrain.launcher.store import agent_limit
from cloudtrain.launcher.store.budgets import month_span
from doubles.billing import Platform
from doubles.twohomes import BEGIN_S, DAY_S, World, two_homes

CONFIG = """\
name: j
task: task.py
backend: sagemaker
sagemaker: {region: us-east-1, role: r, bucket: b}
resources: {instance_type: ml.p4d.24xlarge}
training: {max_steps: 810, eval_every: 90, monitor: {metric: loss, mode: min}}
limits: {max_duration: 1h}
retry: {max_attempts: 3, on: [preempted, node_failure, error]}
"""
SWEEP = "sweep: {space: {training.optimizer.lr: {log: [1e-4, 1e-1]}}, trials: 9, parallel: 4}\n"
TRIES = "capacity: {try: [{}, {resources.instance_type: ml.p5.48xlarge}], limits: {rounds: 2}}\n"
SETTINGS = ("budget.limit=1USD", "budget.limit=9999USD", "budget={limit: 2USD, on_limit: alert}", "project=vision")
SETTINGS += (
    "project=agent",
    "limits.max_duration=40h",
    "resources.instances=3",
    "retry.max_attempts=9",
    "queue.wait=true",
)


class CloudPlatform(Platform):
    """A platform whose capacity has the config's price if given, as on the clouds; the bill knows no such price."""

    def capacity(self, config: Any) -> backends.Capacity:
        """Return the config's price, else the list price."""
        own = config.sagemaker.price_per_hour
        if own is None:
            return super().capacity(config)
        return backends.Capacity(0, own / 1e6, "sagemaker.price_per_hour", self.terms)


class AgentWorld(World):
    """Homes of one user with an owner's limit, and an agent that types any command."""

    def __init__(self, seed: int, top: Path) -> None:
        super().__init__(seed, top)
        self.platform = CloudPlatform(self.rnd, lambda: self.now_s, self.event)
        self.user, self.home, self.codes = top / "user", self.homes[0], list[int]()
        for name, more in (("job", ""), ("sweep", SWEEP), ("tries", TRIES)):
            (top / name).mkdir()
            (top / name / "cloudtrain.yaml").write_text(CONFIG + more)
            (top / name / "task.py").write_text(
                "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
            )
        self.files = [str(top / name / "cloudtrain.yaml") for name in ("job", "sweep", "tries")]

    def begin(self) -> None:
        """Set the owner's limit."""
        self.place, self.period = agent_limit.place(), self.rnd.choice(["all", "month"])
        hour_s = 3600 + self.platform.terms.tail_s
        one = self.platform.worst_micro(hour_s, 1) * self.platform.terms.starts
        self.limit = int(one * self.rnd.uniform(1.05, 2))  # of one job or two
        above = self.rnd.choice([None, None, self.limit // 2])
        self.key = agent_limit._hashed("the owner's word", "00")
        self._write(agent_limit.AgentLimit(self.limit, self.period, above, "00", self.key))
        (agent_limit.folder() / "ledger").mkdir()
        shared_ledger.change(ConditionalObject(self.place), lambda book: None, may_make=True)
        self.is_well = True

    def act(self) -> None:
        """Let time pass, and type a command line; the owner approves some requests."""
        self.now_s += self.rnd.choice([1, 60, 600, DAY_S / 3, 3 * DAY_S]) * self.rnd.random()
        if self.rnd.random() < 0.5:
            self.approve()
        self.home = home = self.rnd.choice(self.homes)
        if self.rnd.random() < 0.03 and not self.running:
            self._delete(home)
        wishes = {self._submit: 7, self._resume: 3, self._evaluate: 1, self._end: 2, self._look: 3, self._budget: 2}
        is_first = not self.platform.jobs
        words = self._submit() if is_first else self.rnd.choices([*wishes], [*wishes.values()])[0]()
        if words == ["retry"]:  # as `watch` does, whose threads would outlive a kill here
            self.command(home, self.retry)
        else:
            self.command(home, lambda registry: self.codes.append(cli._run(words, False, as_json=False)))
        gc.collect()  # closes the database of a dead process

    def approve(self) -> None:
        """Approve the oldest open request, as the owner does who knows the word."""
        found = agent_limit.known()
        asked = [each for each in agent_limit.requests() if each not in found.approved and not each.job]
        self._write(replace(found, approved=(*found.approved, *asked[:1])))

    def _write(self, found: agent_limit.AgentLimit) -> None:
        agent_limit.folder().mkdir(parents=True, exist_ok=True)
        (agent_limit.folder() / "limit.json").write_text(json.dumps(found.dump()))

    def _delete(self, home: Path) -> None:
        for place in [each for each in self.registries if each[0] == home]:
            self.registries.pop(place).close()
        gc.collect()
        shutil.rmtree(home)
        home.mkdir()

    # -- command lines

    def _settings(self) -> list[str]:
        chosen = self.rnd.sample(SETTINGS, self.rnd.randrange(3))
        return [word for each in chosen for word in ("--set", each)]

    def _price(self) -> list[str]:
        return ["--price-per-hour", self.rnd.choice(["0.01", "5000"])] if self.rnd.random() < 0.2 else []

    def _submit(self) -> list[str]:
        more = ["--idempotency-key", f"key-{self.rnd.randrange(9)}"] if self.rnd.random() < 0.3 else []
        more += ["--name", f"n{self.rnd.randrange(9)}"] if self.rnd.random() < 0.3 else []
        more += ["--budget", f"{self.rnd.randrange(1, 500)}"] if self.rnd.random() < 0.3 else []
        yes = ["-y"] if self.rnd.random() < 0.9 else []
        return [
            "submit",
            *yes,
            "-d",
            "--force",
            "-f",
            self.rnd.choice(self.files),
            *self._settings(),
            *self._price(),
            *more,
        ]

    def _resume(self) -> list[str]:
        more = self.rnd.choice(
            [[], ["--budget", "+900USD"], ["--trials", "+5"], ["--instances", "4"], ["--update-config"]]
        )
        return ["resume", self._job(), "-y", "-d", *more, *self._price()]

    def _evaluate(self) -> list[str]:
        return ["evaluate", self._job(), "-y", "--split", "val"]

    def _end(self) -> list[str]:
        job, rnd = self._job(), self.rnd
        lines = [["stop", "--now", "-d", "-y", job], ["stop", "--forget", "-y", job], ["rm", "-y", job]]
        return rnd.choice([*lines, ["prune", "--older", "1s", "-y"], ["status", job]])

    def _look(self) -> list[str]:
        return self.rnd.choice([["retry"], ["retry"], ["advance"], ["list"], ["budget", "show"]])

    def _budget(self) -> list[str]:
        place, job = str(self.user / ".config" / "cloudtrain" / "agent" / "ledger"), self._job()
        lines = [["set", "agent", "99999USD", "--month"], ["set", "agent", "99999USD"], ["remove", "agent"]]
        lines += [["set", "99999USD", "--ledger", place], ["set", "vision", "1USD", "--ledger", place]]
        lines += [["set", "99999USD", "--here"], ["set", "9999USD", "--overcommit", "10"]]
        lines += [["remove"], ["remove", "--here"]]
        lines += [["close", job, "0USD", "-y"], ["set", "agent", "9USD", "--ledger", place]]
        lines += [["approve", each.id] for each in agent_limit.requests()] or [["approve", "0000"]]
        return ["budget", *self.rnd.choice(lines)]

    def _job(self) -> str:
        jobs, is_here = self.platform.jobs.values(), self.rnd.random() < 0.8
        names = sorted({job.job_id for job in jobs if job.home == self.home or not is_here})
        return self.rnd.choice([*names, "last"])


def audit(world: AgentWorld) -> None:
    """Assert that what is billed, and what may still come, is within the limit, and that the owner's file is as set."""
    found = agent_limit.known()
    assert (found.limit_micro, found.period, found.key) == (world.limit, world.period, world.key)
    jobs = list(world.platform.jobs.values())
    assert not any(job.asked["unpriced"] for job in jobs)
    now_s, world.now_s = world.now_s, 1e12  # the bill at the end of each run
    bills = [(job, world.platform.bill_micro(job)) for job in jobs]
    world.now_s = now_s
    first, last = (time.gmtime(at_s)[:2] for at_s in (BEGIN_S, max([now_s, *(job.over_s for job in jobs)])))
    months = range(first[0] * 12 + first[1] - 1, last[0] * 12 + last[1])
    for month in months if world.period == "month" else ():
        span = month_span(f"{month // 12}-{month % 12 + 1:02}")
        assert sum(bill * _share(job, *span) for job, bill in bills) <= world.limit + len(bills), month
    if world.period == "all":
        assert sum(bill for _, bill in bills) <= world.limit
    book = shared_ledger.read(ConditionalObject(world.place))
    assert book is not None
    (standing,) = [shared_ledger.accounts(book).standing(each, now_s) for each in agent_limit.limits()]
    assert (standing.money.spent_micro or 0) + (standing.money.held_micro or 0) <= world.limit


def _share(job: Any, from_s: float, to_s: float) -> Fraction:
    if not job.runs:
        return Fraction(0)
    begin, end = job.runs[0][0], job.runs[-1][1]
    return Fraction(max(0.0, min(end, to_s) - max(begin, from_s))) / Fraction(max(end - begin, 1 / 64))


@contextmanager
def agents(seed: int) -> Iterator[AgentWorld]:
    """Yield a world whose user has an owner's limit."""
    random.seed(seed)
    with two_homes(seed, AgentWorld) as world, pytest.MonkeyPatch.context() as patch:
        assert isinstance(world, AgentWorld)
        entry = SimpleNamespace(pw_name="agent", pw_dir=str(world.user))
        patch.setattr(agent_limit, "pwd", SimpleNamespace(getpwuid=lambda uid: entry))
        patch.setattr(agent_limit, "OWNERS", world.user / "etc")
        patch.setattr(agent_limit, "is_terminal", lambda: world.rnd.random() < 0.5)  # a pseudo terminal
        patch.setattr(click, "prompt", lambda *args, **options: f"guess {world.rnd.random()}")
        world.begin()
        yield world


SOAK = [pytest.param(range(at, at + 10), marks=pytest.mark.soak) for at in range(3, 53, 10)]


@pytest.mark.parametrize("seeds", [(200, 201, 210), *SOAK], ids=str)
def test_agent_with_wrong_wishes_stays_within_the_limit(seeds: Sequence[int]) -> None:
    """Twenty command lines in each history: submits, resumes, budgets, removals, other homes, kills in the middle.

    Without the ledger of agents, each of the first three passes the limit.
    """
    sent, codes = 0, list[int]()
    for seed in seeds:
        with agents(seed) as world:
            try:
                for _ in range(20):
                    world.act()
                    audit(world)
            except AssertionError as error:
                raise AssertionError(f"history {seed}: {error}") from error
            sent, codes = sent + len(world.platform.jobs), codes + world.codes
    assert sent >= len(seeds), sent
    assert {0, 6} <= set(codes), codes
