"""The forms in which scripts print steps: each line as the real library or script prints the line."""

import math

import pytest

from cloudtrain.entrypoints.scripts import forms
from cloudtrain.entrypoints.scripts.forms import BAR, EPOCH, EPOCH_FIGURES, FINE, FREE, NAMED_BAR

BAR_OF = "{} 45%|████▌     | 45/100 [00:09<00:11,  4.98it/s{}]"


@pytest.mark.parametrize(
    ("line", "weight", "step", "total", "epoch", "fields"),
    [
        ("iter 10: loss 3.2145, time 45.20ms, mfu 1.25%", FINE, 10, None, None, {"loss": 3.2145}),
        ("step 10/300 loss 0.5 lr 1e-4", FINE, 10, 300, None, {"loss": 0.5, "lr": 1e-4}),
        ("Step: 10, Loss: 0.5", FINE, 10, None, None, {"loss": 0.5}),
        ("[100/1000] loss: 0.3", FINE, 100, 1000, None, {"loss": 0.3}),
        ("[1,  2000] loss: 2.173", FINE, 2000, None, 1, {"loss": 2.173}),
        ('{"step": 10, "loss": 1.2, "tokens": 12}', FINE, 10, None, None, {"loss": 1.2, "tokens": 12.0}),
        (
            "2026-11-01 12:00:00,123 INFO global_step=7 train/loss=0.5",
            FINE,
            7,
            None,
            None,
            {"loss": 0.5, "train_loss": 0.5},
        ),
        ("Epoch [3/10], Step [100/600], Loss: 0.1234", FINE, 100, 600, 3, {"loss": 0.1234}),
        ("Epoch: [0][ 10/100]\tTime  0.1 ( 0.2)\tLoss 6.9e+00 (7.0e+00)", FINE, 10, 100, 0, {"loss": 6.9}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300039", FINE, 640, 60000, 1, {"loss": 2.300039}),
        ("[RANK0] Epoch 1 | Iter 100 | Train Loss 2.31", FINE, 100, None, 1, {"loss": 2.31, "train_loss": 2.31}),
        ("epoch 2 step 7 loss tensor(0.51, device='cuda:0')", FINE, 7, None, 2, {"loss": 0.51}),
        ("epoch 3 loss=0.4", EPOCH_FIGURES, None, None, 3, {"loss": 0.4}),
        ("epoch 3: {'accuracy': 0.68, 'f1': 0.81}", EPOCH_FIGURES, None, None, 3, {"accuracy": 0.68, "f1": 0.81}),
        ("[GPU0] Epoch 3 | Batchsize: 32 | Steps: 32", EPOCH, None, None, 3, {}),
        (BAR_OF.format("Epoch 3:", ", v_num=0, train_loss=0.5"), NAMED_BAR, 45, 100, 3, {"loss": 0.5}),
        (BAR_OF.format("", ", loss=0.52, lr=0.001"), NAMED_BAR, 45, 100, None, {"loss": 0.52, "lr": 0.001}),
        (BAR_OF.format("Training:", ""), NAMED_BAR, 45, 100, None, {}),
        (BAR_OF.format("", ""), BAR, 45, 100, None, {}),
        (BAR_OF.format("Epochs:", ""), EPOCH, None, None, 45, {}),
    ],
)
def test_line_of_a_step_is_read(
    line: str, weight: int, step: int | None, total: int | None, epoch: int | None, fields: dict[str, float]
) -> None:
    """Step, total, epoch and figures are read from the line."""
    assert forms.may_have_step(line)
    told = forms.read(line)
    assert (told.weight, told.step, told.total, told.epoch, told.fields) == (weight, step, total, epoch, fields)


@pytest.mark.parametrize("old", [True, False])
def test_hugging_face_prints_figures_without_a_step(old: bool) -> None:
    """Both spellings, of numbers and of text, give the same figures."""
    line = "{'loss': 1.25, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.31}"
    if not old:
        line = "{'loss': '1.25', 'grad_norm': 'nan', 'learning_rate': '5e-05', 'epoch': '0.31'}"
    told = forms.read(line)
    assert (told.weight, told.step, told.fields["loss"], told.fields["lr"]) == (FREE, None, 1.25, 5e-05)
    assert math.isnan(told.fields["grad_norm"])


@pytest.mark.parametrize(
    ("line", "step", "scores"),
    [
        (
            "{'eval_loss': '3.6', 'eval_runtime': '0.02', 'eval_steps_per_second': '3', 'epoch': '1'}",
            None,
            {"eval_loss": 3.6},
        ),
        ("step 100: train loss 2.1000, val loss 2.2000", 100, {"train_loss": 2.1, "val_loss": 2.2}),
        ("Test set: Average loss: 0.0503, Accuracy: 9832/10000 (98%)", None, {"average_loss": 0.0503}),
        ("[RANK0] Epoch 1 | Iter 0 | Eval Loss 2.5", None, {"eval_loss": 2.5}),
    ],
)
def test_line_of_an_evaluation_has_scores(line: str, step: int | None, scores: dict[str, float]) -> None:
    """An evaluation's figures are not a step's."""
    told = forms.read(line)
    assert (told.step, told.fields, told.scores) == (step, {}, scores)


@pytest.mark.parametrize(
    "line",
    [
        *(BAR_OF.format(f"{name}:", "") for name in ("Map", "Tokenizing train dataset", "Loading weights", "Saving")),
        *(
            BAR_OF.format(f"{name}:", "")
            for name in ("Generating train split", "Sanity Checking DataLoader 0", "Filter")
        ),
        *(BAR_OF.format(f"{name}:", ", loss=0.5") for name in ("Validation", "Testing", "Epoch 3 eval", "Predicting")),
        "Test: [ 1/10]\tTime  0.1 ( 0.2)\tLoss 6.9e+00 (7.0e+00)",
        "{'train_runtime': '0.4', 'train_steps_per_second': '105', 'train_loss': '3.6', 'epoch': '3'}",
        *("Resuming training from snapshot at Epoch 5", "Step 1: download the data", "loss scale 1024 at step 5"),
        *("Loading checkpoint shards:  50%|█████     | 1/2 [00:01<00:01]", "12%|# of them", ""),
    ],
)
def test_further_lines_give_no_step(line: str) -> None:
    """Bars of different work, sums at the end and prose are no steps."""
    assert forms.read(line) is None


def test_loss_that_is_not_finite_is_read() -> None:
    """An alarm needs exactly the non-finite values."""
    for text in ("nan", "NaN", "inf", "-inf", "Infinity"):
        told = forms.read(f"step 5 loss {text}")
        assert not math.isfinite(told.fields["loss"])
