"""The segments of a sweep on one node: a training of its own on a slot's GPUs, cores and folders.

`JobSpec.sweep` holds `search` (the JSON form of search.Search), `slots` (ranks of a trial on a machine), `instances`
(machines of a trial), `nproc_per_node` (ranks of a node, one a GPU), `metric` (None: that of training.monitor), `keep`
(trials whose checkpoints stay at the end), `kind` (script or module; absent: a task), and `until`: a segment ends at a
`rung`, or at the `end` of a script whose steps are unknown.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import atomic_json, events, processes
from ..checkpoints import folder as folders
from ..contract import JobSpec
from ..rank import heartbeat
from .script_trial import ScriptTrial, ended_at
from .search import BATCH, COPYING, Segment, script_args, steps_of

_LOOPBACK = "127.0.0.1"
_VARIABLE = "env."  # the beginning of a key whose value is an environment variable
GRACE_S = 120.0  # for the save of a segment after SIGTERM, as torchrun has in a job of its own (agent/boot.py)
# The variables of the controller's own rank. A segment's torchrun sets its own; a training of one rank needs none.
_OUTER = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_.*|TORCHELASTIC_.*|CLOUDTRAIN_(RESTART|RESUME_PATH)"
)


@dataclass(frozen=True)
class Slot:
    """A part of a node for one segment: the visible GPUs (None without GPUs) and the cores."""

    gpus: str | None
    cores: frozenset[int]


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a trial meet: a key of the job's store, at which the first writes its address and port."""

    key: str
    rank: int  # of the machine in the trial
    nodes: int


@dataclass(frozen=True)
class SegmentEnd:
    """The end of a segment."""

    trial: int
    rung: int
    state: str  # paused, done, failed, or saved: interrupted, and begun again later
    step: int
    value: float | None = None
    message: str = ""
    start_s: float | None = None  # from the launch to the first step, None without a step
    step_s: float | None = None  # a unit of the rungs (step, sample or epoch), None without a step
    seconds: float = 0.0  # in the slot
    is_fault: bool = False  # killed, or silent, without an error of the training


def slots_of(sweep: Mapping[str, Any]) -> list[Slot]:
    """Return the slots of this node; each has an equal share of the GPUs and cores."""
    count = max(1, sweep["nproc_per_node"] // sweep["slots"])
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    cpus = [frozenset(cores[(n * share) % len(cores) :][:share]) for n in range(count)]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(sweep["nproc_per_node"]))))
    has_gpus = "CUDA_VISIBLE_DEVICES" in os.environ or Path("/dev/nvidia0").exists()
    gpus = [each for each in listed.split(",") if each] if has_gpus else []
    width = sweep["slots"]
    return [Slot(",".join(gpus[n * width : (n + 1) * width]) if gpus else None, cpus[n]) for n in range(count)]


def place_of(checkpoints: Path) -> str:
    """Return the identity of the folder: machines that share the folder have the same. Raises OSError."""
    mark = checkpoints / ".place"
    if not mark.exists():  # a name for a whole file: a crash leaves no empty mark, and of two machines one is first
        own = uuid.uuid4().hex
        partial = mark.with_name(f"{mark.name}.{own}")
        partial.write_text(own)
        try:
            with contextlib.suppress(FileExistsError):
                _linked(str(partial), str(mark))
        finally:
            partial.unlink()
    return mark.read_text()


def trial_folder(checkpoints: Path, trial: int) -> Path:
    """Return the folder of a trial's checkpoints."""
    return checkpoints / "trials" / str(trial)


def trial_spec(spec: JobSpec, segment: Segment) -> JobSpec:
    """Return the spec of a segment: the sweep's, with the trial's values, and the pause at the segment's end."""
    assert spec.sweep is not None
    # One checkpoint is enough for a pause. A mirror has one place for a job, and would mix the trials.
    checkpoint = replace(spec.checkpoint, keep=1, mirror=None, resume="auto")
    run, own = replace(spec.run, kind=spec.sweep.get("kind", "task")), {}
    if run.kind == "task":
        own = _sections(spec, spec.sweep["search"]["rungs"][-1], segment)
    else:
        run = replace(run, args=tuple(script_args(run.args, segment.values)))
    machines = spec.sweep["instances"]
    alone = replace(spec, attempt=1, nodes=machines, nproc_per_node=spec.sweep["slots"], notices=None, sweep=None)
    return replace(alone, run=run, checkpoint=checkpoint, **own)


def _sections(spec: JobSpec, last: int, segment: Segment) -> dict[str, Any]:
    """Return the sections `training` and `params` of a task's trial; `last` is the last rung."""
    sections: dict[str, Any] = {"training": dict(spec.training or {}), "params": dict(spec.params or {})}
    for key, value in segment.values.items():
        if key.startswith(_VARIABLE):
            continue
        *above, name = key.split(".")
        place = sections
        for part in above:
            place[part] = place = dict(place.get(part) or {})
        place[name] = value
    training = sections["training"]
    until = None if segment.until_step >= last else segment.until_step
    if training.get("epochs"):  # rungs count epochs
        training["pause_epochs"] = until
        return sections
    if BATCH in segment.values:
        training["max_steps"] = steps_of(last, segment.values)
    training["pause_at"] = None if until is None else steps_of(until, segment.values)
    return sections


def metric_of(spec: JobSpec) -> str:
    """Return the name of the sweep's metric."""
    monitor = (spec.training or {}).get("monitor") or {}
    return str((spec.sweep or {}).get("metric") or monitor.get("metric") or "loss")


class _Running:
    """A segment's process, its log, and its folders. `is_first`: the trial's first machine, which has its results."""

    def __init__(self, segment: Segment, slot: int, work: Path, timeout_s: float, *, is_first: bool) -> None:
        self.segment, self.slot, self.is_first = segment, slot, is_first
        self.result = work / "result"
        self.log = work / "log" / "rank-0.log"
        self.read, self.rest = 0, b""
        self.began_s = time.monotonic()
        self.first_s: float | None = None
        self.first_step = segment.from_step
        self.beats = heartbeat.Watch(self.result, timeout_s, self.began_s)
        self.child: subprocess.Popen[bytes]
        self.told_s: float | None = None
        self.script: ScriptTrial | None = None
        self.is_pausing = False  # a script that has reached its rung

    def relay(self) -> None:
        """Copy the new lines of the log to this node's log, each with the trial's number."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.read)
                found = file.read()
        except OSError:
            return
        self.read += len(found)
        *lines, self.rest = (self.rest + found).split(b"\n")
        for line in lines:
            text, fields = events.parse(line.decode(errors="replace"))
            text = f"[{self.segment.trial}] {text}"
            if fields is not None:
                begins = "start" if self.script is None else "step"
                if fields["e"] == begins and self.first_s is None:
                    self.first_s, self.first_step = time.monotonic(), int(fields.get("step") or 0)
                if self.script is not None:
                    self.script.note(fields)
                name = fields.pop("e")
                text = events.format_line(name, text, {**fields, "trial": self.segment.trial})
            os.write(1, text.encode()[: events.MAX_BYTES - 1] + b"\n")


class SlotRunner:
    """Runs segments on the slots of this node. `torchrun` and `shell` are the modules that start ranks."""

    def __init__(self, spec: JobSpec, torchrun: str, shell: str, checkpoints: Path, store: Any = None) -> None:
        assert spec.sweep is not None
        self._store, self.place = store, place_of(checkpoints)
        self._metric = metric_of(spec)
        self._spec, self._torchrun, self._shell, self._checkpoints = spec, torchrun, shell, checkpoints
        self._sweep, self._slots = spec.sweep, slots_of(spec.sweep)
        self.slots = len(self._slots)
        self._keeps_rungs = spec.sweep["search"]["algorithm"] in COPYING
        own = Path(os.environ.get("CLOUDTRAIN_RESULT_DIR") or checkpoints / ".work")
        self._work = own / "trials"
        self._running: list[_Running] = []
        self._known: list[SegmentEnd] = []  # of trials whose scripts have ended: nothing to start

    def start(self, segment: Segment, meeting: Meeting | None = None) -> None:
        """Start the segment on a free slot; a script that has ended by itself is not started again.

        `meeting`: of a trial on several machines.
        """
        is_script = self._sweep.get("kind", "task") != "task"
        if is_script and (found := ended_at(trial_folder(self._checkpoints, segment.trial))):
            step, value = found
            message = f"the script had ended at step {step}, and is not started again; value {value:.6g}"
            self._known.append(SegmentEnd(*segment.key, "done", step, value, message))
            return
        slot = min(set(range(self.slots)) - {each.slot for each in self._running})
        work = self._work / f"{segment.trial}-{segment.rung}"
        shutil.rmtree(work, ignore_errors=True)
        for name in ("log", "result"):
            (work / name).mkdir(parents=True)
        if segment.is_new:
            shutil.rmtree(trial_folder(self._checkpoints, segment.trial), ignore_errors=True)
        if segment.source is not None:
            copy_trial(self._checkpoints, segment)
        folder = trial_folder(self._checkpoints, segment.trial)
        folder.mkdir(parents=True, exist_ok=True)
        spec = trial_spec(self._spec, segment)
        atomic_json.write_json(work / "spec.json", spec.dump())
        timeout_s = self._spec.hang_timeout_s or float("inf")
        is_first = meeting is None or meeting.rank == 0
        running = _Running(segment, slot, work, timeout_s, is_first=is_first)
        script = running.script = None if spec.run.is_own else ScriptTrial(spec.run, work, folder, self._metric)
        values = segment.values.items()
        own = {key.removeprefix(_VARIABLE): str(value) for key, value in values if key.startswith(_VARIABLE)}
        environment = {**self._environment(work, folder, self._slots[slot]), **own}
        words = [spec.run.kind, *([] if script is None else script.words())]
        with (work / "log" / "segment.log").open("wb") as log:
            running.child = subprocess.Popen(
                self._command(work, words, meeting),
                env=environment if script is None else {**environment, **self._alone(meeting), **script.environment()},
                cwd=work,  # the shell goes to the code
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.sched_setaffinity(running.child.pid, self._slots[slot].cores)
        self._running.append(running)

    def _command(self, work: Path, words: list[str], meeting: Meeting | None) -> list[str]:
        """Return the command of a segment; a trial of a single rank needs no torchrun, which imports torch again.

        `words`: the kind of the program, and a script's name and arguments. torchrun takes `$` for macros.
        """
        python, nproc = [sys.executable, "-u", "-m"], self._sweep["slots"]
        if nproc == 1 and meeting is None:
            return [*python, self._shell, *words]
        own, (nodes, rank) = _LOOPBACK, (1, 0) if meeting is None else (meeting.nodes, meeting.rank)
        head, port = own, _free_port(own)
        if meeting is not None:
            own = os.environ.get("CLOUDTRAIN_ADDRESS") or own
            if rank == 0:
                self._store.set(meeting.key, f"{own} {_free_port(own)}")
            head, port = self._store.get(meeting.key).decode().split()
        meet = ["--rdzv-backend=static", f"--master-addr={head}", f"--master-port={port}", "--max-restarts=0"]
        apart = [f"--local-addr={own}", f"--shutdown-timeout={GRACE_S:.0f}", f"--log-dir={work}/torchrun"]
        return [
            *(*python, self._torchrun, f"--nnodes={nodes}", f"--node-rank={rank}", f"--nproc-per-node={nproc}", *meet),
            *(*apart, "-m", self._shell, "--", *(word.replace("$", "$$") for word in words)),
        ]

    def _alone(self, meeting: Meeting | None) -> dict[str, str]:
        """Return torchrun's variables for a script that runs on a single rank, without torchrun."""
        if self._sweep["slots"] > 1 or meeting is not None:
            return {}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return {**ranks, "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(_free_port(_LOOPBACK))}

    def _environment(self, work: Path, folder: Path, slot: Slot) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not _OUTER.fullmatch(key)}
        threads = max(1, len(slot.cores) // self._sweep["slots"])
        with_gpus = {} if slot.gpus is None else {"CUDA_VISIBLE_DEVICES": slot.gpus}
        return {
            **kept,
            **with_gpus,
            "OMP_NUM_THREADS": str(min(threads, int(kept.get("OMP_NUM_THREADS") or threads))),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CLOUDTRAIN_CODE_DIR": str(Path.cwd()),
            "CLOUDTRAIN_SPEC": str(work / "spec.json"),
            "CLOUDTRAIN_RESULT_DIR": str(work / "result"),
            "CLOUDTRAIN_LOG_DIR": str(work / "log"),
            "CLOUDTRAIN_CHECKPOINT_DIR": str(folder),
            "CLOUDTRAIN_OUTPUT_DIR": str(folder / "output"),
        }

    def stop(self) -> None:
        """Ask all segments to save and to leave, once; kill segments that stay longer than their grace."""
        for each in self._running:
            _ask_to_leave(each)

    def drop(self, *, by_force: bool) -> None:
        """Kill a trial's part whose ranks have left, and whose torchrun waits for a failed part on another machine.

        `by_force`: also a part whose ranks still write.
        """
        for each in self._running:
            if by_force or heartbeat.left_code(each.result, self._sweep["slots"]) is not None:
                processes.kill(each.child.pid, signal.SIGKILL)

    def look(self) -> list[SegmentEnd]:
        """Relay new lines; return the segments that have ended since the last call."""
        ended, self._known = self._known, []
        for each in list(self._running):
            code = each.child.poll()
            each.relay()
            if code is None:
                if each.script is not None and (each.is_pausing or self._is_due(each)):
                    each.is_pausing = each.is_pausing or each.told_s is None
                    _ask_to_leave(each)
                if hangs := each.beats.look(time.monotonic()):
                    print(f"[{each.segment.trial}] made no step for {hangs[0].silent_s:.0f} s: killed", flush=True)
                    processes.kill(each.child.pid, signal.SIGKILL)
                continue
            self._running.remove(each)
            left = heartbeat.left_code(each.result, self._sweep["slots"])
            ended.append(self._end(each, code if left is None else left))  # torchrun may fail after its ranks
        for end in ended:
            if self._keeps_rungs and end.state == "paused":
                keep_rung(self._checkpoints, end.trial, end.step)
        return ended

    def finish(self, exported: int | None, kept: Sequence[int] | None) -> None:
        """Copy the output of the trial to the job's, and delete the checkpoints of all trials but those to keep.

        None: export nothing, delete nothing. Raises OSError, CheckpointError.
        """
        if exported is not None and (target := os.environ.get("CLOUDTRAIN_OUTPUT_DIR")):
            folder = trial_folder(self._checkpoints, exported)
            if (folder / "output").is_dir():
                shutil.copytree(folder / "output", target, dirs_exist_ok=True)
            if (folder / folders.BEST).exists():  # the weights of the best evaluation, not of the last
                from ..checkpoints import weights

                ending = {"torch": "pt", "safetensors": "safetensors"}[self._spec.checkpoint.export]
                weights.write(Path(target) / f"model.{ending}", weights.from_checkpoint(folder))
        if kept is None:
            return
        for folder in (self._checkpoints / "trials").glob("*"):
            if not folder.name.isdecimal() or int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._checkpoints / "rungs", ignore_errors=True)

    def end(self) -> None:
        """Do nothing: the driver ends with the process."""

    def _is_due(self, each: _Running) -> bool:
        """Return whether a script has reached its rung, with a metric; on the last rung a script ends by itself."""
        assert each.script is not None
        until, script = each.segment.until_step, each.script
        is_last = until >= self._sweep["search"]["rungs"][-1]
        return not is_last and script.has_begun and script.value is not None and script.step >= until

    def _end(self, each: _Running, code: int) -> SegmentEnd:
        """Return how the trial's segment has ended, or its part on a machine that is not the trial's first."""
        was_told, outcome = each.told_s is not None, atomic_json.read_json(each.result / "outcome.json") or {}
        step, state = int(outcome.get("step") or 0), outcome.get("outcome", "failed")
        if each.script is not None:
            each.script.close(ended=each.is_first and not code and not was_told)
            step = each.script.step
            state = "paused" if each.is_pausing else "failed" if code or was_told else "done"
        now_s = time.monotonic()
        end = functools.partial(SegmentEnd, *each.segment.key, seconds=now_s - each.began_s)
        if not each.is_first:
            step, state = 0, "done" if code in (0, 75) else "failed"
        if state == "failed" and was_told:
            state = "saved"  # the stop request came before the training could save
        if state == "failed":
            message, is_fault = _cause(each, code)
            return end(state, step, message=message, is_fault=is_fault)
        if state == "saved" or not each.is_first:
            return end(state, step)
        if each.script is not None:
            return self._end_of_script(each, each.script, end, state, now_s)
        metric, monitor = self._metric, (self._spec.training or {}).get("monitor") or {}
        value = (outcome.get("metrics") or {}).get(metric)
        if metric == monitor.get("metric") and outcome.get("best") is not None:
            value = outcome["best"]  # with `patience` or `keep_best` the best evaluation counts
        if not isinstance(value, int | float):
            known = ", ".join(sorted(outcome.get("metrics") or {})) or "no metric"
            return end("failed", step, message=f"the evaluation has no {metric}; it has {known}")
        start_s = step_s = None
        if each.first_s is not None and step > each.first_step:
            units = (step - each.first_step) * each.segment.until_step / step  # of the rungs
            start_s, step_s = each.first_s - each.began_s, (now_s - each.first_s) / units
        return end(state, step, float(value), start_s=start_s, step_s=step_s)

    def _end_of_script(
        self, each: _Running, script: ScriptTrial, end: Callable[..., SegmentEnd], state: str, now_s: float
    ) -> SegmentEnd:
        if script.value is None:
            known = ", ".join(sorted(script.names)) or "no figures"
            message = f"the output has no {self._metric}, it has {known}: print the metric, or name its pattern in "
            message += "`progress.metrics`"
            return end("failed", script.step, message=message)
        start_s, step_s, until, message = None, None, each.segment.until_step, ""
        if state == "done" and self._sweep["until"] == "rung" and script.step < until:
            message = f"warning: the script ended by itself at step {script.step}, before step {until}: the trial is "
            message += f"done; value {script.value:.6g}"
            until = max(script.step, each.segment.from_step + 1)
        if self._sweep["until"] == "end":  # the whole script is the step
            start_s, step_s = 0.0, now_s - each.began_s
        elif each.first_s is not None:
            steps = until - each.segment.from_step
            start_s, step_s = each.first_s - each.began_s, (now_s - each.first_s) / steps
        return end(state, script.step, script.value, message, start_s, step_s)


def _ask_to_leave(each: _Running) -> None:
    """Send SIGTERM, once; kill a process that stays longer than its grace."""
    now_s = time.monotonic()
    if each.told_s is None:
        each.told_s = now_s
        processes.kill(each.child.pid, signal.SIGTERM)
    elif now_s - each.told_s > GRACE_S:
        processes.kill(each.child.pid, signal.SIGKILL)


def copy_trial(checkpoints: Path, segment: Segment) -> None:
    """Replace the trial's checkpoint by the source's of the last rung, unless done before. Raises OSError."""
    folder = trial_folder(checkpoints, segment.trial)
    mark = folder / f"copied-{segment.rung}"
    if mark.exists():
        return
    assert segment.source is not None
    step = f"step-{segment.from_step:08d}"
    partial = folder.with_name(f"{segment.trial}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    source = checkpoints / "rungs" / str(segment.source) / step
    shutil.copytree(source, partial / step, copy_function=_linked)
    (partial / mark.name).touch()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def keep_rung(checkpoints: Path, trial: int, step: int) -> None:
    """Keep a second name of the trial's checkpoint of a rung, for copies: the trial itself may go on (pbt)."""
    name = f"step-{step:08d}"
    kept = checkpoints / "rungs" / str(trial)
    if (kept / name).exists() or not (trial_folder(checkpoints, trial) / name).is_dir():
        return
    partial = kept / f"{name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(trial_folder(checkpoints, trial) / name, partial, copy_function=_linked)
    partial.rename(kept / name)


def _linked(source: str, target: str) -> None:
    """Give the file a second name. Raises FileExistsError; copies on a file system without links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _cause(each: _Running, code: int) -> tuple[str, bool]:
    """Return why the segment failed, and whether no rank has recorded an error of its own."""
    found = [f for path in sorted(each.result.glob("rank-*.json")) if (f := atomic_json.read_json(path))]
    found.sort(key=lambda f: (bool(f.get("peer_lost")), f.get("time_s", 0.0)))
    if found:
        words = f"rank {found[0]['rank']}: {found[0]['type']}: {found[0]['message']}"
        return words[:1000], bool(found[0].get("peer_lost"))
    return f"ended with code {code}", True


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
