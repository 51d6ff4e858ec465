"""All faults of a config at once, although each check of a request needs a config that passes the checks before.

Each faulty key gets a sound value, and the checks run again. In place of a faulty machine the config gets two others in
turn, and only faults with both count: the faults that have nothing to do with the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import BudgetError, ConfigError, Fault

if TYPE_CHECKING:
    from ..config.schema import JobConfig

MOST_LOOKS = 12
_MACHINE = ("resources", "resources.accelerators", "resources.instance_type")


def require_all_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> None:
    """Raise ConfigError with all faults for which `ask` refuses the config; BudgetError if money alone is short."""
    from .. import config as configs

    try:
        ask(config)
        return
    except (BudgetError, ConfigError) as error:
        if isinstance(error, ConfigError) and error.where:
            raise
        poor = [] if isinstance(error, ConfigError) else [Fault(error.message, error.where, hint=error.hint)]
        first, faults = error, list(error.faults if isinstance(error, ConfigError) else ())
    looks, left = [config.model_copy(update={"budget": None})], faults  # money counts after the faults
    for _ in range(MOST_LOOKS):
        looks = [sound for each in looks if (sound := configs.cured(each, left)) is not None]
        if looks and any(fault.key in _MACHINE for fault in left):
            looks = _with_other_machines(looks[0], config)
        seen = [_faults_of(each, ask) for each in looks]
        left = [fault for fault in (seen or [()])[0] if all(fault in each for each in seen)]
        faults += [fault for fault in left if not _follows(fault, faults)]
        if not left:
            break
    raise ConfigError([*faults, *poor]) if len(faults) > len(getattr(first, "faults", ())) else first


def _faults_of(config: JobConfig, ask: Callable[[JobConfig], object]) -> Sequence[Fault]:
    try:
        ask(config)
    except ConfigError as error:
        return error.faults
    except BudgetError:
        pass
    return ()


def _with_other_machines(sound: JobConfig, config: JobConfig) -> list[JobConfig]:
    """Return the sound config with two machines of the backend's table; the first has the wanted number of GPUs."""
    from ..prices import catalog

    wanted = (config.resources.accelerators or "").rpartition(":")[2]
    counts = [int(wanted) if wanted.isdigit() else 1, 8, 4, 1]
    names = [name for count in counts for name in catalog.types(config.backend, count=count)[:1]]
    if not names:
        return [sound]
    changes = [{"instance_type": name, "accelerators": None} for name in list(dict.fromkeys(names))[:2]]
    machines = [config.resources.model_copy(update=each) for each in changes]
    return [sound.model_copy(update={"resources": each}) for each in machines]


def _follows(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Return whether an earlier fault of the same key, or of the machine, explains the fault."""
    return any(
        not fault.key or f"{fault.key}.".startswith(f"{each.key}.") or (fault.key in _MACHINE and each.key in _MACHINE)
        for each in faults
    )
