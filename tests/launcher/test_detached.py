"""What is said of a job that nobody follows from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.launcher.job import Job
from cloudtrain.launcher.jobs.describe import unattended


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"notify": [{"slack": "env:A"}]}, "all that `notify` names receive nothing"),
        ({"notify": [{"slack": "env:A"}, {"slack": "env:B", "from_job": True}]}, "without `from_job` receive nothing"),
        ({"budget": {"limit": "1 USD"}}, "get alerts  cloudtrain watch one"),
    ],
)
def test_who_is_to_be_told_needs_somebody_to_look(
    make_job: Callable[..., Job], config: dict[str, Any], said: str
) -> None:
    """Or the job itself."""
    text = "\n".join(unattended(replace(make_job("one"), config=config)))
    assert said in text
    assert "cloudtrain stop one" in text


@pytest.mark.parametrize("config", [{}, {"notify": [{"slack": "env:B", "from_job": True}]}])
def test_job_that_tells_by_itself_needs_nobody(make_job: Callable[..., Job], config: dict[str, Any]) -> None:
    """Neither does one of which nobody wants to hear."""
    assert len(unattended(replace(make_job("one"), config=config))) == 2
