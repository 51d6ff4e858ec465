"""The figures of a test: counts of a rank's batches, their sum over ranks, and the figures from the sum.

Counts are integers, and sums of fractions are whole multiples of 2**-50, so the sum over ranks is exact: the figures
have the same bits for any number of ranks, if the batches are the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import TaskError

BINS = 10  # of the calibration, by the probability of the predicted class
WORST = 50  # samples
Z = 1.959963984540054  # the 97.5 % quantile of the normal distribution: intervals of 95 %
_ONE = 1 << 50
_EPS = 2.0**-52  # the least probability in a logarithm, as in scikit-learn's log_loss
_SUM_ERROR = 1e-4  # of a row that already holds probabilities
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

_NAMES = ("loss", "index", "target", "predicted", "probability")
Worst = list[list[int | float]]  # loss, index, target, predicted class, its probability


@dataclass
class ClassCounts:
    """The counts of a classification: `confusion[target][predicted]`, the calibration's bins, the sum of the losses."""

    confusion: list[list[int]]
    bins: list[list[int]] = field(default_factory=lambda: [[0, 0, 0] for _ in range(BINS)])  # count, right, probability
    loss: int = 0
    worst: Worst = field(default_factory=list)
    kept: Worst = field(default_factory=list)  # of the first samples, for a file


@dataclass
class Residuals:
    """The targets and values of a regression, by the sample's index."""

    rows: list[list[float]] = field(default_factory=list)  # index, target, value


def counted(
    found: Any, indices: Sequence[int], before: ClassCounts | Residuals | None, keep: int = 0
) -> ClassCounts | Residuals:
    """Return the counts with a further batch, the task's `outputs` for samples of these indices. Raises TaskError.

    `keep`: the number of samples whose predictions are kept, by their indices.
    """
    names = sorted(found) if isinstance(found, dict) else []
    wanted = 'outputs(model, batch) must return {"target", "score"} or {"target", "value"}'
    if names not in (["score", "target"], ["target", "value"]):
        raise TaskError(f"{wanted}; it returned {', '.join(names) or type(found).__name__}")
    tensors = {name: torch.as_tensor(value).detach().cpu() for name, value in found.items()}
    if any(not value.dim() or len(value) != len(indices) for value in tensors.values()):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
        raise TaskError(f"{wanted}, with a row for each of the {len(indices)} samples; their shapes are {shapes}")
    if "value" in tensors:
        residuals = before if isinstance(before, Residuals) else Residuals()
        _add_values(residuals, tensors["target"].double(), tensors["value"].double(), indices)
        return residuals
    target, score = tensors["target"].flatten(), tensors["score"].double()
    if score.dim() != 2 or len(target) != len(score) or target.is_floating_point():
        raise TaskError(f"{wanted}: target holds a class number a sample, score a row of (B, classes)")
    classes = score.shape[1]
    numbers = zip(indices, target.tolist(), strict=True)
    if odd := [(index, number) for index, number in numbers if not 0 <= number < classes]:
        raise TaskError(
            f"outputs: the target of sample {odd[0][0]} is {odd[0][1]}, and score has {classes} classes from 0 on; "
            "leave samples without a class out of the split"
        )
    if bad := [index for index, row in zip(indices, score.isfinite().all(1).tolist(), strict=True) if not row]:
        raise TaskError(f"outputs: the score of sample {bad[0]} is not finite")
    counts = before if isinstance(before, ClassCounts) else ClassCounts([[0] * classes for _ in range(classes)])
    if len(counts.confusion) != classes:
        raise TaskError(f"outputs: score has {classes} classes, in an earlier batch {len(counts.confusion)}")
    _add_classes(counts, target, score, indices, keep)
    return counts


def _add_classes(
    counts: ClassCounts, target: torch.Tensor, score: torch.Tensor, indices: Sequence[int], keep: int
) -> None:
    is_done = (score >= 0).all(1) & ((score.sum(1) - 1).abs() <= _SUM_ERROR)  # rows of probabilities stay
    probability = torch.where(is_done[:, None], score, score.softmax(1))
    predicted = probability.argmax(1)
    sure = probability.gather(1, predicted[:, None]).squeeze(1).clamp(0, 1)
    loss = -probability.gather(1, target.long()[:, None]).squeeze(1).clamp(_EPS, 1).log()
    place = (sure * BINS).long().clamp(max=BINS - 1)
    parts = [(values * _ONE).round().long().tolist() for values in (sure, loss)]
    rows = zip(indices, target.tolist(), predicted.tolist(), place.tolist(), *parts, strict=True)
    for index, wanted, chosen, at, sure_parts, loss_parts in rows:
        counts.confusion[wanted][chosen] += 1
        entry = counts.bins[at]
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + (wanted == chosen), entry[2] + sure_parts
        counts.loss += loss_parts
        counts.worst.append([loss_parts / _ONE, index, wanted, chosen, sure_parts / _ONE])
        if index < keep:
            counts.kept.append(counts.worst[-1])
    counts.worst = _worst(counts.worst)


def _worst(rows: Worst) -> Worst:
    """Return the rows with the highest losses; of equal losses the lowest indices."""
    return heapq.nsmallest(WORST, rows, key=lambda row: (-row[0], row[1]))


def _add_values(residuals: Residuals, target: torch.Tensor, value: torch.Tensor, indices: Sequence[int]) -> None:
    if target.numel() != value.numel():
        raise TaskError(f"outputs: target has the shape {tuple(target.shape)}, value {tuple(value.shape)}")
    each = target.numel() // len(indices)
    where = [index for index in indices for _ in range(each)]
    rows = list(zip(map(float, where), target.flatten().tolist(), value.flatten().tolist(), strict=True))
    if bad := [int(row[0]) for row in rows if not math.isfinite(row[1] + row[2])]:
        raise TaskError(f"outputs: target or value of sample {bad[0]} is not finite")
    residuals.rows += map(list, rows)


def summed(parts: Sequence[dict[str, Any] | None]) -> ClassCounts | Residuals | None:
    """Return the counts of all ranks together, from each rank's in JSON's form; None if no rank has counts."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if "rows" in known[0]:
        return Residuals(sorted((row for part in known for row in part["rows"]), key=lambda row: row[0]))
    total = ClassCounts([[0] * len(row) for row in known[0]["confusion"]])
    for part in known:
        for table, further in ((total.confusion, part["confusion"]), (total.bins, part["bins"])):
            for row, more in zip(table, further, strict=True):
                row[:] = [first + second for first, second in zip(row, more, strict=True)]
        total.loss += part["loss"]
        total.worst = _worst([*total.worst, *part["worst"]])
        total.kept = sorted([*total.kept, *part["kept"]], key=lambda row: row[1])
    return total


def predictions(counts: ClassCounts | Residuals, keep: int) -> list[dict[str, Any]]:
    """Return the predictions of the first samples by index, `keep` at most."""
    if isinstance(counts, ClassCounts):
        return [dict(zip(_NAMES, row, strict=True)) for row in counts.kept]
    first = [row for row in counts.rows if row[0] < keep]
    return [{"index": int(index), "target": target, "value": value} for index, target, value in first]


def class_figures(counts: ClassCounts) -> dict[str, Any]:
    """Return accuracy with its interval, loss, figures by class, calibration, and the worst samples.

    A figure without samples is 0, as in scikit-learn with zero_division=0.
    """
    table = counts.confusion
    number = sum(map(sum, table))
    right = sum(row[place] for place, row in enumerate(table))
    low, high = wilson(right, number)
    classes: list[dict[str, Any]] = []
    for place, row in enumerate(table):
        hits, support, chosen = row[place], sum(row), sum(other[place] for other in table)
        rates = {"precision": _ratio(hits, chosen), "recall": _ratio(hits, support)}
        classes.append({"class": place, **rates, "f1": _ratio(2 * hits, support + chosen), "support": support})
    seen = [each for each in classes if each["support"] or any(row[each["class"]] for row in table)]
    calibration = []
    for place, (count, hits, sure) in enumerate(counts.bins):
        figures = {"count": count, "accuracy": _ratio(hits, count), "probability": _ratio(sure, count * _ONE)}
        calibration.append({"from": place / BINS, "to": (place + 1) / BINS, **figures})
    gaps = math.fsum(abs(hits * _ONE - sure) / _ONE for _, hits, sure in counts.bins)
    return {
        "kind": "classification",
        "n": number,
        "accuracy": _ratio(right, number),
        "accuracy_low": low,
        "accuracy_high": high,
        "loss": _ratio(counts.loss, number * _ONE),
        "macro_f1": _ratio(math.fsum(each["f1"] for each in seen), len(seen)),
        "calibration_error": _ratio(gaps, number),
        "classes": classes,
        "confusion": table,
        "calibration": calibration,
        "worst": [dict(zip(_NAMES, row, strict=True)) for row in counts.worst],
    }


def residual_figures(counts: Residuals) -> dict[str, Any]:
    """Return the mean errors, R2, the residuals' quantiles (linear between ranks), and the worst samples."""
    targets = [row[1] for row in counts.rows]
    left = [row[2] - row[1] for row in counts.rows]
    number = len(left)
    mean = math.fsum(targets) / number
    squares = math.fsum(each * each for each in left)
    spread = math.fsum((each - mean) ** 2 for each in targets)
    residuals, shares = torch.tensor(left, dtype=torch.float64), torch.tensor(QUANTILES, dtype=torch.float64)
    quantiles = zip(QUANTILES, residuals.quantile(shares).tolist(), strict=True)
    worst = heapq.nsmallest(WORST, zip(counts.rows, left, strict=True), key=lambda each: (-abs(each[1]), each[0][0]))
    return {
        "kind": "regression",
        "n": number,
        "mae": math.fsum(map(abs, left)) / number,
        "rmse": math.sqrt(squares / number),
        "r2": 1 - squares / spread if spread else None,
        "bias": math.fsum(left) / number,
        "quantiles": [{"share": share, "residual": value} for share, value in quantiles],
        "worst": [{"index": int(row[0]), "target": row[1], "value": row[2], "residual": off} for row, off in worst],
    }


def wilson(right: int, number: int) -> tuple[float, float]:
    """Return the interval of 95 % for a share. Source: Wilson 1927; without samples 0 to 1."""
    if not number:
        return 0.0, 1.0
    share = right / number
    middle = share + Z * Z / (2 * number)
    half = Z * math.sqrt(share * (1 - share) / number + Z * Z / (4 * number * number))
    whole = 1 + Z * Z / number
    return max(0.0, (middle - half) / whole) if right else 0.0, (middle + half) / whole if right < number else 1.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
