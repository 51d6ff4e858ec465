"""The input of a rehearsed start on this machine, and the layout of the start by a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from cloudtrain.entrypoints.contract import JobSpec

from ..backend import Bundle, Request


@dataclass(frozen=True)
class RehearsalOptions:
    """The options. `inputs` have a local path; `tolerance` is the allowed relative difference of losses."""

    steps: int = 5
    preempt_at: int | None = None
    kills: bool = False
    timeout_s: float = 300.0
    inputs: Mapping[str, Path] = field(default_factory=dict)
    tolerance: float = 0.0
    keeps: bool = False


@dataclass(frozen=True)
class Stage:
    """The input of a start of a rehearsed job on this machine.

    `folder`: an empty folder for the nodes' disks, new for each start; `kept`: the folder that outlives a start, like
    the platform's storage; `number` counts the starts from 1. `addresses`: a loopback address per node. `inputs`:
    local places of the inputs, if given. `gpus`: CUDA numbers for each node. `service`: the result of `Stored`, or "".
    `has_own_places`: a node sees its folders at the platform's paths; if not, paths in the command and the variables
    are rewritten. `base`: the config file's folder. `variables`: the last entries of every node's environment.
    """

    bundle: Bundle
    folder: Path
    kept: Path
    number: int
    addresses: tuple[str, ...]
    inputs: Mapping[str, Path]
    gpus: tuple[tuple[str, ...], ...]
    service: str
    has_own_places: bool
    base: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def with_own_mirror(self, job: JobSpec) -> tuple[JobSpec, dict[str, Path]]:
        """Return the job's spec with a local kept folder in place of a mirror in a store, and its place."""
        if "://" not in (job.checkpoint.mirror or ""):
            return job, {}
        folder = self.kept / "mirror"
        folder.mkdir(parents=True, exist_ok=True)
        return replace(job, checkpoint=replace(job.checkpoint, mirror=str(folder))), {str(folder): folder}


@dataclass(frozen=True)
class NodeRun:
    """A machine of a rehearsed start: the platform's command, and the environment of the command.

    `places` maps absolute paths on the machine to local folders or files; a later path may lie inside an earlier path.
    `agents`: the local folders of the machine's agents. `copied`: pairs of a folder on the machine's disk and the copy
    that the platform keeps: copied in before the start, copied out after the end. `stdin`: the command's input, or a
    function from the first machine's answer to the input; `detaches`: the command returns while the agents continue,
    and the agents get stop requests in their folders.
    """

    hostname: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    agents: tuple[Path, ...]
    places: Mapping[str, Path] = field(default_factory=dict)
    cwd: str = "/"
    names: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[tuple[Path, Path], ...] = ()
    stdin: str | Callable[[str], str] | None = None
    detaches: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """A start of a job that this machine can rehearse.

    `notice`: the signal or file by which the platform interrupts a job; `grace_s`: the seconds until the kill. `codes`:
    the exit codes of a finished node and of an interrupted node, if the platform uses exit codes. `checkpoints`: the
    local place of the saved files after the end. `replaced`: the local substitutes for the platform's services.
    `sends_again`: an interrupted job continues as a new attempt of cloudtrain, not as a further start by the platform.
    """

    nodes: tuple[NodeRun, ...]
    notice: str
    grace_s: float
    checkpoints: Path
    codes: Mapping[str, int] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
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
