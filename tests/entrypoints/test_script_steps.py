"""The printed figures that count as a script's steps, and the content of the events."""

from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.scripts import steps as module
from cloudtrain.entrypoints.scripts.steps import Steps


class Clock:
    """A clock that the test moves."""

    now_s = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the module."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(Steps, "_beat_on", lambda self: None)
    return made


def told(steps: Steps, clock: Clock, *lines: str, every_s: float = 2.0) -> list[dict[str, Any]]:
    """Return the events of the lines, printed at intervals."""
    found = []
    for line in lines:
        clock.now_s += every_s
        tail, _ = steps.take(line)
        if tail:
            found.append(events.parse(tail)[1] or {})
    return found


def bar(step: int, total: int, name: str = "", more: str = "") -> str:
    """Return a line of tqdm."""
    return f"{name}{100 * step // total}%|##  | {step}/{total} [00:01<00:02,  5.1it/s{more}]"


def test_events_have_pace_and_time_left(clock: Clock) -> None:
    """The time of a step, and the remaining time, come from the times of the lines."""
    *_, last = told(Steps(0, {}), clock, "step 10/100 loss 0.5", "step 20/100 loss 0.4", "step 30/100 loss 0.3")
    assert last == {"e": "step", "step": 30, "max_steps": 100, "loss": 0.3, "step_s": 0.2, "eta_s": 14.0}


def test_hugging_faces_figures_take_the_step_of_the_bar(clock: Clock) -> None:
    """Without the Trainer, the bar before the figures gives the step; an evaluation's bar does not count."""
    lines = [bar(5, 48), "{'loss': '3.6', 'epoch': '0.31'}", bar(3, 8), "{'eval_loss': '3.5', 'epoch': '1'}"]
    found = told(Steps(0, {}), clock, *lines)
    assert [(each["e"], each["step"]) for each in found] == [("step", 5), ("step", 5), ("eval", 5)]
    assert (found[1]["loss"], found[1]["max_steps"], found[2]["metrics"]) == (3.6, 48, {"eval_loss": 3.5})


def test_known_trainer_gives_full_figures(clock: Clock) -> None:
    """The library's own figures have all digits and the exact step, despite the bar's figures."""
    steps = Steps(0, {})
    steps.library = lambda: {"step": 7, "total": 48, "loss": 3.6123456, "epoch": 0.3125}
    (found,) = told(steps, clock, "{'loss': '3.612', 'epoch': '0.31'}")
    assert found == {"e": "step", "step": 7, "max_steps": 48, "loss": 3.6123456, "epoch": 0.3125}


def test_steps_continue_over_epochs(clock: Clock) -> None:
    """A count that restarts with each epoch continues: by the epoch's number, or from bar to bar."""
    lines = [f"Epoch: [{epoch}][{step}/10] Loss 1.0" for epoch in (0, 1) for step in (1, 6)]
    assert [each["step"] for each in told(Steps(0, {}), clock, *lines)] == [1, 6, 11, 16]
    lines = [bar(step, 10) for _ in range(2) for step in (5, 10)]
    assert [each["step"] for each in told(Steps(0, {}), clock, *lines)] == [5, 10, 15, 20]


def test_script_without_lengths_continues_the_count(clock: Clock) -> None:
    """If no length is known, an epoch begins behind the last step."""
    lines = [f"Epoch {epoch} | Iter {step} | Train Loss 2.0" for epoch in (0, 1) for step in (0, 100)]
    assert [each["step"] for each in told(Steps(0, {}), clock, *lines)] == [0, 100, 101, 201]


def test_totals_are_looked_up_in_the_script(clock: Clock) -> None:
    """`args.epochs`, `max_iters` and the loader's length are variables of the frames that print."""
    steps, args = Steps(0, {}), type("Args", (), {})()
    args.epochs, dataloader = 3, range(50)
    found = told(steps, clock, "Epoch 1 | Iter 10 | Train Loss 2.0")
    assert (len(dataloader), found[0]["step"], found[0]["max_steps"]) == (50, 60, 150)
    max_iters = 600
    (found, *_) = told(Steps(0, {}), clock, "iter 10: loss 3.2")
    assert found["max_steps"] == max_iters


def test_epochs_count_the_trained_fraction(clock: Clock) -> None:
    """With an unknown length of an epoch, a begun epoch says nothing; a line for a whole epoch counts the epoch."""
    lines = [f"Epoch: [{epoch}][{step}/10] Loss 1.0" for epoch in (0, 1) for step in (1, 6)]
    assert [each["epoch"] for each in told(Steps(0, {}), clock, *lines)] == [0.1, 0.6, 1.1, 1.6]
    assert [each.get("epoch") for each in told(Steps(0, {}), clock, "Epoch 1 | Iter 100 | Train Loss 2.0")] == [None]
    assert [each["epoch"] for each in told(Steps(0, {}), clock, "Epoch 1 loss 0.4", "Epoch 2 loss 0.3")] == [1, 2]


def test_finer_count_replaces_a_coarser_one(clock: Clock) -> None:
    """Lines with steps count; bars and lines of epochs next to them do not."""
    lines = [bar(1, 5), "step 10 loss 0.5", bar(2, 5), "Epoch 1 loss 0.4", "step 20 loss 0.4"]
    assert [each["step"] for each in told(Steps(0, {}), clock, *lines)] == [1, 10, 20]


def test_longest_bar_is_training(clock: Clock) -> None:
    """A bar of preparations comes first and ends soon; an evaluation's bar is shorter than the bar of training."""
    steps = Steps(0, {})
    told(steps, clock, *(bar(step, 9) for step in range(1, 10)), every_s=0.1)
    found = told(steps, clock, *(bar(step, 40) for step in range(1, 41)), bar(1, 5), bar(5, 5), every_s=1.5)
    assert {each["max_steps"] for each in found} == {40}
    assert found[-1]["step"] == 40


def test_bar_gives_an_event_once_a_second(clock: Clock) -> None:
    """A bar drawn at any rate gives an event a second, and always an event at its end."""
    lines = [bar(step, 100, more=", loss=0.5") for step in range(1, 101)]
    assert len(told(Steps(0, {}), clock, *lines, every_s=0.02)) == 3


def test_users_expressions_replace_the_forms(clock: Clock) -> None:
    """The first group of each is the number; metrics are fields of the step, and scores without a step."""
    wanted = {"step": r"upd (\d+)", "loss": r"L=(\S+)", "total": r"of (\d+) in all", "metrics": {"acc": r"acc=(\S+)"}}
    lines = ("300 of 1,000 in all", "of 500 in all", "upd 3 L=0.5 acc=0.9", "acc=0.8", "step 1 loss 2")
    found = told(Steps(0, wanted), clock, *lines)
    assert found[0] == {"e": "step", "step": 3, "max_steps": 500, "loss": 0.5, "acc": 0.9}
    assert found[1:] == [{"e": "eval", "step": 3, "metrics": {"acc": 0.8}}]


def test_figures_of_an_epoch_beside_a_bar_are_an_evaluation(clock: Clock) -> None:
    """The bar has the steps; the epoch's own figures stay, by the printed name or the user's, and its loss does not."""
    lines = [
        bar(9, 10, "Epoch 1/3", ", loss=0.5"),
        "epoch 1/3 train_loss 0.72",
        "epoch 1/3 loss 0.7",
        "acc 0.9 epoch 1",
    ]
    steps = Steps(0, {"metrics": {"acc": r"acc (\S+)", "mine": r"train_loss (\S+)"}})
    found = told(steps, clock, *lines)
    assert steps.take(lines[1])[1] == ""  # one evaluation, not two
    assert [each["e"] for each in found] == ["step", "eval", "eval"]
    assert [each["metrics"] for each in found[1:]] == [{"train_loss": 0.72, "mine": 0.72}, {"acc": 0.9}]
    alone = told(
        Steps(0, {}), clock, "epoch 1/3 train_loss 0.72", "step 3 train_loss 0.6", '{"step": 4, "train_loss": 1.5}'
    )
    assert [(each["loss"], each["train_loss"]) for each in alone] == [(0.72, 0.72), (0.6, 0.6), (1.5, 1.5)]


@pytest.mark.parametrize("line", ["resumed from epoch 3, lr 0.02", "lr 0.1 from epoch 5 on"])
def test_learning_rate_in_a_sentence_is_no_figure_of_an_epoch(clock: Clock, line: str) -> None:
    """A sentence that names an epoch and a learning rate is neither a step nor an evaluation."""
    assert told(Steps(0, {}), clock, line) == []


def test_non_finite_loss_is_reported_once(clock: Clock) -> None:
    """The log has a warning, and the event the number itself."""
    steps = Steps(0, {})
    notes = [steps.take(f"step {step} loss nan")[1] for step in (5, 6)]
    assert notes == ["cloudtrain: warning: the loss is nan at step 5\n", ""]


def test_script_with_event_lines_is_left_alone(clock: Clock) -> None:
    """The script's own event lines are complete; the forms are off from the first event line on.

    Only rank 0's events are read, so ranks above 0 print unchanged.
    """
    own = events.format_line("step", "step 1", {"step": 1, "loss": 0.5})
    assert told(Steps(0, {}), clock, own, "step 2 loss 0.4") == []
    assert told(Steps(1, {}), clock, "step 2 loss 0.4") == []


def test_rank_beats_with_printed_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line before the first step counts; any later line does, so a long evaluation is no hang."""
    beats: list[float] = []
    monkeypatch.setattr(module.heartbeat, "beat", lambda: beats.append(clock.now_s))
    steps = Steps(1, {})
    told(steps, clock, "loading", "step 1 loss 0.5", "evaluating")
    assert beats == [1004.0, 1006.0]


def test_scores_of_an_epoch_are_an_evaluation_too(clock: Clock) -> None:
    """An epoch's figures without a loss give a step, and in a further line the metrics that `status` shows."""
    tail, note = Steps(0, {}).take("epoch 3: {'accuracy': 0.68, 'f1': 0.8}")
    words, event = events.parse(note.removesuffix("\n"))
    assert (events.parse(tail)[1] or {})["step"] == 3
    assert words == "evaluated at 3: accuracy 0.68 f1 0.8"
    assert event == {"e": "eval", "step": 3, "metrics": {"accuracy": 0.68, "f1": 0.8}}
