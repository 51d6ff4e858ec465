"""Advice about a job without a follower."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs.view import unattended


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"notify": [{"slack": "env:A"}]}, "all that `notify` names receive nothing"),
        ({"notify": [{"slack": "env:A"}, {"slack": "env:B", "from_job": True}]}, "without `from_job` receive nothing"),
        ({"budget": {"limit": "1 USD"}}, "get alerts  cloudtrain watch one"),
    ],
)
def test_alert_receivers_need_a_follower(make_job: Callable[..., Job], config: dict[str, Any], said: str) -> None:
    """The job itself may send alerts instead."""
    text = "\n".join(unattended(replace(make_job("one"), config=config)))
    assert said in text
    assert "cloudtrain stop one" in text


@pytest.mark.parametrize("config", [{}, {"notify": [{"slack": "env:B", "from_job": True}]}])
def test_job_that_sends_alerts_needs_no_follower(make_job: Callable[..., Job], config: dict[str, Any]) -> None:
    """A job without alerts needs no follower either."""
    assert len(unattended(replace(make_job("one"), config=config))) == 2
