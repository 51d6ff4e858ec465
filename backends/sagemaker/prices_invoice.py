"""AWS's bill for a job's tag: Cost Explorer's GetCostAndUsage, a cent a request.

Cost Explorer reports a tag from the day after a user has made `cloudtrain:job` a cost allocation tag, and a day's costs
up to 24 hours after the day. Source: botocore's model of `ce`, 2017-10-25; docs.aws.amazon.com/cost-management, "Cost
Explorer API" and "Activating user-defined cost allocation tags".
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

from cloudtrain.launcher.backend import Invoice, JobRef
from cloudtrain.launcher.errors import ConfigError

from . import api
from .records import SageMakerRef

TAG = "cloudtrain:job"
HOME = "us-east-1"  # the only region with the service, for all regions
METRIC = "UnblendedCost"
_DAY_S = 86_400
_ABSENT = (
    "AWS's billing has nothing under the tag yet: it comes up to a day late, and only once `cloudtrain:job` is "
    "activated at Billing, Cost allocation tags"
)


def invoice(clients: api.AwsClients, ref: JobRef, job_id: str, from_s: float, to_s: float) -> Invoice:
    """Return the bill for the days from `from_s` to `to_s`. Raises CredentialError, UnreachableError."""
    access = replace(api.AwsAccess.of(SageMakerRef.load(ref), clients), region=HOME)
    first, after = _day(from_s), _day(max(to_s, from_s) + _DAY_S)  # `End` is exclusive
    asked: dict[str, Any] = {
        "TimePeriod": {"Start": first, "End": after},
        "Granularity": "DAILY",
        "Metrics": [METRIC],
        "Filter": {"Tags": {"Key": TAG, "Values": [job_id], "MatchOptions": ["EQUALS"]}},
    }
    days: list[dict[str, Any]] = []
    client = api.client(access, "ce")
    while True:
        with api.answers("ask Cost Explorer (ce:GetCostAndUsage)"):
            page = client.get_cost_and_usage(**asked)
        days += page.get("ResultsByTime", ())
        if not page.get("NextPageToken"):
            break
        asked["NextPageToken"] = page["NextPageToken"]
    amounts = [day["Total"][METRIC] for day in days if METRIC in day.get("Total", {})]
    if units := {each["Unit"] for each in amounts if Decimal(each["Amount"])} - {"USD"}:
        raise ConfigError(f"Cost Explorer tells amounts in {', '.join(sorted(units))}, and money is in US dollars here")
    micro = math.ceil(sum((Decimal(each["Amount"]) for each in amounts), Decimal(0)) * 1_000_000)
    estimated = any(day.get("Estimated") for day in days)
    return Invoice(micro, estimated, first, _day(max(to_s, from_s)), "AWS Cost Explorer", "" if micro else _ABSENT)


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
