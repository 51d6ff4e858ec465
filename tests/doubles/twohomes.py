"""Two homes on one shared ledger, whose commands are processes that may die, fail, and run side by side.

Each command is a process of its own, which may die before any of its effects: a statement of SQLite, a call of the
ledger or of the platform. A dead process executes nothing more. A second process may act while the first talks to the
platform or to the ledger. The product takes the clock and the processes of `two_homes` for the real ones.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.advice.preparing import prepare
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError, CredentialError, UnreachableError
from cloudtrain.launcher.job import ACTIVE, Job
from cloudtrain.launcher.jobs import queue, remove, reserve, retry, stopping, submit
from cloudtrain.launcher.jobs.approval import require_allowed
from cloudtrain.launcher.jobs.refresh import refresh
from cloudtrain.launcher.money import shared_ledger_sync
from cloudtrain.launcher.money.conditional import ConditionalObject, located
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.budgets import LedgerBudget
from cloudtrain.launcher.store.database import Database
from cloudtrain.launcher.store.home import identity
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.terminal import reporting
from doubles.billing import Platform

BEGIN_S = 1_900_000_000.0  # 2030-03-17
DAY_S = 86_400.0
LEFT = ("failed", "stopped")
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would sync at each commit
TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
SWEEP = {"space": {"training.optimizer.lr": {"log": [1e-4, 1e-1]}}, "trials": 9, "parallel": 4}
TRAINING = {"max_steps": 810, "eval_every": 90, "monitor": {"metric": "loss", "mode": "min"}}


class Killed(BaseException):
    """The process is dead."""


@dataclass
class Process:
    """A command. `fuse`: the effects until the process dies; None if it lives."""

    number: int
    fuse: int | None


@dataclass
class Budget:
    """A limit as its owner has set it. `place`: a home's number, or None for the shared ledger."""

    place: int | None
    project: str
    period: Any
    limit_micro: int


class World:
    """Two homes, their ledgers and budgets, a platform, and the clock."""

    def __init__(self, seed: int, top: Path) -> None:
        self.rnd, self.now_s = random.Random(seed), BEGIN_S
        self.homes, self.running, self.numbers = [top / "a", top / "b"], list[Process](), itertools.count(1)
        self.file, self.place = top / "code" / "cloudtrain.yaml", located(str(top / "disk"))
        self.platform = Platform(self.rnd, lambda: self.now_s, self.event)
        self.is_well, self.submits = True, list[tuple[int, JobConfig, str]]()
        archive = top / "code.tar.gz"
        self.bundle = backends.Bundle("0" * 64, archive, 1, 1, 1)
        for folder in (*self.homes, self.file.parent, top / "disk"):
            folder.mkdir()
        for home in self.homes:
            (home / "registry.sqlite").write_bytes(empty_registry())
        archive.touch()
        (self.file.parent / "task.py").write_text(TASK)
        self.checked = checked_configs()
        self.least = [self.platform.worst_micro(1000 + self.platform.terms.tail_s, count) for count in range(5)]
        self.used, self.registries = set[int](), dict[tuple[int, int], Registry]()
        self.own = [identity(home)[:12] for home in self.homes]
        self.budgets, self.shares = list[Budget](), self.rnd.choice([(), ("vision",), ("vision", ""), ("",)])
        self.named_by_b = self.rnd.random() < 0.5 and self.shares == ("vision",)  # by its configs, not by its commands

    # -- processes and their faults

    def command(self, home: int, work: Callable[[Registry], object]) -> None:
        """Run a process that may be killed; errors for its user are part of the history."""
        fuse = self.rnd.randrange(60) if self.is_well and self.rnd.random() < 0.2 else None
        self.running.append(Process(next(self.numbers), fuse))
        place = home, len(self.running)
        with pytest.MonkeyPatch.context() as patch, suppress(CloudtrainError, KeyboardInterrupt, Killed):
            patch.setenv("CLOUDTRAIN_HOME", str(self.homes[home]))
            registry = self.opened(*place)
            try:
                with reporting(lambda line: None):
                    work(registry)
            except Killed:  # SQLite drops what a dead process has not committed
                self.registries.pop(place).close()
                raise
            finally:
                self.running.pop()

    def opened(self, home: int, depth: int = 0) -> Registry:
        """Return a registry that stays open, since opening it costs more than most commands."""
        if (home, depth) not in self.registries:
            self.registries[home, depth] = Registry(self.homes[home])
        return self.registries[home, depth]

    def step(self) -> None:
        """Die if it is time to: before each effect."""
        self.now_s += 1 / 64
        if self.running and (process := self.running[-1]).fuse is not None:
            if process.fuse <= 0:
                raise Killed
            process.fuse -= 1

    def event(self, call: str) -> None:
        """Die, fail, be interrupted, or let a second process act, at a call of the platform or of the ledger."""
        self.step()
        if not self.running or not self.is_well:
            return
        if len(self.running) == 1 and self.rnd.random() < 0.1:
            self.act()
        chance = self.rnd.random()
        if chance < 0.04:
            raise UnreachableError(f"no answer to {call}")
        if chance < 0.05 and call != "created":  # an answer about credentials says that nothing was made
            raise CredentialError(f"{call} needs a login")
        if chance < 0.06 and call in ("upload", "create", "created"):
            raise KeyboardInterrupt

    # -- commands

    def act(self) -> None:
        """Let time pass, and run a random command in a random home."""
        self.now_s += self.rnd.choice([1, 60, 600, DAY_S / 3, 3 * DAY_S]) * self.rnd.random()
        home, acts = self.rnd.randrange(2), {self.submit: 5, self.raise_limit: 1}
        if home in self.used:
            acts |= {self.look: 4, self.resume: 9, self.retry: 5, self.stop: 3, self.advance: 2, self.remove: 1}
        act = self.rnd.choices([*acts], [*acts.values()])[0]
        self.command(home, functools.partial(act, home))

    def submit(self, home: int, registry: Registry) -> None:
        """Submit a new job or sweep, or repeat a submit with its key."""
        if self.submits and self.rnd.random() < 0.2:
            home_then, config, key = self.rnd.choice(self.submits)
            if home_then != home:
                return
        else:
            config, key = self._config(home), f"key-{self.rnd.random()}"
            self.submits.append((home, config, key))
        prepared = prepare(config, self.file, registry.folder, dry=False, shipped=self.bundle)
        require_allowed(registry, prepared, key=key, force=True)
        self.used.add(home)
        submit.send(registry, prepared, key=key)

    def _config(self, home: int) -> JobConfig:
        """Return the config of a job or a sweep: a checked config with drawn numbers."""
        rnd, instances = self.rnd, self.rnd.choice([1, 1, 2, 4])
        found = self.checked[rnd.random() < 0.4]
        limit = int(self.least[instances] * 30 ** rnd.uniform(-0.1, 1))
        on_limit = rnd.choice(["checkpoint-and-stop", "checkpoint-and-stop", "stop", "alert"])
        budget = found.budget.model_copy(update={"limit": limit, "on_limit": on_limit})
        seconds, attempts = rnd.choice([600, 3600, 3600, 36_000, 180_000]), rnd.choice([1, 2, 3])
        project = found.project.model_copy(update={"ledger": self.place if home == 1 and self.named_by_b else None})
        changes = {
            "resources": found.resources.model_copy(update={"instances": instances}),
            "limits": found.limits.model_copy(update={"max_duration": seconds}),
            "retry": found.retry.model_copy(update={"max_attempts": attempts}),
            "queue": found.queue.model_copy(update={"wait": rnd.random() < 0.3}),
            "budget": budget if rnd.random() < 0.7 else None,
            "project": project if rnd.random() < 0.6 else None,
            "tags": {"unpriced": "1"} if rnd.random() < 0.03 else {},
        }
        return found.model_copy(update=changes)

    def look(self, home: int, registry: Registry) -> None:
        """Ask the platform about all active jobs, as `budget show` does."""
        reserve.reconcile(registry)

    def resume(self, home: int, registry: Registry) -> None:
        """Resume a job, often with more money, or with another number of machines; a sweep also with more trials."""
        job = refresh(registry, self._any(registry, LEFT))
        more = int(self.least[1] * 20 ** self.rnd.uniform(-1, 1))
        settings, text = [], self.rnd.choice(["", f"+{usd(more)}", f"+{usd(more)}", usd(more * 5)])
        if job.config.get("sweep") and self.rnd.random() < 0.5:
            settings.append(f"sweep.trials={retry.trials_after(registry, job, '+3')}")
        settings += [f"resources.instances={self.rnd.choice([1, 2])}"] if self.rnd.random() < 0.2 else []
        retry.require_ended(registry, job, is_changed=bool(settings or (job.config.get("sweep") and text)))
        settings += [retry.budget_setting(job, text)] if text else []
        prepared = retry.prepare_next(registry, job, settings)
        submit.require_room(registry, prepared, is_first=False)
        submit.resend(registry, job, prepared)

    def retry(self, home: int, registry: Registry) -> None:
        """Follow a job, which sends the retry that its config asks for."""
        job = refresh(registry, self._any(registry, (*ACTIVE, "failed")))
        if not job.active:
            retry.send_if_due(registry, job)

    def stop(self, home: int, registry: Registry) -> None:
        """Ask a job to stop."""
        stopping.ask(registry, self._any(registry, ACTIVE).id, now=self.rnd.random() < 0.5)

    def advance(self, home: int, registry: Registry) -> None:
        """Send the jobs in line."""
        queue.advance_queue(registry)

    def remove(self, home: int, registry: Registry) -> None:
        """Remove an ended job from the list."""
        job = self._any(registry, ("succeeded", *LEFT))
        remove.require_over([job])
        remove.remove(registry, job)

    def raise_limit(self, home: int, registry: Registry) -> None:
        """Raise a budget; its owner counts on the new limit from now on."""
        budget = self.rnd.choice([each for each in self.budgets if each.place in (None, home)] or [None])
        if budget is not None:
            budget.limit_micro = int(budget.limit_micro * self.rnd.uniform(1, 2))
            self.set_limit(registry, budget)

    def set_limit(self, registry: Registry, budget: Budget) -> None:
        """Store a limit, in the home or in the shared ledger."""
        stored = LedgerBudget(budget.project, budget.period, budget.limit_micro)
        if budget.place is None:
            shared_ledger_sync.set_budget(registry.database, stored, self.place, may_make=True)
        else:
            ledger.set_budget(registry.database, stored)

    def begin(self) -> None:
        """Set the first limits, without any fault."""
        self.is_well = False
        rnd = self.rnd
        for place, project in [(0, "vision"), (0, ""), (1, "vision"), (1, ""), *((None, each) for each in self.shares)]:
            for each in ("all", "month"):
                if rnd.random() < (0.12 if place is not None else 0.6):
                    limit = int(self.least[2] * 60 ** rnd.uniform(0.1, 1))
                    self.budgets.append(Budget(place, project, each, limit))
        self.named_by_b &= any(each.place is None for each in self.budgets)
        for budget, home in itertools.product(self.budgets, range(2)):
            if budget.place == home or (budget.place is None and home == 0):
                self.command(home, functools.partial(self.set_limit, budget=budget))
            elif budget.place is None and not self.named_by_b:
                share = functools.partial(ledger.remember_ledger, project=budget.project, uri=self.place)
                self.command(home, lambda registry, share=share: share(registry.database))
        self.is_well = True

    def _any(self, registry: Registry, states: tuple[str, ...]) -> Job:
        """Return a job, rather one in these states."""
        jobs = registry.jobs()
        fitting = [job for job in jobs if job.attempt.state.state in states and job.attempt.phase != "never_sent"]
        return self.rnd.choice((fitting if self.rnd.random() < 0.9 else jobs) or jobs or [registry.find("last")])


def usd(micro: int) -> str:
    """Return an amount as a user writes it."""
    return f"{micro // 1_000_000}.{micro % 1_000_000:06d}USD"


@functools.cache
def checked_configs() -> tuple[Any, Any]:
    """Return the config of a job, and of a sweep."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(TASK)
        job = {"name": "j", "task": "task.py", "training": TRAINING, "budget": {"limit": "1USD"}, "project": "vision"}
        job["retry"] = {"max_attempts": 3, "on": ["preempted", "node_failure", "error"]}
        both = (job, job | {"sweep": SWEEP})
        return tuple(configs.from_data(each, Path(folder, "cloudtrain.yaml")) for each in both)  # type: ignore[return-value]


@functools.cache
def empty_registry() -> bytes:
    """Return the file of a registry without jobs."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        Registry(Path(folder)).close()
        return Path(folder, "registry.sqlite").read_bytes()


@contextmanager
def two_homes(seed: int) -> Iterator[World]:
    """Yield a world in memory, whose clock and processes the product takes for the real ones."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as top, pytest.MonkeyPatch.context() as patch:
        found = World(seed, Path(top))

        def stepping(owner: Any, name: str, call: str = "") -> None:
            real = getattr(owner, name)

            def wrapped(*args: Any) -> Any:
                found.event(call) if call else found.step()
                answer = real(*args)
                if call == "write" and found.running and found.is_well and found.rnd.random() < 0.1:
                    raise UnreachableError("the answer to a write is lost")
                return answer

            patch.setattr(owner, name, wrapped)

        def sleep(seconds: float) -> None:
            found.now_s += seconds

        def clock() -> float:
            return found.now_s

        stepping(Database, "execute")
        stepping(ConditionalObject, "read", "read")
        stepping(ConditionalObject, "write", "write")
        patch.setattr(time, "time", clock)
        patch.setattr(time, "monotonic", clock)
        patch.setattr(time, "sleep", sleep)
        patch.setattr(backends, "load", lambda name: found.platform)
        patch.setattr(processes, "stamp", lambda pid: str(found.running[-1].number) if found.running else None)
        patch.setattr(processes, "alive", lambda pid, stamp: stamp in {str(each.number) for each in found.running})
        patch.setattr(shared_ledger_sync, "_not_before_s", {})
        try:
            yield found
        finally:
            for registry in found.registries.values():
                registry.close()
