"""The config file's keys: their types, defaults, bounds and help.

The single source for validation, `cloudtrain explain`, the JSON schema of editors and the docs. Rules that span several
keys are in `rules.py`: a config stored as JSON with defaults filled in must stay readable.
"""

import functools
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, create_model, model_validator

from cloudtrain.entrypoints.notices.receivers import RECEIVERS

from ..backend_table import BUILT_IN, DEFAULT, PLACES, block_of, names, traits
from ..job import PROJECT_PATTERN
from . import kinds
from .kinds import Arguments, Duration, JobName, Many, Pattern, Place, RelativePath, Section, Text, key, section_key
from .schema_training import Checkpoint, Evaluate, InitFromOrText, Sweep, Training

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
    "moved",
]


class Code(Section):
    """The code that is shipped to the nodes."""

    dir: RelativePath = key(
        ".", "Folder to ship, relative to the config file: what git has or would add, without .cloudtrainignore.", "src"
    )
    exclude: Many[Text] = key(
        (),
        "More to leave out, as .gitignore patterns; `!FILE` ships an ignored file, or one that looks like a secret.",
        ["*.ipynb", "data/"],
    )
    max_size_mb: int = key(
        500, "Largest upload, in MB; a larger upload is refused, with the names of big files.", 500, ge=1
    )
    max_data_gb: kinds.SizeGb = key(5, "Largest local data of `inputs` that goes along with the job, in GB.", 20)


class Resources(Section):
    """How many machines, and of what kind."""

    instances: int = key(1, "Machines (nodes) of the job.", 2, ge=1, le=10_000)
    min_instances: int | None = key(None, "Fewest machines a restart may continue with. Default: `instances`.", 1, ge=1)
    accelerators: kinds.Accelerators | None = key(
        None, "Type and count per instance (default 1), for each backend's machine type; local takes its own.", "A100:8"
    )
    instance_type: Text | None = key(
        None, "The backend's own machine type, in any case, in place of `accelerators`.", "ml.p4d.24xlarge"
    )
    spot: bool = key(
        False, "Take interruptible machines: cheaper, and resumed from the last checkpoint when taken away.", True
    )
    disk_gb: kinds.SizeGb | None = key(None, "Disk of each instance, in GB. Default: the backend's.", 200)


class Progress(Section):
    """Regular expressions that find a script's steps where the built-in forms do not; the first group is a number."""

    step: Pattern | None = key(None, "Finds the step. Default: the forms that docs/scripts.md lists.", "iter (\\d+)")
    loss: Pattern | None = key(None, "Finds the loss on a step's line.", "loss ([\\d.]+)")
    total: Pattern | None = key(None, "Finds the number of steps of the whole job, on any line.", "max_iters: (\\d+)")
    metrics: dict[kinds.MetricName, Pattern] = key(
        {}, "Name -> expression of a further number.", {"accuracy": "acc ([\\d.]+)"}
    )


class Distributed(Section):
    """How torchrun starts the ranks."""

    nproc_per_node: kinds.ProcessCount = key("auto", "Ranks on one instance. auto: 1 for each GPU, else 1.", 8)
    max_restarts: int = key(3, "Times the ranks are started again after a fault.", 3, ge=0, le=1000)
    allow_alone: bool = key(
        False, "Accept ranks that join no process group of all ranks; otherwise the job fails at the end.", True
    )
    name_runs: bool = key(True, "Let rank 0 go on in the same run of W&B or MLflow after a restart or resume.", False)
    accelerate_config: RelativePath | None = key(
        None,
        "File of `accelerate config`, below `code.dir`: its settings become the variables of `accelerate launch`.",
        "accelerate_config.yaml",
    )
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = key(
        "SIGTERM",
        "Signal that stops a script: one at which the script saves. The same signal to the job from elsewhere, "
        "if not SIGTERM or SIGINT, then means `save`, and ends nothing.",
        "SIGUSR1",
    )
    hang_timeout: Duration | None = key(
        None,
        "Time without a step before a rank counts as hung. Default: `timeout_s` and 5 minutes, for a "
        "script an hour; a script may also be silent for 20 times its longest silence before.",
        "30m",
    )
    workdir: RelativePath | None = key(
        None,
        "Folder below `code.dir` in which the ranks start, as in `cd src && torchrun train.py`. `script` stays "
        "relative to `code.dir`; `keep` and `module` are relative to this folder. Default: `code.dir`.",
        "src",
    )
    timeout_s: int = key(600, "Seconds a collective call may take before the ranks count as hung.", 600, ge=1)


class Limits(Section):
    """Time limits, which the backend enforces by itself."""

    max_duration: Duration = key(
        86_400,
        "Longest time of the job after the submit, restarts included. `resume` and each retry start this "
        "time again; only `budget` limits all attempts together.",
        "12h",
    )
    max_wait: Duration | None = key(
        None,
        "Longest it may wait for machines, in a queue too. Default: the backend's; in a queue no limit.",
        "2h",
        gt=0,
    )


class Queue(Section):
    """Waiting in line for machines that are in use (docs/queue.md)."""

    wait: bool = key(False, "Wait for machines that are in use. The same as `submit --queue`.", True)
    priority: Literal["low", "normal", "high"] = key(
        "normal", "Place in line: higher priorities first, then the order of the submits.", "low"
    )
    preempt: bool = key(
        False, "Let your own jobs of lower priority save and wait again, if this job then starts (local, ssh).", True
    )


class Budget(Section):
    """What the job may cost. Its worst case is reserved before anything is sent."""

    limit: kinds.Money = key(..., "Most the job may cost, all attempts together, in US dollars.", "150 USD")
    alert_at: Many[kinds.Percent] = key((50, 80, 100), "Shares of the limit that send a notice.", ["50%", "80%"])
    on_limit: Literal["alert", "stop", "checkpoint-and-stop"] = key(
        "checkpoint-and-stop",
        "What happens at the limit. checkpoint-and-stop: the job saves before its time limit, which the "
        "backend enforces, and leaves, to be resumed (a script gets SIGTERM: see `on_stop`); stop: the backend ends it "
        "there as it is, without that save; "
        "alert: notices alone, and nothing is ended but by `limits.max_duration`.",
        "checkpoint-and-stop",
    )


class Project(Section):
    """The payer of the jobs: `cloudtrain budget` limits the total cost of all jobs of a project."""

    name: kinds.ProjectName = key(..., "The project that the job counts against.", "vision")
    ledger: kinds.LedgerUri | None = key(
        None,
        "Where a team shares the project's budget: a file in a bucket, or on a shared disk. Default: what "
        "`cloudtrain budget set --ledger` named on this machine, else this machine's own budgets alone.",
        "s3://team-bucket/cloudtrain/ledger.json",
    )


def _project(value: Any) -> Any:
    """Return a bare project name as a mapping. Raises ValueError for a bad name: a mapping would have no place."""
    if isinstance(value, dict | BaseModel | None):
        return value
    if not isinstance(value, str) or not re.fullmatch(PROJECT_PATTERN, value):
        raise ValueError(f"{kinds.PROJECT_WANTED}; or a mapping of `name` and `ledger`")
    return {"name": value}


_POSTED: dict[str, Any] = {
    name: (kinds.Channel | None, key(None, of.help, of.example)) for name, of in RECEIVERS.items()
}


class Notify(create_model("Posted", __base__=Section, **_POSTED)):  # type: ignore[misc]
    """A receiver of alerts, with exactly one kind of address."""

    email: kinds.MailAddress | None = key(None, "Mail address.", "team@example.org")
    apprise: kinds.AppriseUrl | None = key(
        None,
        "An address of one of the many services that Apprise knows; needs the extra `apprise`.",
        "env:NTFY_URL",
        "ntfys://ntfy.sh/my-topic",
    )
    smtp: kinds.MailServer | None = key(
        None,
        "With `email`: the server, as smtp://USER:PASSWORD@HOST:587 or smtps://. Default: env:CLOUDTRAIN_SMTP.",
        "env:SMTP_URL",
    )
    sender: kinds.MailAddress | None = key(
        None, "With `email`: the mail's sender. Default: the server's user.", "train@example.org"
    )
    on: Many[NotifyEvent] = key(
        ("succeeded", "failed", "stopped", "budget", "stalled"),
        "Which events. `budget`: its thresholds, a limit that comes before the last step (`projected`) and "
        "the hour of leaving (`deadline`), which can also be chosen alone.",
        ["budget", "failed"],
    )
    from_job: bool = key(
        False,
        "Let the job send alerts of budget, deadline and end, without your machine. The "
        "address, an `env:NAME`, travels as one of the job's `secrets`.",
        True,
    )


class Retry(Section):
    """New attempts on new machines, each from the newest checkpoint."""

    max_attempts: int = key(
        1, "Attempts that may end by a fault, the first one counted; a lack of machines is no fault.", 3, ge=1, le=30
    )
    on: Many[Literal["preempted", "node_failure", "error"]] = key(
        ("preempted", "node_failure"),
        "What earns a new attempt; `error` is your code failing.",
        ["preempted", "node_failure"],
    )


class FailOverLimits(Section):
    """When the search for machines ends, at one of both limits: exit 5, or in line with `queue.wait`."""

    rounds: int | None = key(None, "Rounds over all candidates. Default: 3, without `until`.", 3, ge=1, le=1000)
    until: Duration | None = key(
        None, "Time after the submit, or after a resume; no candidate is sent later.", "12h", gt=0
    )


_TRY = key(
    ...,
    "Candidates in order: each changes keys of this file by their dotted names; `{}` is the file as it stands.",
    [{}, {"resources.accelerators": "H100:8"}, {"resources.spot": False}],
    min_length=1,
    max_length=100,
)
_TRIED: dict[str, Any] = {"try": (Many[dict[Text, Any]], _TRY)}  # `try` is a word of Python


class FailOver(create_model("Tried", __base__=Section, **_TRIED)):  # type: ignore[misc]
    """Where else the job runs if machines are missing: one candidate after the other, on one reservation."""

    order: Literal["given", "price"] = key(
        "given", "Order of the candidates: as in `try`, or the lowest worst case first, without the budget.", "price"
    )
    wait: Duration | None = key(
        None,
        "Longest that one candidate may wait for machines. Default: as long as the platform lets it wait.",
        "30m",
        gt=0,
    )
    limits: FailOverLimits = section_key(FailOverLimits, {"rounds": 3})

    @property
    def entries(self) -> tuple[dict[str, Any], ...]:
        """The mappings of `try`."""
        return tuple(getattr(self, "try"))


class JobConfig(Section):
    """A training job."""  # `model` adds the blocks of backends

    name: JobName = key(..., "Name of the job; the id adds five letters, or is the ID of `submit --name ID`.", "digits")
    backend: kinds.BackendChoice = key(
        DEFAULT,
        f"Place of the job: {', '.join(BUILT_IN)}, or a plug-in's name; of several, `plan` "
        "shows what each costs, and `submit --backend NAME` or `--backend cheapest` chooses.",
        *list(BUILT_IN),
    )
    task: RelativePath | None = key(
        None,
        "Python file of factories (model, dataset, loss) for the shared trainer, below `code.dir`. "
        "Exactly one of `task`, `script`, `module`.",
        "task.py",
    )
    script: RelativePath | None = key(None, "Python script for torchrun, as it is, below `code.dir`.", "train.py")
    module: Text | None = key(None, "Module for torchrun, as `python -m`.", "pkg.train")
    args: Arguments = key(
        (),
        "Arguments of the script or module. A mapping `{epochs: 10, flag: true, off: false, x: [1, 2]}` "
        "becomes `--epochs 10 --flag --x 1 2`; `no` and `off` are false too, and text in quotes. Text in place of the "
        "mapping is split as a shell splits it.",
        ["--epochs", "10"],
        {"epochs": 10},
        "--epochs 10",
    )
    resume_args: Arguments = key(
        (),
        "Further arguments of the script or module when it starts again and has a checkpoint; "
        "`$CLOUDTRAIN_RESUME_PATH` is the newest one.",
        ["--init_from=resume"],
        {"resume_from_checkpoint": "$CLOUDTRAIN_RESUME_PATH"},
    )
    keep: Many[kinds.KeptPath] = key(
        (),
        "Files, folders or patterns of the working directory that the script writes: they are kept in the "
        "checkpoint folder, are there again after a restart, and come home with `artifacts`. `!data/`: may be lost.",
        ["out/", "snapshot.pt", "*.ckpt", "!data/"],
    )
    progress: Progress = section_key(Progress, {"step": "iter (\\d+)", "loss": "loss ([\\d.]+)"})
    on_stop: Literal["signal", "save"] = key(
        "signal",
        "At a stop or the deadline. signal: the script gets SIGTERM. save: a callback is added to Hugging "
        "Face's Trainer and to Lightning's, which saves a checkpoint and leaves.",
        "save",
    )
    requirements: RelativePath | None = key(
        None,
        "Packages that the job needs, below `code.dir`: pip's requirements file, `pyproject.toml` or "
        "`pyproject.toml[extra]`, or a script with a PEP 723 header. Installed on each node before the ranks start; "
        "torch stays as the machine or image has it.",
        "requirements.txt",
        "pyproject.toml[train]",
        "train.py",
    )
    setup: Many[Text] = key(
        (),
        "Commands for bash that each node runs in the working directory before its ranks start.",
        ["apt-get install -y libsndfile1", "pip install -e ."],
    )
    params: dict[str, Any] = key({}, "Handed to the task's functions as they are.", {"hidden": 128})
    code: Code = section_key(Code, {"dir": "src"})
    env: dict[kinds.EnvName, kinds.Written] = key({}, "Environment variables of every rank.", {"NCCL_DEBUG": "WARN"})
    secrets: Many[kinds.EnvName] = key(
        (),
        "Names only: values come from your environment, and are never rendered, logged or stored in clear.",
        ["WANDB_API_KEY"],
    )
    image: Text | None = key(
        None,
        "Container image on clouds; on ssh with `environment: docker`, Slurm with `container`. Default: the cloud's.",
        "registry/team/train:3",
    )
    resources: Resources = section_key(Resources, {"instances": 2})
    distributed: Distributed = section_key(Distributed, {"nproc_per_node": 8})
    training: Training = section_key(Training, {"max_steps": 2000}, epochs=1)
    checkpoint: Checkpoint = section_key(Checkpoint, {"every_steps": 200}, every=600)
    evaluate: Evaluate | None = key(
        None,
        "Test a task after its last step, on a split that has chosen nothing. Default: no test.",
        {"split": "test", "checkpoint": "best"},
    )
    init_from: InitFromOrText | None = key(
        None,
        "Begin with another job's weights (docs/finetune.md): a job with an optional `@best`, `@last` or "
        "`@step-N`, or a path or uri. A script finds them at CLOUDTRAIN_INPUT_INIT_FROM.",
        "digits@best",
        {"path": "s3://bucket/export/", "skip": ["^head\\."]},
    )
    inputs: dict[kinds.InputName, Place] = key(
        {},
        "Name -> uri or path (docs/data.md); the job sees CLOUDTRAIN_INPUT_<NAME>. A relative path is beside this "
        "file and goes along to the job, an absolute path is on the machine that runs the job. A mapping has a "
        "place for each backend.",
        {"train": "data/"},
        {"train": "s3://bucket/train/"},
        {"train": {name: place.replace("NAME", "train") for name, place in PLACES.items()}},
    )
    outputs: dict[kinds.InputName, Text] = key(
        {},
        "Name -> uri; copied to URI/JOB/ from CLOUDTRAIN_OUTPUT_DIR/<name>. On a cloud one, for all.",
        {"model": "s3://bucket/model"},
    )
    limits: Limits = section_key(Limits, {"max_duration": "12h"})
    queue: Queue = section_key(Queue, {"wait": True})
    capacity: FailOver | None = key(
        None,
        "Other places, machines and prices to try if machines are missing (docs/capacity.md). Default: none.",
        {"try": [{}, {"resources.spot": False}]},
    )
    budget: Budget | None = key(None, "What the job may cost. Default: no limit but the time.", {"limit": "150 USD"})
    project: Annotated[Project, kinds.Shorthand("name", _project, {"type": "string"})] | None = key(
        None,
        "Project whose budget the job counts against. Default: none, only the overall budgets.",
        "vision",
        {"name": "vision", "ledger": "s3://team-bucket/cloudtrain/ledger.json"},
    )
    notify: Many[Notify] = key(
        (), "Who receives alerts, and which alerts.", [{"slack": "env:SLACK_URL", "on": ["failed"]}]
    )
    retry: Retry = section_key(Retry, {"max_attempts": 3})
    sweep: Sweep | None = key(
        None,
        "A search over values of other keys: many trials within one budget (docs/sweeps.md).",
        {"space": {"training.optimizer.lr": {"log": [1e-5, 1e-1]}}, "trials": 27},
    )
    # Options that the mappings of `args` and `resume_args` leave out, for a note: no part of the config as stored.
    _left_out: tuple[str, ...] = ()
    tags: dict[kinds.TagName, kinds.Written] = key({}, "Labels for the platform and its bills.", {"team": "vision"})

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

    @model_validator(mode="before")
    @classmethod
    def _places_of_backend(cls, given: Any) -> Any:
        """Choose the backend's place of each input; a rule across keys reports a missing place."""
        if not isinstance(given, dict) or not isinstance(given.get("inputs"), dict):
            return given
        name = backend_in(given.get("backend"))
        inputs = {
            key: place.get(name, next(iter(place.values()))) if isinstance(place, dict) and place else place
            for key, place in given["inputs"].items()
        }
        return {**given, "inputs": inputs}

    def block(self, kind: type[B]) -> B:
        """Return the backend's block of this kind, or a block of defaults."""
        return next((value for value in reversed(vars(self).values()) if isinstance(value, kind)), None) or kind()


def backend_in(value: Any) -> str:
    """Return the backend's name as the key `backend` has it: a name, a list of one, or nothing."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return first if isinstance(first, str) else DEFAULT


def model(keys: Iterable[str | int] = ()) -> type[JobConfig]:
    """Return the model of a config with the blocks of all built-in backends, and of the plug-ins among these keys."""
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
        name: (block | None, key(None, its.help, its.example)) for name, (block, its) in found.items()
    }
    return create_model(JobConfig.__name__, __base__=JobConfig, __doc__=JobConfig.__doc__, **blocks)


def carried_by(entry: Any) -> list[str]:
    """Return the variables that the job needs for the notifications of a `notify` entry; empty without `from_job`."""
    if isinstance(entry, Notify):
        entry = entry.model_dump()
    if not isinstance(entry, dict) or entry.get("from_job") is not True:
        return []
    keys = ("smtp",) if entry.get("email") else RECEIVERS
    places = [entry.get(key) or ("env:CLOUDTRAIN_SMTP" if key == "smtp" else None) for key in keys]
    names = [place.removeprefix("env:") for place in places if isinstance(place, str) and place.startswith("env:")]
    return [name for name in names if name.isidentifier() and name.isascii()]
