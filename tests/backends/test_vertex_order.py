"""Vertex AI: the memory of a reader of Cloud Logging, so that every line appears once and in order."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.backends.vertex import logs, logs_order
from cloudtrain.backends.vertex.logs import LogQuota
from cloudtrain.backends.vertex.logs_order import HOLD_S, MOST_HELD, LogEntry, Order

BOTH = frozenset({0, 1})


def line(number: int, node: int = 0, life: str = "a", copy: int = 0) -> LogEntry:
    """Return a container's line with the number; a `copy` has a different key."""
    return LogEntry(f"{life}{number}-{copy}", node, float(number), float(number), f"{life} {number}", 0, life, number)


def end(count: int, node: int = 0, life: str = "a", *, final: bool = True) -> LogEntry:
    """Return a container's end event."""
    own = {"e": "end", "node": node, "final": final, "life": life, "lines": count}
    return LogEntry(f"end {life}", node, float(count), float(count), "", own=own)


def texts(found: list[Any]) -> list[str]:
    """Return the lines' texts."""
    return [each.text for each in found]


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.integers(1, 3))
def test_every_line_comes_once_in_any_order_of_arrival(chance: random.Random, count: int, lives: int) -> None:
    """Lines may arrive late, twice or under new keys, and the cursor be saved anywhere: each line appears once."""
    sent = [line(n, life % 2, str(life), copy) for life in range(lives) for n in range(1, count + 1) for copy in (0, 1)]
    sent += [end(count, life % 2, str(life)) for life in range(lives)]
    chance.shuffle(sent)
    reader, found, now_s = Order(), [], 0.0
    while sent:
        piece, sent = sent[:7], sent[7:]
        now_s += chance.choice((0.1, 2.0))
        found += texts(reader.take(piece, now_s))
        reader = Order(json.loads(json.dumps(reader.dump())))
    found += texts(reader.take([], now_s + HOLD_S))
    assert sorted(found) == sorted(f"{life} {n}" for life in range(lives) for n in range(1, count + 1))
    nodes = frozenset(life % 2 for life in range(lives))
    assert (reader.is_complete(nodes), reader.gaps(nodes), reader.is_holding) == (True, [], False)


def test_line_waits_a_moment_for_earlier_lines() -> None:
    """Two swapped lines are put in order; a missing line delays later lines by at most HOLD_S."""
    reader = Order()
    assert texts(reader.take([line(2), line(1), line(4)], 4.5)) == ["a 1", "a 2"]
    assert reader.is_holding
    assert texts(reader.take([], 4.0 + HOLD_S)) == ["a 4"]
    [gap] = reader.gaps(BOTH)
    assert (gap.first, gap.last, gap.before_s) == (3, 3, 2.0)
    assert texts(reader.take([line(3), line(3, copy=1)], 30.0)) == ["a 3"]
    assert reader.gaps(BOTH) == []


def test_old_line_waits_for_no_earlier_line() -> None:
    """A line older than HOLD_S on arrival is returned at once; a slow clock delays a line by HOLD_S only."""
    reader = Order()
    assert texts(reader.take([line(1), line(3)], 3.0 + HOLD_S)) == ["a 1", "a 3"]
    assert texts(reader.take([line(50)], 10.0)) == []
    assert texts(reader.take([], 10.0 + HOLD_S)) == ["a 50"]


def test_gap_after_the_last_line_is_known() -> None:
    """A container reports its number of lines, so lost last lines are noticed."""
    reader = Order()
    reader.take([line(1), end(3)], 0.0)
    assert not reader.is_complete(frozenset({0}))
    assert [(gap.first, gap.last) for gap in reader.gaps(BOTH)] == [(2, 3)]
    reader.take([line(3), line(2)], 0.0)
    assert reader.is_complete(frozenset({0}))
    assert not reader.is_complete(BOTH)


def test_end_of_a_replaced_container_is_not_the_last() -> None:
    """A preempted container's end is not final; its lines and its successor's do not mix."""
    reader = Order()
    reader.take([line(1), end(1, final=False)], 0.0)
    assert not reader.is_complete(frozenset({0}))
    assert texts(reader.take([line(1, life="b"), end(1, life="b")], 1.0)) == ["b 1"]
    assert reader.is_complete(frozenset({0}))


def test_any_end_is_the_last_after_the_job() -> None:
    """A container that saved and left, as before a restart, has no successor if the job has ended."""
    reader = Order()
    reader.take([line(1), end(1, final=False)], 0.0)
    assert not reader.is_complete(frozenset({0}))
    assert Order(reader.dump(), is_over=True).is_complete(frozenset({0}))


def test_memory_does_not_grow_with_a_gap() -> None:
    """If a line never arrives and many follow, the later lines are returned."""
    reader = Order()
    found = reader.take([line(n) for n in range(2, MOST_HELD + 10)], 0.0)
    assert len(found) == MOST_HELD + 8


def test_lines_without_numbers_differ_by_their_keys() -> None:
    """Lines of the service, and output of an image before our program, have no numbers."""
    reader = Order()
    one, other = (LogEntry(key, 0, 5.0, 5.0, "the same words") for key in ("k1", "k2"))
    assert len(reader.take([one, other, one], 0.0)) == 2
    assert reader.take([one], 1.0) == []
    reader.take([LogEntry("k3", 0, 5000.0, 5000.0, "much later")], 2.0)
    assert "k1" not in reader.dump()["seen"]


MARK = {"l": "ab", "n": 7, "t": 1500}
RESOURCE = {"labels": {"job_id": "1", "task_name": "workerpool1-2"}}


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"jsonPayload": {"message": "[3] hello", "ct": MARK}}, ("hello", 3, "ab", 7, 1.5)),
        ({"jsonPayload": {"message": "the node's own\n", "ct": MARK}}, ("the node's own", None, "ab", 7, 1.5)),
        ({"jsonPayload": {"message": json.dumps({"message": "[0] x", "ct": MARK})}}, ("x", 0, "ab", 7, 1.5)),
        ({"textPayload": json.dumps({"severity": "INFO", "message": "[0] x", "ct": MARK})}, ("x", 0, "ab", 7, 1.5)),
        ({"textPayload": "Job is queued."}, ("Job is queued.", None, None, 0, 2.5)),
        ({"jsonPayload": {"message": '{"ct": broken'}}, ('{"ct": broken', None, None, 0, 2.5)),
        ({"jsonPayload": {"status": "ok"}}, ('{"status": "ok"}', None, None, 0, 2.5)),
        ({}, ("", None, None, 0, 2.5)),
    ],
    ids=str,
)
def test_entry_becomes_a_line(payload: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Cloud Logging may parse the object or keep its text, and foreign entries have no rank."""
    raw = {"timestamp": "1970-01-01T00:00:02.500000001Z", "insertId": "i", "resource": RESOURCE, **payload}
    found = logs_order.of_json(raw)
    assert (found.text, found.rank, found.life, found.number, pytest.approx(found.time_s)) == expected
    assert found.node == 3


def test_split_entries_are_one_line() -> None:
    """A line over 256 KiB arrives in parts, in any order and over pages."""
    parts: dict[str, dict[str, str]] = {}

    def part(index: int, text: str) -> dict[str, Any]:
        split = {"uid": "u", "index": index, "totalSplits": 3}
        return {"insertId": f"i{index}", "jsonPayload": {"message": text, "ct": MARK}, "split": split}

    assert list(logs_order.joined([part(2, "c"), {"insertId": "x"}, part(0, "a")], parts)) == [{"insertId": "x"}]
    [whole] = logs_order.joined([part(1, "b")], parts)
    assert (whole["jsonPayload"]["message"], whole["insertId"], parts) == ("abc", "u", {})


def test_calls_are_counted_over_processes(tmp_path: Any) -> None:
    """All processes together make the given number of calls a minute; a second project counts apart."""
    assert [LogQuota(tmp_path, "p").may_ask(3) for _ in range(5)] == [True, True, True, False, False]
    assert LogQuota(tmp_path, "q").may_ask(3)
    [file, _] = sorted(tmp_path.iterdir())
    file.write_text("[broken")
    assert LogQuota(tmp_path, "p").may_ask(3)


def test_followers_take_turns_after_half_of_the_share(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 15 calls of followers come at any time, later calls two seconds apart; a single pass does not wait."""
    now_s = 1000.0
    monkeypatch.setattr(logs.time, "time", lambda: now_s)
    assert [LogQuota(tmp_path, "p").may_ask() for _ in range(17)] == [*[True] * 15, False, False]
    assert LogQuota(tmp_path, "p").may_ask(logs.PASSING)
    now_s += 1.9
    assert not LogQuota(tmp_path, "p").may_ask()
    now_s += 0.2
    assert [LogQuota(tmp_path, "p").may_ask() for _ in range(2)] == [True, False]


def test_nodes_map_to_replicas() -> None:
    """Pool 0 is the leader, pool 1 has the remaining nodes; service messages count as the leader's."""
    assert [logs_order.node_of(logs_order.task_of(node)) for node in range(4)] == [0, 1, 2, 3]
    assert [logs_order.node_of(task) for task in ("service", "", "workerpool2-0")] == [0, 0, 0]
    assert logs_order.HOLD_S < 4  # half of all lines must appear within four seconds
