"""The config file's keys: their types, defaults, bounds and help.

The single source for validation, `cloudtrain explain`, the JSON schema of editors and the docs. Rules that span several
keys are in `rules.py`: a config stored as JSON with defaults filled in must stay readable.
"""

import functools
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model, model_validator

from ..backend_table import BUILT_IN, DEFAULT, block_of, names, traits
from ..job import PROJECT_PATTERN
from .kinds import (
    PROJECT_WANTED,
    Accelerators,
    AppriseUrl,
    Arguments,
    BackendChoice,
    Channel,
    Duration,
    EnvName,
    InputName,
    JobName,
    KeptPath,
    LedgerUri,
    MailAddress,
    MailServer,
    Many,
    MetricName,
    Money,
    Pattern,
    Percent,
    ProcessCount,
    ProjectName,
    RelativePath,
    Section,
    Shorthand,
    SizeGb,
    TagName,
    Text,
    Written,
)
from .schema_after import Evaluate, InitFromOrText
from .schema_training import Checkpoint, Sweep, Training

B = TypeVar("B", bound=Section)

NotifyEvent = Literal[
    "started",
    "succeeded",
    "failed",
    "stopped",
    "preempted",
    "restarted",
    "budget",
    "projected",
    "deadline",
    "stalled",
    "unreachable",
]


class Code(Section):
    """The code that is shipped to the nodes."""

    dir: RelativePath = Field(
        ".",
        description="Folder to ship, relative to the config file. .gitignore and .cloudtrainignore are honoured.",
        examples=["src"],
    )
    exclude: Many[Text] = Field(
        (),
        description="More to leave out, as .gitignore patterns; `!FILE` ships a file that looks like a secret.",
        examples=[["*.ipynb", "data/"]],
    )
    max_size_mb: int = Field(
        500,
        ge=1,
        description="Largest upload, in MB; a larger upload is refused, with the names of big files.",
        examples=[500],
    )


class Resources(Section):
    """How many machines, and of what kind."""

    instances: int = Field(1, ge=1, le=10_000, description="Machines (nodes) of the job.", examples=[2])
    min_instances: int | None = Field(
        None, ge=1, description="Fewest machines a restart may continue with. Default: `instances`.", examples=[1]
    )
    accelerators: Accelerators | None = Field(
        None,
        description="Type and count per instance (default 1), for each backend's machine type; local takes its own.",
        examples=["A100:8"],
    )
    instance_type: Text | None = Field(
        None, description="The backend's own machine type, in place of `accelerators`.", examples=["ml.p4d.24xlarge"]
    )
    spot: bool = Field(
        False,
        description="Take interruptible machines: cheaper, and resumed from the last checkpoint when taken away.",
        examples=[True],
    )
    disk_gb: SizeGb | None = Field(
        None, description="Disk of each instance, in GB. Default: the backend's.", examples=[200]
    )


class Progress(Section):
    """Regular expressions that find a script's steps in its output; the first group of each is a number."""

    step: Pattern | None = Field(
        None, description="Finds the step. Default: the forms that docs/scripts.md lists.", examples=["iter (\\d+)"]
    )
    loss: Pattern | None = Field(None, description="Finds the loss on a step's line.", examples=["loss ([\\d.]+)"])
    total: Pattern | None = Field(
        None, description="Finds the number of steps of the whole job, on any line.", examples=["max_iters: (\\d+)"]
    )
    metrics: dict[MetricName, Pattern] = Field(
        {}, description="Name -> expression of a further number.", examples=[{"accuracy": "acc ([\\d.]+)"}]
    )


class Distributed(Section):
    """How torchrun starts the ranks."""

    nproc_per_node: ProcessCount = Field(
        "auto", description="Ranks on one instance. auto: 1 for each GPU, else 1.", examples=[8]
    )
    max_restarts: int = Field(
        3, ge=0, le=1000, description="Times the ranks are started again after a fault.", examples=[3]
    )
    allow_alone: bool = Field(
        False,
        description="Accept ranks that join no process group of all ranks; otherwise the job fails at the end.",
        examples=[True],
    )
    hang_timeout: Duration | None = Field(
        None,
        description="Time without a step before a rank counts as hung. Default: `timeout_s` and 5 minutes, for a "
        "script an hour; a script may also be silent for 20 times its longest silence before.",
        examples=["30m"],
    )
    timeout_s: int = Field(
        600, ge=1, description="Seconds a collective call may take before the ranks count as hung.", examples=[600]
    )


class Limits(Section):
    """Time limits, which the backend enforces by itself."""

    max_duration: Duration = Field(
        86_400,
        description="Longest time of the job after the submit, restarts included. `resume` and each retry start this "
        "time again; only `budget` limits all attempts together.",
        examples=["12h"],
    )
    max_wait: Duration | None = Field(
        None,
        description="Longest it may wait for machines, in a queue too. Default: the backend's; in a queue no limit.",
        examples=["2h"],
    )


class Queue(Section):
    """Waiting in line for machines that are in use (docs/queue.md)."""

    wait: bool = Field(
        False, description="Wait for machines that are in use. The same as `submit --queue`.", examples=[True]
    )
    priority: Literal["low", "normal", "high"] = Field(
        "normal", description="Place in line: higher priorities first, then the order of the submits.", examples=["low"]
    )
    preempt: bool = Field(
        False,
        description="Let your own jobs of lower priority save and wait again, if this job then starts (local, ssh).",
        examples=[True],
    )


class Budget(Section):
    """What the job may cost. Its worst case is reserved before anything is sent."""

    limit: Money = Field(
        description="Most the job may cost, all attempts together, in US dollars.", examples=["150 USD"]
    )
    alert_at: Many[Percent] = Field(
        (50, 80, 100), description="Shares of the limit that send a notice.", examples=[["50%", "80%"]]
    )
    on_limit: Literal["alert", "stop", "checkpoint-and-stop"] = Field(
        "checkpoint-and-stop",
        description="What happens at the limit. checkpoint-and-stop: the job saves before its time limit, which the "
        "backend enforces, and leaves, to be resumed (a script gets SIGTERM: see `on_stop`); stop: the backend ends it "
        "there as it is, without that save; "
        "alert: notices alone, and nothing is ended but by `limits.max_duration`.",
        examples=["checkpoint-and-stop"],
    )


class Project(Section):
    """The payer of the jobs: `cloudtrain budget` limits the total cost of all jobs of a project."""

    name: ProjectName = Field(description="The project that the job counts against.", examples=["vision"])
    ledger: LedgerUri | None = Field(
        None,
        description="Where a team shares the project's budget: a file in a bucket, or on a shared disk. Default: what "
        "`cloudtrain budget set --ledger` named on this machine, else this machine's own budgets alone.",
        examples=["s3://team-bucket/cloudtrain/ledger.json"],
    )


def _project(value: Any) -> Any:
    """Return a bare project name as a mapping. Raises ValueError for a bad name: a mapping would have no place."""
    if isinstance(value, dict | BaseModel | None):
        return value
    if not isinstance(value, str) or not re.fullmatch(PROJECT_PATTERN, value):
        raise ValueError(f"{PROJECT_WANTED}; or a mapping of `name` and `ledger`")
    return {"name": value}


class Notify(Section):
    """A receiver of alerts, with exactly one of webhook, slack, email and apprise."""

    webhook: Channel | None = Field(
        None,
        description="Address that gets a JSON POST, a Teams channel a card; `env:NAME` reads it from a variable.",
        examples=["env:HOOK_URL"],
    )
    slack: Channel | None = Field(
        None, description="Slack's incoming webhook, the same way; Mattermost's too.", examples=["env:SLACK_URL"]
    )
    email: MailAddress | None = Field(None, description="Mail address.", examples=["team@example.org"])
    apprise: AppriseUrl | None = Field(
        None,
        description="An address of one of the many services that Apprise knows; needs the extra `apprise`.",
        examples=["env:NTFY_URL", "ntfys://ntfy.sh/my-topic"],
    )
    smtp: MailServer | None = Field(
        None,
        description="With `email`: the server, as smtp://USER:PASSWORD@HOST:587 or smtps://. Default: env:"
        "CLOUDTRAIN_SMTP.",
        examples=["env:SMTP_URL"],
    )
    sender: MailAddress | None = Field(
        None, description="With `email`: the mail's sender. Default: the server's user.", examples=["train@example.org"]
    )
    on: Many[NotifyEvent] = Field(
        ("succeeded", "failed", "stopped", "budget", "stalled"),
        description="Which events. `budget`: its thresholds, a limit that comes before the last step (`projected`) and "
        "the hour of leaving (`deadline`), which can also be chosen alone.",
        examples=[["budget", "failed"]],
    )
    from_job: bool = Field(
        False,
        description="Let the job send alerts of budget, deadline and end, without your machine. The "
        "address, an `env:NAME`, travels as one of the job's `secrets`.",
        examples=[True],
    )


class Retry(Section):
    """New attempts on new machines, each from the newest checkpoint."""

    max_attempts: int = Field(1, ge=1, le=30, description="Attempts in all, the first one counted.", examples=[3])
    on: Many[Literal["preempted", "node_failure", "error"]] = Field(
        ("preempted", "node_failure"),
        description="What earns a new attempt; `error` is your code failing.",
        examples=[["preempted", "node_failure"]],
    )


class JobConfig(Section):
    """A training job."""  # `model` adds the blocks of backends

    name: JobName = Field(
        description="Name of the job; the id adds five letters, or is the ID of `submit --name ID`.",
        examples=["digits"],
    )
    backend: BackendChoice = Field(
        DEFAULT,
        description=f"Place of the job: {', '.join(BUILT_IN)}, or a plug-in's name; of several, `plan` "
        "shows what each costs, and `submit --backend NAME` or `--backend cheapest` chooses.",
        examples=list(BUILT_IN),
    )
    task: RelativePath | None = Field(
        None,
        description="Python file of factories (model, dataset, loss) for the shared trainer, below `code.dir`. "
        "Exactly one of `task`, `script`, `module`.",
        examples=["task.py"],
    )
    script: RelativePath | None = Field(
        None, description="Python script for torchrun, as it is, below `code.dir`.", examples=["train.py"]
    )
    module: Text | None = Field(None, description="Module for torchrun, as `python -m`.", examples=["pkg.train"])
    args: Arguments = Field(
        (),
        description="Arguments of the script or module. A mapping `{epochs: 10, flag: true, off: false, x: [1, 2]}` "
        "becomes `--epochs 10 --flag --x 1 2`; text is split as a shell splits it.",
        examples=[["--epochs", "10"], {"epochs": 10}, "--epochs 10"],
    )
    resume_args: Arguments = Field(
        (),
        description="Further arguments of the script or module when it starts again and has a checkpoint; "
        "`$CLOUDTRAIN_RESUME_PATH` is the newest one.",
        examples=[["--init_from=resume"], {"resume_from_checkpoint": "$CLOUDTRAIN_RESUME_PATH"}],
    )
    keep: Many[KeptPath] = Field(
        (),
        description="Files, folders or patterns of the working directory that the script writes: they are kept in the "
        "checkpoint folder, are there again after a restart, and come home with `artifacts`. `!data/`: may be lost.",
        examples=[["out/", "snapshot.pt", "*.ckpt", "!data/"]],
    )
    progress: Progress = Field(
        Progress.model_construct(),
        description="How a script's output tells its steps, where the built-in forms do not find them.",
        examples=[{"step": "iter (\\d+)", "loss": "loss ([\\d.]+)"}],
    )
    on_stop: Literal["signal", "save"] = Field(
        "signal",
        description="At a stop or the deadline. signal: the script gets SIGTERM. save: a callback is added to Hugging "
        "Face's Trainer and to Lightning's, which saves a checkpoint and leaves.",
        examples=["save"],
    )
    requirements: RelativePath | None = Field(
        None,
        description="Packages that the job needs, below `code.dir`: pip's requirements file, `pyproject.toml` or "
        "`pyproject.toml[extra]`, or a script with a PEP 723 header. Installed on each node before the ranks start; "
        "torch stays as the machine or image has it.",
        examples=["requirements.txt", "pyproject.toml[train]", "train.py"],
    )
    setup: Many[Text] = Field(
        (),
        description="Commands for bash that each node runs in the working directory before its ranks start.",
        examples=[["apt-get install -y libsndfile1", "pip install -e ."]],
    )
    params: dict[str, Any] = Field(
        {}, description="Handed to the task's functions as they are.", examples=[{"hidden": 128}]
    )
    code: Code = Field(Code.model_construct(), description="What is shipped to the nodes.", examples=[{"dir": "src"}])
    env: dict[EnvName, Written] = Field(
        {}, description="Environment variables of every rank.", examples=[{"NCCL_DEBUG": "WARN"}]
    )
    secrets: Many[EnvName] = Field(
        (),
        description="Names only: values come from your environment, and are never rendered, logged or stored in clear.",
        examples=[["WANDB_API_KEY"]],
    )
    image: Text | None = Field(
        None, description="Container image on the clouds. Default: the backend's.", examples=["registry/team/train:3"]
    )
    resources: Resources = Field(
        Resources.model_construct(), description="How many machines, and of what kind.", examples=[{"instances": 2}]
    )
    distributed: Distributed = Field(
        Distributed.model_construct(), description="How torchrun starts the ranks.", examples=[{"nproc_per_node": 8}]
    )
    training: Training = Field(
        Training.model_construct(epochs=1),
        description="The shared trainer; only for a `task`.",
        examples=[{"max_steps": 2000}],
    )
    checkpoint: Checkpoint = Field(
        Checkpoint.model_construct(every=600),
        description="When and where state is saved.",
        examples=[{"every_steps": 200}],
    )
    evaluate: Evaluate | None = Field(
        None,
        description="Test a task after its last step, on a split that has chosen nothing. Default: no test.",
        examples=[{"split": "test", "checkpoint": "best"}],
    )
    init_from: InitFromOrText | None = Field(
        None,
        description="Begin with another job's weights (docs/finetune.md): a job with an optional `@best`, `@last` or "
        "`@step-N`, or a path or uri. A script finds them at CLOUDTRAIN_INPUT_INIT_FROM.",
        examples=["digits@best", {"path": "s3://bucket/export/", "skip": ["^head\\."]}],
    )
    inputs: dict[InputName, Text] = Field(
        {}, description="Name -> uri or path; the job sees CLOUDTRAIN_INPUT_<NAME>.", examples=[{"train": "s3://b/d"}]
    )
    outputs: dict[InputName, Text] = Field(
        {},
        description="Name -> uri; copied there from CLOUDTRAIN_OUTPUT_DIR/<name>. On SageMaker one, for all.",
        examples=[{"model": "s3://b/m"}],
    )
    limits: Limits = Field(Limits.model_construct(), description="Time limits.", examples=[{"max_duration": "12h"}])
    queue: Queue = Field(Queue.model_construct(), description="Waiting in line.", examples=[{"wait": True}])
    budget: Budget | None = Field(
        None, description="What the job may cost. Default: no limit but the time.", examples=[{"limit": "150 USD"}]
    )
    project: Annotated[Project, Shorthand("name", _project, {"type": "string"})] | None = Field(
        None,
        description="Project whose budget the job counts against. Default: none, only the overall budgets.",
        examples=["vision", {"name": "vision", "ledger": "s3://team-bucket/cloudtrain/ledger.json"}],
    )
    notify: Many[Notify] = Field(
        (),
        description="Who receives alerts, and which alerts.",
        examples=[[{"slack": "env:SLACK_URL", "on": ["failed"]}]],
    )
    retry: Retry = Field(
        Retry.model_construct(), description="New attempts on new machines.", examples=[{"max_attempts": 3}]
    )
    sweep: Sweep | None = Field(
        None,
        description="A search over values of other keys: many trials within one budget (docs/sweeps.md).",
        examples=[{"space": {"training.optimizer.lr": {"log": [1e-5, 1e-1]}}, "trials": 27}],
    )
    tags: dict[TagName, Written] = Field(
        {}, description="Labels for the platform and its bills.", examples=[{"team": "vision"}]
    )

    @model_validator(mode="before")
    @classmethod
    def _carried_addresses(cls, given: Any) -> Any:
        """Add the variables with addresses for the job's own notifications to `secrets`."""
        if not isinstance(given, dict) or not isinstance(given.get("notify"), list | tuple):
            return given
        secrets = given.get("secrets") or ()
        more = [name for entry in given["notify"] for name in carried_by(entry)]
        if not more or not isinstance(secrets, list | tuple):
            return given
        return {**given, "secrets": list(dict.fromkeys([*secrets, *more]))}

    def block(self, kind: type[B]) -> B:
        """Return the backend's block of this kind, or a block of defaults."""
        return next((value for _, value in self if isinstance(value, kind)), None) or kind()


def model(keys: Iterable[str | int] = ()) -> type[JobConfig]:
    """Return the model of a config with these keys at the top level: with the blocks of all built-in backends.

    A plug-in's block is in the model if it is among the keys.
    """
    return _model(tuple(dict.fromkeys([*BUILT_IN, *blocks_of(keys)])))


def model_of(keys: Iterable[str | int]) -> type[JobConfig]:
    """Return the model of a config with exactly these keys: further blocks are None, and not imported."""
    return _model(tuple(blocks_of(keys)))


def blocks_of(keys: Iterable[str | int]) -> list[str]:
    """Return the keys that are blocks of backends. Plug-ins are searched only for a key that is unknown otherwise."""
    others = [str(key) for key in keys if key not in JobConfig.model_fields]
    known = BUILT_IN if BUILT_IN.keys() >= set(others) else names()
    return [name for name in known if name in others]


@functools.cache
def _model(backends: tuple[str, ...]) -> type[JobConfig]:
    found = {name: (block, traits(name)) for name in backends if (block := block_of(name)) is not None}
    blocks: dict[str, Any] = dict.fromkeys(BUILT_IN, (None, None)) | {
        name: (block | None, Field(None, description=its.help, examples=[its.example]))
        for name, (block, its) in found.items()
    }
    return create_model(JobConfig.__name__, __base__=JobConfig, __doc__=JobConfig.__doc__, **blocks)


def carried_by(entry: Any) -> list[str]:
    """Return the variables that the job needs for the notifications of a `notify` entry; empty without `from_job`."""
    if isinstance(entry, Notify):
        entry = entry.model_dump()
    if not isinstance(entry, dict) or entry.get("from_job") is not True:
        return []
    keys = ("smtp",) if entry.get("email") else ("webhook", "slack")
    places = [entry.get(key) or ("env:CLOUDTRAIN_SMTP" if key == "smtp" else None) for key in keys]
    names = [place.removeprefix("env:") for place in places if isinstance(place, str) and place.startswith("env:")]
    return [name for name in names if name.isidentifier() and name.isascii()]
