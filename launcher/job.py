"""A job and its attempts, as the registry stores them, and as people and scripts see them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .errors import CapacityError, UsageError
from .plan import Plan

JobState = Literal["pending", "running", "stopping", "succeeded", "failed", "stopped"]
ACTIVE: tuple[JobState, ...] = ("pending", "running", "stopping")

PROJECT_PATTERN = "(?!agent$)[a-z0-9][a-z0-9_-]{0,62}"  # also valid as a label value in the clouds

CLOCKS = "the nodes' clocks"  # as State.billed_by: they measure for how long each node was occupied

# Without 0/o, 1/l/i and vowels: no characters to confuse, no words.
_ALPHABET = "23456789bcdfghjkmnpqrstvwxz"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True)
class State:
    """The state of an attempt, as its backend reports; times in unix seconds. `error`: the first failing rank's report.

    `reason`: user budget time_limit paused preempted no_machines superseded node_failure error, or None; no_machines:
    the platform refused or never gave machines, and no rank has run; superseded: the machines came after a newer
    attempt was sent. `detail`: more in words. `billed_s`: the billed seconds of each instance, if the platform does not
    count from start to end; `idle_s`: the seconds that may be billed afterwards, until the platform releases the
    machines. `hourly_usd`: the price of all instances, if only the platform knows the machines; `url`: the platform's
    page about the attempt. `told_s`: the time, by our clock, of the report on how long a running attempt was billed.
    `gone_s`: the nodes that the attempt dropped, by number, with the seconds for which each was occupied; `billed_s` is
    then the mean of all nodes. `joined_s`: the spare nodes that took the place of dropped nodes, by number, each with
    its begin in seconds after the start. `billed_by`: the platform's name for its own count of the seconds, once
    reported. `queue`: while the job waits in line, `place`, `of`, `reason`, and the expected `start_s`.
    """

    state: JobState
    reason: str | None = None
    resumable: bool = False
    error: dict[str, Any] | None = None
    started_s: float | None = None
    ended_s: float | None = None
    restarts: int = 0
    detail: str | None = None
    billed_s: float | None = None
    idle_s: float | None = None
    hourly_usd: float | None = None
    url: str | None = None
    told_s: float | None = None
    gone_s: dict[str, float] | None = None
    joined_s: dict[str, float] | None = None
    billed_by: str | None = None
    queue: dict[str, Any] | None = None

    @property
    def waits_again(self) -> bool:
        """Whether the attempt has ended a run at `ended_s`, and waits for the platform to run the attempt again."""
        return self.state == "pending" and self.ended_s is not None

    @property
    def spare_attempts(self) -> int:
        """How many attempts of `retry.max_attempts` spares began in this one; spares that join at once begin one."""
        return len(set((self.joined_s or {}).values()))

    @property
    def is_fault(self) -> bool:
        """Whether the attempt ended by a fault, which `retry` may repair; a preemption may leave the time to save."""
        if self.state == "stopped":
            return self.reason == "preempted"
        return self.state == "failed" and self.reason != "no_machines"

    @property
    def all_damaged(self) -> bool:
        """Whether the attempt refused to start from step 0 because all checkpoints are damaged."""
        return (self.error or {}).get("type") == "AllDamagedError"  # entrypoints/checkpoints/folder.py raises it


@dataclass(frozen=True)
class Attempt:
    """One submission of a job. `ref` is the backend's handle.

    `phase`: intent (journalled), queued (waits in line to be sent), sent, never_sent, or damaged: the row in the
    registry cannot be read.
    """

    job_id: str
    number: int
    phase: str
    plan: Plan
    request: dict[str, Any]
    created_s: float
    submitter: dict[str, Any]
    ref: dict[str, Any] | None = None
    state: State = field(default_factory=lambda: State("pending"))
    progress: dict[str, Any] = field(default_factory=dict)
    unreachable_since_s: float | None = None

    @property
    def name(self) -> str:
        """The platform's name for this attempt."""
        return platform_name(self.job_id, self.number)

    @property
    def platform_number(self) -> int | None:
        """The platform's number of this attempt, None if the platform has only names."""
        number = (self.ref or {}).get("number")
        return number if isinstance(number, int) else None

    @property
    def settings(self) -> tuple[str, ...]:
        """The `a.b=value` of the submit and of each resume so far."""
        kept = self.submitter.get("settings")
        return tuple(each for each in kept if isinstance(each, str)) if isinstance(kept, list) else ()

    @property
    def word(self) -> str:
        """The state as shown to people."""
        if self.state.queue is not None and self.state.state == "pending":
            return "queued"
        return {"never_sent": "not sent", "damaged": "damaged"}.get(self.phase, self.state.state)

    @property
    def hourly_usd(self) -> float | None:
        """The price of all instances for an hour: as planned, else as the platform reports; None if unknown."""
        return self.state.hourly_usd if self.plan.hourly_usd is None or self.is_chosen else self.plan.hourly_usd

    @property
    def is_chosen(self) -> bool:
        """Whether the platform has chosen, and reports the price of, a machine of the plan's list."""
        return self.plan.lists_machines and self.state.hourly_usd is not None

    @property
    def idle_usd(self) -> float | None:
        """The highest cost of the machines after the end, until the platform releases them; None if unknown."""
        if not self.state.idle_s or self.hourly_usd is None or self.state.started_s is None:
            return None
        return self.hourly_usd * self.state.idle_s / 3600


@dataclass(frozen=True)
class StoredConfig:
    """The values of a stored config that the launcher reads, as text where the config has text; None if not set."""

    budget: str | None
    on_limit: str | None
    alert_at: Sequence[Any]
    max_duration: str | None
    max_wait: str | None
    retry_on: Sequence[str]
    max_attempts: int
    task: str | None
    is_script: bool
    timeout_s: int
    hang_timeout: Any
    tags: dict[str, str]
    monitor: dict[str, Any]
    project: str | None
    notify: Sequence[dict[str, Any]]
    resources: dict[str, Any]
    image: str | None
    waits: bool
    priority: str
    capacity: dict[str, Any]

    @classmethod
    def load(cls, config: Mapping[str, Any]) -> StoredConfig:
        """Return the values; a damaged row may lack keys or hold other types."""
        names = ("budget", "limits", "retry", "distributed", "training", "resources", "queue", "capacity")
        parts = {name: found for name, found in config.items() if isinstance(found, dict)}
        budget, limits, retry, distributed, training, resources, queue, capacity = [
            parts.get(name, {}) for name in names
        ]
        return cls(
            budget=budget.get("limit"),
            on_limit=budget.get("on_limit"),
            alert_at=found if isinstance(found := budget.get("alert_at"), list) else (),
            max_duration=limits.get("max_duration"),
            max_wait=limits.get("max_wait"),
            retry_on=found if isinstance(found := retry.get("on"), list) else (),
            max_attempts=retry.get("max_attempts", 1),
            task=config.get("task"),
            is_script=bool(config.get("script") or config.get("module")),
            timeout_s=distributed.get("timeout_s") or 600,
            hang_timeout=distributed.get("hang_timeout"),
            tags=config.get("tags") or {},
            monitor=training.get("monitor") or {},
            project=project.get("name") if isinstance(project := config.get("project"), dict) else project,
            notify=config.get("notify") or (),
            resources=resources,
            image=config.get("image"),
            waits=queue.get("wait") is True,
            priority=str(queue.get("priority") or "normal"),
            capacity=capacity,
        )


@dataclass(frozen=True)
class Job:
    """A submitted job: the config as loaded, the bundle, and the folder's git state at the submit.

    `config` is the whole stored config, for a resume; `asked` has the values that the launcher reads. `seq` counts the
    submits of the home folder; 0 before the job is journalled.
    """

    id: str
    name: str
    backend: str
    created_s: float
    config: dict[str, Any]
    config_file: str
    bundle: dict[str, Any]
    attempt: Attempt
    idempotency_key: str | None = None
    seq: int = 0

    @cached_property
    def asked(self) -> StoredConfig:
        """The values of the config that the launcher reads."""
        return StoredConfig.load(self.config)

    @property
    def saves(self) -> bool:
        """Whether cloudtrain saves the job at a stop; if not, its script gets a signal and may save by itself."""
        return self.attempt.plan.saves

    @property
    def active(self) -> bool:
        """Whether the job may still be running."""
        return self.attempt.state.state in ACTIVE

    def backend_of(self, attempt: Attempt) -> str:
        """Return the backend of the attempt's request and handle; a search for machines may move to another."""
        return str(attempt.submitter.get("backend") or self.backend)


def faults(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts of `retry.max_attempts` are used up: ends by a fault, and repairs by spares."""
    sent = [each.state for each in attempts if each.phase != "never_sent"]
    return sum(state.is_fault + state.spare_attempts for state in sent)


def last_number(job: Job, attempts: Sequence[Attempt]) -> int:
    """Return the highest number of an attempt that the config's `retry` may send: only faults count."""
    return job.attempt.number + max(0, job.asked.max_attempts - faults(attempts))


def new_id(name: str) -> str:
    """Return a job id for a config's name: unlikely to be taken, short enough to type."""
    import secrets  # the import takes 3 ms, which only a submit needs

    return f"{name}-{''.join(secrets.choice(_ALPHABET) for _ in range(5))}"


def name_of(folder: Path) -> str:
    """Return the folder's name as a job's name."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:41].strip("-")
    return name if name not in ("", "last") else "starter"


def require_name(name: str) -> None:
    """Raise UsageError for an invalid name of a job."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"`{name}` cannot name a job", hint="use a-z, 0-9 and -, 41 characters at most")
    if name == "last":
        raise UsageError("`last` cannot name a job: it stands for the newest job", hint="choose another name")


def platform_name(job_id: str, attempt: int) -> str:
    """Return the platform's name for the attempt: fixed, so that `find` can search for the job after a lost answer."""
    return f"{job_id}-{attempt}"


def no_machines(message: str, **facts: Any) -> State:
    """Return the end of an attempt that got no machines; `facts` are further fields of State."""
    return State("failed", "no_machines", error={"rank": None, "kind": "capacity", "message": message}, **facts)


def exit_code(state: State) -> int:
    """Return the exit code of a command that followed the job to this state, as in docs/cli.md."""
    if state.state == "succeeded":
        return 0
    if state.state == "stopped":
        return {"user": 9, "budget": 6, "paused": 0}.get(state.reason or "", 1)
    return CapacityError.exit_code if state.reason == "no_machines" else 1
