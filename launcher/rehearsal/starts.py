"""A single start of a rehearsed job: each node's rendered command in a sandbox, watched, interrupted and ended.

The output of the ranks is read from their log files as they grow (`Account`).
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from cloudtrain.entrypoints import atomic_json, events, processes
from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.entrypoints.contract import EXIT, STATE, AgentState, ExitReport

from ..errors import ConfigError
from ..text.visible import shown
from . import sandbox
from .stage import NodeRun, Rehearsal

LOOK_S = 0.02
ANSWER_S = 30.0
END_S = 30.0  # after SIGKILL, or beyond the platform's grace, for an agent's last steps
STACKS_S = 1.0  # for printing the stacks, on a busy machine
TAIL_LINES = 12
Until: TypeAlias = "Callable[[Account, float], bool]"


@dataclass
class StartResult:
    """The result of a start."""

    laid_out: Rehearsal
    account: Account
    codes: list[int] = field(default_factory=list)  # exit codes of the sandboxes, by node
    exits: list[ExitReport] = field(default_factory=list)  # of the agents
    seconds: float = 0.0  # since the start
    left_s: float | None = None  # from the interruption to the end of the last node, None without an interruption
    is_killed: bool = False
    is_late: bool = False  # the time limit passed before the job had ended or reached its step
    tail: list[str] = field(default_factory=list)

    @property
    def error(self) -> dict[str, Any] | None:
        """Return the failure in node 0's exit report, or in any node's."""
        return self.exits[0].error if self.exits else None

    @property
    def state(self) -> str | None:
        """Return succeeded, stopped or failed; None without an exit report."""
        return self.exits[0].state if self.exits else None


def run(
    laid_out: Rehearsal, folder: Path, until: Until, ranks: int, *, at_once: bool, timeout_s: float, hidden: Path
) -> StartResult:
    """Start all nodes; interrupt them when `until` (given the account and the seconds since the first rank) is true.

    The interruption waits until all `ranks` have started: rank 0 of a script without collectives may reach the step
    before a busy machine has started the last rank. `at_once` kills the nodes without a stop request. Returns when no
    process is left; if `until` stays false, the job runs to its own end. A job that takes longer than `timeout_s` is
    killed.
    """
    agents = tuple(agent for node in laid_out.nodes for agent in node.agents)
    copied = [pair for node in laid_out.nodes for pair in node.copied]
    found = StartResult(laid_out, Account(agents))
    for own, kept in copied:
        _copy(kept, own)
    begun_s, ranks_s, interrupted_s = time.monotonic(), None, None
    late_s = begun_s + timeout_s
    running: list[sandbox.Running] = []
    try:
        for number, node in enumerate(laid_out.nodes):
            running.append(_start(node, folder / f"cell-{number}", hidden, running))
        while any(one.code is None for one in running):
            time.sleep(LOOK_S)
            now_s = time.monotonic()
            found.account.look()
            if ranks_s is None and any(map(_prepares, agents)):  # pip has a time limit of its own
                late_s = now_s + timeout_s
            if ranks_s is None and found.account.ranks:
                ranks_s = now_s
            if now_s > late_s:
                found.is_late = True
                _show_stacks(running)
                break
            if interrupted_s is not None or ranks_s is None or len(found.account.ranks) < ranks:
                continue
            if until(found.account, now_s - ranks_s):
                interrupted_s, late_s, found.is_killed = now_s, now_s + laid_out.grace_s, at_once
                if at_once:
                    break
                _interrupt(laid_out.nodes, running)
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.process.wait(END_S)
    found.seconds = time.monotonic() - begun_s
    found.left_s = None if interrupted_s is None else time.monotonic() - interrupted_s
    _collect(found, agents, running)
    for own, kept in copied:
        _copy(own, kept)
    return found


def _collect(found: StartResult, agents: tuple[Path, ...], running: list[sandbox.Running]) -> None:
    """Add the last events, the exit codes, the exit reports and the last log lines of a start that has ended."""
    found.account.look()
    found.codes = [one.code or 0 for one in running]
    reports = [atomic_json.read_json(agent / EXIT) for agent in agents]
    found.exits = [ExitReport.load(report) for report in reports if report is not None]
    found.tail = _tail(found, agents, running)


def _start(node: NodeRun, folder: Path, hidden: Path, before: list[sandbox.Running]) -> sandbox.Running:
    stdin = node.stdin(_answer(before[0])) if callable(node.stdin) else node.stdin
    # The job's own code comes only from its bundle, so a file missing in the bundle is missing here too.
    return sandbox.start(node, folder, [] if node.detaches else [hidden], stdin)


def _answer(first: sandbox.Running) -> str:
    """Return the first machine's answer, a single line. Raises ConfigError without an answer."""
    until_s = time.monotonic() + ANSWER_S
    while True:
        is_over = first.code is not None
        line, whole, _ = first.output.read_text(errors="replace").partition("\n")
        if whole and line.startswith("{"):
            return line
        if is_over or line or time.monotonic() > until_s:
            said = shown(line, colour=False) or "it says nothing"
            raise ConfigError(f"the first node did not start: {said}", where=str(first.output))
        time.sleep(LOOK_S)


def _prepares(agent: Path) -> bool:
    state = atomic_json.read_json(agent / STATE)
    return state is not None and AgentState.load(state).phase == "preparing"


def _interrupt(nodes: tuple[NodeRun, ...], running: list[sandbox.Running]) -> None:
    """Notify every node, as the platform does; our detached agents by a stop request."""
    for node, one in zip(nodes, running, strict=True):
        if not node.detaches:
            one.process.terminate()
        for agent in node.agents if node.detaches else ():
            node_folder.ask_to_stop(agent, "user")


def _show_stacks(running: list[sandbox.Running]) -> None:
    """Have the ranks print where they are: the last lines of a rank that hangs are then the cause."""
    ranks = [pid for one in running for pid in processes.descendants(one.process.pid)]
    for pid in (each for each in ranks if processes.catches(each, signal.SIGUSR2)):
        processes.kill(pid, signal.SIGUSR2)
    time.sleep(STACKS_S)


def _copy(source: Path, target: Path) -> None:
    """Copy new files, as the platform does; no file is removed."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)


def _tail(found: StartResult, agents: tuple[Path, ...], running: list[sandbox.Running]) -> list[str]:
    """Return the last lines of the failed rank, else of rank 0, else of any log with output."""
    rank = (found.error or {}).get("rank")
    paths = [agent / "log" / f"rank-{rank or 0}.log" for agent in agents]
    paths += [agent / "log" / name for agent in agents for name in ("boot.log", "agent.txt")]
    paths += [one.output for one in running]
    for path in paths:
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").rstrip().splitlines()[-TAIL_LINES:]
            if lines:
                return [shown(line, colour=False).rstrip() for line in lines]
    return []


SETTLE_S = 2.0  # after this time a save begun with a step is durable, or its event is being written
_RANK_LOG = re.compile(r"rank-(\d+)\.log")


@dataclass
class Account:
    """The events of rank 0, and the ranks with a log: boot has started these ranks after the rendezvous."""

    folders: tuple[Path, ...]  # of the nodes' agents
    steps: dict[int, float | None] = field(default_factory=dict)  # step -> loss, None if a script reports no loss
    events: list[dict[str, Any]] = field(default_factory=list)  # events except steps
    ranks: set[int] = field(default_factory=set)
    met: set[int] = field(default_factory=set)  # of a script: ranks that have joined a group of all ranks
    alone: str = ""  # why a rank has not, in its own words, after a minute or at its end
    _read: dict[Path, int] = field(default_factory=dict)
    _reported_s: float = 0.0  # when the newest step was reported, by the monotonic clock

    def look(self) -> None:
        """Read new lines."""
        for folder in self.folders:
            for path in folder.glob("log/rank-*.log"):
                if match := _RANK_LOG.fullmatch(path.name):
                    self.ranks.add(int(match[1]))
                    if int(match[1]) == 0:
                        self._take(path)
            self.met |= {int(path.name.rpartition("-")[2]) for path in folder.glob("result/*/met-*")}
            for path in () if self.alone else folder.glob("result/*/missing_group-*"):
                self.alone = path.read_text()

    @property
    def last_step(self) -> int | None:
        """Return the last reported step, None before the first."""
        return max(self.steps, default=None)

    def is_settled(self) -> bool:
        """Return whether a checkpoint is durable, or no step was reported for SETTLE_S."""
        is_durable = any(event["e"] == "checkpoint" and "step" in event for event in self.events)
        return is_durable or time.monotonic() - self._reported_s > SETTLE_S

    @property
    def odd_steps(self) -> list[int]:
        """Return the steps with a loss that is not finite."""
        return sorted(step for step, loss in self.steps.items() if loss is not None and not math.isfinite(loss))

    def _take(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                event = events.parse(line)[1]
                if event is None:
                    continue
                step, loss = event.get("step"), event.get("loss")
                if event["e"] == "step" and isinstance(step, int):
                    self._reported_s = time.monotonic()
                    self.steps[step] = float(loss) if isinstance(loss, (int, float)) else self.steps.get(step)
                else:
                    self.events.append(event)
