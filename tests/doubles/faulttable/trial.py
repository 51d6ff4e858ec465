"""One fault of one job: the observed times in seconds, and the deviations from the required outcome."""

import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import Any

from doubles.faulttable.table import MORE_STEPS, Ending, Fault
from doubles.faulttable.training import Look, Process, Training, ours, training, until
from doubles.sshhosts.cluster import Cluster

RIGHT_S, EMPTY_S, AGAIN_S = 15.0, 30.0, 30.0  # the targets; the last without the import
CAP_S = 60.0  # for each, before the trial gives up
FAILED = {
    Ending.FAILS: ("failed", "node_failure"),
    Ending.BREAKS: ("failed", "error"),
    Ending.STOPS: ("stopped", "preempted"),
}


@dataclass
class Seen:
    """Times in seconds after the fault; None if not applicable or never reached. `wrong` lists the deviations."""

    fault: str
    seed: int
    right_s: float | None = None
    empty_s: float | None = None
    again_s: float | None = None  # without the import; counted from the end of a fault that leaves the job unhurt
    import_s: float | None = None
    status_s: float | None = None  # duration of a new `status` during the fault
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # correct, but later than the target
    notes: list[str] = field(default_factory=list)


def run(fault: Fault, cluster: Cluster, seed: int) -> Seen:
    """Train on the cluster's hosts, all new; inject the fault at a moment chosen by the seed, and observe the job."""
    chance = random.Random(f"{fault.name} {seed}")
    seen = Seen(fault.name, seed)
    node = fault.node if fault.node is not None else seed % fault.hosts
    try:
        with training(cluster, fault.config()) as job:
            _befall(fault, job, node, chance, seen)
    except Exception as error:  # any kind of error: the other trials must still run
        seen.wrong.append(f"{type(error).__name__}: {error}")
    return seen


def _befall(fault: Fault, job: Training, node: int, chance: random.Random, seen: Seen) -> None:
    first = fault.from_step + chance.randrange(25)
    until(lambda: job.steps()[-1].number >= first, 120, f"step {first}", every_s=0.05)
    time.sleep(chance.uniform(0, 0.2))
    until(lambda: _is_running(job.looks), 30, "a look that says running")
    before = {host.name: ours(host) for host in job.hosts}
    left_out = node if fault.ending is Ending.FEWER or fault.spares else None
    kept = {  # the processes that outlive the fault
        host.name: {job.keeper(number), *([] if number == left_out else [job.agent(number)])}
        for number, host in enumerate(job.hosts)
    }
    struck_s = time.time()
    struck_s = fault.strike(job, node) or struck_s
    if fault.ending is Ending.UNHURT:
        _watch_unhurt(fault, job, struck_s, seen)
    elif fault.ending in FAILED:
        _watch_end(fault, job, struck_s, seen)
    else:
        _watch_restart(fault, job, struck_s, before, kept, seen)
    _watch_over(fault, job, node, struck_s, seen)


def _watch_unhurt(fault: Fault, job: Training, struck_s: float, seen: Seen) -> None:
    """Wait for further steps, in the same start."""
    if not fault.ends_by_itself:
        joined_s = time.time()
        until(lambda: job.steps()[-1].time_s > joined_s, CAP_S, "a step after the fault")
        step = next(step for step in job.steps() if step.time_s > joined_s)
        seen.again_s = step.time_s - joined_s
        count = len(job.steps())
        until(lambda: len(job.steps()) > count + MORE_STEPS, 3 * CAP_S, "more steps")


def _watch_end(fault: Fault, job: Training, struck_s: float, seen: Seen) -> None:
    """Wait until the job ends as required and no process is left on any host."""
    end = struck_s + CAP_S
    while time.time() < end and (seen.right_s is None or seen.empty_s is None):
        if seen.empty_s is None and not any(ours(host) for host in job.hosts):
            seen.empty_s = time.time() - struck_s
        seen.right_s = _right_s(fault, job.looks, struck_s)
        time.sleep(0.1)


def _watch_restart(
    fault: Fault,
    job: Training,
    struck_s: float,
    before: dict[str, list[Process]],
    kept: dict[str, set[int]],
    seen: Seen,
) -> None:
    """Wait until a new start trains, with all nodes or without the lost node, and the old processes are gone."""
    ranks = fault.hosts - (fault.ending is Ending.FEWER)
    old = {
        name: {(process.pid, process.started) for process in found if process.pid not in kept[name]}
        for name, found in before.items()
    }
    last = [step for step in job.steps() if step.time_s < struck_s][-1]
    end = struck_s + 2 * CAP_S
    while time.time() < end and (seen.right_s is None or seen.empty_s is None or seen.again_s is None):
        if seen.empty_s is None:
            left = [p for host in job.hosts for p in ours(host) if (p.pid, p.started) in old[host.name]]
            seen.empty_s = None if left else time.time() - struck_s
        seen.right_s = _right_s(fault, job.looks, struck_s)
        again = [step for step in job.steps() if step.restart > 0 and step.time_s > struck_s]
        if seen.again_s is None and again:
            _note_again(job, struck_s, last.number, ranks, again[0], seen)
        time.sleep(0.1)


def _note_again(job: Training, struck_s: float, last: int, ranks: int, step: Any, seen: Seen) -> None:
    seen.import_s = job.imported_s(step.restart)
    seen.again_s = step.time_s - struck_s - seen.import_s
    seen.notes.append(f"from step {last} back to {step.number}")
    if step.number == 1:
        seen.wrong.append("it began anew, without the checkpoint")
    if step.ranks != ranks:
        seen.wrong.append(f"{step.ranks} ranks train, not {ranks}")


def _watch_over(fault: Fault, job: Training, node: int, struck_s: float, seen: Seen) -> None:
    """Check the job's end, the state in a new `status`, and the processes left after the fault."""
    expected: tuple[str, str | None] = FAILED.get(fault.ending, ("succeeded", None))
    if fault.ending not in FAILED:
        job.end()
        with contextlib.suppress(TimeoutError):
            until(lambda: job.looks[-1].state and job.looks[-1].state["state"] not in ("running", "pending"), CAP_S, "")
    asked_s = time.time()
    status = job.status()
    seen.status_s = time.time() - asked_s
    _compare(fault, status, expected, "status", seen)
    if fault.after is not None:
        seen.wrong += fault.after(job, node)
        _compare(fault, job.status(), expected, "status when the fault was over", seen)
    with contextlib.suppress(TimeoutError):
        until(lambda: not any(ours(host) for host in job.hosts), 15, "")
    for host in job.hosts:
        seen.wrong += [f"left on {host.name}: {process.pid} {process.line[:120]}" for process in ours(host)]
    if status.get("error"):
        seen.notes.append(f"error: {status['error'].get('message', '')[:160]}")
    seen.notes += [f"started again after: {cause[:160]}" for cause in job.causes()]
    _judge(fault, job.looks, struck_s, expected, seen)


def _compare(fault: Fault, status: dict[str, Any], expected: tuple[str, str | None], what: str, seen: Seen) -> None:
    restarts = int(fault.ending in (Ending.RESTARTS, Ending.FEWER))
    told = (status.get("state"), status.get("reason"))
    if told != expected or status.get("restarts") != restarts:
        why = status.get("error") or status.get("failed", "")
        seen.wrong.append(f"{what}: {told}, {status.get('restarts')} restarts; {why}")
    elif fault.ending in FAILED and not status["resumable"]:
        seen.wrong.append(f"{what}: not resumable")


def _judge(fault: Fault, looks: list[Look], struck_s: float, expected: tuple[str, str | None], seen: Seen) -> None:
    for look in looks:
        if look.state and look.state["state"] in ("succeeded", "failed", "stopped"):
            told = (look.state["state"], look.state["reason"])
            if told != expected:
                seen.wrong.append(f"told {told} at {look.time_s - struck_s:.1f} s")
                break
    if fault.ending is Ending.UNHURT:
        return
    _hold(seen, "the state was right", seen.right_s, RIGHT_S)
    _hold(seen, "no process was left", seen.empty_s, EMPTY_S)
    if fault.ending not in FAILED:
        _hold(seen, "training again", seen.again_s, AGAIN_S)


def _hold(seen: Seen, what: str, seconds: float | None, target_s: float) -> None:
    if seconds is None:
        seen.wrong.append(f"{what}: never")
    elif seconds > target_s:
        seen.late.append(f"{what} after {seconds:.1f} s")


def _is_running(looks: list[Look]) -> bool:
    return bool(looks) and looks[-1].state is not None and looks[-1].state["state"] == "running"


def _right_s(fault: Fault, looks: list[Look], struck_s: float) -> float | None:
    """Return the seconds until a follower first had the required state; `_judge` checks the final state."""
    for look in looks:
        if look.asked_s >= struck_s and look.state is not None and _is_right(fault, look.state):
            return look.time_s - struck_s
    return None


def _is_right(fault: Fault, state: dict[str, Any]) -> bool:
    if fault.ending in FAILED:
        return (state["state"], state["reason"]) == FAILED[fault.ending] and bool(state["resumable"])
    is_told = fault.ending is not Ending.FEWER or "going on with" in (state["detail"] or "")
    return state["state"] == "running" and state["restarts"] == 1 and is_told
