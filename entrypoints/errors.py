"""The errors of a node that a user can fix; each message says what, where, and how."""

from __future__ import annotations

HELD = (  # a place of a new job
    "{} holds files of another job: choose another --name or place; `cloudtrain resume` continues the other job, "
    "`init_from` takes the weights"
)


class TaskError(Exception):
    """The task file or the settings are wrong: a retry changes nothing, and the message says how to fix the error."""


class FormError(TaskError):
    """The task's code has a form that trains on no machine, so `plan` refuses the task too."""


class Refused(RuntimeError):
    """The request cannot be done on this host; the text has the reason, the place, and the cure."""
