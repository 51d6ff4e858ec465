"""The task of a Slurm step on each node: identifies the node, and supervises the node in the foreground.

    python3 -c '... slurm_step.main(sys.argv[1:])' ORDER.json [INTERFACE]

The order is the AgentSpec without the facts of one node. Its folder is the attempt's folder, on the cluster's shared
disk; the agent of node K works in `node-K`. Further files in the attempt's folder: `head.json` (address of node 0 in
the newest run of the job), `refused.json` (a node that cannot start), `ended` (the exit code of the job's end), and
`requeue` (the batch script requeues the job).
A job that Slurm starts again goes on from its checkpoint, and its clock goes on too.
Exit codes: 0 done, 75 saved and stopped, 64 bad config, 70 failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket

from .. import atomic_json, processes
from ..contract import BEAT, BEAT_S, EXIT, STATE, STOP, AgentSpec, AgentState, ExitReport
from . import node as nodes
from . import node_folder, returning, transport
from .agent import Agent
from .boot import EXIT_CONFIG, EXIT_FAILED, SLURM, exit_code

HEAD, REFUSED, ENDED, REQUEUE = "head.json", "refused.json", "ended", "requeue"
# Below the ephemeral range, and apart from the ports of torchrun: two jobs on a node rarely share a number.
PORTS = range(28000, 32000)
HEAD_S, HEAD_AGAIN_S = 5.0, 90.0  # until a follower takes the usual port, or gives up: an NFS client sees a file late
LOOK_S = 1.0
FENCE_S = 4 * LOOK_S  # for the agents of an earlier run on a node that Slurm has lost
LEAVE_S = 3.0  # for the other nodes' own ends
# Slurm's variables are of this task, one a node. A library that finds some of them takes over the rendezvous from
# torchrun, or misses the rest. MPI's are never a rank's.
HIDDEN, OF_MPI = ("SLURM", "SRUN_", "SBATCH_"), ("PMI_", "PMIX_")


@dataclass(frozen=True)
class _Step:
    """This node's place in the step, from Slurm's variables. `life` counts the earlier runs of the job."""

    node: int
    count: int
    life: int
    job: int
    head: str  # address of the host that runs srun, which is node 0
    attempt: Path
    interface: str | None


def main(argv: list[str]) -> int:
    """Supervise this node until the job's end, or until the end of this run; return the exit code."""
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stops.append(signum))
    processes.outlive_save_signals()
    processes.become_subreaper()
    umask = os.umask(0o077)
    path, *interface = argv
    try:
        step = _step(os.environ, Path(path).absolute().parent, interface[0] if interface else None)
        root = step.attempt / f"node-{step.node}"
        (root / "log").mkdir(parents=True, exist_ok=True)
        processes.write_into(root / "log" / "agent.txt")  # as on the ssh backend
        try:
            order = AgentSpec.load(json.loads(Path(path).read_text()))
            if step.count != order.job.nodes:
                raise ValueError(f"the step has {step.count} nodes, the job {order.job.nodes}")
            began_s, used_s = _earlier(root)
            spec, server = _spec(order, step, root, used_s)
        except (OSError, ValueError) as error:
            return _refuse(root, step, f"node {step.node} cannot start: {error}")
    except (OSError, KeyError, ValueError) as error:
        print(f"the node cannot be identified: {error!r}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    own = {name: os.environ[name] for name in os.environ if name.startswith(HIDDEN)}
    hidden = OF_MPI if spec.shows_variables else (*HIDDEN, *OF_MPI)
    for name in [name for name in os.environ if name.startswith(hidden)]:
        del os.environ[name]
    os.environ[SLURM] = str(step.job)

    def run(spec: AgentSpec, taken: object = None) -> int:
        agent = Agent(spec, server, umask)
        agent.count_earlier(began_s, used_s + spec.used_s)
        return _run(agent, step, Path(path), stops, own)

    return returning.stay(spec, run) if returning.may_return(spec) else run(spec)


def _run(agent: Agent, step: _Step, path: Path, stops: list[int], own: Mapping[str, str]) -> int:
    """Supervise this node to the agent's end; return the exit code."""
    spec = agent.spec
    agent.comes_again = lambda verdict: _comes_again(spec, step.life, verdict)
    threading.Thread(target=_watch, args=(agent, step, path), name="fence", daemon=True).start()
    agent.run(stops=stops)
    assert agent.ended is not None
    code = _end(agent.ended, spec, step, path)
    leads_now = spec.head is not None and agent.membership.head_address == spec.address != spec.head[0]
    if leads_now and not agent.ended.fenced:
        _end_without_script(spec, step, own)
    return code


def _step(environ: Mapping[str, str], attempt: Path, interface: str | None) -> _Step:
    """Return this node's place. Raises KeyError or ValueError without Slurm's variables."""
    count = environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"]
    life, head = environ.get("SLURM_RESTART_COUNT", "0"), environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    node, job = int(environ["SLURM_NODEID"]), int(environ["SLURM_JOB_ID"])
    return _Step(node, int(count), int(life), job, head, attempt, interface)


def _earlier(root: Path) -> tuple[float, float]:
    """Return the job's first start in unix seconds and its time in use, of earlier runs. Removes their results."""
    shutil.rmtree(root / "result", ignore_errors=True)
    (root / EXIT).unlink(missing_ok=True)
    if (found := atomic_json.read_json(root / STATE)) is None:
        return 0.0, 0.0
    state, written_s = AgentState.load(found), (root / STATE).stat().st_mtime
    after_s = 0.0 if state.phase == "ended" else node_folder.last_sign_s(root, written_s) - written_s
    return state.started_s, (state.held_s or 0.0) + after_s


def _spec(order: AgentSpec, step: _Step, root: Path, used_s: float) -> tuple[AgentSpec, socket | None]:
    """Return the agent's spec for this node, and node 0's listener. Raises OSError."""
    server = None
    if step.node == 0:
        address = _own_address(step, step.head)
        server = _listen(address, PORTS[step.job % len(PORTS)])
        head = server.getsockname()[:2]
        states = [atomic_json.read_json(path) or {} for path in step.attempt.glob(f"node-*/{STATE}")]
        atomic_json.write_json(step.attempt / HEAD, {"life": step.life, "address": head[0], "port": head[1]})
        if any(state.get("phase") != "ended" for state in states):
            time.sleep(FENCE_S)  # an earlier agent may run on a node that Slurm lost
    else:
        head = _head(step)
        address = _own_address(step, "") or nodes.towards(head[0])
    job = order.job
    if used_s and not job.run.is_own and job.checkpoint.resume == "never":  # a task notes its first start by itself
        job = replace(job, checkpoint=replace(job.checkpoint, resume="auto"))
    spec = replace(
        order,
        job=job,
        node=step.node,
        address=address,
        head=head,
        root=str(root),
        python=sys.executable,
        join_timeout_s=order.join_timeout_s + (used_s if step.node == 0 else 0.0),  # node 0's clock goes on
    )
    return spec, server


def _own_address(step: _Step, known: str) -> str:
    """Return the address on the wanted interface, else the `known` address unless only this machine can use it."""
    if step.interface is not None:
        address = nodes.address_of(step.interface)
        if address is None:
            raise ValueError(f"{os.uname().nodename} has no address on slurm.interface {step.interface}")
        return address
    if step.node == 0 and step.count > 1 and not _is_for_all(known):
        return nodes.towards(nodes.ELSEWHERE)
    return known or ("127.0.0.1" if step.node == 0 else "")


def _is_for_all(address: str) -> bool:
    return bool(address) and not address.startswith("127.0.")  # a name that only this machine resolves


def _listen(address: str, port: int) -> socket:
    """Return node 0's listener: on the usual port, or if a different job has this port, on the next free port."""
    for candidate in (*range(port, PORTS.stop), *range(PORTS.start, port)):
        try:
            return transport.listen(address, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no free port between {PORTS.start} and {PORTS.stop - 1} on {address}")


def _head(step: _Step) -> tuple[str, int]:
    """Return node 0's address and port from the attempt's folder, else the usual ones. Raises TimeoutError."""
    usual = _is_for_all(step.head) and step.interface is None
    end_s = time.monotonic() + (HEAD_S if usual else HEAD_AGAIN_S)
    while time.monotonic() < end_s:
        note = atomic_json.read_json(step.attempt / HEAD) or {}
        if note.get("life") == step.life:
            return str(note["address"]), int(note["port"])
        if refused := _refused(step):
            raise ValueError(refused)
        time.sleep(0.1)
    if not usual:
        raise TimeoutError(f"node 0 has not written {step.attempt / HEAD} within {HEAD_AGAIN_S:.0f} s")
    return step.head, PORTS[step.job % len(PORTS)]


def _refused(step: _Step) -> str | None:
    """Return why a node of this run cannot start, None without such a node."""
    note = atomic_json.read_json(step.attempt / REFUSED) or {}
    return str(note["message"]) if note.get("life") == step.life else None


def _comes_again(spec: AgentSpec, life: int, verdict: ExitReport) -> bool:
    """Return whether the job is requeued: after a pre-emption, and a limited number of times after a node's loss."""
    is_lost = verdict.reason == "node_failure" and (verdict.error or {}).get("kind") == "lost"
    return spec.requeues and (verdict.reason == "preempted" or (is_lost and life < spec.job.max_restarts))


def _watch(agent: Agent, step: _Step, order: Path) -> None:
    """End this node if a later run of the job has begun: Slurm lost the node. Forget the secrets in time.

    If the job needs all nodes, and a node cannot start, also end this node. Give the launcher a sign of life: its
    machine cannot see the agent's process.
    """
    spec = agent.spec
    has_secrets = step.node == 0 and not spec.requeues
    beat_s = 0.0
    while True:
        time.sleep(LOOK_S)
        if time.monotonic() - beat_s > BEAT_S:
            beat_s = time.monotonic()
            with contextlib.suppress(OSError):
                (agent.root / BEAT).touch()
        note = atomic_json.read_json(step.attempt / HEAD) or {}
        if note.get("life", 0) > step.life:
            print(f"a later run of the job has begun on {note['address']}: this node ends", flush=True)
            processes.kill_descendants()
            os._exit(EXIT_FAILED)
        needs_all = not agent.report.generation and (spec.job.min_nodes or step.count) == step.count
        if needs_all and (refused := _refused(step)):
            processes.kill_descendants()
            os._exit(_refuse(agent.root, step, refused))
        if has_secrets and agent.report.generation:  # all nodes have read the order
            _forget(order)
            has_secrets = False


def _forget(order: Path) -> None:
    """Remove the secrets from the order."""
    if (data := atomic_json.read_json(order)) is not None:
        atomic_json.write_json(order, {**data, "secrets": {}, "token": ""})


def _end(verdict: ExitReport, spec: AgentSpec, step: _Step, order: Path) -> int:
    """Leave the batch script the job's end or the wish for a requeue; return this node's exit code."""
    code = exit_code(verdict)
    if _comes_again(spec, step.life, verdict):
        why = (verdict.error or {}).get("message") or verdict.reason
        print(f"node {step.node} ends, and the job is requeued: {why}", flush=True)
        (step.attempt / REQUEUE).touch()
    elif not verdict.fenced:  # else only this node has ended
        if step.node == 0:
            _forget(order)
        (step.attempt / f".{ENDED}-{step.node}").write_text(f"{code}\n")
        (step.attempt / f".{ENDED}-{step.node}").replace(step.attempt / ENDED)
    return code


def _end_without_script(spec: AgentSpec, step: _Step, own: Mapping[str, str]) -> None:
    """End or requeue the job from the new leader: the batch script was on node 0, which is lost. `own`: Slurm's part.

    Slurm would keep the other nodes for the job until its time limit. An image has no commands of Slurm.
    """
    is_requeued = (step.attempt / REQUEUE).exists() and not (Path(spec.root) / STOP).exists()
    words = ("scontrol", "requeue") if is_requeued else ("scancel",)
    time.sleep(LEAVE_S)
    try:
        subprocess.run([*words, str(step.job)], stdin=subprocess.DEVNULL, env={**os.environ, **own}, check=False)
    except OSError as error:
        print(f"the job keeps its nodes until its time limit: {' '.join(words)}: {error}", flush=True)


def _refuse(root: Path, step: _Step, message: str) -> int:
    """Write the exit report of a node that cannot be supervised, and tell the other nodes; return the exit code."""
    print(message, file=sys.stderr, flush=True)
    error = {"rank": None, "kind": "config", "message": message}
    atomic_json.write_json(root / EXIT, ExitReport("failed", "error", error, ended_s=time.time()).dump())
    atomic_json.write_json(step.attempt / REFUSED, {"life": step.life, "message": message})
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
