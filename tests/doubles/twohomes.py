"""Two homes on one shared ledger, whose commands are processes that may die, fail, and run side by side.

Each command is a process of its own, which may die before any of its effects: a statement of SQLite, a call of the
ledger or of the platform. A dead process executes nothing more. A second process may act while the first talks to the
platform or to the ledger. The product takes the clock and the processes of `two_homes` for the real ones.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from cloudtrain.launcher.store.registry import Registry
from cloudtrain.launcher.text.terminal import reporting
from doubles.billing import Platform

BEGIN_S = 1_900_000_000.0  # 2030-03-17
DAY_S = 86_400.0
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would sync at each commit
JOB = {
    "name": "j",
    "task": "task.py",
    "training": {"max_steps": 810, "eval_every": 90, "monitor": {"metric": "loss", "mode": "min"}},
    "budget": {"limit": "1USD"},
    "project": "vision",
    "retry": {"max_attempts": 3, "on": ["preempted", "node_failure", "error"]},
}
SWEEP = {"space": {"training.optimizer.lr": {"log": [1e-4, 1e-1]}}, "trials": 9, "parallel": 4}


class Killed(BaseException):
    """The process is dead."""


class World:
    """Two homes, their ledgers, a platform, and the clock.

    `running`: process -> the effects until it dies. `limits`: home (None for the shared ledger), project, period ->
    the limit in micro-dollars, as its owner has set it. `kills`: the share of dying processes, their most effects.
    """

    kills = 0.2, 60

    def __init__(self, seed: int, top: Path) -> None:
        self.rnd, self.now_s, self.is_well = random.Random(seed), BEGIN_S, False
        self.homes, self.place, self.nowhere = [top / "a", top / "b"], located(str(top)), located(str(top / "a"))
        self.running, self.numbers = dict[int, float](), itertools.count(1)
        self.platform = Platform(self.rnd, lambda: self.now_s, self.event)
        self.submits, self.used = list[tuple[Path, JobConfig, str]](), set[Path]()
        self.file, self.checked, registry = site()
        for home in self.homes:
            home.mkdir()
            (home / "registry.sqlite").write_bytes(registry)
        self.least = [int(self.platform.worst_micro(1000 + self.platform.terms.tail_s, count)) for count in range(5)]
        self.registries = dict[tuple[Path, int], Registry]()
        self.limits = dict[tuple[Path | None, str, Any], int]()
        self.shares = self.rnd.choice([(), ("vision",), ("vision", ""), ("",)])
        self.named_by_b = self.rnd.random() < 0.5 and self.shares == ("vision",)  # by its configs, not by its commands

    # -- processes and their faults

    def command(self, home: Path, work: Callable[[Registry], object]) -> None:
        """Run a process that may be killed; errors for its user are part of the history."""
        number, place = next(self.numbers), (home, len(self.running))
        self.running[number] = self.rnd.randrange(self.kills[1]) if self._dies() else float("inf")
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt, Killed):
            patch.setenv("CLOUDTRAIN_HOME", str(home))
            try:
                with reporting(lambda line: None):
                    work(self.opened(*place))
            except CloudtrainError:
                if not self.is_well:  # a begin without a ledger would be a history of its own
                    raise
            except Killed:  # SQLite drops what a dead process has not committed
                self.registries.pop(place).close()
            finally:
                del self.running[number]

    def _dies(self) -> bool:
        return self.is_well and self.rnd.random() < self.kills[0]

    def opened(self, home: Path, depth: int = 0) -> Registry:
        """Return a registry that stays open, since opening it costs more than most commands."""
        if (home, depth) not in self.registries:
            self.registries[home, depth] = Registry(home)
        return self.registries[home, depth]

    def event(self, call: str) -> None:
        """Die if it is time to; at a call of the platform or of the ledger also fail, or let a second process act."""
        self.now_s += 1 / 64
        if not self.running:
            return
        number = max(self.running)
        self.running[number] -= 1
        if self.running[number] < 0:
            raise Killed
        if not self.is_well or call == "statement":
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
        home, acts = self.rnd.choice(self.homes), {self.submit: 5, self.raise_limit: 1}
        if home in self.used:
            acts |= {self.resume: 9, self.retry: 5, self.stop: 3, self.remove: 1}
            acts |= {reserve.reconcile: 4, queue.advance_queue: 2}  # type: ignore[dict-item]
        self.command(home, self.rnd.choices([*acts], [*acts.values()])[0])

    def submit(self, registry: Registry) -> None:
        """Submit a new job or sweep, or repeat a submit with its key."""
        home, config, key = registry.folder, self._config(registry.folder), f"key-{self.rnd.random()}"
        if (known := [each for each in self.submits if each[0] == home]) and self.rnd.random() < 0.2:
            home, config, key = self.rnd.choice(known)
        self.submits.append((home, config, key))
        bundle = backends.Bundle("0" * 64, self.file, 1, 1, 1)
        prepared = prepare(config, self.file, home, dry=False, shipped=bundle)
        require_allowed(registry, prepared, key=key, force=True)
        self.used.add(home)
        submit.send(registry, prepared, key=key)

    def _config(self, home: Path) -> JobConfig:
        """Return the config of a job or a sweep: a checked config with drawn numbers."""
        rnd, instances = self.rnd, self.rnd.choice([1, 1, 2, 4])
        config = self.checked[rnd.random() < 0.4]
        budget = {"limit": int(self.least[instances] * 30 ** rnd.uniform(-0.1, 1))}
        budget["on_limit"] = rnd.choice(["checkpoint-and-stop", "checkpoint-and-stop", "stop", "alert"])
        place = self.place if home == self.homes[1] and self.named_by_b else None
        project = {"ledger": self.nowhere if rnd.random() < 0.05 else place}
        changes = {
            "resources": {"instances": instances},
            "limits": {"max_duration": rnd.choice([600, 3600, 3600, 36_000, 180_000])},
            "retry": {"max_attempts": rnd.choice([1, 2, 3])},
            "queue": {"wait": rnd.random() < 0.3},
            "budget": budget if rnd.random() < 0.7 else None,
            "project": project if rnd.random() < 0.6 else None,
        }
        update = {key: value and getattr(config, key).model_copy(update=value) for key, value in changes.items()}
        return config.model_copy(update={**update, "tags": {"unpriced": "1"} if rnd.random() < 0.03 else {}})

    def resume(self, registry: Registry) -> None:
        """Resume a job, often with more money, or with another number of machines; a sweep also with more trials."""
        job, rnd = refresh(registry, self._any(registry, ("failed", "stopped"))), self.rnd
        more = int(self.least[1] * 20 ** rnd.uniform(-1, 1))
        amounts = "", f"+{more / 1e6:.6f}USD", f"+{more / 1e6:.6f}USD", f"{more * 5 / 1e6:.6f}USD"
        settings, text = list[str](), rnd.choice(amounts)
        if job.config.get("sweep") and rnd.random() < 0.5:
            settings.append(f"sweep.trials={retry.trials_after(registry, job, '+3')}")
        if rnd.random() < 0.2:
            settings.append(f"resources.instances={rnd.choice([1, 2])}")
        retry.require_ended(registry, job, is_changed=bool(settings or (job.config.get("sweep") and text)))
        settings += [retry.budget_setting(job, text)] if text else []
        prepared = retry.prepare_next(registry, job, settings)
        submit.require_room(registry, prepared, is_first=False)
        submit.resend(registry, job, prepared)

    def retry(self, registry: Registry) -> None:
        """Follow a job, which sends the retry that its config asks for."""
        job = refresh(registry, self._any(registry, (*ACTIVE, "failed")))
        if not job.active:
            retry.send_if_due(registry, job)

    def stop(self, registry: Registry) -> None:
        """Ask a job to stop."""
        stopping.ask(registry, self._any(registry, ACTIVE).id, now=self.rnd.random() < 0.5)

    def remove(self, registry: Registry) -> None:
        """Remove an ended job from the list."""
        job = self._any(registry, ("succeeded", "failed", "stopped"))
        remove.require_over([job])
        remove.remove(registry, job)

    def raise_limit(self, registry: Registry) -> None:
        """Raise a budget; its owner counts on the new limit from now on."""
        if near := [key for key in self.limits if key[0] in (None, registry.folder)]:
            key = self.rnd.choice(near)
            self.limits[key] = int(self.limits[key] * self.rnd.uniform(1, 2))
            self._set(registry, key)

    def begin(self) -> None:
        """Set the first limits, without any fault."""
        rnd, (a, b) = self.rnd, self.homes
        places = [(a, "vision"), (a, ""), (b, "vision"), (b, ""), *((None, project) for project in self.shares)]
        for (home, project), period in itertools.product(places, ("all", "month")):
            if rnd.random() < (0.6 if home is None else 0.12):
                key = home, project, period
                self.limits[key] = int(self.least[2] * 60 ** rnd.uniform(0.1, 1))
                self.command(home or a, functools.partial(self._set, key=key))
                if home is None and not self.named_by_b:
                    share = functools.partial(ledger.remember_ledger, project=project, uri=self.place)
                    self.command(b, lambda registry, share=share: share(registry.database))
        self.named_by_b &= any(home is None for home, _, _ in self.limits)
        self.is_well = True

    def _set(self, registry: Registry, key: tuple[Path | None, str, Any]) -> None:
        stored = LedgerBudget(*key[1:], self.limits[key])
        if key[0] is None:
            shared_ledger_sync.set_budget(registry.database, stored, self.place, may_make=True)
        else:
            ledger.set_budget(registry.database, stored)

    def _any(self, registry: Registry, states: tuple[str, ...]) -> Job:
        """Return a job, rather one in these states."""
        jobs = registry.jobs()
        fitting = [job for job in jobs if job.attempt.state.state in states and job.attempt.phase != "never_sent"]
        return self.rnd.choice((fitting if self.rnd.random() < 0.9 else jobs) or jobs or [registry.find("last")])


@functools.cache
def site() -> tuple[Path, tuple[JobConfig, JobConfig], bytes]:
    """Return the file of the configs, the configs of a job and of a sweep, and the file of an empty registry."""
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    atexit.register(shutil.rmtree, folder)
    (folder / "task.py").write_text(
        "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
    )
    (file := folder / "cloudtrain.yaml").touch()
    Registry(folder).close()
    checked = configs.load(file, data=JOB), configs.load(file, data=JOB | {"sweep": SWEEP})
    return file, checked, (folder / "registry.sqlite").read_bytes()


@contextmanager
def two_homes(seed: int, make: Callable[[int, Path], World] = World) -> Iterator[World]:
    """Yield a world in memory, whose clock and processes the product takes for the real ones."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as top, pytest.MonkeyPatch.context() as patch:
        world, thread = make(seed, Path(top)), threading.get_ident()

        def watch(owner: Any, name: str, call: str) -> None:
            real = getattr(owner, name)

            def wrapped(*args: Any) -> Any:
                if threading.get_ident() != thread:  # of an earlier test, whose threads still end
                    return real(*args)
                world.event(call)
                answer = real(*args)
                if call == "write" and world.running and world.is_well and world.rnd.random() < 0.1:
                    raise UnreachableError("the answer to a write is lost")
                return answer

            patch.setattr(owner, name, wrapped)

        def sleep(seconds: float) -> None:
            world.now_s += seconds

        watch(Database, "execute", "statement")
        watch(ConditionalObject, "read", "read")
        watch(ConditionalObject, "write", "write")
        for clock in ("time", "monotonic"):
            patch.setattr(time, clock, lambda: world.now_s)
        patch.setattr(time, "sleep", sleep)
        patch.setattr(backends, "load", lambda name: world.platform)
        patch.setattr(processes, "stamp", lambda pid: str(max(world.running, default=0)))
        patch.setattr(processes, "alive", lambda pid, stamp: stamp in map(str, world.running))
        patch.setattr(shared_ledger_sync, "_not_before_s", {})
        try:
            yield world
        finally:
            for registry in world.registries.values():
                registry.close()
