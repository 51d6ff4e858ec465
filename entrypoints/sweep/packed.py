"""The controller of a sweep: one process a node; the first one drives, and each runs segments on its slots.

The driver calls `search.decide` over the journal beside the checkpoints, and sends each segment to a node, or to a gang
of nodes. The time of the job is the money: a segment starts only if it is expected to end before the deadline, and if
afterwards enough time is left to bring the furthest trial to its end. At a stop request or at the deadline all segments
save, and the next start goes on from the journal. Exit codes as the trainer's: 0 done, 75 saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .. import atomic_json, events
from ..contract import JobSpec
from ..errors import TaskError
from ..format import span
from ..rank import heartbeat, variables
from .journal import Journal
from .search import HOPELESS, MOST_TRIES, Allowance, Search, Segment, best, decide, ranked, steps_of, values_of
from .segments import Meeting, SegmentEnd, SlotRunner, metric_of

EXIT_DONE, EXIT_SAVED = 0, 75
LOOK_S = 0.05
MARGINS = 1.1, 1.5  # of the median pace, the least and the greatest: a segment's highest expected time
SPREADS = 4.5  # median deviations above the median, 3 standard deviations of a normal pace
FEWEST = 5  # paces, to know their spread
PACES = 20  # of a machine, the newest, whose median counts
MOST_DROPS = 2  # that leave ranks the time to write what they write
PARTNER_S = 60.0  # after a failure, for a trial's other machines: torchrun alone waits for the failed one, 300 s
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
    store = _store(nodes) if nodes > 1 else None
    own = SlotRunner(spec, torchrun, shell, checkpoints, store)
    if node:
        return _serve(own, store, node)
    machines: list[SlotRunner | _RemoteNode] = [own, *(_RemoteNode(store, number) for number in range(1, nodes))]
    teams: Sequence[_Node] = machines
    if (width := spec.sweep["instances"] if spec.sweep else 1) > 1:
        teams = [_Gang(machines[at : at + width], at) for at in range(0, nodes - width + 1, width)]
    with contextlib.closing(Journal(checkpoints)) as journal:
        return _Driver(spec, journal, teams, deadline_s).drive()


def _store(nodes: int) -> Any:
    """Return the store that all nodes share; the driver's node hosts the store."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_head = os.environ.get("RANK") == "0"
    # With torchrun's static rendezvous the agent of node 0 may host the store already (TORCHELASTIC_USE_AGENT_STORE).
    hosts = is_head and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(address, port, nodes, hosts, timeout=timedelta(seconds=JOIN_S), wait_for_workers=False)


class _RemoteNode:
    """Another node, over the store, as SlotRunner: numbered orders one way, numbered reports the other."""

    def __init__(self, store: Any, node: int) -> None:
        self._store, self._node, self._sent, self._read = store, node, 0, 0
        self._is_stopped = False
        joined = json.loads(store.get(f"joined/{node}"))
        self.slots, self.place = int(joined["slots"]), str(joined["place"])

    def start(self, segment: Segment, meeting: Meeting | None = None) -> None:
        self._send({"do": "start", "segment": asdict(segment), "meeting": meeting and asdict(meeting)})

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

    def drop(self, *, by_force: bool) -> None:
        self._send({"do": "drop", "by_force": by_force})

    def finish(self, exported: int | None, kept: Sequence[int] | None) -> None:
        self._send({"do": "finish", "exported": exported, "kept": kept})

    def end(self) -> None:
        self._send({"do": "end"})
        self._store.get(f"left/{self._node}")

    def _send(self, order: dict[str, Any]) -> None:
        self._store.set(f"order/{self._node}/{self._sent}", json.dumps(order))
        self._sent += 1


class _Gang:
    """Several machines that train a trial together, as one node with one slot. The first has the trial's results."""

    slots = 1

    def __init__(self, nodes: Sequence[SlotRunner | _RemoteNode], number: int) -> None:
        self._nodes, self._number, self._count = nodes, number, 0
        self._left: list[SegmentEnd] = []
        self._drop_s, self._drops = math.inf, 0  # when the other machines of a failed trial are ended next
        self.place = nodes[0].place

    def start(self, segment: Segment) -> None:
        self._count += 1
        for rank, node in enumerate(self._nodes):
            node.start(segment, Meeting(f"meet/{self._number}/{self._count}", rank, len(self._nodes)))

    def stop(self) -> None:
        for node in self._nodes:
            node.stop()

    def look(self) -> list[SegmentEnd]:
        self._left += [end for node in self._nodes for end in node.look()]
        if len(self._left) < len(self._nodes):
            now_s = time.monotonic()
            if any(end.state == "failed" for end in self._left):
                self._drop_s = min(self._drop_s, now_s + PARTNER_S)
            if now_s >= self._drop_s:
                self._drop_s, self._drops = math.inf, self._drops + 1
                for node in self._nodes:
                    node.drop(by_force=self._drops > MOST_DROPS)
            return []
        ends, self._left, self._drop_s, self._drops = self._left, [], math.inf, 0
        own = [end for end in ends if end.state == "failed" and not end.is_fault]  # an error of the training
        valued = [end for end in ends if end.value is not None]  # of the first machine; others may lose it as it leaves
        failed, saved = ([end for end in ends if end.state == state] for state in ("failed", "saved"))
        return [*own, *valued, *failed, *saved, *ends][:1]

    def finish(self, exported: int | None, kept: Sequence[int] | None) -> None:
        for number, node in enumerate(self._nodes):
            node.finish(None if number else exported, kept)

    def end(self) -> None:
        for node in self._nodes:
            node.end()


_Node = SlotRunner | _RemoteNode | _Gang


def _serve(own: SlotRunner, store: Any, node: int) -> int:
    """Run the driver's orders on this node until the driver ends; return the exit code."""
    store.set(f"joined/{node}", json.dumps({"slots": own.slots, "place": own.place}))
    done, told, is_stopped = 0, 0, False
    while True:
        while store.check([key := f"order/{node}/{done}"]):
            asked = json.loads(store.get(key))
            done += 1
            if asked["do"] == "end":
                store.set(f"left/{node}", "1")
                return EXIT_SAVED if is_stopped else EXIT_DONE
            if asked["do"] == "start":
                own.start(Segment(**asked["segment"]), asked["meeting"] and Meeting(**asked["meeting"]))
            if asked["do"] == "finish":
                own.finish(asked["exported"], asked["kept"])
            if asked["do"] == "drop":
                own.drop(by_force=asked["by_force"])
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

    def __init__(self, spec: JobSpec, journal: Journal, nodes: Sequence[_Node], deadline_s: float | None) -> None:
        assert spec.sweep is not None
        self._spec, self._sweep, self._journal = spec, spec.sweep, journal
        self._nodes, self._deadline_s, self._state = nodes, deadline_s, journal.state
        total = sum(node.slots for node in nodes)
        search = Search.load(spec.sweep["search"])
        self._search = replace(search, parallel=min(search.parallel, total))
        self._running: dict[tuple[int, int], tuple[Segment, int]] = {}  # with the node
        self._pending = list(journal.state.open.values())  # interrupted at the last end, in the order of their starts
        self._saved = ""  # why the sweep leaves early
        self._tries: dict[tuple[int, int], int] = {}  # of killed segments
        self._fault = ""  # the first failure, if no segment has a result

    def drive(self) -> int:
        """Run the search to its end or to a stop; return the exit code. Raises TaskError if all trials fail."""
        if self._has_no_result():
            self._forget_failures()
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
        left = [*self._pending, *decide(self._search, self._state.results, ())]
        if not self._saved and left:
            self._saved = "deadline"  # the search could go on with more time
        self._finish(self._why_not(left[0]) if left and not _stops else "")
        return EXIT_SAVED if self._saved else EXIT_DONE

    def _has_no_result(self) -> bool:
        """Return whether segments have ended, and all of them have failed."""
        return bool(self._state.results) and all(value is None for value in self._state.results.values())

    def _forget_failures(self) -> None:
        """Begin the failed segments again, all on the first rung: the user may have mended the task since."""
        until = self._search.rungs[0]
        failed = [Segment(each, 0, 0, until, values_of(self._search, {}, each, 0)) for each, _ in self._state.results]
        for segment in failed:
            self._journal.add("start", segment=asdict(segment), place=self._state.places.get(segment.trial, ""))
        for segment in failed:
            self._say(segment, "saved", 0, None, "failed before, and trains again")
        self._pending[:0] = failed

    def _start_due(self) -> None:
        """Start interrupted segments, then the segments that the search chooses, on free slots."""
        if len(self._running) >= self._search.parallel:
            return
        allowance = self._allowance()
        wanted = [s for s in self._pending if allowance.cost(s.trial, s.from_step, s.until_step) <= allowance.left]
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
                self._journal.add("start", segment=asdict(segment), place=self._nodes[node].place)
            self._running[segment.key] = segment, node
            self._say(segment, "running", segment.from_step, None, f"starts, to {self._place(segment)}")
            self._nodes[node].start(segment)

    def _place(self, segment: Segment) -> str:
        """Return the end of the segment in words."""
        if (self._spec.training or {}).get("epochs"):
            return f"epoch {segment.until_step}"
        if self._sweep["until"] == "end":
            return "its end"
        return f"step {steps_of(segment.until_step, segment.values)}"

    def _free(self) -> list[int]:
        """Return the nodes with a free slot, the one with the fewest trials first."""
        used = [node for _, node in self._running.values()]
        free = [n for n, node in enumerate(self._nodes) if used.count(n) < node.slots]
        return sorted(free, key=used.count)

    def _node_for(self, segment: Segment) -> int | None:
        """Return a node with a free slot, one at the place of the trial's checkpoint first; None if no slot is free."""
        free, places = self._free(), [node.place for node in self._nodes]
        home = self._state.places.get(segment.trial if segment.source is None else segment.source)
        if segment.from_step and home in places:
            free = [n for n in free if places[n] == home]
        return next((n for n in free if places[n] == home), next(iter(free), None))

    def _allowance(self) -> Allowance:
        """Return the seconds to the deadline, and a segment's highest expected seconds by the machine that is free.

        A trial's own pace counts before its machine's, and the median of the machine before all machines'.
        """
        if self._deadline_s is None:
            return Allowance()
        left_s = max(0.0, self._deadline_s - time.monotonic())
        if not self._state.paces:  # the first trials measure the pace
            return Allowance(left_s)
        place = next((self._nodes[node].place for node in self._free()), "")
        paces = self._state.paces.get(place, [])[-PACES:]
        paces = paces or [each for some in self._state.paces.values() for each in some[-PACES:]]
        starts, steps = zip(*paces, strict=True)
        margin = _margin(steps)
        own = {trial: (start_s, margin * step_s) for trial, (start_s, step_s) in self._state.own.items()}
        return Allowance(left_s, statistics.median(starts), margin * statistics.median(steps), own)

    def _why_not(self, segment: Segment) -> str:
        """Return why the segment was not begun, in words; empty without a deadline."""
        allowance = self._allowance()
        needs_s = allowance.cost(segment.trial, segment.from_step, segment.until_step)
        if needs_s <= allowance.left:
            return ""
        needs, left = span(needs_s), span(allowance.left)
        return f"trial {segment.trial} to {self._place(segment)} needs {needs}, {left} are left"

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
        results = self._state.results
        found = best(self._search, results)
        fields = {
            "trial": segment.trial,
            "rung": segment.rung,
            "step": step,
            "value": value,
            "state": state,
            "seconds": round(seconds, 3),  # in the slot
            "values": dict(segment.values),
            "source": segment.source,
            "sweep": {
                "done": sum(rung == 0 for _, rung in results),
                "trials": self._search.trials,
                "metric": metric_of(self._spec),
                "best": None if found is None else results[found],
            },
        }
        text = f"trial {segment.trial}, rung {segment.rung + 1} of {len(self._search.rungs)}: {words}"
        events.emit("trial", text, **fields)

    def _finish(self, why_not: str) -> None:
        """Export the best finished trial, delete what a finished sweep needs no more, and write the outcome."""
        found = best(self._search, self._state.results)
        is_finished = found is not None and found[1] == len(self._search.rungs) - 1
        kept = None if self._saved else self._kept()
        places, exported = [node.place for node in self._nodes], found[0] if found is not None and is_finished else None
        home = self._state.places.get(-1 if exported is None else exported)
        for number, node in enumerate(self._nodes):
            node.finish(exported if number == (places.index(home) if home in places else 0) else None, kept)
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
            ended = f"sweep saved ({self._saved}), {text}{f'; {why_not}' if why_not else ''}"
            event, words = "preempt", f"{ended}; the next start continues"
        first = None if found is None else found[0]
        events.emit(event, words, trials=trials, best_trial=first, best=value, not_begun=why_not or None)
        if folder := os.environ.get("CLOUDTRAIN_RESULT_DIR"):
            outcome = {"outcome": "saved" if self._saved else "done", "reason": self._saved or None, "step": None}
            atomic_json.write_json(Path(folder) / "outcome.json", outcome)

    def _kept(self) -> list[int]:
        """Return the trials whose checkpoints stay: the best `keep`, and the sources of copies."""
        order = list(ranked(self._search, self._state.results))
        return sorted({*order[: int(self._sweep.get("keep") or KEEP)], *self._state.sources})


def _margin(paces: Sequence[float]) -> float:
    """Return how far above the median a pace is expected to be at most, by the spread of the paces."""
    if len(paces) < FEWEST:
        return MARGINS[1]
    median = statistics.median(paces)
    spread = statistics.median(abs(each - median) for each in paces)
    return min(MARGINS[1], max(MARGINS[0], 1 + SPREADS * spread / median)) if median > 0 else MARGINS[1]
