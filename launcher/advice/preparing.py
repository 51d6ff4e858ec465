"""Prepares a submit with the facts of this machine's home: the parent's place before, the proof of the resume after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..planning import prepare as planning
from ..planning.prepare import Prepared

if TYPE_CHECKING:
    from ..backend import Bundle
    from ..config.schema import JobConfig


def prepare(
    config: JobConfig,
    config_file: Path,
    cache: Path,
    *,
    dry: bool,
    shipped: Bundle | None = None,
    spent_micro: int = 0,
    job_id: str = "",
) -> Prepared:
    """Return the prepared submit, as `planning.prepare.prepare` does, of a config that may have a parent.

    A dry run of a job on spot machines also notes its proof; a submit refuses a missing proof, with the same text.
    """
    parent: list[str] = []
    if config.init_from is not None:
        from . import parents

        config, parent = parents.resolved(config, config_file.parent)
    try:
        prepared = planning.prepare(
            config, config_file, cache, dry=dry, shipped=shipped, spent_micro=spent_micro, parent=parent, job_id=job_id
        )
    except ConfigError as error:
        if error.where:
            raise
        own = "inputs.init_from"  # no key of the file
        raise ConfigError([replace(f, key=f.key.replace(own, "init_from.path")) for f in error.faults]) from error
    on_spot = [each for each in prepared.candidates or (prepared,) if each.config.resources.spot]
    if dry and shipped is None and on_spot:
        from . import proofs

        return replace(prepared, warnings=(*prepared.warnings, *proofs.notes(on_spot[0])))
    return prepared
