"""The figures of a test: equal to scikit-learn's, and to the bit for any split of the batches over ranks."""

import importlib
import json
import math
import random
from dataclasses import asdict
from typing import Any

import pytest
import torch

from cloudtrain.entrypoints.errors import TaskError
from cloudtrain.entrypoints.trainer import scores

F64 = torch.float64
CLASSES, SAMPLES, BATCH = 7, 1003, 16


@pytest.fixture(scope="module")
def metrics() -> Any:
    """Return scikit-learn's figures; the import takes seconds, and each worker of a session collects this file."""
    return importlib.import_module("sklearn.metrics")


def batches(seed: int = 0) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Return batches of indices, and outputs with logits that are right in part."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES - 1, (SAMPLES,), generator=generator)  # one class has no samples
    score = torch.randn(SAMPLES, CLASSES, generator=generator)
    score[torch.arange(SAMPLES), target] += 1.5
    places = torch.arange(SAMPLES).split(BATCH)
    return [(place.tolist(), {"target": target[place], "score": score[place]}) for place in places]


def total(parts: list[list[tuple[list[int], dict[str, torch.Tensor]]]]) -> scores.ClassCounts | scores.Residuals | None:
    """Return the counts of ranks that have these batches, after a way through JSON."""
    counted = []
    for part in parts:
        counts = None
        for indices, found in part:
            counts = scores.counted(found, indices, counts)
        counted.append(json.loads(json.dumps(asdict(counts))))
    return scores.summed(counted)


def test_classification_equals_scikit_learn(metrics: Any) -> None:
    """Accuracy, table, precision, recall, F1, log loss and the curve of calibration agree to 1e-12."""
    counts = total([batches()])
    assert isinstance(counts, scores.ClassCounts)
    found = scores.class_figures(counts)
    target = torch.cat([each["target"] for _, each in batches()])
    sure = torch.cat([each["score"] for _, each in batches()]).double().softmax(1)
    predicted = sure.argmax(1)
    names = range(CLASSES)
    exact = {"abs": 1e-12, "rel": 1e-12}
    assert found["confusion"] == metrics.confusion_matrix(target, predicted, labels=names).tolist()
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(target, predicted), **exact)
    assert found["loss"] == pytest.approx(metrics.log_loss(target, sure.numpy(), labels=names), **exact)
    table = metrics.precision_recall_fscore_support(target, predicted, labels=names, zero_division=0)
    for name, column in zip(("precision", "recall", "f1", "support"), table, strict=True):
        assert [each[name] for each in found["classes"]] == pytest.approx(column.tolist(), **exact)
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(target, predicted, average="macro"), **exact)
    highest, right = sure.max(1).values, predicted == target
    for each in found["calibration"]:
        inside = (highest >= each["from"]) & ((highest < each["to"]) | (each["to"] == 1.0))
        assert each["count"] == int(inside.sum())
        if each["count"]:
            assert each["probability"] == pytest.approx(float(highest[inside].mean()), **exact)
            assert each["accuracy"] == pytest.approx(float(right[inside].double().mean()), **exact)
    assert sum(each["count"] for each in found["calibration"]) == SAMPLES


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_figures_have_the_same_bits_on_any_number_of_ranks(ranks: int) -> None:
    """The whole result, worst samples included, is equal as text."""
    whole, parted = (total([batches()[rank::count] for rank in range(count)]) for count in (1, ranks))
    assert isinstance(whole, scores.ClassCounts)
    assert isinstance(parted, scores.ClassCounts)
    assert json.dumps(scores.class_figures(parted)) == json.dumps(scores.class_figures(whole))
    losses = [each["loss"] for each in scores.class_figures(whole)["worst"]]
    assert len(losses) == scores.WORST
    assert losses == sorted(losses, reverse=True)


def test_regression_equals_scikit_learn(metrics: Any) -> None:
    """MAE, RMSE, R2 and the quantiles agree to 1e-12, on one rank and on three, whatever the order."""
    drawn = random.Random(1)
    rows = [(index, drawn.gauss(5, 3)) for index in range(501)]
    pairs = [(index, value, value + drawn.gauss(0.1, 1)) for index, value in rows]
    parts = [pairs[rank::3] for rank in range(3)]
    made = [
        [([i], {"target": torch.tensor([t], dtype=F64), "value": torch.tensor([[v]], dtype=F64)}) for i, t, v in part]
        for part in (*parts, pairs)
    ]
    several, alone = total(made[:3]), total(made[3:])
    assert isinstance(several, scores.Residuals)
    assert isinstance(alone, scores.Residuals)
    found = scores.residual_figures(several)
    assert found == scores.residual_figures(alone)
    target, value = ([pair[place] for pair in pairs] for place in (1, 2))
    exact = {"abs": 1e-12, "rel": 1e-12}
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(target, value), **exact)
    assert found["rmse"] == pytest.approx(math.sqrt(metrics.mean_squared_error(target, value)), **exact)
    assert found["r2"] == pytest.approx(metrics.r2_score(target, value), **exact)
    left = torch.tensor(value, dtype=torch.float64) - torch.tensor(target, dtype=torch.float64)
    for each in found["quantiles"]:
        assert each["residual"] == pytest.approx(float(left.quantile(each["share"])), **exact)


def test_probabilities_are_taken_as_they_are() -> None:
    """Rows of probabilities give the loss without a softmax."""
    found = scores.counted({"target": torch.tensor([1]), "score": torch.tensor([[0.25, 0.75]])}, [0], None)
    assert isinstance(found, scores.ClassCounts)
    assert scores.class_figures(found)["loss"] == pytest.approx(-math.log(0.75), abs=1e-12)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1], "it returned list"),
        ({"target": torch.tensor([0])}, "it returned target"),
        ({"target": torch.tensor([0, 1]), "score": torch.ones(2, 3)}, "a row for each of the 1 samples"),
        (
            {"target": torch.tensor([3]), "score": torch.ones(1, 3)},
            "the target of sample 8 is 3, and score has 3 classes",
        ),
        ({"target": torch.tensor([0]), "score": torch.full((1, 3), math.nan)}, "the score of sample 8 is not finite"),
        ({"target": torch.tensor([0.5]), "score": torch.ones(1, 3)}, "a class number a sample"),
        ({"target": torch.ones(1, 2), "value": torch.ones(1, 3)}, "target has the shape (1, 2), value (1, 3)"),
    ],
)
def test_wrong_outputs_are_refused(found: object, words: str) -> None:
    """The error names the wrong name, shape, class or number, and the sample if known."""
    with pytest.raises(TaskError) as refusal:
        scores.counted(found, [8], None)
    assert words in str(refusal.value)


@pytest.mark.parametrize(("right", "number"), [(0, 10), (10, 10), (355, 359), (1, 1), (0, 0)])
def test_interval_contains_the_share(right: int, number: int) -> None:
    """Wilson's interval lies in 0 to 1, around the share. Reference for 355 of 359: 0.9717 to 0.9957 (by hand)."""
    low, high = scores.wilson(right, number)
    assert 0 <= low <= (right / number if number else 0) <= high <= 1
    if number == 359:
        assert (round(low, 4), round(high, 4)) == (0.9717, 0.9957)
