"""A loss that is a sum with a count: `loss(model, batch)` may return (sum, count) in place of a mean over the batch.

The gradient is then that of all sums divided by all counts of the global batch, for any cut into micro-batches and
ranks. A strategy gives the mean of the gradients of V micro-batches. Here these are gradients of sums, so V / count
scales them once a step, after the counts have travelled with the ranks' agreement. A rank that takes a step alone
(strategies local and async) divides by its own counts.

Each sum is divided at once by a power of two near the expected count, and so is each count: gradients keep about the
size of a mean's, which fp16 and compressed gradients need, and a power of two rounds nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import FormError
from ..rank.agree import Agreed
from . import data


def is_pair(returned: object) -> bool:
    """Return whether a value of the task is (sum, count)."""
    return isinstance(returned, tuple) and len(returned) == 2


class Tally:
    """What the task's functions have shown: the form of the loss, the counts of the present step, and collectives."""

    def __init__(self, split: data.Split, tokens_per_sample: int | None, *, says: bool = False) -> None:
        """`says`: prints the first (sum, count), which may be a loss and an accuracy by mistake."""
        self._says = says
        self._unit = 2.0 ** round(math.log2(split.micro * (tokens_per_sample or 1)))
        self._ranks, self._is_compared = split.ranks, False  # the form, over the ranks
        self.is_weighted: bool | None = None  # None until a loss, or an agreement, has shown the form
        self.uses_collectives: bool | None = None  # the task's evaluation; None until evaluate.py has looked
        self.count: torch.Tensor | float = 0.0  # of this rank in the present step

    @property
    def needs_total(self) -> bool:
        """Whether the step needs the counts of all ranks, as far as this rank knows."""
        return self.is_weighted is not False

    def take(self, returned: Any) -> torch.Tensor:
        """Return what `loss` returned as a scalar for the backward pass, and add its count. Raises FormError."""
        weighted = is_pair(returned)
        if self.is_weighted not in (None, weighted):
            now, before = ("(sum, count)", "a mean") if weighted else ("a mean", "(sum, count)")
            raise FormError(f"loss(model, batch) returned {now}, and {before} earlier; return one form in all calls")
        self.is_weighted = weighted
        loss, count = returned if weighted else (returned, 0.0)
        if not isinstance(loss, torch.Tensor):
            hint = "; write (sum, count) as a tuple" if isinstance(loss, list) else ""
            raise FormError(f"loss(model, batch) must return a tensor; it returned {loss!r:.200}{hint}")
        if loss.numel() != 1:
            shape = "x".join(map(str, loss.shape))
            mean = f"must return one number, the mean; it returned {shape}: call .mean() on it"
            total = f"returned (sum, count) with a sum of {shape} numbers: call .sum() on it"
            raise FormError(f"loss(model, batch) {total if weighted else mean}")
        if weighted:
            terms = checked_count(count)
            if self._says:
                self._says = False
                print(in_words(float(terms)), flush=True)
            self.count = self.count + terms / self._unit
            loss = loss / self._unit
        if not loss.requires_grad:
            raise FormError(
                "loss(model, batch) returned a tensor without a gradient; was it detached, made under "
                "torch.no_grad(), or taken from .item() or numpy?"
            )
        return loss.squeeze() if loss.dim() else loss

    def compare(self, verdict: Agreed) -> None:
        """Learn the form from the first agreement. Raises FormError, on all ranks, if the ranks have two forms."""
        if self._is_compared or verdict.pairs is None:
            return
        if verdict.pairs not in (0, self._ranks):
            raise FormError(
                f"loss(model, batch) returned (sum, count) on {verdict.pairs} of {self._ranks} ranks, and a mean on "
                "the others; return one form on all ranks"
            )
        self._is_compared, self.is_weighted = True, verdict.pairs > 0

    def total(self, verdict: Agreed, *, is_lone: bool) -> float | None:
        """Return the step's count, of this rank alone in a lone step; None if the loss is a mean."""
        if not self.is_weighted:
            return None
        return float(self.count) if is_lone else verdict.count


def in_words(count: float) -> str:
    """Return the effect of (sum, count), and a warning if the first count can hardly be a number of terms."""
    words = f"loss(model, batch) returns (sum, count), first with a count of {count:g}: sums are divided by counts"
    cure = "; if the second part is an accuracy or another metric, and no count, return the loss alone"
    return words if count >= 1 and count.is_integer() else words + cure


def checked_count(count: Any) -> torch.Tensor | float:
    """Return the count, on a GPU as a tensor, which the caller reads later. Raises FormError."""
    is_tensor = isinstance(count, torch.Tensor)
    try:
        if is_tensor and count.requires_grad:
            raise TypeError
        has_value = not is_tensor or (type(count) is torch.Tensor and count.device.type == "cpu")  # memory.py has none
        value = float(count) if has_value else count.double().reshape(())
    except (TypeError, ValueError, RuntimeError):
        what = f"Tensor of shape {tuple(count.shape)}" if is_tensor else type(count).__name__
        raise FormError(
            f"the second part of (sum, count) must be one number without a gradient, and is a {what}; return the mean "
            "over the batch alone, or the sum and the number of its terms"
        ) from None
    if isinstance(value, torch.Tensor):
        return value
    if not 0 <= value < math.inf:
        raise FormError(f"the count in (sum, count) is {value}; it must be 0 or more, and finite")
    # In 24 bits, the sum over the ranks in float64 is exact, and does not depend on their number.
    return value if value.is_integer() else torch.tensor(value).item()
