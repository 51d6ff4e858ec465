"""Removes from a bucket the checkpoints that were removed on this node, if the platform copies the folder to a bucket.

SageMaker copies new files of the checkpoint folder, and removes no file: after a day on spot machines a restart would
download every checkpoint the job ever wrote, and fill the disk.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from ..stores.store import Store, StoreError, open_store
from . import folder as folders

SWEEP_S = 20.0

_OURS = re.compile(r"(step-(\d{8,}))(\.tmp)?/")


class Sweeper(threading.Thread):
    """A thread of node 0 that sweeps every SWEEP_S, for a job of the shared trainer; a failure is tried again."""

    def __init__(self, folder: Path, uri: str) -> None:
        super().__init__(name="sweeper", daemon=True)
        self._folder = folder
        self._uri = uri
        self._is_over = threading.Event()

    def finish(self) -> None:
        """Begin no further round; a round under way is not waited for."""
        self._is_over.set()

    def run(self) -> None:
        """Sweep until `finish`."""
        try:
            store = open_store(self._uri)
        except StoreError as error:  # the image lacks the store's library
            print(f"checkpoints that are removed here stay in {self._uri}: {error}", flush=True)
            return
        is_reported = False
        while not self._is_over.wait(SWEEP_S):
            try:
                sweep(self._folder, store)
                for trial in self._folder.glob("trials/[0-9]*"):  # of a sweep
                    sweep(trial, store, f"trials/{trial.name}/")
            except (OSError, ValueError, folders.CheckpointError) as error:
                if not is_reported:
                    print(f"checkpoints that are removed here stay in the bucket for now: {error}", flush=True)
                is_reported = True


def sweep(folder: Path, store: Store, below: str = "") -> list[str]:
    """Remove steps from the store that are older than the newest local step and absent here; return their names.

    `below`: the beginning of the folder's names in the store, with a slash at its end. Removes steps only after the
    newest step is in the store too: the store never has less to resume from than before. Raises OSError.
    """
    here = {path.name: step for step, path in folders.list_steps(folder)}
    if not here:
        return []
    newest = max(here, key=lambda name: here[name])
    there: dict[str, list[str]] = {}
    for name in store.names(f"{below}step-"):
        match = _OURS.match(name.removeprefix(below))
        if match and match[1] not in here and int(match[2]) < here[newest]:
            there.setdefault(match[0], []).append(name)
    whole = set(folders.read_manifest(folder / newest)) | {folders.MANIFEST}
    if not whole <= {name.removeprefix(f"{below}{newest}/") for name in store.names(f"{below}{newest}/")}:
        return []
    for names in there.values():
        # The manifest first: a half-removed checkpoint must not look complete.
        for name in sorted(names, key=lambda name: not name.endswith(folders.MANIFEST)):
            store.delete(name)
    return sorted(name.rstrip("/") for name in there)
