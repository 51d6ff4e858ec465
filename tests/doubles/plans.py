"""Stored plans for tests."""

from typing import Any

from cloudtrain.launcher.plan import Plan


def plan_of(**fields: Any) -> Plan:
    """Return a stored plan of a single rank for an hour, with the given fields."""
    return Plan.load({"instances": 1, "nproc_per_node": 1, "ranks": 1, "cap_s": 3600, **fields})
