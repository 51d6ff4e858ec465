"""A rehearsal on the user's own machine: at which step the trainer waits to be interrupted, and at which it leaves.

    CLOUDTRAIN_REHEARSAL='{"hold_at": 7, "leave_at": 12}'

Where the job ends is not changed: the learning rate's schedule and the order of the samples are those of the whole run.
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
HOLD_S = 60.0  # the interruption comes within moments; without it the job goes on
EVAL_BATCHES = 2  # on each rank: that evaluation works shows in few


@dataclass(frozen=True)
class Rehearsal:
    """`hold_at`: behind this step the ranks wait until they are told to stop. `leave_at`: the run's last step.

    `environments`: the folder for environments that are built from `requirements`; `is_apart`: in these no package of
    this machine is seen but torch and what torch requires.
    """

    hold_at: int | None = None
    leave_at: int | None = None
    environments: str | None = None
    is_apart: bool = False


def of_environment(environ: Mapping[str, str] = os.environ) -> Rehearsal | None:
    """Return what is rehearsed, None where the job is in earnest."""
    text = environ.get(VARIABLE)
    return None if not text else Rehearsal(**json.loads(text))


def shortened(spec: Spec) -> Spec:
    """Return the spec with an evaluation of a few batches; `config_sha256` stays that of the whole job."""
    wanted = spec.training
    batches = min(wanted.eval_batches or EVAL_BATCHES, EVAL_BATCHES)
    return dataclasses.replace(spec, training=dataclasses.replace(wanted, eval_batches=batches, log_every=1))
