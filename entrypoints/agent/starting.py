"""Starts agents, each detached from the calling process: all requested agents, or no agent.

python -m cloudtrain.entrypoints.agent.starting < specs.json      answers when all agents run
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import processes
from ..contract import NEVER_SENT, START_LOCK, STATE, STOP, AgentSpec
from . import gpulocks, queue_line, returning, transport
from .agent import Agent
from .queue_wait import REQUEUE, Earlier, QueueWait

MOST_WORDS = 400  # characters
MOST_SHOWN = 64  # spares of a host


def main() -> int:
    """Start the agents that standard input describes, if it does; print their pids as JSON."""
    if not (request := sys.stdin.read()):  # the launcher has given up, or was killed
        return 0
    try:
        answer = start(json.loads(request))
    except processes.NoLocks as error:
        answer = {"started": False, "why": f"{error.filename}: {error.strerror}", "no_locks": True}
    print(json.dumps(answer))
    return 0


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a detached agent for each AgentSpec in `request["nodes"]`; return when all agents have written their states.

    All agents start, once, or no agent starts: `request["folder"]` holds a lock, and a mark if the start was given up
    meanwhile. With the mark the answer is `{"started": false, "why": ...}`. `"busy": true` means that a different job
    holds a lock of `request["locks"]`, or waits in line for it: a retry may succeed. With `queue` in the locks, the
    agents wait for their turn, and take the locks then (queue_wait.py). With `spare` in the locks, the agent takes the
    locks when the job needs its host. If an agent cannot start (a full disk), `why`
    is the agent's error, the start is marked as given up, and the earlier agents are killed.
    """
    umask = os.umask(0o077)
    folder, specs = Path(request["folder"]), [AgentSpec.load(node) for node in request["nodes"]]
    with processes.locked(folder / START_LOCK) as lock:
        if (folder / NEVER_SENT).exists():
            return {"started": False, "why": "given up before it started"}
        if any((Path(spec.root) / STATE).exists() for spec in specs):
            return {"started": False, "why": "already started"}
        try:
            taken = _take(request.get("locks"), specs[0])
        except gpulocks.GpuBusy as error:
            return {"started": False, "why": str(error), "busy": True}
        first = next((spec for spec in specs if spec.node == 0), None)
        server = None if first is None else transport.on_free_port(first, partial(transport.listen, first.address))
        head = server.getsockname()[:2] if server else None
        pids: list[int] = []
        try:
            for spec in specs:
                known = replace(spec, head_listens=True, head=head or spec.head)
                pids.append(_fork_agent(known, server, umask, lock, taken, request.get("locks")))
        except (OSError, RuntimeError) as error:
            for pid in pids:  # the agents wait for the missing agent, and have started no ranks
                processes.kill(pid, signal.SIGKILL)
            try:
                (folder / NEVER_SENT).touch()
            except OSError:  # the disk is full: no state may say that agents have started
                for spec in specs:
                    (Path(spec.root) / STATE).unlink(missing_ok=True)
            return {"started": False, "why": str(error)}
        if taken is not None:
            taken.hand_over()
        if server is not None:
            server.close()
        return {"started": True, "pids": pids, "head": head}


def _take(locks: dict[str, Any] | None, spec: AgentSpec) -> gpulocks.HeldLocks | None:
    """Take the locks that the nodes' agents hold until their end. Raises gpulocks.GpuBusy, gpulocks.Unusable.

    The agents of a queued job take the locks at their turn, and a spare at a call. A different job leaves the locks to
    the jobs in line; with `may_share` the job starts without locks that are not free.
    """
    if locks is None or "queue" in locks or locks.get("spare"):
        return None
    cap_s = spec.max_duration_s + queue_line.KILL_S
    about = {**locks["about"], "until_s": time.time() + cap_s}
    if locks.get("may_share"):
        with contextlib.suppress(gpulocks.GpuBusy, gpulocks.Unusable):
            return gpulocks.take(gpulocks.folder(locks["folder"]), locks["names"], about)
        return None
    folder = gpulocks.folder(locks["folder"])
    if why := queue_line.why_not(folder, locks["names"], spec.job.job, cap_s):
        raise gpulocks.GpuBusy(locks["names"][0], None, why=why)
    return gpulocks.take(folder, locks["names"], about)


def _show(locks: dict[str, Any]) -> None:
    """Take a lock until the end of this process, which only shows that the job has a spare on this host."""
    for number in range(MOST_SHOWN):  # a name per job would leave a file per job on the host
        with contextlib.suppress(gpulocks.GpuBusy):
            gpulocks.take(gpulocks.folder(locks["folder"]), [f"{gpulocks.SPARE}{number}"], locks["about"])
            return


def _fork_agent(
    spec: AgentSpec,
    server: socket.socket | None,
    umask: int,
    lock: int,
    taken: gpulocks.HeldLocks | None,
    locks: dict[str, Any] | None,
) -> int:
    """Fork twice, so that init is the agent's parent; return the agent's pid after its state is on disk."""
    ready, announce = os.pipe()
    child = os.fork()
    if child:
        os.close(announce)
        with os.fdopen(ready) as pipe:
            line = pipe.readline()
        os.waitpid(child, 0)
        if not line.strip().isdigit():
            why = line.strip() or f"see {spec.root}/log/agent.txt"
            raise RuntimeError(f"node {spec.node}: {why}")
        return int(line)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(ready)
    os.close(lock)
    if spec.node != 0 and server is not None:
        server.close()
    code, account = 1, os.dup(announce)
    try:
        _detach(Path(spec.root))
        if taken is not None:
            taken.write_notes()
        own = server if spec.node == 0 else None
        if locks is not None and "queue" in locks:
            _run_in_turn(spec, own, umask, locks, announce)
        elif locks is not None and locks.get("spare"):
            _show(locks)
            Agent(spec, own, umask, take=partial(_take, {**locks, "spare": False}, spec)).run(announce)
        elif returning.may_return(spec):
            returning.stay(spec, partial(_run_again, umask, announce, locks), taken)
        else:
            Agent(spec, own, umask, taken).run(announce)
        code = 0
    except BaseException as error:
        with contextlib.suppress(OSError):  # after the agent's start the pipe has no reader
            os.write(account, f"{_words(error, spec)}\n".encode())
        traceback.print_exc()
    finally:
        processes.kill_descendants()
        sys.stderr.flush()
        os._exit(code)


def _run_again(
    umask: int, announce: int, locks: dict[str, Any] | None, spec: AgentSpec, taken: gpulocks.HeldLocks | None
) -> int:
    """Supervise a node that may return, from its first start or from a return on; as the holder of its locks."""
    if taken is not None:
        taken.write_notes()
    agent = Agent(spec, None, umask, taken, partial(_take, locks, spec) if spec.life else None)
    agent.count_earlier(0.0, spec.used_s)
    agent.run(None if spec.life else announce)
    return 0


def _run_in_turn(
    spec: AgentSpec, server: socket.socket | None, umask: int, locks: dict[str, Any], announce: int
) -> None:
    """Wait for the job's turn, supervise the job, and wait again each time a waiting job has preempted the job."""
    pipe: int | None = announce
    earlier = Earlier()
    while True:
        wait = QueueWait(spec, server, locks, earlier)
        if (own := wait.run(pipe)) is None:
            return
        agent = Agent(own, server.dup() if server else None, umask, wait.taken)
        agent.count_earlier(earlier.started_s, earlier.used_s)
        agent.run()
        if wait.taken is not None:
            wait.taken.release()
        if agent.ended is None or agent.ended.reason != REQUEUE:
            return
        pipe, earlier = None, Earlier(agent.started_s, agent.membership.now_s(), time.time())
        spec = _continued(spec, earlier.used_s)


def _continued(spec: AgentSpec, used_s: float) -> AgentSpec:
    """Return the message for the start after a preemption: the job continues from its checkpoint. Removes old results.

    The job's clock goes on from `used_s`, and so does the time to join.
    """
    root = Path(spec.root)
    shutil.rmtree(root / "result", ignore_errors=True)
    (root / STOP).unlink(missing_ok=True)
    job = replace(spec.job, checkpoint=replace(spec.job.checkpoint, resume="auto"))
    return replace(spec, job=job, join_timeout_s=used_s + spec.join_timeout_s)


def _words(error: BaseException, spec: AgentSpec) -> str:
    """Return the reason, in a line, why the agent could not start."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk of {spec.root} ({error.strerror})"
    return " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]


def _detach(root: Path) -> None:
    (root / "log").mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    processes.write_into(root / "log" / "agent.txt")
    processes.become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.outlive_save_signals()


if __name__ == "__main__":
    sys.exit(main())
