"""What a rehearsed start gets on this machine, and how a backend lays the start out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cloudtrain.launcher.backend import Bundle, Request

__all__ = ["NodeRun", "Rehearsal", "Rehearsed", "Stage", "Stored"]


@dataclass(frozen=True)
class Stage:
    """What one start of a rehearsed job gets on this machine.

    `folder`, empty and this start's own, is for the nodes' disks; `kept` is what outlives a start, as the platform's
    storage does; `number` counts the starts from 1. `addresses` are loopback ones, one a node. `inputs` have the place
    here of those that were given one. `gpus` are each node's, by CUDA's numbers. `service` is what `Stored` gave, else
    nothing. `has_own_places`: a node sees its own folders at the platform's paths; else paths in its command and
    variables are rewritten. `base` is the config file's folder. `variables` come last into every node's environment.
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

    def with_own_mirror(self, spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return the job's spec with a mirror in a store replaced by a folder that is kept, and that folder's place."""
        checkpoint = spec["checkpoint"]
        if "://" not in (checkpoint.get("mirror") or ""):
            return spec, {}
        folder = self.kept / "mirror"
        folder.mkdir(parents=True, exist_ok=True)
        return {**spec, "checkpoint": {**checkpoint, "mirror": str(folder)}}, {str(folder): folder}


@dataclass(frozen=True)
class NodeRun:
    """A machine of a rehearsed start: the command as the platform would start it, and all that it finds there.

    `places` leads from absolute paths in it to folders or files here; a later one may lie inside an earlier one.
    `agents` are the folders, here, of the agents that will run on it. `copied` are pairs of a folder of the machine's
    own disk and what the platform keeps of it: brought before the start, taken after its end. `stdin` is handed to the
    command, or what it returns for the first machine's answer; `detaches`: it returns while its agents go on, and these
    are asked to stop by their folders.
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
    """One start of a job as this machine can rehearse it.

    `notice` says how the platform interrupts a job, which has `grace_s` then until it is killed. `codes` are the exit
    codes of a node that is done and of one that was interrupted, where the platform goes by them. `checkpoints` is
    where what was saved is found here after the end. `replaced` names what stands in for the platform's own.
    `sends_again`: an interrupted job goes on as a new attempt of ours, not as another start of the platform's.
    """

    nodes: tuple[NodeRun, ...]
    notice: str
    grace_s: float
    checkpoints: Path
    codes: Mapping[str, int] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    sends_again: bool = False


class Rehearsed(Protocol):
    """What a backend can do whose jobs can be rehearsed on this machine: without a network, without an account."""

    def rehearsal(self, request: Request, stage: Stage) -> Rehearsal:
        """Lay out a start of the very request below the stage's folder. Raises ConfigError where that cannot be."""


class Stored(Protocol):
    """What a rehearsed backend can do whose nodes ask its storage by themselves."""

    def rehearsal_service(self, kept: Path) -> AbstractContextManager[str]:
        """Stand in for the storage on loopback, with `kept` as its disk; give its address."""
