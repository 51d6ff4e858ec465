"""The Slurm backend's pure part: machines, price, request and check of a config.

Not yet in the table of backends: the calls of a job's life are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.backend import Capacity, Terms, lazy_modules

if TYPE_CHECKING:
    from cloudtrain.backends.slurm import block, check, request
    from cloudtrain.launcher.backend import Request
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault
    from cloudtrain.launcher.plan import Plan
else:  # each module is imported on its first use
    globals().update(lazy_modules(__package__))

# Slurm's limit is in whole minutes. A node is charged until the last process has ended: KillWait (30 s by default)
# after the limit, and Slurm looks for jobs over their limit every 30 s (seen in 22.05).
TERMS = Terms(tail_s=90, unit_s=60)


class SlurmBackend:
    """The backend of the name `slurm`."""

    def capacity(self, config: JobConfig) -> Capacity:
        """Return the GPUs of a node as the config states them, and the price of these GPUs."""
        gpus = int((config.resources.accelerators or ":0").rpartition(":")[2])
        price = config.block(block.Slurm).price_per_gpu_hour
        if price is None or not gpus:
            return Capacity(gpus, 0.0, "your cluster", TERMS, is_own=True, machine="cluster nodes")
        source = "slurm.price_per_gpu_hour"
        return Capacity(gpus, gpus * price / 1e6, source, TERMS, is_own=price == 0, machine="cluster nodes")

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        return request.build(plan, config, job_id, attempt, bundle_sha256)

    def check(self, request: Request) -> list[Fault]:
        """Return the faults in the request that a cluster would refuse, or would accept and never run."""
        return list(check.faults(request.body))
