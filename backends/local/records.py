"""The stored record of a job on this machine: the handle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cloudtrain.launcher.backend import StoredRecord


@dataclass(frozen=True)
class LocalRef(StoredRecord):
    """The handle of a job: `folder` of the attempt, the number of `nodes`, and the folder of the checkpoints.

    `written`: the job's further folders, of outputs and of a mirror.
    """

    folder: str
    nodes: int
    checkpoint_dir: str
    written: tuple[str, ...] = ()

    @property
    def roots(self) -> list[Path]:
        """The nodes' folders, by number."""
        return [Path(self.folder) / f"node-{node}" for node in range(self.nodes)]
