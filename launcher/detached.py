"""What to do about a job that nobody follows from here."""

from __future__ import annotations

from cloudtrain.launcher.job import Job
from cloudtrain.launcher.money.outlook import limit_micro

__all__ = ["lines"]


def lines(job: Job) -> list[str]:
    """Return how to follow the job and to stop it; where somebody is to be told of it, by whom."""
    found = [f"  follow it   cloudtrain logs -f {job.id}", f"  stop it     cloudtrain stop {job.id}"]
    places = job.config.get("notify") or []
    others = [each for each in places if not each.get("from_job")]
    if others:
        told = "all that `notify` names" if len(others) == len(places) else "those of `notify` without `from_job`"
        found.append(f"  get alerts  cloudtrain watch {job.id}")
        found.append(f"              (while no command follows the job, {told} receive nothing;")
        found.append("              `from_job: true` in an entry of `notify` makes the job itself send alerts)")
    elif not places and limit_micro(job) is not None:
        found.append(f"  get alerts  cloudtrain watch {job.id}   (of its budget; or set `notify`)")
    return found
