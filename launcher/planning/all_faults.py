"""All faults of a config at once, although each check of a request needs a config that passes the checks before.

Each faulty key gets a sound value, and the checks run again. In place of a faulty machine the config gets two others in
turn, and only faults with both count: the faults that have nothing to do with the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import BudgetError, ConfigError, Fault

if TYPE_CHECKING:
    from ..config.schema import JobConfig, Resources

MOST_LOOKS = 12
_MACHINE = ("resources", "resources.accelerators", "resources.instance_type")


def require_all_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> None:
    """Raise ConfigError with all faults for which `ask` refuses the config; BudgetError if money alone is short."""
    from .. import config as configs

    try:
        ask(config)
        return
    except BudgetError as error:
        first, faults, poor = error, list[Fault](), [Fault(error.message, error.where, hint=error.hint)]
    except ConfigError as error:
        if error.where:
            raise
        first, faults, poor = error, list(error.faults), []  # type: ignore[assignment]
    count = len(faults)
    looks, left = [config.model_copy(update={"budget": None})], faults  # the prices of other machines say nothing
    for _ in range(MOST_LOOKS):
        looks = [sound for each in looks if (sound := configs.cured(each, left)) is not None]
        if looks and any(fault.key in _MACHINE for fault in left):
            looks = [looks[0].model_copy(update={"resources": each}) for each in _machines(config)] or looks
        seen = [_faults_of(each, ask) for each in looks]
        left = [fault for fault in (seen or [()])[0] if all(fault in each for each in seen)]
        faults = [*faults, *(fault for fault in left if not _follows(fault, faults))]
        if not left:
            break
    raise ConfigError([*faults, *poor]) if len(faults) > count else first


def _faults_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> Sequence[Fault]:
    with contextlib.suppress(BudgetError):
        try:
            ask(config)
        except ConfigError as error:
            return error.faults
    return ()


def _machines(config: JobConfig) -> list[Resources]:
    """Return the config's resources with two machines of the backend's table, the first with the wanted GPUs."""
    from ..prices import catalog

    wanted = (config.resources.accelerators or "").rpartition(":")[2]
    counts = [int(wanted) if wanted.isdigit() else 1, 8, 4, 1]
    names = dict.fromkeys(name for count in counts for name in catalog.types(config.backend, count=count)[:1])
    changes = [{"instance_type": name, "accelerators": None} for name in list(names)[:2]]
    return [config.resources.model_copy(update=each) for each in changes]


def _follows(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Return whether an earlier fault of the same key, or of the machine, explains the fault."""
    keys = [each.key for each in faults]
    is_below = any(f"{fault.key}.".startswith(f"{key}.") for key in keys)
    return is_below or not fault.key or (fault.key in _MACHINE and not set(keys).isdisjoint(_MACHINE))
