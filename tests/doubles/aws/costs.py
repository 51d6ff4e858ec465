"""AWS's Cost Explorer: GetCostAndUsage of training jobs, by a tag that has been activated."""

from __future__ import annotations

import calendar
import time
from typing import Any

from doubles.aws import validate
from doubles.aws.pricelist import TRAINING
from doubles.aws.wire import AwsError, Call
from doubles.aws.world import World

__all__ = ["get_cost_and_usage"]

JSON = dict[str, Any]
DAY_S = 86_400
PAGE = 2  # days


def get_cost_and_usage(world: World, call: Call) -> JSON:
    """Return a page of days; costs are billable seconds x instances x price, on the day of the job's end."""
    validate.check("ce", call.operation, call.params)
    if call.operation != "GetCostAndUsage" or call.params["Granularity"] != "DAILY":
        raise AwsError("UnknownOperationException", f"the stand-in has no such ce:{call.operation}")
    span = call.params["TimePeriod"]
    first, after = (_midnight_s(span[key]) for key in ("Start", "End"))
    if first >= after:
        raise AwsError("ValidationException", "Start date (and hour) should be before end date (and hour)")
    days = list(range(first, after, DAY_S))
    start = int(call.params.get("NextPageToken") or 0)
    unit = world.settings.cost_currency
    found = [
        {
            "TimePeriod": {"Start": _day(day), "End": _day(day + DAY_S)},
            "Total": {"UnblendedCost": {"Amount": f"{_cost(world, call, day):.10f}", "Unit": unit}},
            "Groups": [],
            "Estimated": day + DAY_S > time.time(),
        }
        for day in days[start : start + PAGE]
    ]
    more = {"NextPageToken": str(start + PAGE)} if start + PAGE < len(days) else {}
    return {"ResultsByTime": found, "DimensionValueAttributes": [], **more}


def _cost(world: World, call: Call, day: int) -> float:
    tag = call.params["Filter"]["Tags"]
    if tag["Key"] not in world.settings.cost_tags:
        return 0.0
    usd = 0.0
    for job in list(world.jobs.values()):
        is_asked = job.tags.get(tag["Key"]) in tag["Values"]
        if is_asked and job.billable_s and day <= (job.training_end or 0) < day + DAY_S:
            machines = job.request["ResourceConfig"]
            usd += job.billable_s * machines["InstanceCount"] * TRAINING[machines["InstanceType"]] / 3600
    return usd


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))


def _midnight_s(day: str) -> int:
    return calendar.timegm(time.strptime(day, "%Y-%m-%d"))
