"""A rehearsal on the user's own machine: the step at which the trainer waits for an interruption, and the last step.

    CLOUDTRAIN_REHEARSAL='{"hold_at": 7, "leave_at": 12}'

The job's end stays the same: the learning rate's schedule and the order of the samples are as in the whole run.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.entrypoints.settings import Spec

__all__ = ["HOLD_S", "VARIABLE", "Rehearsal", "of_environment", "shortened"]

VARIABLE = "CLOUDTRAIN_REHEARSAL"
HOLD_S = 60.0  # the interruption normally comes at once; without an interruption the job continues
EVAL_BATCHES = 2  # on each rank: a few batches show that the evaluation works


@dataclass(frozen=True)
class Rehearsal:
    """`hold_at`: after this step the ranks wait for a stop request. `leave_at`: the run's last step.

    `environments`: the folder for environments that are built from `requirements`; `is_apart`: such an environment
    sees no package of this machine except torch and torch's requirements.
    """

    hold_at: int | None = None
    leave_at: int | None = None
    environments: str | None = None
    is_apart: bool = False


def of_environment(environ: Mapping[str, str] = os.environ) -> Rehearsal | None:
    """Return the rehearsal of the environment, or None for a real job."""
    text = environ.get(VARIABLE)
    return None if not text else Rehearsal(**json.loads(text))


def shortened(spec: Spec) -> Spec:
    """Return the spec with an evaluation of a few batches; `config_sha256` stays the hash of the whole job."""
    wanted = spec.training
    batches = min(wanted.eval_batches or EVAL_BATCHES, EVAL_BATCHES)
    return dataclasses.replace(spec, training=dataclasses.replace(wanted, eval_batches=batches, log_every=1))
