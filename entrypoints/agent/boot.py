"""The process that a node's agent starts for the ranks: runs torchrun, and reports the end.

Standard library only, so that a broken torch installation is still reported. Exit codes: 0 done, 75 saved and
resumable, 64 bad config, 69 the nodes did not find each other, 70 the training failed, 143 stopped by a signal
before the first save.

Messages go to standard output; torchrun's own output goes to CLOUDTRAIN_LOG_DIR/torchrun.log if the variable is set.
CLOUDTRAIN_RESULT_DIR/result.json holds the code and every known failure, the root cause first.

Boot ends processes that do not end by themselves: ranks that make no more steps (heartbeat.py), a torchrun that stays
after all work on the node is done, and a job long after its deadline, whose supervisor is stopped or stuck.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from .. import atomic_json, events, processes
from ..contract import OUT_OF_MEMORY, ExitReport, JobSpec, RunSpec
from ..rank import heartbeat, variables
from ..scripts import meeting
from . import node as nodes
from .node_logs import last_lines

EXIT_DONE, EXIT_CONFIG, EXIT_RENDEZVOUS, EXIT_FAILED, EXIT_SAVED, EXIT_STOPPED = 0, 64, 69, 70, 75, 143

RESOLVE_PATIENCE_S = 300  # a cluster's DNS and its slowest node's image pull
JOIN_TIMEOUT_S = 900
SHUTDOWN_TIMEOUT_S = 120  # torchrun's default of 30 s kills a save under way; SageMaker gives 120 s
LOOK_S = 1.0  # between two polls of the ranks' files
EXIT_DEADLINE_S = 60.0  # from the end of the work to the end of torchrun, which takes about 1 s
EXIT_BARRIER_S = 300.0  # torchrun's own wait for ranks on all nodes, at its end (torch 2.13)
OBEY_S = (
    10.0  # from a signal to torchrun's end after its ranks have left: in that wait, native code, it obeys no signal
)
GRACE_S = 120.0  # for stopping, without CLOUDTRAIN_GRACE
SLACK_S = 60.0  # the supervisor's time to end a job that does not stop within its grace
# Slurm sends SIGTERM to all processes of a job at once: torchrun needs no second signal, and a rank may have obeyed
# before boot's handler runs. Signals of the agent are then STOP_SIGNAL, which no user or site sends.
SLURM, AT_ONCE_S = "CLOUDTRAIN_SLURM_JOB", 1.0
STOP_SIGNAL = signal.SIGRTMIN
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+\S.*\n", re.MULTILINE)
HANG_ACCOUNTS_S = 5.0  # from a hang to the kill: ranks on remaining nodes would report the kill as a cause


def main() -> int:
    """Run this node's part of the job; return its exit code."""
    processes.die_with_parent()
    processes.become_subreaper()
    processes.outlive_save_signals()
    variables.deadline_s(os.environ)  # before the wait for node 0's name
    try:
        spec = JobSpec.load(json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text()))
        node = nodes.identify(os.environ)
        if spec.run.workdir is not None:  # also for the trials of a sweep, which the controller starts
            os.environ[variables.WORKDIR] = spec.run.workdir
    except (OSError, KeyError, ValueError) as error:
        message = f"boot: cannot read the job's spec: {error!r}"
        print(message, file=sys.stderr)
        return _finish(EXIT_CONFIG, [{"rank": None, "kind": "config", "message": message}])
    try:
        head = nodes.resolve(node.head, RESOLVE_PATIENCE_S)
    except TimeoutError as error:
        return _finish(EXIT_RENDEZVOUS, [{"rank": None, "kind": "rendezvous", "message": str(error)}])
    restart = os.environ.get("CLOUDTRAIN_RESTART", "0")
    begun = f"restart {restart}: node" if restart != "0" else "node"
    path = os.environ.get("CLOUDTRAIN_RESUME_PATH")
    resume = "" if path is None else f", newest checkpoint {path}"
    where = f"at {node.address}, head {head} ({node.platform}: {node.evidence})"
    events.emit(
        "boot",
        f"{begun} {node.rank} of {node.count} {where}{resume}",
        node=node.rank,
        nodes=node.count,
        address=node.address,
        head=head,
        platform=node.platform,
        python=sys.version.split()[0],
    )
    killed_before = processes.killed_for_memory()
    folder = Path(os.environ["CLOUDTRAIN_RESULT_DIR"])
    environment = {**torchrun_environment(node), "CLOUDTRAIN_STOP_SIGNAL": spec.run.stop_signal or ""}
    environment["CLOUDTRAIN_TRACKED_AS"] = spec.run.tracked_as or ""
    ended = _run_torchrun(torchrun_command(spec, node, head, folder), environment, folder, spec)
    stuck = processes.kill_descendants()
    heartbeat.Supervisor(os.getppid()).wait()
    if stuck:
        print(f"boot: processes {stuck} could not be killed", file=sys.stderr)
    code, failures = _outcome(folder, ended, spec.nproc_per_node, is_task=spec.run.is_own)
    if code == EXIT_STOPPED and ended.asked_ago_s >= SHUTDOWN_TIMEOUT_S:
        message = spec.run.ignored(SHUTDOWN_TIMEOUT_S)
        failures = [{"rank": None, "kind": "stop", "message": message, "time_s": time.time()}]
    if _needs_group(spec, node.count) and not any(folder.glob("met-*")):
        failures = [{**failure, "unmet": True} for failure in failures]
    if code == EXIT_DONE and (alone := _alone(folder, spec, node.count)):
        code, failures = EXIT_CONFIG, [alone]
    return _finish(code, _with_memory(failures, processes.killed_for_memory() - killed_before))


def torchrun_command(spec: JobSpec, node: nodes.Node, head: str, scratch: Path) -> list[str]:
    """Return the command line of torchrun on this node; its own files go below `scratch`, not into the temp folder.

    Static rendezvous, ranks in node order, no restarts: the agents restart the whole job and choose the port. `--`
    protects the script's flags: torchrun takes ambiguous prefixes of its own options (`--log`, `--max`) even after the
    script's name.
    """
    run = spec.run
    # torchrun takes `$` in its arguments for macros (string.Template).
    args = [*run.args, *(run.resume_args if "CLOUDTRAIN_RESUME_PATH" in os.environ else ())]
    words = [] if run.is_own else [word.replace("$", "$$") for word in (run.target, *args)]
    return [
        *(sys.executable, "-u", "-m", "cloudtrain.entrypoints.agent.elastic"),
        *(f"--nnodes={node.count}", f"--nproc-per-node={spec.nproc_per_node}", f"--node-rank={node.rank}"),
        *("--rdzv-backend=static", f"--master-addr={head}", f"--master-port={node.port}"),
        *("--max-restarts=0", f"--rdzv-conf=timeout={JOIN_TIMEOUT_S}", f"--local-addr={node.address}"),
        *(f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}", f"--log-dir={scratch}/torchrun"),
        *("-m", "cloudtrain.entrypoints.agent.worker", "--", run.kind, *words),
    ]


def torchrun_environment(node: nodes.Node) -> dict[str, str]:
    """Return the environment for torchrun: without the platform's misleading variables, with variables for torch."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in nodes.MISLEADING and not key.startswith(nodes.MISLEADING_PREFIXES)
    }
    env |= {"CLOUDTRAIN_NODE_RANK": str(node.rank), "CLOUDTRAIN_NUM_NODES": str(node.count)}
    # A restarted rank would read the dead generation's addresses from the shared store (torch 2.13: half of all
    # restarts in place failed; with the variable, 0 of 6).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = nodes.interface_of(node.address)
    if interface:  # gloo falls back to loopback; on Debian the host name resolves to 127.0.1.1
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def exit_code(verdict: ExitReport) -> int:
    """Return the exit code of a node for the job's end."""
    if verdict.state == "failed":
        return EXIT_CONFIG if (verdict.error or {}).get("kind") == "config" else EXIT_FAILED
    return EXIT_DONE if verdict.state == "succeeded" else EXIT_SAVED


def is_done(folder: Path, spec: JobSpec, nodes_count: int) -> bool:
    """Return whether all ranks of this node have written their success, and joined a group with all ranks."""
    return heartbeat.left_code(folder, spec.nproc_per_node) == EXIT_DONE and _alone(folder, spec, nodes_count) is None


def root_cause_first(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort failures: independent failures before failures caused by a lost peer, then by time."""
    return sorted(failures, key=lambda f: (bool(f.get("peer_lost")), f.get("time_s", 0.0)))


@dataclass(frozen=True)
class _Ended:
    """How torchrun ended: exit code (None if boot ends torchrun), whether a stop request came, boot's reasons.

    A stop request after the success of all local ranks does not count. `asked_ago_s`: since the stop request.
    """

    code: int | None
    was_stopped: bool = False
    failures: tuple[dict[str, Any], ...] = ()
    asked_ago_s: float = 0.0


def _run_torchrun(command: list[str], env: dict[str, str], folder: Path, spec: JobSpec) -> _Ended:
    """Run torchrun and relay signals, until torchrun ends or boot must end torchrun."""
    told_s, asked_s = list[float](), list[float]()  # the times of all signals, and of those that are stop requests
    logs = os.environ.get("CLOUDTRAIN_LOG_DIR")
    with (Path(logs) / "torchrun.log").open("a") if logs else contextlib.nullcontext() as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT if log else None)

        def relay(signum: int, frame: FrameType | None) -> None:
            told_s.append(time.monotonic())
            is_for_all = signum == signal.SIGTERM and SLURM in os.environ
            # A script may obey the signal at once.
            is_over = heartbeat.left_code(folder, spec.nproc_per_node) == EXIT_DONE
            left_s = max((path.stat().st_mtime for path in folder.glob("left-*")), default=0.0)
            if is_for_all and time.time() - left_s < AT_ONCE_S:
                is_over = False
            # Relay one signal only: after a second signal torchrun stops waiting for the workers' save.
            if not asked_s and not is_for_all:
                processes.kill(child.pid, STOP_SIGNAL if spec.run.stop_signal else signal.SIGTERM)
            elif not asked_s and spec.run.stop_signal:
                _tell_ranks(child.pid, signal.Signals[spec.run.stop_signal])
            if not is_over:
                asked_s.append(time.monotonic())

        for signum in (signal.SIGTERM, signal.SIGINT, STOP_SIGNAL):
            signal.signal(signum, relay)
        if (saves := save_signal(spec.run)) is not None:
            signal.signal(saves, lambda signum, frame: _tell_ranks(child.pid, signum))
        return _watch(child, told_s, asked_s, folder, spec)


def save_signal(run: RunSpec) -> int | None:
    """Return the signal that means `save` and is passed on to the ranks; None for Slurm, which sends it to all."""
    signum = signal.Signals[run.stop_signal] if run.stop_signal else None
    return signum if signum in processes.SAVE_SIGNALS and SLURM not in os.environ else None


def _tell_ranks(torchrun: int, signum: int) -> None:
    """Send the ranks the signal, except a rank without a handler: the signal would end the rank."""
    for pid in processes.children(torchrun):
        if processes.catches(pid, signum):
            processes.kill(pid, signum)


def _watch(
    child: subprocess.Popen[bytes], told_s: list[float], asked_s: list[float], folder: Path, spec: JobSpec
) -> _Ended:
    """Return when torchrun has ended, stays after the work or the job's deadline is over, or when a rank hangs."""
    supervisor = heartbeat.Supervisor(os.getppid())
    beats = heartbeat.Watch(folder, spec.hang_timeout_s or math.inf, time.monotonic())
    over_s: float | None = None
    limit_s = _limit_s(os.environ, time.monotonic())
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(LOOK_S)
            return _Ended(code, bool(asked_s), asked_ago_s=time.monotonic() - asked_s[0] if asked_s else 0.0)
        now_s = time.monotonic()
        supervisor.look(now_s)
        if asked_s and now_s - asked_s[0] > SHUTDOWN_TIMEOUT_S + EXIT_DEADLINE_S:
            return _Ended(None, True)
        if (patience_s := _patience_s(folder, spec.nproc_per_node)) is not None:
            over_s = now_s if over_s is None else over_s
            if told_s and heartbeat.left_code(folder, spec.nproc_per_node) is not None:
                over_s, patience_s = max(over_s, told_s[0]), OBEY_S
            if now_s - over_s > patience_s:
                print(f"boot: the work is done, but torchrun stayed for {patience_s:.0f} s more: killed", flush=True)
                return _Ended(None, bool(asked_s))
        if now_s > limit_s:
            message = "the job's deadline passed long ago, and the node's supervisor has not ended the job"
            overdue = {"rank": None, "kind": "deadline", "message": message, "time_s": time.time()}
            return _Ended(None, bool(asked_s), (overdue,) if patience_s is None else ())
        if hangs := beats.look(now_s):
            failures = tuple(_hang(hang) for hang in hangs)
            heartbeat.print_stacks(folder)
            time.sleep(HANG_ACCOUNTS_S)
            return _Ended(None, bool(asked_s), failures)


def _limit_s(environ: Mapping[str, str], now_s: float) -> float:
    """Return the time when boot itself ends the job, on the monotonic clock of `now_s`; infinity without a deadline.

    A working supervisor has stopped the job long before, in good order, with a save.
    """
    deadline_s = variables.deadline_s(environ)
    if deadline_s is None:
        return math.inf
    return max(now_s, deadline_s) + float(environ.get("CLOUDTRAIN_GRACE", GRACE_S)) + SLACK_S


def _patience_s(folder: Path, nproc: int) -> float | None:
    """Return how long torchrun may stay after the work is over, None while ranks may still work.

    The trainer's outcome is for all nodes. If only this node's ranks have left, torchrun waits for remote ranks.
    """
    if _trainer_code(folder) is not None:
        return EXIT_DEADLINE_S
    return EXIT_DEADLINE_S + EXIT_BARRIER_S if heartbeat.left_code(folder, nproc) is not None else None


def _trainer_code(folder: Path) -> int | None:
    """Return the exit code for the outcome that the trainer has written, None without an outcome."""
    outcome = atomic_json.read_json(folder / "outcome.json") or {}
    return {"done": EXIT_DONE, "saved": EXIT_SAVED, "paused": EXIT_SAVED}.get(outcome.get("outcome", ""))


def _hang(hang: heartbeat.Hang) -> dict[str, Any]:
    """Return the failure, with the time of the last beat: if several ranks wait, the cause was silent first."""
    where = "its stack is in the log"
    if processes.state(hang.pid) == "D":
        where = "it waits for a disk or a network share, and cannot print its stack"
    message = f"made no step for {hang.silent_s:.0f} s; {where}"
    failure = {"rank": hang.rank, "kind": "hang", "message": message, "time_s": hang.last_s}
    return {**failure, "lines": last_lines(hang.rank)}


def _outcome(folder: Path, ended: _Ended, nproc: int, *, is_task: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """Return the node's exit code and failures, from what the ranks, torchrun and the trainer have written."""
    if ended.code == 0 and (is_task or not ended.was_stopped):  # torchrun may not know of a stop
        return EXIT_DONE, []
    if ended.failures:
        return EXIT_FAILED, [_at_step(folder, failure) for failure in ended.failures]
    left = heartbeat.left_code(folder, nproc)
    # After a stop request, a script that exits 0 has saved, or given up; the script is not done. The trainer is done.
    if left == EXIT_SAVED or (left == EXIT_DONE and (is_task or not ended.was_stopped)):
        return left, []
    if ended.code is None and (code := _trainer_code(folder)) is not None:
        return code, []
    by_rank = {f["rank"]: f for path in sorted(folder.glob("rank-*.json")) if (f := atomic_json.read_json(path))}
    for failure in atomic_json.read_json(folder / "torchrun.json") or []:
        if failure["rank"] not in by_rank:  # a rank's own record is more precise than its exit code
            by_rank[failure["rank"]] = _with_lines(failure)
    saved_ranks = [f for f in by_rank.values() if f.get("exit_code") == EXIT_SAVED]
    failures = [_at_step(folder, f, is_task=is_task) for f in by_rank.values() if f.get("exit_code") != EXIT_SAVED]
    if ended.was_stopped:  # a rank that died of the stop signal has not failed
        failures = [f for f in failures if f.get("signal") != "SIGTERM"]
    if any(f.get("signal") != "SIGTERM" for f in failures):  # torchrun ends the remaining ranks with SIGTERM
        failures = [{**f, "peer_lost": True} if f.get("signal") == "SIGTERM" else f for f in failures]
    if failures:
        failures = root_cause_first(failures)
        codes = {"config": EXIT_CONFIG, "rendezvous": EXIT_RENDEZVOUS}
        return codes.get(failures[0]["kind"], EXIT_FAILED), failures
    if saved_ranks or _trainer_code(folder) == EXIT_SAVED:
        return EXIT_SAVED, []
    if ended.was_stopped:
        return EXIT_STOPPED, []
    kind = "signal" if ended.code is not None and ended.code < 0 else "exit"
    message = f"torchrun ended with code {ended.code}{_last_words()}"
    return EXIT_FAILED, [{"rank": None, "kind": kind, "message": message}]


def _alone(folder: Path, spec: JobSpec, nodes_count: int) -> dict[str, Any] | None:
    """Return the failure of a script if the ranks have ended well but joined no common group."""
    nproc = spec.nproc_per_node
    return meeting.failure(folder, nproc, nproc * nodes_count) if _needs_group(spec, nodes_count) else None


def _needs_group(spec: JobSpec, nodes_count: int) -> bool:
    """Return whether the ranks of a script must join a group of all ranks."""
    return not (spec.run.is_own or spec.run.allow_alone or spec.nproc_per_node * nodes_count == 1)


def _at_step(folder: Path, failure: dict[str, Any], *, is_task: bool = False) -> dict[str, Any]:
    """Return the failure with the steps that the rank has done, if known; `early`: a task's training had not begun."""
    step = heartbeat.steps_done(folder, failure["rank"])
    if step is None:
        return {**failure, "early": True} if is_task else failure
    return {**failure, "step": step}


def _with_lines(failure: dict[str, Any]) -> dict[str, Any]:
    """Return the failure of a rank without a record of its own, with the lines that the rank printed last.

    An exit code alone has little information (argparse): the message names the last line too.
    """
    if failure["rank"] is None:
        return failure
    lines = last_lines(failure["rank"]) or _before_the_log(failure["rank"])
    if not lines or failure["kind"] != "exit":
        return {**failure, "lines": lines}
    return {**failure, "message": f"{failure['message']}; last line: {lines[-1]}", "lines": lines}


def _before_the_log(rank: int) -> list[str]:
    """Put what a rank without a log has printed into its log, and return the last lines: torchrun.log has the rest."""
    folder = Path(os.environ.get("CLOUDTRAIN_LOG_DIR") or "/nowhere")
    with contextlib.suppress(OSError):
        text = (folder / "torchrun.log").read_text(errors="replace")
        if found := _TRACEBACK.search(text):
            with (folder / f"rank-{rank}.log").open("x") as log:
                log.write(found[0])
    return last_lines(rank)


def _with_memory(failures: list[dict[str, Any]], killed: int) -> list[dict[str, Any]]:
    """Return the failures. Add a note to failures by SIGKILL if the kernel has killed processes for lack of memory."""
    if killed < 1:
        return failures
    count = "a process" if killed == 1 else f"{killed} processes"
    words = f"; meanwhile the kernel killed {count} of this machine {OUT_OF_MEMORY}"
    return [{**f, "message": f["message"] + words} if f.get("signal") == "SIGKILL" else f for f in failures]


def _last_words() -> str:
    """Return the last lines of torchrun's output, which may name the cause."""
    folder = os.environ.get("CLOUDTRAIN_LOG_DIR")
    try:
        lines = (Path(folder) / "torchrun.log").read_text(errors="replace").splitlines() if folder else []
    except OSError:
        return ""
    last = [line for line in lines if line.strip()][-3:]
    return ": " + " | ".join(last) if last else ""


def _finish(code: int, failures: list[dict[str, Any]]) -> int:
    if failures:
        first = failures[0]
        who = f"rank {first['rank']}: " if first.get("rank") is not None else ""
        kind = f"{first['type']}: " if first.get("type") else ""
        about = {"rank": first.get("rank"), "type": first.get("type"), "message": first["message"], "code": code}
        events.emit("error", f"{who}{kind}{first['message']}", **about)
    with contextlib.suppress(OSError):  # the exit code has the main fact
        place = Path(os.environ["CLOUDTRAIN_RESULT_DIR"], "result.json")
        atomic_json.write_json(place, {"code": code, "failures": failures})
    return code


if __name__ == "__main__":
    sys.exit(main())
