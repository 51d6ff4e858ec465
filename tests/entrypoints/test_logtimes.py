"""The time of each line, from the log sizes that a supervisor saw."""

from pathlib import Path

from cloudtrain.entrypoints.agent.node_logs import TimeIndex, between


def test_bytes_have_the_time_at_which_they_were_first_seen(tmp_path: Path) -> None:
    """Bytes have the time of the first poll that found them; bytes after the last poll have no time."""
    log = tmp_path / "rank-0.log"
    index = TimeIndex(tmp_path)
    log.write_text("one\n")
    assert between(log, 0, 4) == []
    index.note(100.0)
    log.write_text("one\ntwo\nthree\n")
    index.note(101.5)
    assert between(log, 0, 14) == [(4, 100.0), (14, 101.5)]
    assert between(log, 4, 8) == [(14, 101.5)]
    assert between(log, 14, 20) == []


def test_part_of_a_long_index_is_found(tmp_path: Path) -> None:
    """A part at any position is found, and notes before and after the part are not read."""
    log = tmp_path / "rank-0.log"
    notes = [(10 * number, float(number)) for number in range(1, 20_001)]
    (tmp_path / "rank-0.times").write_text("".join(f"{size} {time_s:.3f}\n" for size, time_s in notes))
    for begin in (0, 5, 10, 99_990, 100_005, 199_980, 199_999, 200_000):
        wanted = [note for note in notes if note[0] > begin and note[0] - 10 < begin + 30]
        assert between(log, begin, begin + 30) == wanted, begin


def test_log_that_vanishes_stops_no_notes(tmp_path: Path) -> None:
    """The job may remove a log between two polls; the times of the remaining logs are noted."""
    (tmp_path / "gone.log").symlink_to("nowhere")  # listed but missing
    (tmp_path / "rank-0.log").write_text("one\n")
    TimeIndex(tmp_path).note(100.0)
    assert [path.name for path in tmp_path.glob("*.times")] == ["rank-0.times"]


def test_index_notes_nothing_if_no_log_grew(tmp_path: Path) -> None:
    """An idle log costs no bytes."""
    (tmp_path / "rank-0.log").write_text("one\n")
    index = TimeIndex(tmp_path)
    for time_s in (100.0, 101.0, 102.0):
        index.note(time_s)
    assert (tmp_path / "rank-0.times").read_text() == "4 100.000\n"
