"""A rehearsal on the user's machine: the step at which the trainer waits for an interruption, and its last step.

    CLOUDTRAIN_REHEARSAL='{"hold_at": 7, "leave_at": 12}'

The job's planned end stays the same: the learning rate's schedule and the order of the samples are the whole run's.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

VARIABLE = "CLOUDTRAIN_REHEARSAL"
HOLD_S = 60.0  # the interruption comes within moments; otherwise the job continues


@dataclass(frozen=True)
class RehearsalSteps:
    """`hold_at`: after this step the ranks wait for a stop request. `leave_at`: the run's last step.

    `environments`: the folder for environments that are built from `requirements`; `is_apart`: such environments see
    only torch, and torch's requirements, of this machine's packages.
    """

    hold_at: int | None = None
    leave_at: int | None = None
    environments: str | None = None
    is_apart: bool = False


def of_environment() -> RehearsalSteps | None:
    """Return the rehearsal, None for a real run."""
    text = os.environ.get(VARIABLE)
    return None if not text else RehearsalSteps(**json.loads(text))
