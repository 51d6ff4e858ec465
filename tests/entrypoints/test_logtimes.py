"""When each line was written, from the sizes a supervisor saw."""

from __future__ import annotations

from pathlib import Path

from cloudtrain.entrypoints.logtimes import Clock, TimeIndex


def test_clock_gives_the_time_at_which_a_line_was_first_seen(tmp_path: Path) -> None:
    """A line's time is that of the first look that found its first byte."""
    log = tmp_path / "rank-0.log"
    index = TimeIndex(tmp_path)
    log.write_text("one\n")
    index.note(100.0)
    log.write_text("one\ntwo\nthree\n")
    index.note(101.5)
    clock = Clock(log)
    assert [clock.at(offset) for offset in (0, 4, 8)] == [100.0, 101.5, 101.5]


def test_clock_knows_no_time_for_what_was_not_seen_yet(tmp_path: Path) -> None:
    """A byte beyond the last look has no time; after the next look it has."""
    log = tmp_path / "rank-0.log"
    index, clock = TimeIndex(tmp_path), Clock(log)
    log.write_text("one\n")
    assert clock.at(0) is None
    index.note(100.0)
    assert clock.at(0) == 100.0


def test_index_notes_nothing_where_nothing_grew(tmp_path: Path) -> None:
    """An idle log costs no bytes."""
    (tmp_path / "rank-0.log").write_text("one\n")
    index = TimeIndex(tmp_path)
    for time_s in (100.0, 101.0, 102.0):
        index.note(time_s)
    assert (tmp_path / "rank-0.times").read_text() == "4 100.000\n"
