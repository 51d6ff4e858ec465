"""The facts about the built-in optimizers and schedules that the config, the rules and the trainer read, without torch.

optim.py builds the optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer as rules, estimates and methods of training see it."""

    heeds: tuple[str, ...]
    """The settings that the optimizer uses, beside `lr` and `weight_decay`."""
    states: int = 2
    """Tensors of state for each parameter."""
    is_state_momentum: bool = False
    """The state is the momentum, and without momentum there is no state."""
    is_by_layer: bool = False
    """A step needs the norms of whole layers."""
    is_adaptive: bool = False
    """A step does not grow with the gradient, so the rate follows the square root of the samples."""


_ADAM = ("betas", "eps")
OPTIMIZERS = {
    "sgd": OptimizerFacts(("momentum",), states=1, is_state_momentum=True),
    "adamw": OptimizerFacts(_ADAM, is_adaptive=True),
    "radam": OptimizerFacts(_ADAM, is_adaptive=True),
    "lars": OptimizerFacts(("momentum", "trust_coefficient"), states=1, is_by_layer=True),
    "lamb": OptimizerFacts(_ADAM, is_by_layer=True, is_adaptive=True),
}
SCHEDULES = ("constant", "cosine", "linear", "one-cycle", "step", "plateau")
BY_LAYER = tuple(name for name, facts in OPTIMIZERS.items() if facts.is_by_layer)


def heeded_by() -> dict[str, tuple[str, ...]]:
    """Return the optimizers that use a setting, by the setting; the remaining optimizers would ignore the setting."""
    settings = dict.fromkeys(setting for facts in OPTIMIZERS.values() for setting in facts.heeds)
    return {key: tuple(name for name, facts in OPTIMIZERS.items() if key in facts.heeds) for key in settings}
