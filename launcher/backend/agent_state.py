"""The state of a job from the reports of the nodes' agents, for backends whose agents the launcher asks directly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.entrypoints.contract import ExitReport, NodeStatus

from ..job import CLOCKS, State

STRAGGLER_S = 30.0  # after node 0's exit record; from then on the record decides, even while slower agents are alive


def fold(looks: Mapping[int, NodeStatus], nodes: int, *, can_shrink: bool = True, spares: int = 0) -> State | None:
    """Return the job's state from the agents' reports by node; None if the unseen nodes may know more.

    `looks` come from `node_folder.look`. A node whose agent ended without an exit record is lost. `can_shrink`: a
    restart may continue with fewer nodes, so a fenced node knows only its own end. `spares`: agents beyond the nodes.
    """
    looks = {node: look for node, look in looks.items() if not look.elsewhere}
    seen = [looks[node] for node in sorted(looks)]
    states = [look.state for look in seen if look.state]
    newest_first = sorted(states, key=lambda state: -state.generation)
    facts: dict[str, Any] = {
        "started_s": min((state.started_s for state in states if state.started_s), default=None),
        "restarts": max([state.generation - 1 for state in states if state.generation], default=0),
        "detail": next((state.detail for state in newest_first if state.detail), None),
    }
    verdict = _verdict(looks)
    facts |= _held(seen, nodes)
    first = looks.get(0, NodeStatus())
    is_reported = first.exit is not None and not first.exit.fenced and first.ended_ago_s > STRAGGLER_S
    if any(look.alive for look in seen) and not is_reported:
        if any(look.asked for look in seen):
            return State("stopping", **facts)
        if any(state.generation for state in states):
            return State("running", **facts)
        queues = [dict(state.queue) for state in states if state.queue is not None]
        line = next(filter(None, queues), queues[0] if queues else None)
        ends_s = [state.ended_s for state in states if state.ended_s]  # of the last run, if the job waits again
        return State("pending", queue=line, ended_s=max(ends_s, default=None), **facts)
    others_may_go_on = verdict is None or (verdict.fenced and can_shrink)
    if len(seen) < nodes + spares and others_may_go_on:
        # After `stop --now`, machines that cannot be reached count as stopped.
        return _lost(seen, facts) if seen and all(look.asked == "now" for look in seen) else None
    if verdict is None:
        return _lost(seen, facts)
    # Without a shared disk, the checkpoint may be on a different node than the exit record.
    is_saved = any(look.saved or (look.exit is not None and look.exit.resumable) for look in seen)
    end_facts = {
        **{name: getattr(verdict, name) for name in ("reason", "error", "ended_s", "restarts")},
        "resumable": verdict.state != "succeeded" and is_saved,
        "billed_s": verdict.held_s,
        "gone_s": verdict.gone_s or None,
        "joined_s": verdict.joined_s,
        "billed_by": None if verdict.held_s is None else CLOCKS,
    }
    return State(state=verdict.state, **{**facts, **end_facts})


def _verdict(looks: Mapping[int, NodeStatus]) -> ExitReport | None:
    """Return node 0's exit record, else the latest record: a node that the job continued without ended earlier.

    The record of a fenced node counts last, because a fenced node knows only its own end.
    """
    ended = {node: look.exit for node, look in looks.items() if look.exit is not None}
    best = max(ended, key=lambda node: (not ended[node].fenced, node == 0, ended[node].ended_s), default=None)
    return None if best is None else ended[best]


def _held(seen: Sequence[NodeStatus], nodes: int) -> dict[str, Any]:
    """Return the mean seconds for which the nodes are occupied, and the seconds of the dropped nodes.

    The figures come from the node with the newest generation: after a network partition, from the half that continues.
    """
    reports = [(look.state, look.alive, look.held_s) for look in seen if look.state and look.held_s is not None]
    if not reports:
        return {}
    state, _, held_s = max(reports, key=lambda each: (each[0].generation, *each[1:]))
    joined_s = state.joined_s or {}
    late_s = sum(begin_s for node, begin_s in joined_s.items() if node not in state.gone_s)
    left = nodes - len(state.gone_s) + len(joined_s)
    billed_s = (held_s * left - late_s + sum(state.gone_s.values())) / nodes
    return {"billed_s": billed_s, "gone_s": state.gone_s or None, "joined_s": state.joined_s, "billed_by": CLOCKS}


def _lost(seen: list[NodeStatus], facts: dict[str, Any]) -> State:
    """Return the end of a job whose agents are all gone: killed by `stop --now`, or for an unknown reason."""
    is_saved = any(look.saved for look in seen)
    ends_s = [look.exit.ended_s if look.exit else look.last_s for look in seen]
    facts = {**facts, "ended_s": max(ends_s, default=0.0) or time.time()}
    if any(look.asked == "now" for look in seen):
        return State("stopped", "user", is_saved, **facts)
    rebooted = any(look.rebooted for look in seen)
    why = "the machine was restarted" if rebooted else "killed, or the machine was restarted"
    error = {"rank": None, "kind": "lost", "message": f"all agents are gone without a word: {why}"}
    return State("failed", "node_failure", is_saved, error, **facts)
