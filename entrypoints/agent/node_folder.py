"""Reads the state of an agent from its folder, and leaves requests in the folder: on this machine and over ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.environments import dockerrun
from cloudtrain.entrypoints.job_files import EXIT, STATE, STOP, TELL_S, has_checkpoint

__all__ = ["agent_pid", "ask_to_stop", "end", "look", "sweep"]

OBEY_S = 15.0  # an agent's own end may take 12 s if processes do not die


def look(root: Path, checkpoints: Path) -> dict[str, Any]:
    """Return the node's state, as JSON; kill processes that a killed agent has left running.

    `state` and `exit` are the agent's files, None if missing; `alive`: whether the agent runs; `asked`: the reason of
    the stop request; `ended_ago_s`: seconds since the agent's end. For an agent that is gone without an exit: `saved`:
    whether a checkpoint to resume from exists; `last_s`: when the job last wrote a log line, in unix seconds (not the
    time of the call); `rebooted`: whether the machine has restarted since. `elsewhere`: the agent runs on a different
    machine, which this machine replaces or shares a disk with; then no further facts follow. `held_s`: how long an
    agent without an exit has used the node, by the monotonic clock.
    """
    state = atomic_json.read_json(root / STATE)
    if _is_elsewhere(state):
        return {"state": state, "exit": None, "alive": False, "asked": None, "elsewhere": True}
    # Check the process before the files: an agent that ends between the two checks has then written its exit.
    is_alive = state is not None and processes.alive(state["pid"], state["stamp"])
    ended = atomic_json.read_json(root / EXIT)
    asked = atomic_json.read_json(root / STOP)
    told = {"state": state, "exit": ended, "alive": is_alive, "asked": asked and asked["reason"]}
    if ended is not None:
        return {**told, "ended_ago_s": time.time() - ended["ended_s"]}
    if state is None:
        return told
    if is_alive:  # all processes share the monotonic clock, which counts from the machine's start
        return {**told, **({"held_s": time.monotonic() - state["zero_s"]} if "zero_s" in state else {})}
    sweep(root)  # the ranks' processes may still run
    lost = {"saved": has_checkpoint(checkpoints), "last_s": _last_sign_s(root, state["started_s"])}
    if "held_s" in state:  # the last written value, extended to the last log line by TELL_S at most
        signs_s = lost["last_s"] - state["started_s"]
        lost["held_s"] = min(max(signs_s, state["held_s"]), state["held_s"] + TELL_S)
    return {**told, **lost, "rebooted": not processes.is_of_this_boot(state["stamp"])}


def ask_to_stop(root: Path, reason: str) -> None:
    """Leave a stop request for the agent: `user` saves first, `now` does not."""
    with contextlib.suppress(FileNotFoundError):
        atomic_json.write_json(root / STOP, {"reason": reason})


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
    state = atomic_json.read_json(root / STATE)
    return state["pid"] if state and processes.alive(state["pid"], state["stamp"]) else None


def sweep(root: Path) -> None:
    """Kill the processes that a killed agent has left; the log folder in their environment identifies them."""
    if fault := dockerrun.sweep(root):
        print(fault, file=sys.stderr)
    for pid in processes.with_environment(CLOUDTRAIN_LOG_DIR=str(root / "log")):
        processes.kill(pid, signal.SIGKILL)


def _is_elsewhere(state: dict[str, Any] | None) -> bool:
    """Return whether a different machine's agent wrote the state: a different host name, and no stamp of this boot."""
    if state is None or state.get("machine") in (None, os.uname().nodename):
        return False
    return not processes.is_of_this_boot(state["stamp"])


def _last_sign_s(root: Path, started_s: float) -> float:
    signs = [started_s]
    for path in root.glob("log/*.log"):
        with contextlib.suppress(OSError):
            signs.append(path.stat().st_mtime)
    return max(signs)
