"""What an agent's folder tells whoever asks, and what is left there for it: the same on this machine and over ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import durable, processes
from cloudtrain.entrypoints.environments import dockerrun
from cloudtrain.entrypoints.places import EXIT, STATE, STOP, TELL_S, has_checkpoint

__all__ = ["agent_pid", "ask_to_stop", "end", "look", "sweep"]

OBEY_S = 15.0  # an agent's own end may take 12 s where processes do not die


def look(root: Path, checkpoints: Path) -> dict[str, Any]:
    """Return how the node is, as JSON; what a killed agent has left running is killed.

    `state` and `exit` are what the agent has written, None where it has not; `alive` whether it runs; `asked` the
    reason to stop that was left for it; `ended_ago_s` seconds since its end. Of an agent that is gone without a word,
    `saved`: whether there is something to go on from; `last_s`: when the job last wrote a line, in unix seconds, not
    the moment somebody asks; `rebooted`: whether the machine has been started since. `elsewhere`: the agent is another
    machine's, in whose place this one answers, or whose disk it shares; then nothing is told of it. `held_s`: how long
    an agent without an exit has had the node, by a clock that nobody can set.
    """
    state = durable.read_json(root / STATE)
    if _is_elsewhere(state):
        return {"state": state, "exit": None, "alive": False, "asked": None, "elsewhere": True}
    # Who lives, before what they wrote: an agent that ends in between has written its exit by then.
    is_alive = state is not None and processes.alive(state["pid"], state["stamp"])
    ended = durable.read_json(root / EXIT)
    asked = durable.read_json(root / STOP)
    told = {"state": state, "exit": ended, "alive": is_alive, "asked": asked and asked["reason"]}
    if ended is not None:
        return {**told, "ended_ago_s": time.time() - ended["ended_s"]}
    if state is None:
        return told
    if is_alive:  # one clock for all processes, from the machine's start on
        return {**told, **({"held_s": time.monotonic() - state["zero_s"]} if "zero_s" in state else {})}
    sweep(root)  # what its ranks had started may still be there
    lost = {"saved": has_checkpoint(checkpoints), "last_s": _last_sign_s(root, state["started_s"])}
    if "held_s" in state:  # as last written, and up to the last line since
        signs_s = lost["last_s"] - state["started_s"]
        lost["held_s"] = min(max(signs_s, state["held_s"]), state["held_s"] + TELL_S)
    return {**told, **lost, "rebooted": not processes.is_of_this_boot(state["stamp"])}


def ask_to_stop(root: Path, reason: str) -> None:
    """Leave the agent the word: `user` saves first, `now` does not."""
    with contextlib.suppress(FileNotFoundError):
        durable.write_json(root / STOP, {"reason": reason})


def end(roots: list[Path]) -> None:
    """See that nothing of these nodes is left: kill agents that do not obey, and what they leave behind."""
    until_s = time.monotonic() + OBEY_S
    while any(map(agent_pid, roots)) and time.monotonic() < until_s:
        time.sleep(0.05)
    for root in roots:
        if pid := agent_pid(root):
            processes.kill(pid, signal.SIGKILL)
        sweep(root)


def agent_pid(root: Path) -> int | None:
    """Return the pid of the agent, None where it is gone."""
    state = durable.read_json(root / STATE)
    return state["pid"] if state and processes.alive(state["pid"], state["stamp"]) else None


def sweep(root: Path) -> None:
    """Kill what an agent that was killed itself has left: found by the log folder in its environment."""
    if fault := dockerrun.sweep(root):
        print(fault, file=sys.stderr)
    for pid in processes.with_environment(CLOUDTRAIN_LOG_DIR=str(root / "log")):
        processes.kill(pid, signal.SIGKILL)


def _is_elsewhere(state: dict[str, Any] | None) -> bool:
    """Return whether another machine's agent has written it; a name may change, but not since this machine's start."""
    if state is None or state.get("machine") in (None, os.uname().nodename):
        return False
    return not processes.is_of_this_boot(state["stamp"])


def _last_sign_s(root: Path, started_s: float) -> float:
    signs = [started_s]
    for path in root.glob("log/*.log"):
        with contextlib.suppress(OSError):
            signs.append(path.stat().st_mtime)
    return max(signs)
