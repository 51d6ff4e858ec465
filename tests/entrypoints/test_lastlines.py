"""The last lines of a rank: shown as on a screen, bounded, and recorded with the rank's failure."""

from pathlib import Path

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.agent import node_logs


def test_last_lines_are_as_on_a_screen() -> None:
    """Event tails and empty lines are removed, a progress bar is in its last state, and the order stays."""
    step = events.format_line("step", "step 7/9 loss 1.5", {"step": 7})
    text = f"loading\r\n\n{step}\n  0%|   | 1/90\r 50%|== | 45/90\r 99%|===| 89/90\nabout to read shard 7\n"
    assert node_logs.last_lines_of(text) == ["loading", "step 7/9 loss 1.5", " 99%|===| 89/90", "about to read shard 7"]


def test_last_lines_of_a_rank_are_few_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of any size costs one small read, and each line is cut at LINE_CHARACTERS."""
    (tmp_path / "rank-3.log").write_text("".join(f"line {n} {'x' * 900}\n" for n in range(5000)))
    monkeypatch.setenv("CLOUDTRAIN_LOG_DIR", str(tmp_path))
    lines = node_logs.last_lines(3)
    assert [line.split(" ")[1] for line in lines] == [str(n) for n in range(4990, 5000)]
    assert {len(line) for line in lines} == {node_logs.LINE_CHARACTERS}


def test_last_lines_of_a_rank_without_a_log_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torchrun keeps the output, so no log exists."""
    monkeypatch.delenv("CLOUDTRAIN_LOG_DIR", raising=False)
    assert node_logs.last_lines(0) == []
    monkeypatch.setenv("CLOUDTRAIN_LOG_DIR", str(tmp_path))
    assert node_logs.last_lines(0) == []
