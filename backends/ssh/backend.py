"""The ssh backend: jobs are agents on the user's own machines, and cloudtrain reaches the machines by ssh alone.

A dry run imports only the modules that plan and render. A command imports the modules that use ssh on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher import lazily
from cloudtrain.launcher.backend import Capacity, Request, Terms

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.errors import Fault

_JOBS = "cloudtrain.backends.ssh.jobs"
# The agent of node 0 ends the job at the cap by its own clock. The remaining agents end at its message, or after 15 s
# of silence (entrypoints/agent/transport.py); killing the processes takes some seconds more.
TERMS = Terms(tail_s=20)


def capacity(config: JobConfig) -> Capacity:
    """Return the GPUs of a host as the config states them: a dry run asks no host, and a submit checks the hosts."""
    from cloudtrain.backends.ssh.block import Ssh  # a poll of a job's state needs no config

    gpus = int((config.resources.accelerators or ":0").rpartition(":")[2])
    price = config.block(Ssh).price_per_hour
    if price is None:
        return Capacity(gpus, 0.0, "your own machines", TERMS, is_own=True, machine="your hosts")
    return Capacity(gpus, price / 1e6, "ssh.price_per_hour", TERMS, is_own=price == 0, machine="your hosts")


def check(request: Request) -> list[Fault]:
    """Return the faults in the request that no host would accept."""
    from cloudtrain.backends.ssh import check as rules

    return list(rules.faults(request.body))


request = lazily.of("cloudtrain.backends.ssh.request", "build")
ready = lazily.of("cloudtrain.backends.ssh.jobs_send", "ready")
send = lazily.of("cloudtrain.backends.ssh.jobs_send", "send")
find = lazily.of("cloudtrain.backends.ssh.jobs_send", "find")
jobs = lazily.of("cloudtrain.backends.ssh.jobs_send", "jobs")
state = lazily.of(_JOBS, "state")
logs = lazily.of(_JOBS, "logs")
logs_from = lazily.of(_JOBS, "logs_from")
pace = lazily.of(_JOBS, "pace")
stop = lazily.of(_JOBS, "stop")
artifacts = lazily.of(_JOBS, "artifacts")
checkpoints = lazily.of(_JOBS, "checkpoints")
shell = lazily.of(_JOBS, "shell")
doctor = lazily.of("cloudtrain.backends.ssh.doctor", "checks")
hosts = lazily.of("cloudtrain.backends.ssh.doctor", "hosts")
rehearsal = lazily.of("cloudtrain.backends.ssh.rehearsal", "rehearsal")
