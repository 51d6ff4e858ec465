"""The first process in a managed platform's container: identifies the node, and supervises the node.

    python3 -m cloudtrain.entrypoints.container /opt/ml input/data/job/spec.json
    python3 -m cloudtrain.entrypoints.container . env:CLOUDTRAIN_ORDER checkpoints=/mnt/a/b input.train=/mnt/c
    python3 -m cloudtrain.entrypoints.container /tmp/cloudtrain gs://BUCKET/.../order.json fence=MARK

The first argument is the platform's folder. The second argument locates the container order: a file in the folder, a
variable in base64, or an object in a bucket (with the mark of its submission). The order has the platform's paths
relative to the folder; further arguments override these paths. The supervisor is the agent of the ssh and local
backends, so a job restarts, stops and fails in the same way on all backends. But logs go to standard output, the exit
report goes to the platform's place for failures, and the archive is already in place.
Exit codes: 0 done, 75 saved and stopped, 64 bad config, 70 failed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import contract, events, processes
from ..agent import agent, transport
from ..agent import node as nodes
from ..agent.boot import EXIT_DONE, exit_code
from ..checkpoints.sweeper import Sweeper
from ..contract import AgentSpec, ContainerOrder, ExitReport, Places
from ..format import failure
from ..rank import tracebacks
from . import inputs as staging
from . import secrets, toolkit
from .folder_sync import Carrier
from .log_relay import LogRelay

FAILURE_BYTES = 1000  # SageMaker passes on the first 1024 characters
MESSAGE_BYTES, TYPE_BYTES, LINE_BYTES = (300, 200, 120, 60), 80, 100
LEAST_S = 60.0  # for a job whose time is nearly used up: the platform will end the job
WORKDIR = "/tmp/cloudtrain-work"  # the same path in every container: an environment cannot be moved
CUDA_COMPAT = Path("/usr/local/bin/start_cuda_compat.sh")


def main(argv: list[str]) -> int:
    """Supervise this container's node to the job's end; return the container's exit code."""
    root = Path(argv[0]).absolute()
    stops: list[int] = []
    # The kernel ignores signals without a handler for process 1.
    signal.signal(signal.SIGTERM, lambda signum, frame: stops.append(signum))
    processes.outlive_save_signals()
    processes.become_subreaper()
    ending = _ExitTarget(codes=staging.EXIT_CODES if argv[1].startswith("gs://") else None)
    order: ContainerOrder | None = None
    node: nodes.Node | None = None
    try:
        order = _order(root, argv[1], argv[2:])
        ending = _ExitTarget.of(order, root)
        about = {"CLOUDTRAIN_PLATFORM_ROOT": str(root), "CLOUDTRAIN_NODES": str(order.job.nodes)}
        node = nodes.identify({**os.environ, **about})
        ending.begin(node.rank)
        staging.require_newest(order, root, is_head=node.rank == 0)
        order = staging.bring_in(order, root)
        spec = _agent_spec(order, root, node)
        (Path(spec.root) / "log").mkdir(parents=True, exist_ok=True)
        _prefer_newer_driver()
        server = transport.listen(spec.address, node.port) if spec.node == 0 else None
    except (OSError, KeyError, ValueError, secrets.SecretError) as error:
        is_known = isinstance(error, (secrets.SecretError, staging.StagingError))
        words = str(error) if is_known else f"cannot read the job's spec: {error!r}"
        reason = error.reason if isinstance(error, staging.StagingError) else "error"
        cause = {"rank": None, "kind": reason if reason == staging.SUPERSEDED else "config", "message": words}
        verdict = ExitReport("failed", reason, cause)
        if order is None or node is None:
            print(words, file=sys.stderr, flush=True)
            return ending.report(verdict)
        pump = LogRelay(root, form=order.log or "plain")
        pump.write(words)
        code = ending.report(verdict)
        _end_log(pump, node.rank, is_final=not ending.asks_again(code))
        return code
    pump, helpers = LogRelay(Path(spec.root) / "log", form=order.log or "plain"), _helpers(order, spec, root)
    for helper in (pump, *helpers):
        helper.start()
    try:
        verdict = agent.supervise(spec, server, stops)
    except OSError as error:  # a full disk
        cause = {"rank": None, "kind": "lost", "message": f"the node cannot be supervised: {error}"}
        verdict = ExitReport("failed", "node_failure", cause)
    finally:
        pump.finish()
    code = ending.report(verdict)  # before the last copies, which may exceed the platform's time
    for helper in helpers:
        helper.finish()
    _end_log(pump, spec.node, is_final=verdict.reason != "preempted" and not ending.asks_again(code))
    return code


def _end_log(pump: LogRelay, node: int, *, is_final: bool) -> None:
    """Tell log followers that the log is complete, if `is_final`; else the platform may start the container again."""
    counted = {"node": node, "final": is_final, "life": pump.life, "lines": pump.count}
    events.emit("end", f"node {node} has ended", **counted)


def _helpers(order: ContainerOrder, spec: AgentSpec, root: Path) -> list[Sweeper | staging.Note | Carrier]:
    """Return the threads that run in addition to the agent and the log relay."""
    found: list[Sweeper | staging.Note | Carrier] = [
        Carrier(root / each.place, each.uri, by=f"node-{spec.node}") for each in order.carried
    ]
    if spec.node != 0:
        return found
    job, is_task = order.job, order.job.run.is_own
    if is_task or order.kept_in:  # a script's checkpoint folder belongs to the script
        found.append(staging.Note(_note_folder(order, root), job.job, job.attempt, spec.used_s, order.kept_in))
    if is_task and order.places.copied_to:
        found.append(Sweeper(Path(spec.environment["CLOUDTRAIN_CHECKPOINT_DIR"]), order.places.copied_to))
    return found


def _note_folder(order: ContainerOrder, root: Path) -> Path:
    """Return the folder for the note on used time: the checkpoint folder, unless a store keeps the note."""
    return root / (order.places.own if order.kept_in else order.places.checkpoints)


def account(verdict: ExitReport) -> str:
    """Return the exit report: an event line of at most FAILURE_BYTES, which platforms pass on whole.

    The frame of the user's code has priority, then the lines printed last, then more of the traceback. A long message
    is cut further if the frame does not fit.
    """
    error = verdict.error or {}
    frames, end = tracebacks.frames_of(str(error.get("traceback") or ""))
    frames = [[_short(line, LINE_BYTES * (1 if place else 2)) for place, line in enumerate(each)] for each in frames]
    least = len(json.dumps("\n".join(tracebacks.chosen(frames, lambda lines: False))))
    for size in MESSAGE_BYTES:
        words, fields = _words(verdict, error, size)
        room = FAILURE_BYTES - len(events.format_line("ended", words, {**fields, "lines": []}).encode())
        if room >= least:
            break
    lines = [_short(str(line), LINE_BYTES) for line in error.get("lines") or ()]
    left = room - len(json.dumps(_last(lines, min(2 * LINE_BYTES, room - least))))
    end = _last(end, left - least, "\n".join)
    found = tracebacks.chosen(frames, lambda lines: len(json.dumps("\n".join([*lines, *end]))) <= left)
    text = "\n".join([*found, *end])
    lines = _last(lines, room - len(json.dumps(text)))
    return events.format_line("ended", words, {**fields, "traceback": text, **({"lines": lines} if lines else {})})


def _words(verdict: ExitReport, error: Mapping[str, Any], message_bytes: int) -> tuple[str, dict[str, Any]]:
    """Return the exit report's text, and its fields without the traceback and the lines printed last."""
    kind = _short(str(error["type"]), TYPE_BYTES) if error.get("type") else error.get("type")
    message = _short(str(error.get("message") or f"{verdict.state} ({verdict.reason})"), message_bytes)
    fields: dict[str, Any] = {key: getattr(verdict, key) for key in ("state", "reason", "resumable", "restarts")}
    fields |= {"rank": error.get("rank"), "kind": error.get("kind"), "type": kind, **contract.sign_fields(error)}
    return failure(error.get("rank"), kind, message), fields | {"message": message, "traceback": ""}


def _last(parts: list[str], size: int, joined: Callable[[list[str]], Any] = list) -> list[str]:
    """Return the longest tail of the parts whose JSON has at most `size` bytes."""
    while parts and len(json.dumps(joined(parts))) > size:
        parts = parts[1:]
    return parts


def _short(text: str, size: int) -> str:
    """Return the beginning of the text as a single line whose JSON has at most `size` bytes."""
    text = " ".join(text.split("\n"))[:size]
    while len(json.dumps(text)) > size:
        text = text[: len(text) * 9 // 10]
    return text


def _order(root: Path, source: str, given: list[str]) -> ContainerOrder:
    """Return the container order, with the platform's paths from the command line. Raises ValueError."""
    name = source.removeprefix("env:")
    if source.startswith("gs://"):
        return staging.with_lead_back(staging.order(source, given[0].removeprefix("fence=")), time.time())
    text = (root / source).read_bytes() if name == source else base64.b64decode(os.environ[name])
    order = ContainerOrder.load(json.loads(text))
    if name != source:  # values known only at submission
        sent = json.loads(base64.b64decode(os.environ.get("CLOUDTRAIN_SENT", "")) or b"{}")
        order = replace(order, token=sent.get("token", order.job.job), sent_s=sent.get("sent_s"))
        order = replace(order, claim_uri=sent.get("claim_uri"))
        if isinstance(order.secrets, contract.KeyVaultSecrets):
            order = replace(order, secrets=replace(order.secrets, vault=sent.get("vault")))
    return staging.with_lead_back(replace(order, places=_placed(order.places, root, given)), time.time())


def _placed(places: Places, root: Path, given: list[str]) -> Places:
    """Return the places with the platform's paths of the command line. Raises KeyError at an unknown place."""
    paths, inputs = vars(places), dict(places.inputs)
    for each in given:
        place, _, path = each.partition("=")
        if place.startswith("input."):
            inputs[place.partition(".")[2]] = path
        else:
            with contextlib.suppress(OSError):  # a link, because rendered files refer to the usual path only
                (root / paths[place]).symlink_to(path, target_is_directory=True)
            paths = {**paths, place: path}
    return Places(**{**paths, "inputs": inputs})


def _agent_spec(order: ContainerOrder, root: Path, node: nodes.Node) -> AgentSpec:
    """Return the agent's spec for this node. Raises ContractError if no send has completed the order."""
    if not order.token:
        raise contract.ContractError("the container order lacks `token`")
    places, job = order.places, order.job
    own, checkpoints, output = root / places.own, root / places.checkpoints, root / places.output
    for folder in (checkpoints, output):
        folder.mkdir(parents=True, exist_ok=True)
    inputs = {f"CLOUDTRAIN_INPUT_{name.upper()}": str(root / path) for name, path in places.inputs.items()}
    folders = {"CLOUDTRAIN_CHECKPOINT_DIR": str(checkpoints), "CLOUDTRAIN_OUTPUT_DIR": str(output)}
    used_s = staging.used_s(_note_folder(order, root), job.job, job.attempt, order.kept_in)
    left_s = max(order.max_duration_s - used_s, LEAST_S)
    return AgentSpec(
        job=job,
        max_duration_s=left_s,
        deadline_s=max(order.deadline_s - used_s, left_s * order.deadline_s / order.max_duration_s),
        used_s=order.max_duration_s - left_s,
        limit_reason=order.limit_reason,
        grace_s=order.grace_s,
        join_timeout_s=order.join_timeout_s,
        token=order.token,
        node=node.rank,
        address=node.address,
        head=(node.head, node.port),
        root=str(own),
        bundle=str(root / places.bundle),
        sha256=order.bundle_sha256,
        python=sys.executable,
        environment={**toolkit.variables(root, own, job.run, os.environ), **order.environment, **inputs, **folders},
        secrets=secrets.fetch(order.secrets),
        # If the platform shares no folder between running nodes, a script's start gathers files from all nodes.
        copies=str(own / "fetched.json") if order.gathers else None,
        replicates=False,
        workdir=WORKDIR,
        store=order.environments_in or places.environments,
    )


def _prefer_newer_driver() -> None:
    """Apply the image's own start-up script: an image newer than the machine's driver contains a newer driver."""
    bash = shutil.which("bash")
    if bash is None or not CUDA_COMPAT.exists():
        return
    script = f'. {CUDA_COMPAT} >&2; printf %s "$LD_LIBRARY_PATH"'
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run([bash, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        if found:
            os.environ["LD_LIBRARY_PATH"] = found


@dataclass
class _ExitTarget:
    """The place of the exit report for the platform or the launcher: a file, an object in a bucket, or the log.

    `codes`: the exit codes that tell the platform whether a restart may help, None if the platform uses no such codes.
    """

    failure: Path | None = None
    uri: str | None = None
    codes: contract.ExitCodes | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)  # the report of an earlier container

    @classmethod
    def of(cls, order: ContainerOrder, root: Path) -> _ExitTarget:
        """Return the places and codes that the container order names."""
        place = order.places.failure
        return cls(root / place if place else None, order.ended_uri, order.exit_codes)

    def begin(self, node: int) -> None:
        """Add the node to the exit report's uri, and delete the report of an earlier container."""
        if self.uri is not None:
            self.uri = f"{self.uri}-{node}.json"
            self.earlier = staging.retract(self.uri)

    def asks_again(self, code: int) -> bool:
        """Return whether the exit code asks the platform for a new start."""
        return self.codes is not None and code == self.codes.again

    def report(self, verdict: ExitReport) -> int:
        """Write the exit report; return the container's exit code."""
        if self.uri is not None and self.uri.endswith(".json"):
            staging.report(self.uri, verdict)
        if verdict.state == "succeeded":
            return EXIT_DONE
        with contextlib.suppress(OSError):  # a full disk: the log has the error
            if self.failure is None:
                print(account(verdict), flush=True)
            else:
                self.failure.parent.mkdir(parents=True, exist_ok=True)
                self.failure.write_text(account(verdict))
        if self.codes is not None:
            kind = (verdict.error or {}).get("kind")
            is_mended = verdict.state == "failed" and kind in self.codes.mended_by_a_start
            may_mend = is_mended or verdict.reason in ("preempted", "node_failure")
            sign = contract.sign_of(verdict.error)
            is_again = sign is not None and sign == contract.sign_of(self.earlier)
            return self.codes.again if may_mend and not is_again else self.codes.permanent
        return exit_code(verdict)
