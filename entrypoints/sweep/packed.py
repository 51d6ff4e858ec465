"""The controller of a packed sweep: one process a node; the first one drives, and each runs segments on its slots.

The driver calls `search.decide` over the journal beside the checkpoints, and sends each segment to a node. The time of
the job is the money: a segment starts only if it is expected to end before the deadline, and if afterwards enough time
is left to bring the furthest trial to its end. At a stop request or at the deadline all segments save, and the next
start goes on from the journal. Exit codes as the trainer's: 0 done, 75 saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import atomic_json, events
from ..contract import JobSpec
from ..errors import TaskError
from ..rank import heartbeat, variables
from .search import HOPELESS, MOST_TRIES, Allowance, Search, Segment, best, decide, steps_of
from .segments import SegmentEnd, SlotRunner, trial_folder

NAME = "sweep.jsonl"  # of the journal
EXIT_DONE, EXIT_SAVED = 0, 75
LOOK_S = 0.05
MARGIN = 1.5  # of the measured pace: a segment's highest expected time
JOIN_S = 300.0  # until all nodes have said how many slots they have
KEEP = 5  # trials whose checkpoints stay at the end

# A stop request, before the deadline's own.
_stops: list[int] = []


def main(torchrun: str, shell: str) -> int:
    """Run this node's part of the sweep; return the exit code. The arguments are modules that start ranks."""
    signal.signal(signal.SIGTERM, lambda signum, frame: _stops.append(signum))
    deadline_s = variables.deadline_s(os.environ)
    spec = JobSpec.load(json.loads(Path(os.environ["CLOUDTRAIN_SPEC"]).read_text()))
    checkpoints = Path(os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints").absolute()
    checkpoints.mkdir(parents=True, exist_ok=True)
    node, nodes = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    own = SlotRunner(spec, torchrun, shell, checkpoints)
    if node:
        return _serve(own, _store(nodes), node)
    others: list[_Node] = [_RemoteNode(_store(nodes), number) for number in range(1, nodes)] if nodes > 1 else []
    with contextlib.closing(Journal(checkpoints)) as journal:
        return _Driver(spec, checkpoints, journal, [own, *others], deadline_s).drive()


def _store(nodes: int) -> Any:
    """Return the store that all nodes share; the driver's node hosts the store."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_head = os.environ.get("RANK") == "0"
    # With torchrun's static rendezvous the agent of node 0 may host the store already (TORCHELASTIC_USE_AGENT_STORE).
    hosts = is_head and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(address, port, nodes, hosts, timeout=timedelta(seconds=JOIN_S), wait_for_workers=False)


@dataclass
class SweepState:
    """What a packed sweep knows of its segments: the state after the last whole line of the journal."""

    results: dict[tuple[int, int], float | None] = field(default_factory=dict)  # by (trial, rung)
    open: dict[tuple[int, int], Segment] = field(default_factory=dict)  # begun, without a result
    starts_s: list[float] = field(default_factory=list)  # of each result, from the launch to the first step
    paces_s: list[float] = field(default_factory=list)  # of each result, seconds a step
    homes: dict[int, int] = field(default_factory=dict)  # the node with a trial's checkpoint
    sources: set[int] = field(default_factory=set)  # the trials that others were copied from

    def apply(self, line: dict[str, Any]) -> None:
        """Apply a line: the start of a segment, or its end with a result."""
        if line["e"] == "start":
            segment = Segment(**line["segment"])
            self.open[segment.key] = segment
            self.homes[segment.trial] = line["node"]
            self.sources |= set() if segment.source is None else {segment.source}
            return
        key = line["trial"], line["rung"]
        self.open.pop(key, None)
        self.results[key] = line["value"]
        if line["start_s"] is not None and line["step_s"] is not None:
            self.starts_s.append(line["start_s"])
            self.paces_s.append(line["step_s"])


class Journal:
    """The journal in a folder, open for further lines; `state` includes all lines.

    One JSON object a line, each durable before the next decision. A crash may tear the last line, which is ignored and
    cut.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.state = folder / NAME, SweepState()
        is_new = not self.path.exists()
        self._file = self.path.open("ab+")
        if is_new:
            atomic_json.sync(folder)
        self._file.seek(0)
        whole = self._file.read().rpartition(b"\n")
        for line in whole[0].splitlines():
            self.state.apply(json.loads(line))
        self._file.truncate(len(whole[0] + whole[1]))

    def add(self, event: str, **fields: Any) -> None:
        """Append a line, make the line durable, and apply it. Raises OSError."""
        line = {"e": event, **fields}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.state.apply(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _RemoteNode:
    """Another node, over the store, as SlotRunner: numbered orders one way, numbered reports the other."""

    def __init__(self, store: Any, node: int) -> None:
        self._store, self._node, self._sent, self._read = store, node, 0, 0
        self._is_stopped = False
        self.slots = int(store.get(f"slots/{node}"))

    def start(self, segment: Segment) -> None:
        self._send({"do": "start", "segment": asdict(segment)})

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._send({"do": "stop"})

    def look(self) -> list[SegmentEnd]:
        found = []
        while self._store.check([key := f"report/{self._node}/{self._read}"]):
            found.append(SegmentEnd(**json.loads(self._store.get(key))))
            self._read += 1
        return found

    def end(self) -> None:
        self._send({"do": "end"})
        self._store.get(f"left/{self._node}")

    def _send(self, order: dict[str, Any]) -> None:
        self._store.set(f"order/{self._node}/{self._sent}", json.dumps(order))
        self._sent += 1


_Node = SlotRunner | _RemoteNode


def _serve(own: SlotRunner, store: Any, node: int) -> int:
    """Run the driver's orders on this node until the driver ends; return the exit code."""
    store.set(f"slots/{node}", str(own.slots))
    done, told, is_stopped = 0, 0, False
    while True:
        while store.check([key := f"order/{node}/{done}"]):
            asked = json.loads(store.get(key))
            done += 1
            if asked["do"] == "end":
                store.set(f"left/{node}", "1")
                return EXIT_SAVED if is_stopped else EXIT_DONE
            if asked["do"] == "start":
                own.start(Segment(**asked["segment"]))
            is_stopped = is_stopped or asked["do"] == "stop"
        if _stops or is_stopped:
            own.stop()
        for each in own.look():
            store.set(f"report/{node}/{told}", json.dumps(asdict(each)))
            told += 1
        heartbeat.beat()
        time.sleep(LOOK_S)


class _Driver:
    """The driver: the journal, and the running segments by node."""

    def __init__(
        self, spec: JobSpec, checkpoints: Path, journal: Journal, nodes: Sequence[_Node], deadline_s: float | None
    ) -> None:
        assert spec.sweep is not None
        self._spec, self._sweep, self._checkpoints, self._journal = spec, spec.sweep, checkpoints, journal
        self._nodes, self._deadline_s, self._state = nodes, deadline_s, journal.state
        total = sum(node.slots for node in nodes)
        search = Search.load(spec.sweep["search"])
        self._search = replace(search, parallel=min(search.parallel, total))
        self._running: dict[tuple[int, int], tuple[Segment, int]] = {}
        self._pending = list(journal.state.open.values())  # interrupted at the last end, in the order of their starts
        if self._has_no_result():  # the user may have mended the task since
            journal.state.results.clear()
        self._saved = ""  # why the sweep leaves early
        self._tries: dict[tuple[int, int], int] = {}  # of killed segments
        self._fault = ""  # the first failure, if no segment has a result

    def drive(self) -> int:
        """Run the search to its end or to a stop; return the exit code. Raises TaskError if all trials fail."""
        while True:
            if _stops and not self._saved:
                self._saved = "sigterm"
            if self._saved or (len(self._state.results) >= HOPELESS and self._has_no_result()):
                for node in self._nodes:
                    node.stop()
            else:
                self._start_due()
            if not self._running:
                break
            for node in self._nodes:
                for end in node.look():
                    self._note(end)
            heartbeat.beat()
            time.sleep(LOOK_S)
        if self._has_no_result():
            for node in self._nodes:
                node.end()
            raise TaskError(f"no trial has a result; the first failure: {self._fault or 'see the log'}")
        if not self._saved and (self._pending or decide(self._search, self._state.results, ())):
            self._saved = "deadline"  # the search could go on with more time
        self._finish()
        return EXIT_SAVED if self._saved else EXIT_DONE

    def _has_no_result(self) -> bool:
        """Return whether segments have ended, and all of them have failed."""
        return bool(self._state.results) and all(value is None for value in self._state.results.values())

    def _start_due(self) -> None:
        """Start interrupted segments, then the segments that the search chooses, on free slots."""
        allowance = self._allowance()
        wanted = [s for s in self._pending if allowance.cost(s.from_step, s.until_step) <= allowance.serial]
        if not wanted:
            running = [*self._running, *(segment.key for segment in self._pending)]
            wanted = decide(self._search, self._state.results, running, allowance)
        for segment in wanted:
            node = self._node_for(segment)
            if node is None or len(self._running) >= self._search.parallel:
                continue  # the segment is chosen again when a slot is free
            if segment in self._pending:
                self._pending.remove(segment)
            else:
                self._journal.add("start", segment=asdict(segment), node=node)
            self._running[segment.key] = segment, node
            self._say(segment, "running", segment.from_step, None, f"starts, to {self._place(segment)}")
            self._nodes[node].start(segment)

    def _place(self, segment: Segment) -> str:
        """Return the end of the segment in words."""
        if (self._spec.training or {}).get("epochs"):
            return f"epoch {segment.until_step}"
        return f"step {steps_of(segment.until_step, segment.values)}"

    def _node_for(self, segment: Segment) -> int | None:
        """Return a node with a free slot, the node of the trial's checkpoint first; None if no slot is free."""
        used = [node for _, node in self._running.values()]
        free = [n for n, node in enumerate(self._nodes) if used.count(n) < node.slots]
        home = self._state.homes.get(segment.trial if segment.source is None else segment.source)
        if home in free or not segment.from_step:
            return home if home in free else next(iter(free), None)
        is_shared = len(self._nodes) == 1 or bool(self._sweep.get("shared"))
        return next(iter(free), None) if is_shared or home is None or home >= len(self._nodes) else None

    def _allowance(self) -> Allowance:
        """Return the slot-seconds to the deadline, less those of the running segments, and a segment's highest cost."""
        if self._deadline_s is None:
            return Allowance()
        serial = max(0.0, self._deadline_s - time.monotonic())
        starts, paces = self._state.starts_s, self._state.paces_s
        if not paces:  # the first trials measure the pace
            return Allowance(serial * self._search.parallel, serial=serial)
        start_s, step_s = max(starts[-20:]), MARGIN * max(paces[-20:])
        held = sum(start_s + step_s * (s.until_step - s.from_step) for s, _ in self._running.values())
        return Allowance(serial * self._search.parallel - held, start_s, step_s, serial)

    def _note(self, end: SegmentEnd) -> None:
        """Enter the end of a segment; an interrupted segment has no result."""
        segment, _ = self._running.pop((end.trial, end.rung))
        if end.state == "saved":
            # The segments obey the job's deadline by themselves, and may save before this process does.
            self._saved = self._saved or ("sigterm" if _stops else "deadline")
            self._say(segment, "saved", end.step, None, f"saved at step {end.step}", end.seconds)
            return
        if end.is_fault and (tries := self._tries.get(segment.key, 1)) < MOST_TRIES:
            self._tries[segment.key] = tries + 1
            self._pending.append(segment)
            words = f"{end.message}; goes on from its last checkpoint"
            self._say(segment, "saved", end.step, None, words, end.seconds)
            return
        value = end.value if end.value is not None and not math.isnan(end.value) else None
        self._journal.add("end", **{**asdict(end), "value": value})
        self._fault = self._fault or end.message
        words = end.message or f"{end.state} at step {end.step}, value {'nan' if value is None else f'{value:.6g}'}"
        self._say(segment, end.state, end.step, value, words, end.seconds)

    def _say(
        self, segment: Segment, state: str, step: int, value: float | None, words: str, seconds: float = 0.0
    ) -> None:
        at = {"trial": segment.trial, "rung": segment.rung, "step": step, "value": value, "state": state}
        at["seconds"] = round(seconds, 3)  # in the slot
        text = f"trial {segment.trial}, rung {segment.rung + 1} of {len(self._search.rungs)}: {words}"
        events.emit("trial", text, **at, values=dict(segment.values), source=segment.source)

    def _finish(self) -> None:
        """Export the best finished trial, delete what a finished sweep needs no more, and write the outcome."""
        found = best(self._search, self._state.results)
        is_finished = found is not None and found[1] == len(self._search.rungs) - 1
        if found is not None and is_finished:
            output = trial_folder(self._checkpoints, found[0]) / "output"
            if (target := os.environ.get("CLOUDTRAIN_OUTPUT_DIR")) and output.is_dir():
                shutil.copytree(output, target, dirs_exist_ok=True)
        if not self._saved:
            self._delete()
        for node in self._nodes:
            node.end()
        trials = len({trial for trial, _ in self._state.results})
        value = None if found is None else self._state.results[found]
        text = f"{trials} trials"
        if found is not None:
            text += f", the best is trial {found[0]} with {value:.6g}"
        if not is_finished:
            text += "; no trial has finished, so nothing is exported"
        event, words = "done", f"sweep done, {text}"
        if self._saved:
            event, words = "preempt", f"sweep saved ({self._saved}), {text}; the next start continues"
        events.emit(event, words, trials=trials, best_trial=None if found is None else found[0], best=value)
        if folder := os.environ.get("CLOUDTRAIN_RESULT_DIR"):
            outcome = {"outcome": "saved" if self._saved else "done", "reason": self._saved or None, "step": None}
            atomic_json.write_json(Path(folder) / "outcome.json", outcome)

    def _delete(self) -> None:
        """Delete the checkpoints of all trials but the best `keep` and the sources of copies."""
        sign = -1.0 if self._search.mode == "max" else 1.0
        ranked = sorted(
            (-rung, sign * value, trial) for (trial, rung), value in self._state.results.items() if value is not None
        )
        order = list(dict.fromkeys(trial for _, _, trial in ranked))
        kept = {*order[: int(self._sweep.get("keep") or KEEP)], *self._state.sources}
        for folder in (self._checkpoints / "trials").glob("*"):
            if not folder.name.isdecimal() or int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._checkpoints / "rungs", ignore_errors=True)
