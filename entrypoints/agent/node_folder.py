"""Reads the state of an agent from its folder, and leaves requests in the folder: on this machine and over ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from .. import atomic_json, processes
from ..contract import EXIT, STATE, STATE_EVERY_S, STOP, AgentState, ExitReport, NodeStatus, has_checkpoint

OBEY_S = 15.0  # an agent's own end may take 12 s if processes do not die


def look(root: Path, checkpoints: Path) -> NodeStatus:
    """Return the node's status; kill processes that a killed agent has left running."""
    state = state_of(root)
    has_other_name = state is not None and state.machine not in (None, os.uname().nodename)
    if (
        state is not None and has_other_name and not processes.is_of_this_boot(state.stamp)
    ):  # by another machine's agent
        return NodeStatus(state, elsewhere=True)
    # Check the process before the files: an agent that ends between the two checks has then written its exit.
    is_alive = state is not None and processes.alive(state.pid, state.stamp)
    ended = atomic_json.read_json(root / EXIT)
    asked = atomic_json.read_json(root / STOP)
    status = NodeStatus(state, ended and ExitReport.load(ended), is_alive, asked and asked["reason"])
    if status.exit is not None:
        return replace(status, ended_ago_s=time.time() - status.exit.ended_s)
    if state is None:
        return status
    if is_alive:  # all processes share the monotonic clock, which counts from the machine's start
        return replace(status, held_s=state.held_s if state.zero_s is None else time.monotonic() - state.zero_s)
    sweep(root)  # the ranks' processes may still run
    last_s, held_s = last_sign_s(root, state.started_s), state.held_s
    if held_s is not None:  # the last written value, extended to the last log line by STATE_EVERY_S at most
        held_s = min(max(last_s - state.started_s, held_s), held_s + STATE_EVERY_S)
    is_saved, is_rebooted = has_checkpoint(checkpoints), not processes.is_of_this_boot(state.stamp)
    return replace(status, held_s=held_s, saved=is_saved, last_s=last_s, rebooted=is_rebooted)


def ask_to_stop(root: Path, reason: str) -> None:
    """Leave a stop request for the agent: `user` saves first, `now` does not."""
    with contextlib.suppress(FileNotFoundError):
        atomic_json.write_json(root / STOP, {"reason": reason})


def write(path: Path, value: AgentState | ExitReport) -> None:
    """Write the agent's own state or exit report; a full disk must not end the agent."""
    try:
        atomic_json.write_json(path, value.dump())
    except OSError as error:
        print(f"agent: {path.name} cannot be written: {error}", file=sys.stderr)


def end(roots: list[Path]) -> None:
    """End all processes of the nodes: kill agents that do not end by themselves, and the agents' descendants."""
    until_s = time.monotonic() + OBEY_S
    while any(map(agent_pid, roots)) and time.monotonic() < until_s:
        time.sleep(0.05)
    for root in roots:
        if pid := agent_pid(root):
            processes.kill(pid, signal.SIGKILL)
        sweep(root)


def agent_pid(root: Path) -> int | None:
    """Return the pid of the agent, None if the agent is gone."""
    state = state_of(root)
    return state.pid if state and processes.alive(state.pid, state.stamp) else None


def sweep(root: Path) -> None:
    """Kill the processes that a killed agent has left; the log folder in their environment identifies them."""
    from ..environments import dockerrun  # dry runs of the launcher need no containers

    if fault := dockerrun.sweep(root):
        print(fault, file=sys.stderr)
    for pid in processes.with_environment(CLOUDTRAIN_LOG_DIR=str(root / "log")):
        processes.kill(pid, signal.SIGKILL)


def last_sign_s(root: Path, started_s: float) -> float:
    """Return when the node last wrote a log line, `started_s` if never."""
    signs = [started_s]
    for path in root.glob("log/*.log"):
        with contextlib.suppress(OSError):
            signs.append(path.stat().st_mtime)
    return max(signs)


def state_of(root: Path) -> AgentState | None:
    """Return the agent's state, None before the first; over a network, the file may be replaced during a read."""
    found = atomic_json.read_json(root / STATE) or atomic_json.read_json(root / STATE)
    return found and AgentState.load(found)
