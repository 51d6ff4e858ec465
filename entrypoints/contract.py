"""The messages between the launcher and the nodes, as frozen dataclasses with a JSON form; names in a job's folder.

The launcher sends a `JobSpec` to each node, in a `ContainerOrder` on the clouds and in an `AgentSpec` elsewhere. A node
answers with its `AgentState`, then its `ExitReport`; an own host to an `EnvironmentSpec` by a `PreparedEnvironment`.

`load` accepts messages of older and newer versions of cloudtrain: unknown keys are ignored, and a missing key or null
stands for the default. A message without the key `version` has version 1; `load` refuses a version above VERSION.
Times are in seconds, and clock times in unix seconds; money is in micro-dollars.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from .records import Record
from .terms import CostRate, Terms

VERSION = 1  # of all messages; a later version adds the key `version` to its messages

# Names in a job's folder: the lock held while agents start; the mark of a start that was given up, at any time.
START_LOCK, NEVER_SENT = "start.lock", "never-sent"
RECORD = "record.json"  # for a registry that has lost the job
# Per node: the agent's state, the exit record, the stop request.
STATE, EXIT, STOP = "state.json", "exit.json", "stop.json"
BEAT, BEAT_S = "beat", 5.0  # a file that the agent touches, if the readers are on other machines
STATE_EVERY_S = 60.0  # between two writes of the state: the state has the node's time in use, even after a power cut

_NOT_WHOLE = re.compile(r"\.(tmp|damaged-\d+|old-\d+)$|^first-start\.json$|^\.")

ExitState = Literal["succeeded", "failed", "stopped"]

_M = TypeVar("_M", bound="Message")


class ContractError(ValueError):
    """A message that this version cannot read; the text names the message and the fault."""


class Message(Record):
    """The base of all messages."""

    @classmethod
    def fault(cls, why: str) -> ContractError:
        """Return the error of `load`."""
        return ContractError(f"{cls.__name__} {why}")

    @classmethod
    def load(cls: type[_M], data: Any) -> _M:
        """Return the message from its JSON form. Raises ContractError."""
        version = data.get("version", VERSION) if isinstance(data, Mapping) else VERSION
        if type(version) is not int or version > VERSION:
            raise cls.fault(f"has version {version!r}; this cloudtrain reads {VERSION}")
        return super().load(data)


@dataclass(frozen=True)
class RunSpec(Message, optional="resume_args keep progress on_stop allow_alone workdir stop_signal tracked_as"):
    """The program of a job."""

    kind: str = "task"  # task, script, module, or sweep: trials of a task
    target: str = "task.py"  # the file or the module
    args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()  # of scripts and modules: follow `args` if the job resumes from a checkpoint
    keep: tuple[str, ...] = ()  # of scripts and modules: paths below the workdir, copied to the checkpoint folder
    progress: Mapping[str, Any] | None = None  # how to read steps from the output of a script
    on_stop: str | None = None  # `save` asks a Trainer to save
    allow_alone: bool = False  # the ranks need not join one process group
    workdir: str | None = None  # of scripts and modules: the working directory, below the code; None: the code folder
    tracked_as: str | None = None  # the group of the job's run in W&B; None: cloudtrain names no run
    stop_signal: str | None = None  # of a script that saves at another signal than SIGTERM

    @property
    def is_own(self) -> bool:
        """Whether cloudtrain's trainer trains and saves: the program is a task, or a sweep of tasks."""
        return self.kind in ("task", "sweep")

    def ignored(self, waited_s: float) -> str:
        """Return the words about ranks that a stop has not ended."""
        if self.is_own:
            return f"did not leave within {waited_s:.0f} s, so it was killed"
        return f"the script did not obey {self.stop_signal or 'SIGTERM'} within {waited_s:.0f} s and was killed"


@dataclass(frozen=True)
class CheckpointSettings(Message, optional="all_damaged saved_step"):
    """Section `checkpoint`: when to save, how many to keep, and where to resume (auto, never, or a path)."""

    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3
    keep_best: bool = False
    blocking: bool = False  # True: training waits until a checkpoint is durable
    export: str = "torch"  # the form of the weights in the output folder: torch or safetensors
    mirror: str | None = None  # the uri of a second place, for copies of finished checkpoints
    resume: str = "auto"
    all_damaged: str = "stop"  # or start-over: train from step 0 if there are checkpoints and all are damaged
    saved_step: int | None = None  # saved by earlier attempts: no start from an older step if the mirror cannot be read


@dataclass(frozen=True)
class InitSettings(Message, names={"what": "load"}):
    """Section `init_from`: the weights of the first step; their place is the input `init_from`."""

    job: str | None = None
    checkpoint: str | None = None  # of several: best, last or step-N; None: the best, else the last
    what: str = "weights"  # weights, or weights+optimizer
    rename: Mapping[str, str] = field(default_factory=dict)  # patterns, which replace in the saved names, in order
    skip: tuple[str, ...] = ()  # patterns, which find new names to leave out
    strict: bool = True  # every weight of the model is saved, and every saved weight is in the model


@dataclass(frozen=True)
class EvaluateSettings(Message):
    """Section `evaluate`: the test after the last step, or with `only` in place of training."""

    split: str = "test"
    checkpoint: str | None = None  # best or last; None: the best if recorded
    batch_size: int | None = None  # samples of a forward pass
    only: bool = False
    predictions: int = 0  # the number of samples whose predictions are written to a file


@dataclass(frozen=True)
class SetupSpec(Message):
    """The packages (`requirements`, a file in the code folder) and the commands that prepare a node's environment."""

    requirements: str | None = None
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoticeChannel(Message):
    """A notification channel. `secret` is the name of the secret with the address; `on`: the subscribed events."""

    id: str
    kind: str
    secret: str
    to: str = ""
    sender: str = ""
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoticeSettings(Message):
    """The settings of the job's own notifications, with the budget and the price that the notifications compute with.

    `alert_at`: percents of the budget. `rate`: None if unknown. `terms`: those of a resume. `spent_micro` was spent
    before this attempt.
    """

    channels: tuple[NoticeChannel, ...] = ()
    backend: str = ""
    limit_micro: int | None = None
    alert_at: tuple[int, ...] = ()
    on_limit: str | None = None
    rate: CostRate | None = None
    terms: Terms = field(default_factory=Terms)
    spent_micro: int = 0


@dataclass(frozen=True)
class JobSpec(Message, optional="init_from evaluate params training setup notices sweep"):
    """The job for the nodes, the same on every backend: read by the agent, boot, the trainer and a script's ranks.

    No secrets.
    """

    job: str = "job"
    attempt: int = 1
    nodes: int = 1
    min_nodes: int | None = None
    node_counts: tuple[int, ...] | None = None  # with which the job may continue, at least `min_nodes`
    nproc_per_node: int = 1
    max_restarts: int = 0
    timeout_s: float = 600  # of a collective call
    hang_timeout_s: float | None = None  # without a step, after which a rank counts as hung
    run: RunSpec = RunSpec()
    checkpoint: CheckpointSettings = CheckpointSettings()
    init_from: InitSettings | None = None
    evaluate: EvaluateSettings | None = None
    params: Mapping[str, Any] | None = None  # a section of the config, for tasks only
    training: Mapping[str, Any] | None = None  # the same; trainer/settings.py reads the section
    setup: SetupSpec | None = None
    notices: NoticeSettings | None = None
    sweep: Mapping[str, Any] | None = None  # the search of a sweep (sweep/segments.py)

    @property
    def devices_per_node(self) -> int:
        """The number of processes that train on a node at once; with GPUs, each has a GPU."""
        return int(self.sweep["nproc_per_node"]) if self.sweep else self.nproc_per_node


@dataclass(frozen=True)
class ParameterSecrets(Message):
    """Secrets in AWS's Parameter Store: names, and the prefix of the parameters' paths."""

    region: str
    prefix: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyVaultSecrets(Message, optional="vault", names={"identity": "as"}):
    """Secrets in one entry of an Azure key vault."""

    names: tuple[str, ...] = ()
    identity: str = "managed"  # `managed` or `user`: reads the entry
    vault: str | None = None  # the address of the entry, known after the send


@dataclass(frozen=True)
class SecretManagerSecrets(Message):
    """Secrets in one entry of Google's Secret Manager: the entry's name, with or without `/versions/NUMBER`."""

    names: tuple[str, ...]
    secret: str
    endpoint: str | None = None


SecretSource = ParameterSecrets | SecretManagerSecrets | KeyVaultSecrets  # known by the keys; the last needs no key


@dataclass(frozen=True)
class Places(Message, optional="copied_to environments"):
    """Paths in a container, relative to the platform's folder, or absolute."""

    own: str  # the agent's folder
    bundle: str
    checkpoints: str
    output: str
    failure: str | None = None  # the file for the exit report that the platform reads
    inputs: Mapping[str, str] = field(default_factory=dict)  # by name
    copied_to: str | None = None  # the store to which the platform copies the checkpoint folder
    environments: str | None = None  # a shared folder of installed environments


@dataclass(frozen=True)
class ExitCodes(Message):
    """The container's exit codes for the platform: `permanent` ends the job, `again` starts the containers again.

    `mended_by_a_start`: kinds of failures that a new start may repair.
    """

    permanent: int
    again: int
    mended_by_a_start: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchedInput(Message):
    """An input that the container copies from `uri`, unless the platform has mounted the input at `mounted`."""

    uri: str
    mounted: str | None = None


@dataclass(frozen=True)
class SyncedFolder(Message):
    """A folder that a node copies to the bucket. `back`: the node first copies the bucket's files into the folder."""

    place: str
    uri: str
    back: bool = False


@dataclass(frozen=True, kw_only=True)
class ContainerOrder(
    Message,
    optional="gathers lead_s log exit_codes fetched environments_in carried ended_uri kept_in fence token sent_s "
    "claim_uri",
):
    """The order of a cloud container: the job spec, whose keys lie beside the order's own, and the container's duties.

    Times count from the container's start.
    """

    job: JobSpec
    gathers: bool = False  # a script's start gathers files from all nodes
    environment: Mapping[str, str]
    secrets: SecretSource | None = None
    deadline_s: float
    max_duration_s: float
    lead_s: float | None = None  # the start-up allowance that was taken off `deadline_s` and `max_duration_s`
    limit_reason: str
    grace_s: float
    join_timeout_s: float
    log: Literal["plain", "stamped", "json"] | None = None  # the form of the relayed lines
    exit_codes: ExitCodes | None = None
    fetched: Mapping[str, FetchedInput] | None = None
    environments_in: str | None = None  # a store of installed environments
    places: Places
    bundle_sha256: str
    carried: tuple[SyncedFolder, ...] = ()
    ended_uri: str | None = None  # the place of the exit report
    kept_in: str | None = None  # a store for the note on used time
    fence: str | None = None  # the mark of one submission, known to the send alone
    token: str | None = field(default=None, repr=False)  # the shared secret of the agents, known to the send alone
    sent_s: float | None = None  # known to the send alone
    claim_uri: str | None = None  # the claim of the job's newest attempt (stores/claims.py), known to the send alone

    @classmethod
    def load(cls, data: Any) -> ContainerOrder:
        """Return the order from its JSON form. Raises ContractError."""
        return super().load({**data, "job": data})

    def dump(self) -> dict[str, Any]:
        """Return the order's JSON form."""
        own = super().dump()
        return {**own.pop("job"), **own}


@dataclass(frozen=True, kw_only=True)
class AgentSpec(Message, names={"job": "spec"}):
    """The message for one node's agent. Times count from the agent's start."""

    node: int
    address: str
    root: str  # the agent's folder
    bundle: str  # the code archive
    sha256: str
    python: str
    job: JobSpec
    max_duration_s: float
    deadline_s: float
    limit_reason: str
    grace_s: float
    workdir: str
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)  # the agents' shared secret
    head: tuple[str, int] | None = None  # address and port of the leader
    head_listens: bool = False  # node 0's agent runs already
    join_timeout_s: float = 120.0
    silence_s: float = 15.0  # several beats on a machine whose cores are all busy importing torch
    ports: tuple[int, int] | None = None  # the lowest and the highest port
    succeeds: bool = False  # another agent may take over the leadership
    spares: int = 0  # agents beyond the job's nodes that wait to take the place of a lost node
    swaps: int = 0  # attempts that the agents may begin with spares
    copies: str | None = None  # the file that notes files fetched from other nodes, None without copies
    replicates: bool = True  # this node keeps copies of the leader's checkpoints
    colocated: int = 1  # agents on this machine
    used_s: float = 0.0  # on earlier machines
    container: Mapping[str, Any] | None = None  # the fields of dockerrun.Container
    mounts: tuple[tuple[str, bool], ...] = ()  # paths, and whether the mount is read-only
    gpus: tuple[str, ...] = ()  # for the container
    environment_lock: str | None = None  # of the job's environment
    store: str | None = None  # of installed environments
    requeues: bool = False  # the platform starts the job again after a pre-emption
    shows_variables: bool = False  # Slurm's, to the ranks
    life: int = 0  # the earlier agents of this node
    grow_s: float = 300.0  # from a start of the ranks until the job may start again on more nodes


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Message):
    """The environment of a job on a host; most fields apply to some kinds only."""

    kind: str = "venv"  # none venv conda docker podman
    workdir: str = ""
    python: str = "python3"  # to run, to build the venv with, or in the image
    requirements: str | None = None  # the text of a requirements file
    requirements_folder: str = "."  # the file's folder below `code`
    requirements_file: str | None = None  # the file in that folder with exactly this text
    system_site_packages: bool = False  # a venv sees all packages of the interpreter
    conda: str | None = None  # a name or a prefix
    image: str | None = None  # by digest
    gpus: tuple[str, ...] = ()  # UUIDs, for a container's trial
    code: str = ""  # the unpacked code
    holds_torch: bool = False  # pip leaves the interpreter's torch in a venv as installed
    is_apart: bool = False  # of the interpreter's packages, a venv sees only torch and torch's requirements
    shows: bool = False  # pip's output goes to the standard output
    store: str | None = None  # has copies of environments
    keeps: bool = False  # the store gets a copy of a new environment


@dataclass(frozen=True, kw_only=True)
class PreparedEnvironment(Message):
    """How the agent starts Python in a job's environment."""

    python: str  # an absolute path, in the container if there is a `container`
    detail: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # variables
    container: Mapping[str, Any] | None = None  # the fields of dockerrun.Container
    lock: str | None = None  # held by each process that uses the venv (venvs.hold)


@dataclass(frozen=True)
class AgentState(Message, checks=True, optional="queue ended_s joined_s"):
    """The agent's state, the content of state.json. `pid` and `stamp` identify the agent's process."""

    pid: int
    stamp: str | None = None
    machine: str | None = None
    phase: str = "idle"  # queued preparing idle running exited ended
    generation: int = 0  # counts the starts of the ranks, from 0
    detail: str | None = None  # tells users what the agent waits for
    started_s: float = 0.0
    held_s: float | None = None  # how long the node has been used, by the monotonic clock
    zero_s: float | None = None  # the monotonic clock at the agent's start
    gone_s: Mapping[str, float] = field(default_factory=dict)  # the seconds of the dropped nodes by number
    queue: Mapping[str, Any] | None = None  # while the job waits in line: `place`, `of`, `reason`, `start_s`
    ended_s: float | None = None  # while the job waits in line again: the end of its last run
    joined_s: Mapping[str, float] | None = None  # the spares that took a lost node's place: when, from the job's start


@dataclass(frozen=True)
class ExitReport(Message, checks=True, optional="fenced joined_s"):
    """The end of the job as a node's agent reports it, the content of exit.json."""

    state: ExitState
    reason: str | None = None  # as in launcher.job.State
    error: dict[str, Any] | None = None  # the first failure, as event lines and `status --json` show it
    restarts: int = 0
    restarted_after: tuple[Any, ...] = ()  # the failures before the restarts
    fenced: bool = False  # the node lost contact and knows only its own end
    resumable: bool = False  # the node has a checkpoint
    started_s: float | None = None
    ended_s: float = 0.0
    held_s: float | None = None
    gone_s: Mapping[str, float] = field(default_factory=dict)
    joined_s: Mapping[str, float] | None = None
    unkillable: tuple[int, ...] = ()  # pids
    unkept: tuple[str, ...] = ()  # names of files of a script that cloudtrain did not keep


OUT_OF_MEMORY = "for want of memory"  # in the message of a failure
ALONE = (
    "call torch.distributed.init_process_group, or give the library that does so the number of nodes and ranks; "
    "a script that starts torchrun or another launcher, such as mp.spawn: run its inner script or function instead, "
    "since one rank for each GPU is started already; `distributed.allow_alone: true` accepts ranks without a group"
)
# Signals by which a program ends itself; others come from outside.
_OWN_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")


def sign_of(error: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Return the sign by which a failure is known again; None if a new start may mend the failure.

    The same sign a second time, which includes the step, is an error of the code, or the machine is too small. A kill
    may come from outside, but hardly twice to the same rank in the same step.
    """
    told = error or {}
    kind, signal, step = told.get("kind"), told.get("signal"), told.get("step")
    if kind == "signal" and (signal in _OWN_SIGNALS or OUT_OF_MEMORY in str(told.get("message"))):
        return None if step is None and not told.get("early") else (step, kind, signal)
    if kind == "signal":
        return (step, kind, signal, told.get("rank")) if signal == "SIGKILL" and step is not None else None
    is_own = kind == "hang" or (kind == "exception" and not told.get("peer_lost"))
    return (step, kind, signal or told.get("type")) if is_own and step is not None else None


def step_in_words(error: Mapping[str, Any]) -> str:
    """Return when a failure with a sign came."""
    return "before the first step" if error.get("step") is None else f"at step {error['step']}"


def sign_fields(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a failure's sign that not every failure has, for a report."""
    return {key: error[key] for key in ("signal", "step", "early", "again") if error.get(key) is not None}


@dataclass(frozen=True)
class NodeStatus(Message, checks=True):
    """A node as agent/node_folder.py finds it: the agent's files, and the facts that the files alone do not show.

    Of an agent `elsewhere` the further fields have their defaults. Only without an exit: `held_s`, and if the agent is
    gone, `saved`, `last_s` and `rebooted`.
    """

    state: AgentState | None = None  # None if the file is missing
    exit: ExitReport | None = None  # None if the file is missing
    alive: bool = False  # the agent runs
    asked: str | None = None  # the reason of the stop request
    elsewhere: bool = False  # on a different machine, which this machine replaces or shares a disk with
    ended_ago_s: float = 0.0  # since the exit
    held_s: float | None = None  # how long the node has been used
    saved: bool = False  # a checkpoint exists
    last_s: float = 0.0  # when the job last wrote a log line
    rebooted: bool = False  # the machine has restarted since
    now_s: float | None = None  # the host's clock at the answer


def has_checkpoint(folder: Path) -> bool:
    """Return whether the folder has a checkpoint to resume from: the trainer's, or any file that a script has saved."""
    try:
        whole = (entry for entry in folder.iterdir() if is_whole(entry.name))
        # A kept folder exists from the start, without a file.
        return any(not entry.is_dir() or any(files for _, _, files in os.walk(entry)) for entry in whole)
    except OSError:
        return False


def is_whole(name: str) -> bool:
    """Return whether an entry with the name in a checkpoint folder is complete and not set aside."""
    return not _NOT_WHOLE.search(name)
