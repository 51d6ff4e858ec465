"""The facts about the strategies that a plan and the trainer need before a model is spread, without torch.

Only this folder compares the name of a strategy: other modules ask these facts, or the record of the spread model
(strategy.py). The config has its names and texts from here too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..settings import TrainingSettings


@dataclass(frozen=True)
class StrategyFacts:
    """A strategy of `training.strategy`."""

    spread: str
    """The model and the gradients over the ranks, in words."""
    is_whole: bool = False
    """Each rank holds the whole model, with gradients."""
    averages_gradients: bool = False
    """Each step sums whole gradients over the ranks, which compression and ZeRO-1 build on."""
    averages_weights: bool = False
    """The ranks train apart, and average their weights from time to time."""
    has_servers: bool = False
    """Processes beside the ranks train (parameter_server/)."""
    sharded: str | None = None
    """The strategy that shards the copies of this strategy, to save memory."""
    nearer: str = ""
    """A strategy that sends less over slow connections, in words."""

    @property
    def is_apart(self) -> bool:
        """Whether the ranks do not meet in each step."""
        return self.averages_weights or self.has_servers


FACTS = {
    "ddp": StrategyFacts("replicated", is_whole=True, averages_gradients=True, sharded="fsdp"),
    "fsdp": StrategyFacts("sharded", nearer="strategy: hsdp, which sends shards within an instance only"),
    "hsdp": StrategyFacts("sharded within a group of ranks and replicated over the groups"),
    "local": StrategyFacts(
        "replicated and averaged from time to time, for slow networks", is_whole=True, averages_weights=True
    ),
    "async": StrategyFacts("trained by workers that do not wait for each other", is_whole=True, has_servers=True),
}


def facts_of(settings: TrainingSettings) -> StrategyFacts:
    """Return the facts about the strategy of the settings."""
    return FACTS[settings.strategy]


def together(settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of the same training with ranks that meet in each step: ddp in place of local and async."""
    from ..settings import ServerSettings  # slow to import; the config and `status` need the facts alone

    if not facts_of(settings).is_apart:
        return settings
    return replace(settings, strategy="ddp", local=None, server=ServerSettings())
