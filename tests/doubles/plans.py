"""Stored plans and jobs for tests."""

import time
from dataclasses import replace
from typing import Any

from cloudtrain.launcher.job import Attempt, Job
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.store.registry import this_process


def plan_of(**fields: Any) -> Plan:
    """Return a stored plan of a single rank for an hour, with the given fields."""
    return Plan.load({"instances": 1, "nproc_per_node": 1, "ranks": 1, "cap_s": 3600, **fields})


def make_job(job_id: str, number: int = 1, **changes: Any) -> Job:
    """Return a job as `submit` makes it, before the job is journalled; fields of job and attempt may be changed."""
    plan = plan_of(instances=2, ranks=2, hourly_usd=0.0)
    attempt = Attempt(job_id, number, "intent", plan, {"body": 1}, time.time(), this_process())
    of_attempt = {name: changes.pop(name) for name in vars(attempt).keys() & changes.keys() - {"created_s"}}
    attempt = replace(attempt, **of_attempt)
    job = Job(job_id, job_id.split("-")[0], "local", time.time(), {}, "/x/cloudtrain.yaml", {}, attempt)
    return replace(job, **changes)
