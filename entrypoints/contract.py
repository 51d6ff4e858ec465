"""The messages between the launcher and the nodes, as frozen dataclasses with a JSON form.

The launcher sends a `JobSpec` to every node, inside a `ContainerOrder` on the clouds and inside an `AgentSpec` on the
local and ssh backends. A node answers with its `AgentState`, and at the end with its `ExitReport`. The messages about
a host's environment are in environments/spec.py.

`load` accepts messages of older and newer versions of cloudtrain: unknown keys are ignored, and a missing key or null
stands for the default. A message without the key `version` has version 1; `load` refuses a version above VERSION.
Times are in seconds, and clock times in unix seconds; money is in micro-dollars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .records import Record
from .terms import CostRate, Terms

VERSION = 1  # of all messages; a later version adds the key `version` to its messages

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
        if isinstance(data, Mapping) and data.get("version", VERSION) > VERSION:
            raise cls.fault(f"has version {data['version']}; this cloudtrain reads {VERSION}")
        return super().load(data)


@dataclass(frozen=True)
class RunSpec(Message, optional="resume_args keep progress on_stop allow_alone"):
    """The program of a job. `kind`: task, script, module, or sweep: trials of a task; `target`: the file or the module.

    For scripts and modules: `resume_args` follow `args` if the job resumes from a checkpoint. `keep`: paths in the
    code folder that cloudtrain copies to the checkpoint folder. `progress`: how to read steps from the output.
    `on_stop`: `save` asks a Trainer to save. `allow_alone`: the ranks need not join one process group.
    """

    kind: str = "task"
    target: str = "task.py"
    args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    progress: Mapping[str, Any] | None = None
    on_stop: str | None = None
    allow_alone: bool = False

    @property
    def is_own(self) -> bool:
        """Whether cloudtrain's trainer trains and saves: the program is a task, or a sweep of tasks."""
        return self.kind in ("task", "sweep")


@dataclass(frozen=True)
class CheckpointSettings(Message, optional="all_damaged"):
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


@dataclass(frozen=True)
class InitSettings(Message, names={"what": "load"}):
    """Section `init_from`: the weights of the first step; their place is the input `init_from`.

    `checkpoint` chooses among several: best, last or step-N; None: the best, else the last. `what`: weights, or
    weights+optimizer. `rename`, `skip` and `strict` are those of checkpoints/matching.py.
    """

    job: str | None = None
    checkpoint: str | None = None
    what: str = "weights"
    rename: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    strict: bool = True


@dataclass(frozen=True)
class EvaluateSettings(Message):
    """Section `evaluate`: the test after the last step, or with `only` in place of training.

    `checkpoint`: best or last; None: the best if recorded. `batch_size`: samples of a forward pass. `predictions`: the
    number of samples whose predictions are written to a file.
    """

    split: str = "test"
    checkpoint: str | None = None
    batch_size: int | None = None
    only: bool = False
    predictions: int = 0


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

    `node_counts`: the numbers of nodes with which the job may continue, at least `min_nodes`. `timeout_s`: of a
    collective call; `hang_timeout_s`: without a step, a rank counts as hung. `params` and `training` are sections of
    the config, for tasks only (trainer/settings.py reads `training`). `sweep`: the search of a packed sweep
    (sweep/segments.py). No secrets.
    """

    job: str = "job"
    attempt: int = 1
    nodes: int = 1
    min_nodes: int | None = None
    node_counts: tuple[int, ...] | None = None
    nproc_per_node: int = 1
    max_restarts: int = 0
    timeout_s: float = 600
    hang_timeout_s: float | None = None
    run: RunSpec = RunSpec()
    checkpoint: CheckpointSettings = CheckpointSettings()
    init_from: InitSettings | None = None
    evaluate: EvaluateSettings | None = None
    params: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    setup: SetupSpec | None = None
    notices: NoticeSettings | None = None
    sweep: Mapping[str, Any] | None = None

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
    """Secrets in one entry of an Azure key vault. `vault` is the entry's address, known after the send.

    `identity`: `managed` or `user`, the identity that reads the entry.
    """

    names: tuple[str, ...] = ()
    identity: str = "managed"
    vault: str | None = None


@dataclass(frozen=True)
class SecretManagerSecrets(Message):
    """Secrets in one entry of Google's Secret Manager: the entry's name, with or without `/versions/NUMBER`."""

    names: tuple[str, ...]
    secret: str
    endpoint: str | None = None


SecretSource = ParameterSecrets | SecretManagerSecrets | KeyVaultSecrets  # known by the keys; the last needs no key


@dataclass(frozen=True)
class Places(Message, optional="copied_to environments"):
    """Paths in a container, relative to the platform's folder, or absolute.

    `own`: the agent's folder; `failure`: the file for the exit report that the platform reads. `inputs`: paths by
    name. `copied_to`: the store to which the platform copies the checkpoint folder. `environments`: a shared folder
    of installed environments.
    """

    own: str
    bundle: str
    checkpoints: str
    output: str
    failure: str | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    copied_to: str | None = None
    environments: str | None = None


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
    optional="gathers lead_s log exit_codes fetched environments_in carried ended_uri kept_in fence token sent_s",
):
    """The order of a cloud container: the job spec, whose keys lie beside the order's own, and the container's duties.

    `max_duration_s` and `deadline_s` count from the container's start; `lead_s`: the start-up allowance that was taken
    off both. `log`: the form of the relayed lines. `gathers`: a script's start gathers files from all nodes. Only the
    send knows `fence`, the mark of one submission, `token`, the agents' shared secret, and `sent_s`. `ended_uri`: the
    place of the exit report; `kept_in`: a store for the note on used time; `environments_in`: a store of installed
    environments.
    """

    job: JobSpec
    gathers: bool = False
    environment: Mapping[str, str]
    secrets: SecretSource | None = None
    deadline_s: float
    max_duration_s: float
    lead_s: float | None = None
    limit_reason: str
    grace_s: float
    join_timeout_s: float
    log: Literal["plain", "stamped", "json"] | None = None
    exit_codes: ExitCodes | None = None
    fetched: Mapping[str, FetchedInput] | None = None
    environments_in: str | None = None
    places: Places
    bundle_sha256: str
    carried: tuple[SyncedFolder, ...] = ()
    ended_uri: str | None = None
    kept_in: str | None = None
    fence: str | None = None
    token: str | None = field(default=None, repr=False)
    sent_s: float | None = None

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
    """The message for one node's agent.

    `head`: address and port of the leader; `token`: the agents' shared secret. `bundle` and `sha256`: the code
    archive. `root`: the agent's folder. Times count from the agent's start; `used_s` was used on earlier machines.
    `colocated`: agents on this machine; `ports`: the lowest and the highest port. `succeeds`: another agent may take
    over the leadership. `copies`: the file that notes files fetched from other nodes, None without copies;
    `replicates`: this node keeps copies of the leader's checkpoints. `head_listens`: node 0's agent runs already.
    `container`: the fields of dockerrun.Container; `mounts`: pairs of a path and whether the mount is read-only;
    `gpus`: the GPUs for the container. `store`: a store of installed environments; `environment_lock`: the lock of
    the job's environment. `requeues`: the platform starts the job again after a pre-emption.
    """

    node: int
    address: str
    root: str
    bundle: str
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
    token: str = field(default="", repr=False)
    head: tuple[str, int] | None = None
    head_listens: bool = False
    join_timeout_s: float | None = None
    silence_s: float | None = None
    ports: tuple[int, int] | None = None
    succeeds: bool = False
    copies: str | None = None
    replicates: bool = True
    colocated: int = 1
    used_s: float = 0.0
    container: Mapping[str, Any] | None = None
    mounts: tuple[tuple[str, bool], ...] = ()
    gpus: tuple[str, ...] = ()
    environment_lock: str | None = None
    store: str | None = None
    requeues: bool = False


@dataclass(frozen=True)
class AgentState(Message, optional="queue"):
    """The agent's state, the content of state.json. `pid` and `stamp` identify the agent's process.

    `phase`: queued preparing idle running exited ended; `generation` counts the starts of the ranks, from 0. `detail`
    tells users what the agent waits for. `held_s`: how long the node has been used by the monotonic clock, which stood
    at `zero_s` at the agent's start; `gone_s`: the seconds of the dropped nodes by number. `queue`: while the job waits
    in line, `place`, `of`, `reason`, and the expected `start_s`.
    """

    pid: int
    stamp: str | None = None
    machine: str | None = None
    phase: str = "idle"
    generation: int = 0
    detail: str | None = None
    started_s: float = 0.0
    held_s: float | None = None
    zero_s: float | None = None
    gone_s: Mapping[str, float] = field(default_factory=dict)
    queue: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ExitReport(Message, optional="fenced"):
    """The end of the job as a node's agent reports it, the content of exit.json.

    `state`: succeeded, failed or stopped; `reason`: as in launcher.job.State. `error`: the first failure, as event
    lines and `status --json` show it. `restarted_after`: the failures before the restarts. `resumable`: the node has
    a checkpoint. `fenced`: the node lost contact and knows only its own end. `unkillable`: pids; `unkept`: names of
    files of a script that cloudtrain did not keep.
    """

    state: ExitState
    reason: str | None = None
    error: dict[str, Any] | None = None
    restarts: int = 0
    restarted_after: tuple[Any, ...] = ()
    fenced: bool = False
    resumable: bool = False
    started_s: float | None = None
    ended_s: float = 0.0
    held_s: float | None = None
    gone_s: Mapping[str, float] = field(default_factory=dict)
    unkillable: tuple[int, ...] = ()
    unkept: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeStatus(Message):
    """A node as agent/node_folder.py finds it: the agent's files, and the facts that the files alone do not show.

    `state` and `exit` are None if the file is missing. `alive`: the agent runs. `asked`: the reason of the stop
    request. `elsewhere`: the agent runs on a different machine, which this machine replaces or shares a disk with; then
    the further fields have their defaults. `ended_ago_s`: since the exit. Only without an exit: `held_s`, how
    long the node has been used; and if the agent is gone: `saved`, whether a checkpoint exists; `last_s`, when the job
    last wrote a log line; `rebooted`, whether the machine has restarted since. `now_s`: the host's clock at the answer.
    """

    state: AgentState | None = None
    exit: ExitReport | None = None
    alive: bool = False
    asked: str | None = None
    elsewhere: bool = False
    ended_ago_s: float = 0.0
    held_s: float | None = None
    saved: bool = False
    last_s: float = 0.0
    rebooted: bool = False
    now_s: float | None = None
