"""The types of the functions that fixtures return, for the signatures of tests."""

from collections.abc import Callable
from pathlib import Path

from cloudtrain.launcher.job import Job
from doubles.terminals import Terminal

MakeJob = Callable[..., Job]
MakeProject = Callable[..., Path]
OpenTerminal = Callable[..., Terminal]
SetAnswers = Callable[..., None]
