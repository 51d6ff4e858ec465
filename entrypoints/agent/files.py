"""The saved files of a node: copies from other nodes before a start, copies for other nodes, kept files of a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..contract import AgentSpec, has_checkpoint
from ..replication import copies
from ..replication.replicas import Replicas
from ..replication.restore import Gathering
from ..scripts.keep import FileKeeper, newest, report_unkept, saved
from . import transport
from .coordinate import Desired

KEEP_S = 60.0  # time to copy the kept files at the job's end
QUIET_S = 2.0  # after a script's last write: then its save is whole, and the ranks may be killed
NOT_COPIED = f"agent: the kept files were not copied within {KEEP_S:.0f} s"


class NodeFiles:
    """The files, from the agent's start to its end. `port`: of the server of copies, 0 without copies.

    `is_opening`: the start of the ranks waits for files. The first successor keeps a copy of the leader's checkpoints;
    `leader` returns the leader's address and port of copies on this node, else None.
    """

    def __init__(self, spec: AgentSpec, leader: Callable[[], tuple[str, int] | None]) -> None:
        self.checkpoints = Path(spec.environment["CLOUDTRAIN_CHECKPOINT_DIR"])
        self.is_task = spec.job.run.is_own
        self.port = 0
        self.is_opening = False
        self._spec, self._log = spec, Path(spec.root) / "log"
        code = Path(spec.root, "code", spec.job.run.workdir or "")
        where = code, self.checkpoints, spec.job.run.keep, self._log / "rank-0.log"
        self._keeper = None if self.is_task else FileKeeper(*where)
        self._gathering: Gathering | None = None
        self._closing_s = 0.0  # since when the ranks have ended
        self._looked_s, self._latest = -transport.BEAT_S, ""  # the last look for the newest checkpoint
        self._replicas: Replicas | None = None
        if spec.copies:
            folder, token = self.checkpoints, spec.token
            server = transport.on_free_port(spec, lambda port: copies.Server(folder, spec.address, port, token, saved))
            self.port = server.address[1]
            self._replicas = Replicas(folder, leader, token, Path(spec.copies))

    @property
    def fault(self) -> str | None:
        """Why the kept files of a script cannot be kept, else None."""
        return self._keeper.fault if self._keeper is not None else None

    @property
    def newest_kept(self) -> tuple[str, float] | None:
        """The newest checkpoint among the kept files of a script."""
        return self._keeper.newest if self._keeper is not None else None

    def newest(self) -> tuple[str, float] | None:
        """Return a script's newest checkpoint on this node; None for the trainer, which finds its own checkpoints."""
        return None if self.is_task else newest(self.checkpoints)

    def latest(self) -> str:
        """Return a mark of the newest complete checkpoint on this node, at most a beat old; empty without any."""
        if time.monotonic() - self._looked_s > transport.BEAT_S:
            found, self._looked_s = newest(self.checkpoints), time.monotonic()
            if found is not None and (self.is_task or time.time() - found[1] >= QUIET_S):
                self._latest = f"{found[0]} {found[1]}"
        return self._latest

    def has_checkpoint(self) -> bool:
        """Return whether this node has a checkpoint."""
        return has_checkpoint(self.checkpoints)

    def start(self) -> None:
        """Start to copy the leader's checkpoints, if this node should."""
        if self._replicas is not None and self._spec.replicates:
            self._replicas.start()

    def open(self, desired: Desired, places: tuple[tuple[int, str, int, int], ...]) -> None:
        """Start to gather the files that a start of the ranks needs, from the other nodes' `places`."""
        self.is_opening = True
        sources = [(address, port) for node, address, _, port in places if node != self._spec.node]
        needs_files = not self.is_task or self._spec.node == desired.nodes[0]
        if self._replicas is not None and sources and needs_files:
            merged = self._keeper.tops if self._keeper is not None else ()
            where = self.checkpoints, sources, self._spec.token, self._replicas.note
            finds = None if self.is_task else saved
            self._gathering = Gathering(*where, newest_alone=self.is_task, merged=merged, saved=finds)

    def opened(self) -> tuple[str, ...] | None:
        """Return the files that could not be fetched, once all others are here; None before, and without a start."""
        is_here = self._gathering is None or self._gathering.is_done
        if not self.is_opening or not is_here or not (self._keeper is None or self._keeper.has_opened()):
            return None
        missing = tuple(self._gathering.missing) if self._gathering else ()
        self.is_opening, self._gathering = False, None
        return missing

    def cancel(self) -> bool:
        """Cancel the start of the ranks; return whether the start had waited for files."""
        if self._gathering is not None:
            self._gathering.cancel()
        was_opening, self.is_opening = self.is_opening, False
        if was_opening:
            self._gathering = None
            if self._keeper is not None:
                self._keeper.close()
        return was_opening

    def have_closed(self, kill: Callable[[], object]) -> bool:
        """Call `kill` for the processes that the ranks have left; return whether the ranks' files are kept."""
        if self._keeper is None:
            return True
        if not self._keeper.is_closing:
            kill()
            self._closing_s = time.monotonic()
        if self._keeper.close():
            return True
        if time.monotonic() - self._closing_s < KEEP_S:
            return False
        print(NOT_COPIED, flush=True)
        return True

    def finish(self) -> None:
        """End the copies between nodes."""
        if self._replicas is not None:
            self._replicas.finish()

    def report_unkept(self) -> list[str]:
        """Copy the last kept files; log the names of the script's unkept files, and return these names."""
        if self._keeper is None:
            return []
        if not self._keeper.close(KEEP_S):
            print(NOT_COPIED, flush=True)
        return report_unkept(self._keeper.unkept(), self._keeper.log or self._log / "boot.log")
