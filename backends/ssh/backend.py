"""The ssh backend: jobs are agents on the user's own machines, and cloudtrain reaches the machines by ssh alone.

A dry run imports only the modules that plan and render. A command imports the modules that use ssh on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Pace, ReceivesModels, Terms

from ..adapter import HostsAdapter, handed
from .records import SshRef

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import JobRef
    from cloudtrain.launcher.config.schema import JobConfig

# The agent of node 0 ends the job at the cap by its own clock. The remaining agents end at its message, or after 15 s
# of silence (entrypoints/agent/transport.py); killing the processes takes some seconds more.
TERMS = Terms(tail_s=20)
LINES_S, STATE_S = 0.3, 1.0
HOLD_BACK_S = 0.5  # hosts answer one after the other, and their clock differences are known to a quarter second
LATE_S = 15.0  # after node 0's verdict, for the end of another node's log


class SshBackend(HostsAdapter):
    """The backend of the name `ssh`."""

    FOLDER = __package__
    push_model = handed(ReceivesModels.push_model, "models", "push")
    restore_model = handed(ReceivesModels.restore_model, "models", "restore")

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs of a host as the config states them: only a submit asks the hosts."""
        from .block import Ssh  # a poll of a job's state needs no config

        gpus = int((config.resources.accelerators or ":0").rpartition(":")[2])
        price = config.block(Ssh).price_per_hour
        source = "your own machines" if price is None else "ssh.price_per_hour"
        return Capacity(gpus, (price or 0) / 1e6, source, TERMS, is_own=not price, machine="your hosts")

    def pace(self, ref: JobRef) -> Pace:
        """Return the polling intervals: a poll is one message each way on an open connection."""
        return Pace(lines_s=LINES_S, state_s=STATE_S, late_s=LATE_S, hold_back_s=HOLD_BACK_S)

    def checkpoint_place(self, ref: JobRef) -> str | None:
        return SshRef.load(ref).nodes[0].checkpoints
