"""The rehearsal of a job: start, interrupt, start again, and compare; each step is judged."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.rank.rehearsal import VARIABLE

from ..backend_table import DEFAULT, traits
from ..config.schema import JobConfig
from ..errors import ConfigError, UsageError
from ..plan import Plan
from ..planning.prepare import Prepared
from ..planning.request_rules import own_places
from ..text import addresses
from ..text.extras import install
from . import judging, sandbox, starts
from .judging import Verdict
from .stage import Rehearsal, RehearsalOptions, Rehearsed, Stage, Stored
from .starts import Account

HINT_S = 15.0  # without a step by then, a hint on event lines is printed
ENVIRONMENTS = "rehearsed"  # below the home folder: environments built from `requirements`
_OF_PIP = re.compile(r"PIP_\w+|https?_proxy|no_proxy|SSL_CERT_FILE", re.IGNORECASE)
PLACE, KEPT = "rehearsals", "stays"  # below the home folder; the mark of a folder to keep


@dataclass(frozen=True)
class Scale:
    """The rehearsed nodes and ranks per node."""

    nodes: int
    nproc: int
    gpus: tuple[tuple[str, ...], ...]  # of each node, by CUDA's numbers; empty if training runs on the CPU
    settings: tuple[str, ...]  # apply the scale to the config
    words: tuple[str, ...]  # list the differences

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.nproc


def choose_scale(config: JobConfig, plan: Plan, most_nodes: int, most_nproc: int | None, gpus: list[str]) -> Scale:
    """Return the largest scale of the plan that this machine supports.

    With GPUs each rank has its own GPU; without GPUs two ranks stand for several. A task's micro-batches are shared
    evenly, so only some numbers of ranks are possible.
    """
    nodes_most = min(plan.instances, most_nodes)
    has_gpus = bool(plan.gpus_per_instance) and len(gpus) >= nodes_most
    bears = len(gpus) // nodes_most if has_gpus else (1 if nodes_most > 1 else 2)
    nproc_most = min(plan.nproc_per_node, bears if most_nproc is None else most_nproc)
    if most_nproc is not None and nproc_most * nodes_most > len(gpus):
        has_gpus = False
    nodes, nproc = _fitting(plan, nodes_most, nproc_most)
    has_gpus = has_gpus and nproc <= nproc_most
    each = len(gpus) // nodes if has_gpus else 0
    shares = tuple(tuple(gpus[number * each : number * each + each][:nproc]) for number in range(nodes))
    settings, words = [], []
    if nodes < plan.instances or nproc < plan.nproc_per_node:
        ranks = f" x {nproc} of {plan.nproc_per_node} ranks" if nproc < plan.nproc_per_node else ""
        words.append(f"{nodes} of {plan.instances} nodes{ranks}")
        settings += [f"resources.instances={nodes}", f"distributed.nproc_per_node={nproc}"]
        if config.resources.min_instances is not None:  # a rehearsal loses no machine
            settings.append(f"resources.min_instances={nodes}")
        if plan.batch is not None:
            settings.append(f"training.micro_batch_size={plan.batch.micro_size}")
            data_ranks = plan.batch.data_ranks(nodes * nproc)
            steps = plan.batch.global_size // (plan.batch.micro_size * data_ranks)
            planned = plan.batch.accumulation
            words.append(f"{steps} micro-batches of {plan.batch.micro_size} a rank and step, not {planned}")
            shard = config.training.shard_size
            if shard is not None and data_ranks % shard:
                width = max(1, nproc // plan.batch.tensor)
                settings.append(f"training.shard_size={width}")
                words.append(f"shards over {width} ranks, not {shard}")
    if not has_gpus and plan.gpus_per_instance:
        words.append("on the CPU, over gloo")
    return Scale(nodes, nproc, shares, tuple(settings), tuple(words))


def _fitting(plan: Plan, nodes_most: int, nproc_most: int) -> tuple[int, int]:
    """Return the largest numbers of nodes and ranks that give each copy of the model the same number of micro-batches.

    A copy that is spread over more ranks than fit is rehearsed on one node.
    """
    if plan.batch is None:
        return nodes_most, nproc_most
    tried = itertools.product(range(nodes_most, 0, -1), range(nproc_most, 0, -1))
    tensor = plan.batch.tensor  # ranks that share a layer are on one node
    fits = ((nodes, nproc) for nodes, nproc in tried if plan.batch.fits(nodes * nproc) and not nproc % tensor)
    return next(fits, (1, tensor * plan.batch.pipeline))


@dataclass
class _Work:
    """State shared by the starts of a rehearsal."""

    prepared: Prepared
    scale: Scale
    wish: RehearsalOptions
    folder: Path
    addresses: tuple[str, ...]
    secrets: Mapping[str, str]
    services: ExitStack
    verdict: Verdict
    say: Callable[[str], None]
    laid_out: Rehearsal = field(init=False)  # the layout of the latest start
    _urls: dict[Path, str] = field(default_factory=dict)

    def service(self, kept: Path) -> str:
        """Return the address of the stand-in for the platform's storage over this folder."""
        if kept not in self._urls:
            backend = self.prepared.backend
            opened = backend.rehearsal_service(kept) if isinstance(backend, Stored) else nullcontext("")
            self._urls[kept] = self.services.enter_context(opened)
        return self._urls[kept]


def require_torch() -> None:
    """Raise ConfigError if this machine cannot run nodes, or if this Python has no torch."""
    if sys.platform != "linux":
        raise ConfigError("a rehearsal needs Linux", hint="run it in a container, or on a Linux machine")
    if find_spec("torch") is None:
        raise ConfigError("a rehearsal trains here, and torch is not installed", hint=install(DEFAULT))


def rehearse(
    prepared: Prepared,
    chosen: Scale,
    wish: RehearsalOptions,
    secrets: Mapping[str, str],
    say: Callable[[str], None],
    folder: Path,
) -> Verdict:
    """Rehearse the prepared job at the chosen scale, below the folder. Raises ConfigError, UsageError."""
    backend = prepared.config.backend
    if not isinstance(prepared.backend, Rehearsed):
        raise UsageError(f"the backend `{backend}` cannot be rehearsed", hint="its package has no `rehearsal`")
    is_task, is_asked_to_prove = prepared.config.task is not None, wish.preempt_at is not None
    needs_group = not (is_task or chosen.ranks == 1 or prepared.config.distributed.allow_alone)
    verdict = Verdict(backend, prepared.bundle.sha256, is_task, chosen.ranks, is_asked_to_prove, needs_group)
    begun_s = time.monotonic()
    addresses, lock = sandbox.addresses(chosen.nodes)
    with ExitStack() as services, lock:
        work = _Work(prepared, chosen, wish, folder, addresses, secrets, services, verdict, say)
        _acts(work)
    verdict.seconds = time.monotonic() - begun_s
    if prepared.config.requirements and (verdict.failure or {}).get("type") in ("ModuleNotFoundError", "ImportError"):
        verdict.hint = f"the environment holds torch and {prepared.config.requirements} alone: add the package there"
    if (verdict.failure or {}).get("type") == "KeyError":  # of the environment: the plan's note has the cure
        name = str((verdict.failure or {}).get("message")).strip("'\"")
        verdict.hint = next((note for note in prepared.warnings if f" {name}" in note), "")
    verdict.scaled, verdict.not_checked = chosen.words, [*verdict.not_checked, *_not_checked(work)]
    return verdict


def _acts(work: _Work) -> None:
    """Start, interrupt, start again, compare; the first fault ends the rehearsal."""
    wish, verdict, kept, backend = work.wish, work.verdict, work.folder / "kept", work.prepared.config.backend
    if wish.preempt_at is None:
        goal = "to step {}" if verdict.is_task else "until the script reports step {} or a later step"
        work.say(f"{backend}: {goal.format(wish.steps)}")
        judging.ran(verdict, _start(work, "start", kept, 1, leave_at=wish.steps))
        return
    work.say(f"{backend}: to step {wish.preempt_at}, where it is interrupted")
    first = _start(work, "first", kept, 1, hold_at=wish.preempt_at)
    if not judging.interrupted(verdict, first, wish.preempt_at):
        return
    assert verdict.saved_step is not None or not verdict.is_task
    last = (verdict.saved_step or first.account.last_step or 0) + wish.steps
    work.say(f"{backend}: again, from what was saved")
    second = _start(work, "second", kept, 2, leave_at=last)
    if not judging.resumed(verdict, first, second):
        return
    work.say(f"{backend}: once more without the interruption, to compare the losses")
    last = min(last, second.account.last_step or last)
    whole = _start(work, "whole", work.folder / "kept-whole", 1, leave_at=last)
    is_exact = work.scale.ranks <= 2 or work.prepared.config.training.reproducible == "strict"
    judging.compared(verdict, first, second, whole, wish.tolerance, is_exact=is_exact)


def _start(
    work: _Work, name: str, kept: Path, number: int, *, hold_at: int | None = None, leave_at: int | None = None
) -> starts.StartResult:
    """Run a single start: a task to its own end, a script until enough steps were seen."""
    wish, prepared = work.wish, work.prepared
    folder = work.folder / name
    for each in (folder, kept):
        each.mkdir(parents=True, exist_ok=True)
    request = prepared.request
    if number > 1 and work.laid_out.sends_again:
        job = request.name.rpartition("-")[0]
        config = own_places(prepared.config, job)
        request = prepared.backend.request(prepared.plan, config, job, number, prepared.bundle.sha256)
    paths = {name: addresses.path_of(uri) for name, uri in prepared.config.inputs.items()}
    base = prepared.config_file.parent
    along = {name: (base / path).resolve() for name, path in paths.items() if path != prepared.config.inputs[name]}
    variables = {"OMP_NUM_THREADS": str(max(1, processes.cores() // work.scale.ranks))}
    tried: dict[str, object] = {"hold_at": hold_at, "leave_at": leave_at}
    # Environments stay for the next rehearsal; on `local` they see this machine's packages, as in a real run.
    environments = work.folder.parent.parent / ENVIRONMENTS
    if prepared.config.requirements:
        environments.mkdir(mode=0o700, exist_ok=True)
        tried |= {"environments": str(environments), "is_apart": not traits(prepared.config.backend).runs_here}
        # This machine's access to the package index, unless the config defines the nodes' access.
        ways = {name: value for name, value in os.environ.items() if _OF_PIP.fullmatch(name)}
        variables |= {name: value for name, value in ways.items() if name not in prepared.config.env}
    variables[VARIABLE] = json.dumps(tried)
    stage = Stage(
        bundle=prepared.bundle,
        folder=folder,
        kept=kept,
        number=number,
        addresses=work.addresses,
        inputs={**along, **wish.inputs},
        gpus=work.scale.gpus,
        service=work.service(kept),
        has_own_places=sandbox.mode() != "none",
        base=base.absolute(),
        variables=variables,
        secrets=work.secrets,
    )
    assert isinstance(prepared.backend, Rehearsed)  # `rehearse` has checked
    laid_out = prepared.backend.rehearsal(request, stage)
    if prepared.config.requirements:
        seen = {str(environments): environments}
        laid_out = replace(laid_out, nodes=tuple(replace(n, places={**n.places, **seen}) for n in laid_out.nodes))
    work.laid_out = laid_out
    hidden = (prepared.config_file.parent / prepared.config.code.dir).resolve()
    # The last start needs no second save.
    at_once = wish.kills if hold_at is not None else wish.preempt_at is not None
    until, ranks = _until(work, hold_at, leave_at), work.scale.ranks
    return starts.run(laid_out, folder, until, ranks, at_once=at_once, timeout_s=wish.timeout_s, hidden=hidden)


def _until(work: _Work, hold_at: int | None, leave_at: int | None) -> starts.Until:
    """Return a function of the account and the seconds since the first rank that decides when to interrupt."""
    last = hold_at if hold_at is not None else leave_at
    assert last is not None
    hinted = False

    def is_due(account: Account, seconds: float) -> bool:
        nonlocal hinted
        has_last_step = (account.last_step or 0) >= last
        if work.verdict.is_task:
            # After a kill only durable checkpoints remain, so wait for a save in progress.
            return hold_at is not None and has_last_step and (not work.wish.kills or account.is_settled())
        if not account.steps and seconds > HINT_S and not hinted:
            hinted, limit_s = True, work.wish.timeout_s
            work.say(f"no step reported yet; waiting up to {limit_s:.0f} s (scripts: docs/rehearse.md, event lines)")
        is_patient = work.wish.timeout_s > RehearsalOptions.timeout_s  # a script may prepare its data before it joins
        return has_last_step or bool(account.alone and len(account.met) < work.scale.ranks and not is_patient)

    return is_due


def _not_checked(work: _Work) -> list[str]:
    """Return what this rehearsal did not check, the most important first."""
    config = work.prepared.config
    missing = [name for name in config.inputs if name not in work.wish.inputs and "://" in config.inputs[name]]
    own = [] if sandbox.mode() != "none" else ["the platform's own paths: this kernel does not allow namespaces"]
    return [
        *([] if work.wish.preempt_at else ["the resume after an interruption (--preempt-at STEP)"]),
        *([] if any(work.scale.gpus) else ["GPUs, NCCL, memory at full size"]),
        *([f"input data: nothing is in {', '.join(missing)} here (--input NAME=PATH)"] if missing else []),
        *own,
        *work.laid_out.replaced,
        "quotas, permissions, the network between nodes",
    ]


@contextmanager
def place(home: Path, *, keeps: bool) -> Iterator[Path]:
    """Create the rehearsal's folder below the home folder; removed at the end unless `keeps`, with dead ones."""
    above = home / PLACE
    processes.make_private(above)
    _sweep(above)
    folder = Path(tempfile.mkdtemp(dir=above))
    with processes.locked(folder / "lock"):
        if keeps:
            (folder / KEPT).touch()
        try:
            yield folder
        finally:
            if not (folder / KEPT).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _sweep(above: Path) -> None:
    """Remove the folders of dead rehearsals."""
    for folder in above.iterdir():
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (folder / KEPT).exists():
                shutil.rmtree(folder, ignore_errors=True)
