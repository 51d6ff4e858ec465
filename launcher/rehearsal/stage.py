"""The input of a rehearsed start on this machine, and the layout of the start by a backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from cloudtrain.entrypoints.contract import JobSpec

from ..backend import Bundle, Request

MOST_TOLERANCE = 0.1  # a share of the loss; a larger tolerance would be no proof


@dataclass(frozen=True)
class RehearsalOptions:
    """The options of a rehearsal."""

    steps: int = 5
    preempt_at: int | None = None
    kills: bool = False
    timeout_s: float = 300.0
    inputs: Mapping[str, Path] = field(default_factory=dict)  # local paths by name
    tolerance: float = 0.0  # the allowed relative difference of losses
    keeps: bool = False


@dataclass(frozen=True)
class Stage:
    """The input of a start of a rehearsed job on this machine."""

    bundle: Bundle
    folder: Path  # empty, for the nodes' disks; new for each start
    kept: Path  # the folder that outlives a start, like the platform's storage
    number: int  # of the start, from 1
    addresses: tuple[str, ...]  # a loopback address per node
    inputs: Mapping[str, Path]  # local places, if given
    gpus: tuple[tuple[str, ...], ...]  # CUDA numbers for each node
    service: str  # the result of `Stored`, or ""
    has_own_places: bool  # a node sees the platform's paths; else paths in command and variables are rewritten
    base: Path  # the config file's folder
    variables: Mapping[str, str] = field(default_factory=dict)  # the last entries of every node's environment
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def with_own_mirror(self, job: JobSpec) -> tuple[JobSpec, dict[str, Path]]:
        """Return the job's spec with a local kept folder in place of a mirror in a store, and its place."""
        if "://" not in (job.checkpoint.mirror or ""):
            return job, {}
        folder = self.kept / "mirror"
        folder.mkdir(parents=True, exist_ok=True)
        return replace(job, checkpoint=replace(job.checkpoint, mirror=str(folder))), {str(folder): folder}

    def container_variables(self, number: int, hostname: str, disk: Path) -> dict[str, str]:
        """Return the usual variables of a node's container; `disk` is the node's folder on this machine."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": "/tmp" if self.has_own_places else str(disk),
            "HOSTNAME": hostname,
            "LANG": "C.UTF-8",
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus[number]),
        }


@dataclass(frozen=True)
class NodeRun:
    """A machine of a rehearsed start: the platform's command, and the environment of the command."""

    hostname: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    agents: tuple[Path, ...]  # the local folders of the machine's agents
    # Absolute paths on the machine to local ones; a later may lie inside an earlier
    places: Mapping[str, Path] = field(default_factory=dict)
    cwd: str = "/"
    names: Mapping[str, str] = field(default_factory=dict)
    # Folders on the machine's disk, each with the platform's copy: copied in before the start, out after the end
    copied: tuple[tuple[Path, Path], ...] = ()
    # The input, or a function from the first machine's answer to the input
    stdin: str | Callable[[str], str] | None = None
    detaches: bool = False  # the command returns while the agents continue, and get stop requests in their folders


@dataclass(frozen=True)
class Rehearsal:
    """A start of a job that this machine can rehearse."""

    nodes: tuple[NodeRun, ...]
    notice: str  # the signal or file by which the platform interrupts a job
    grace_s: float  # until the kill
    checkpoints: Path  # the local place of the saved files after the end
    # Of a finished and of an interrupted node, if the platform uses exit codes
    codes: Mapping[str, int] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()  # the local substitutes for the platform's services
    # An interrupted job continues as a new attempt of cloudtrain, not as a further start by the platform
    sends_again: bool = False


@runtime_checkable
class Rehearsed(Protocol):
    """A backend whose jobs can be rehearsed on this machine: without a network, without an account."""

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        """Lay out a start of the same request below the stage's folder. Raises ConfigError if impossible."""


@runtime_checkable
class Stored(Protocol):
    """A rehearsed backend whose nodes use the platform's storage directly."""

    def rehearsal_service(self, kept: Path) -> AbstractContextManager[str]:
        """Serve the storage on loopback, with `kept` as the disk; yield the address."""
