"""Loading a config: overrides, rules, hints, files, and errors of every kind."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.entrypoints.stores import store
from cloudtrain.entrypoints.trainer.optimizer_facts import OPTIMIZERS
from cloudtrain.launcher import config
from cloudtrain.launcher.commands.validate import command
from cloudtrain.launcher.config import JobConfig
from cloudtrain.launcher.config.schema import model
from cloudtrain.launcher.errors import ConfigError, Fault

TASK = "def model(params): ...\ndef dataset(params, split): ...\ndef loss(model, batch): ...\n"
Load = Callable[..., JobConfig]

ROOT = Path(__file__).resolve().parents[2]


EMPTY = [
    *(
        "train.py",
        "src/inner.py",
        "requirements.txt",
        "environment.yml",
        "pkg/__init__.py",
        "pkg/train.py",
        "pkg/sub/__init__.py",
    ),
    *("pkg/sub/__main__.py", "pkg/sub/deep.py", "bare/data.csv", "json/data.csv", "pytest/data.csv"),
]
BROKEN = {
    "pkg/broken.py": "x = 1\nif x\n",
    "pkg/relative.py": "import os\nfrom . import train\n",
    "relative.py": "from .pkg import train\n",
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a loader of texts; beside the config are task.py, train.py, src/inner.py and a package."""
    for name, text in {"task.py": TASK, "src/try.ipynb": "{}", **dict.fromkeys(EMPTY, ""), **BROKEN}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def load(text: str, *overrides: str, backend: str | None = None, **environ: str) -> JobConfig:
        file = tmp_path / "cloudtrain.yaml"
        file.write_bytes(text.encode())
        return config.load(file, backend=backend, overrides=overrides, environ=environ)

    return load


def test_missing_name_is_suggested_from_the_folder(tmp_path: Path) -> None:
    """The hint for a missing name is the name that `init` would write."""
    file = tmp_path / "My_Vision" / "cloudtrain.yaml"
    file.parent.mkdir()
    file.write_text("task: task.py\n")
    (file.parent / "task.py").write_text(TASK)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert [fault.hint for fault in caught.value.faults] == ["add `name: my-vision`"]


def faults(load: Load, text: str, *overrides: str, **environ: str) -> Sequence[Fault]:
    """Return the faults of a text."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, **environ)
    return caught.value.faults


def only_fault(load: Load, text: str, *overrides: str, **environ: str) -> Fault:
    """Return the single fault of a text."""
    (fault,) = faults(load, text, *overrides, **environ)
    return fault


def task(rest: str) -> str:
    """Return a config that runs task.py."""
    return f"name: x\ntask: task.py\n{rest}\n"


def script(rest: str) -> str:
    """Return a config that runs train.py."""
    return f"name: x\nscript: train.py\n{rest}\n"


FULL = """
name: digits
backend: sagemaker
task: task.py
params: {hidden: 128, ratio: 0.5, deep: {a: [1, null, true]}}
code: {dir: ., exclude: [data/]}
env: {NCCL_DEBUG: WARN, BUILD: 1.10, ON: true}
secrets: [WANDB_API_KEY]
image: reg/train:3
resources: {instances: 2, min_instances: 1, accelerators: A100, spot: true, disk_gb: 200 GB}
distributed: {nproc_per_node: 8, max_restarts: 0, timeout_s: 60}
training: {strategy: fsdp, precision: bf16, global_batch_size: 256, micro_batch_size: 32, max_steps: 2000,
           optimizer: {name: radam, lr: 3e-4, betas: [0.9, 0.95]}, schedule: {name: cosine, warmup_steps: 100}}
checkpoint: {every_steps: 200, every: 10m, keep: 3, uri: s3://b/c, resume: never}
inputs: {train: s3://b/d}
outputs: {model: s3://b/m}
limits: {max_duration: 12h, max_wait: 2h}
budget: {limit: 150 USD, alert_at: [50%, 80%], on_limit: stop}
notify: [{webhook: env:HOOK, on: [budget, failed]}, {email: a@b.c}]
retry: {max_attempts: 3, on: [preempted]}
project: {name: vision, ledger: s3://team-bucket/money}
tags: {team: vision, build: 1.10}
local: {python: python3}
ssh: {hosts: [gpu1, {host: gpu2, python: /p}], price_per_hour: 2.5, ssh_config: ~/.ssh/config}
sagemaker: {region: r, role: a, bucket: b, distribution: torchrun, raw: {A: {B: 1}}, keep_alive: 30m}
azureml: {subscription: s, resource_group: g, workspace: w, region: eastus, compute: c, raw: {}}
vertex: {project: p, location: l, staging_bucket: gs://b, service_account: a, endpoints: {logging: "http://127.0.0.1:1"}}
"""


def test_load_reads_every_key(load: Load) -> None:
    """Units become seconds, micro-dollars, percent and GB, a text key stays text; a mark and CRLF change no value."""
    job = load(FULL)
    assert job.limits.max_duration == 43_200
    assert (job.budget.limit, job.budget.alert_at) == (150_000_000, (50, 80))
    assert (job.resources.accelerators, job.resources.disk_gb) == ("A100:1", 200)
    assert (job.ssh.hosts[1].python, job.ssh.price_per_hour) == ("/p", 2_500_000)
    assert job.env == {"NCCL_DEBUG": "WARN", "BUILD": "1.10", "ON": "true"}
    assert job.tags["build"] == "1.10"
    assert load("\ufeff" + task("").replace("\n", "\r\n")).name == "x"


@pytest.mark.parametrize("text", [FULL, task(""), script("args: {a: 1}")])
def test_config_survives_json(load: Load, text: str) -> None:
    """A config written as JSON and read back is equal."""
    job = load(text)
    assert dict(model().model_validate(json.loads(json.dumps(job.model_dump(mode="json"))))) == dict(job)


def test_short_config_is_complete(load: Load) -> None:
    """A short file is a complete config; `min_instances` may equal `instances`: then a restart needs all of them."""
    job = load(task("training:\nresources: {}\n"))
    assert (job.backend, job.resources.instances, job.training.epochs) == ("local", 1, 1)
    assert (job.limits.max_duration, job.checkpoint.every, job.distributed.max_restarts) == (86_400, 600, 3)
    assert job.budget is None
    resources = load(task("resources: {instances: 2, min_instances: 2}")).resources
    assert (resources.instances, resources.min_instances) == (2, 2)


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        ("[--epochs, 10, --lr, 3e-4]", ("--epochs", "10", "--lr", "3e-4")),
        ("{epochs: 10, lr: 3e-4}", ("--epochs", "10", "--lr", "3e-4")),
        ("{flag: true, off: false, none: null}", ("--flag",)),
        ("{a: False, b: FALSE, c: no, d: No, e: off, f: OFF, k: 0}", ("--k", "0")),
        (
            "{a: 'no', b: \"off\", c: 'false', d: [no, off]}",
            ("--a", "no", "--b", "off", "--c", "false", "--d", "no", "off"),
        ),
        ("{x: [1, 2.50], -v: true}", ("--x", "1", "2.50", "-v")),
        ("{name: 'a b', no: yes}", ("--name", "a b", "--no", "yes")),
    ],
)
def test_args_become_argv(load: Load, args: str, argv: tuple[str, ...]) -> None:
    """Arguments are a list, or a mapping of options; numbers keep their spelling, and false has no second meaning."""
    job = load(script(f"args: {args}\nresume_args: {args}"))
    assert (job.args, job.resume_args) == (argv, argv)


@pytest.mark.parametrize(
    ("setting", "argv"),
    [
        ("args.lr=1e-3", ("--lr", "1e-3", "--data=x", "-v", "1", "--all", "--k", "2")),
        ("args.data=y", ("--lr", "-1", "--data", "y", "-v", "1", "--all", "--k", "2")),
        ("args.-v=3", ("--lr", "-1", "--data=x", "-v", "3", "--all", "--k", "2")),
        ("args.all=false", ("--lr", "-1", "--data=x", "-v", "1", "--k", "2")),
        ("args.k=0", ("--lr", "-1", "--data=x", "-v", "1", "--all", "--k", "0")),
        ("args.n=[1, 2]", ("--lr", "-1", "--data=x", "-v", "1", "--all", "--k", "2", "--n", "1", "2")),
        ("args.f=true", ("--lr", "-1", "--data=x", "-v", "1", "--all", "--k", "2", "--f")),
        ("args.z=off", ("--lr", "-1", "--data=x", "-v", "1", "--all", "--k", "2")),
        ("args.2=--data=z", ("--lr", "-1", "--data=z", "-v", "1", "--all", "--k", "2")),
        ("args=[]", ()),
    ],
)
def test_setting_of_one_option_keeps_the_others(load: Load, setting: str, argv: tuple[str, ...]) -> None:
    """`--set args.lr=1` changes one option of a list or a text too, and of a stored config, whose `args` are a list."""
    words = "[--lr, -1, --data=x, -v, 1, --all, --k, 2]"
    for args in (words, words[1:-1].replace(",", "") if "args.2" not in setting else words):
        job = load(script(f"args: {args}"), setting)
        assert job.args == argv
    before = load(script(f"args: {words}")).model_dump(mode="json")
    assert config.stored(before, overrides=[setting]).args == argv


def test_args_as_text_are_split_like_a_shell(load: Load) -> None:
    """`args: --lr 0.1 --name "a b"` is a command line with the rank's numbers; an open quote is refused."""
    assert load(script("args: --lr 0.10 --name \"a b\" '$CLOUDTRAIN_OUTPUT_DIR'")).args == (
        "--lr", "0.10", "--name", "a b", "$CLOUDTRAIN_OUTPUT_DIR"
    )  # fmt: skip
    assert load(script("resume_args: --resume")).resume_args == ("--resume",)
    assert load(script("args: ${RANK} ${MASTER_ADDR} $${RANK} ${NONE:-x}")).args == (
        "${RANK}", "${MASTER_ADDR}", "$${RANK}", "x"
    )  # fmt: skip
    (fault,) = faults(load, script("args: --name 'a"))
    assert (fault.key, "as a shell would split them (no closing quotation)" in fault.message) == ("args", True)


NO_BLOB_HOST = "is not a host of Azure's blob storage"
BAD_ADDRESSES = [
    ("~/nas", "`~/nas` is not a whole path", "a folder that stays, such as /mnt/nas/ckpt"),
    ("r2://b/x", "knows no `r2:` store", "gs://BUCKET/PREFIX, or https://ACCOUNT.blob."),
    ("gcs://b/x", "knows no `gcs:` store", "did you mean `gs://`?"),
    ("gs:///x", "`gs:///x` names no bucket", "as in gs://BUCKET/PREFIX"),
    ("gs://Bucket/x", "`Bucket` is not a bucket name", "did you mean `bucket`?"),
    ("gs://b/x", "`b` is not a bucket name", "3 to 63 small letters"),
    ("s3://My_Bucket/x", "`My_Bucket` is not a bucket name", "3 to 63 small letters"),
    ("s3://192.168.5.4/x", "`192.168.5.4` is not a bucket name", "3 to 63 small letters"),
    ("s3://arn:aws:s3:::one/x", "`arn:aws:s3:::one` is not a bucket name", "did you mean `one`?"),
    ("nas:/x", "knows no `nas:` store", "a folder such as /mnt/nas/ckpt, file:///mnt/nas/ckpt"),
    ("s3://", "`s3://` names no bucket", "s3://BUCKET/PREFIX"),
    ("s3:bkt/x", "`s3:bkt/x` is not an address of the form s3://BUCKET/PREFIX", "did you mean `s3://bkt/x`?"),
    ("s3://bkt/*.pt", "is a pattern, not one file or folder", "name the folder, `s3://bkt/`"),
    ("abfs://c@a.dfs.core.windows.net", "knows no `abfs:` store", "did you mean `abfss://`?"),
    ("http://a.blob.core.windows.net/con", "no `http:` store", "did you mean `https://`?"),
    ("https://example.com/con", "`example.com` is not a host of Azure's", "as in https://ACCOUNT.b"),
    ("https://a.dfs.core.windows.net/con", f"`a.dfs.core.windows.net` {NO_BLOB_HOST}", "`a.blob.core.windows.net`?"),
    ("abfss://con@a.file.core.windows.net/x", NO_BLOB_HOST, "did you mean `a.dfs.core.windows.net`?"),
    ("https://bucket.s3.eu-west-1.amazonaws.com/x", NO_BLOB_HOST, "did you mean `s3://bucket/x`?"),
    ("https://storage.googleapis.com/bucket/x", NO_BLOB_HOST, "did you mean `gs://bucket/x`?"),
    ("https://a.blob.core.windows.net", "the address names no container", "as in https://ACC"),
    ("https://a.blob.core.windows.net/Up", "`Up` is not a valid container name", "3 to 63 of a-z"),
    ("wasbs://a.blob.core.windows.net/x", "not an address of Azure's blob", "wasbs://CONTAINER@ACC"),
    (
        "https://a.blob.core.windows.net/con?sv=1&sig=x",
        "the address continues after a `?`",
        "AZURE_STORAGE_SAS_TOKEN in `secrets`",
    ),
]
BAD_VALUES = [
    ("inputs: {x: 'data/*.csv'}", "`data/*.csv` is a pattern, not one file or folder", "name the folder, `data/`"),
    ("inputs: {x: 's3://b*/x'}", "`s3://b*/x` is a pattern, not one file or folder", "name the folder"),
    ("outputs: {x: 'gs://bkt/out-?'}", "`gs://bkt/out-?` is a pattern", "name the folder, `gs://bkt/`"),
    ("resources: {instances: two}", "expected a whole number, found the text `two`", ""),
    ("resources: {instances: '2'}", "expected a whole number, found the text `2`", "write 2"),
    ("resources: {instances: 0}", "expected at least 1, found the number 0", ""),
    ("resources: {instances: true}", "expected a whole number, found `true`", ""),
    ("resources: {spot: yes}", "expected `true` or `false`, found the text `yes`", "write `true`"),
    ("resources: {accelerators: 8}", "such as `A100:8`, found the number 8", ""),
    ("resources: {accelerators: A100x8}", "found the text `A100x8`", "did you mean `A100:8`?"),
    ("resources: {accelerators: H100-80GBX4}", "found the text `H100-80GBX4`", "did you mean `H100-80GB:4`?"),
    ("resources: {accelerators: L40S 2}", "found the text `L40S 2`", "did you mean `L40S:2`?"),
    ("resources: {accelerators: 'RTX PRO 6000:2'}", "such as `A100:8`", "did you mean `RTX-PRO-6000:2`?"),
    ("resources: {accelerators: ml.p4d.24xlarge}", "such as `A100:8`", "is for `resources.instance_type`"),
    ("resources: {accelerators: 4xT4}", "found the text `4xT4`", "did you mean `T4:4`?"),
    ("resources: {disk_gb: 1.5}", "gigabytes", ""),
    ("resources: [2]", "expected a mapping of keys, found a list", "keys here: `instances`"),
    ("training: {precision: bfloat16}", "one of `fp32`, `bf16`, `fp16`, found the text `bfloat16`", "`bf16`"),
    ("training: {optimizer: {name: adam}}", "one of `sgd`", "did you mean `adamw`?"),
    ("training: {strategy: FSDP}", "one of `ddp`, `fsdp`", "did you mean `fsdp`?"),
    ("training: {max_steps: 1e4}", "expected a whole number, found the number 1e4", "write 10000"),
    ("training: {optimizer: adamw}", "expected a mapping", "`optimizer: {name: adamw}`"),
    ("training: {optimizer: {lr: 0}}", "expected more than 0", ""),
    ("training: {optimizer: {betas: [0.9]}}", "at least 2 items", ""),
    ("training: {eval_every: 0}", "expected at least 1", ""),
    ("training: {ema_decay: 0}", "expected more than 0", ""),
    ("training: {ema_decay: 1}", "expected less than 1", ""),
    ("checkpoint: {every: soon}", "expected a duration with a unit", ""),
    ("limits: {max_duration: 12 hours}", "expected a duration with a unit", "write `12h`"),
    ("limits: {max_duration: 90min}", "expected a duration with a unit", "write `90m`"),
    ("keep: [/tmp/out]", "below the working directory", "CLOUDTRAIN_CHECKPOINT_DIR"),
    ("limits: {max_duration: 30}", "expected a duration with a unit", "write `30s`, `30m` or `30h`"),
    ("checkpoint: {every: '600'}", "expected a duration with a unit", "write `600s`, `600m` or `600h`"),
    ("budget: {limit: 150 EUR}", "an amount in US dollars such as `150 USD` (in US dollars alone", ""),
    ("budget: {limit: 1, alert_at: 50}", "expected a list", "write `[50%]`"),
    ("budget: {limit: 1, alert_at: [50]}", "percentage with its sign, such as `50%`", "write `50%`"),
    ("budget: {limit: 1, alert_at: [10%, '75']}", "percentage with its sign", "write `75%`"),
    ("budget: {limit: 1, on_limit: checkpoint_and_stop}", "one of `alert`", "`checkpoint-and-stop`"),
    ("budget: {}", "missing key `limit`", "add `limit: 150 USD`"),
    ("budget: {limit: }", "`limit` has no value", "150 USD"),
    ("notify: [{slack: foo}]", "`env:NAME`", ""),
    ("notify: [{slack: env:A, on: [fail]}]", "one of `started`", "did you mean `failed`?"),
    ("ssh: {hosts: gpu1}", "expected a list, found the text `gpu1`", "write `[gpu1]`"),
    ("env: {a-b: x}", "a variable's name", ""),
    ("env: {A: [1]}", "expected text, found a list", ""),
    ("env: {A: }", "expected text, found nothing", ""),
    ("env: {RANK: 0}", "`RANK` is set on every rank", "remove it"),
    ("env: {CLOUDTRAIN_JOB: x}", "is set on every rank", ""),
    ("distributed: {nproc_per_node: many}", "`auto` or a whole number", ""),
    ("params: [1]", "expected a mapping of keys, found a list", ""),
    ("backend: sagemakr", "unknown backend `sagemakr`", "did you mean `sagemaker`?"),
    ("backend: Azure ML", "a backend's name", ""),
    ("image: ''", "text that is not empty", ""),
    *((f"checkpoint: {{mirror: '{uri}'}}", message, hint) for uri, message, hint in BAD_ADDRESSES),
]


@pytest.mark.parametrize(("rest", "message", "hint"), BAD_VALUES)
def test_bad_values_are_explained(load: Load, rest: str, message: str, hint: str) -> None:
    """A bad value is a fault with the expected value, the found value, the place, and the fix."""
    found = faults(load, task(rest))
    fault = next(fault for fault in found if message in fault.message)
    assert hint in fault.hint
    assert fault.place.line == 3


PLACES = ["/mnt/x", "x/y", "file:///mnt/x", "s3://bucket", "s3://bucket/a b/c", "S3://b-1.x/a"]
PLACES += ["https://a1.blob.core.windows.net/con", "HTTPS://A1.Blob.core.chinacloudapi.cn/con-1/a b/c"]
PLACES += ["https://a1.z01.blob.storage.azure.net/con/x", "abfss://con@a1.dfs.core.windows.net/x/y"]
PLACES += ["gs://bucket", "gs://my-bucket_1.example.com/a b/c", "GS://b-1/a"]
PLACES += ["wasbs://con@a1.blob.core.usgovcloudapi.net"]


def test_project_is_a_name_or_a_mapping(load: Load) -> None:
    """The name alone equals the mapping with the name; a ledger's address is unchanged."""
    short, long = load(script("project: vision")).project, load(script("project: {name: vision}")).project
    assert short == long
    shared = load(script("project: {name: vision, ledger: 's3://team-bucket/money'}")).project
    assert (shared.name, shared.ledger) == ("vision", "s3://team-bucket/money")


@pytest.mark.parametrize("name", ["Vision", "../x", "a b", "-a", "x" * 64, "'; DROP TABLE budgets; --"])
def test_bad_project_is_reported_at_its_place(load: Load, name: str) -> None:
    """The rule holds for the name alone and for the mapping."""
    for text in (f"project: {json.dumps(name)}", f"project: {{name: {json.dumps(name)}}}"):
        fault = only_fault(load, script(text))
        assert "a project's name" in fault.message
        assert fault.place.line == 3


def test_unknown_backend_is_told_once(load: Load) -> None:
    """An input that is one path for all backends has no place for the unknown backend."""
    assert only_fault(load, script("backend: aws\ninputs: {text: ./data}")).key == "backend"


@pytest.mark.parametrize("uri", PLACES)
def test_checkpoint_addresses_are_accepted(load: Load, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every address that the trainer opens is accepted unchanged."""
    assert load(task(f"checkpoint: {{mirror: '{uri}'}}")).checkpoint.mirror == uri
    assert store.open_store(uri) is not None


UNKNOWN_KEYS = {  # hint -> keys
    "did you mean `name`?": "nam",
    "did you mean `limits`?": "limit",
    "did you mean `backend`?": "Backend",
    "`instances` belongs under `resources`": "instances",
    "`spot` belongs under `resources`": "spot",
    "`epochs` belongs under `training`": "epochs",
    "`lr` belongs under `training.local.outer` or `training.optimizer`": "lr",
    "it is `resources.instances` here": "num_nodes nodes instance_count num_machines",
    "it is `resources.spot` here": "use_spot use_spot_instances",
    "it is `env` here": "envs environment_variables",
    "`script: train.py`": "entrypoint script_path",
    "torchrun is started: write": "run cmd",
    "commands before it: `setup`": "commands",
    "it is `requirements` here": "pip dependencies pip_packages",
    "write `requirements: requirements.txt`": "conda",
    "`code.dir` for the folder to ship, `distributed.workdir` for": "workdir",
    "write `keep: [out/]`": "artifacts outputs_dir output_dir",
    "did you mean `resume_args`?": "resume_arg",
    "it is `progress.metrics` here": "metric_definitions",
    "`resources.accelerators: A100:8`": "gpus num_gpus gpus_per_node",
    "it is `distributed.nproc_per_node` here": "nproc",
    "`training.global_batch_size`": "batch_size",
    "it is `training.micro_batch_size` here": "per_device_train_batch_size",
    "it follows from": "gradient_accumulation_steps",
    "it is `training.optimizer.lr` here": "learning_rate",
    "it is `training.precision` here": "mixed_precision",
    "`training.precision: fp16`": "fp16",
    "`training.precision: bf16`": "bf16",
    "it is `limits.max_duration` here": "max_run",
    "`max_wait` belongs under `limits`": "max_wait",
    "`limits.max_duration`": "timeout",
    "it is `sagemaker.role` here": "role_arn",
    "it is `image` here": "image_uri docker",
    "it is `params` here": "hyperparameters",
    "it is `budget.on_limit` here": "on_exceed",
    "`budget.limit": "max_price",
    "`cloudtrain explain` lists the keys": "zzzzz",
}


@pytest.mark.parametrize(("key", "hint"), [(key, hint) for hint, keys in UNKNOWN_KEYS.items() for key in keys.split()])
def test_unknown_keys_have_a_hint(load: Load, key: str, hint: str) -> None:
    """A misspelt, misplaced or foreign key is refused at its place, with the right key."""
    fault = only_fault(load, task(f"{key}: 1"))
    assert fault.message == f"unknown key `{key}`"
    assert hint in fault.hint
    assert (fault.place.line, fault.place.column) == (3, 1)


@pytest.mark.parametrize(
    ("rest", "key", "hint"),
    [
        ("resources: {instanecs: 2}", "resources.instanecs", "did you mean `instances`?"),
        ("training: {optimizer: {momentun: 2}}", "training.optimizer.momentun", "did you mean `momentum`?"),
        ("ssh: {hosts: [{hostname: a}]}", "ssh.hosts.0.hostname", "did you mean `host`?"),
        ("retry: {xyz: 1}", "retry.xyz", "keys here: `max_attempts`, `on`"),
        ("resources: {notifi: 1}", "resources.notifi", "did you mean `notify`, at the top level?"),
        ("vertex: {region: x}", "vertex.region", "it is `location` here"),  # as in another cloud
        ("vertex: {bucket: x}", "vertex.bucket", "it is `staging_bucket` here"),
        ("sagemaker: {location: x}", "sagemaker.location", "it is `region` here"),
        *(
            (f"budget: {{limit: 5 USD, {key}: [50]}}", f"budget.{key}", "it is `budget.alert_at` here")
            for key in ("alert", "notify", "alerts", "thresholds")
        ),
    ],
)
def test_unknown_nested_keys_have_their_path(load: Load, rest: str, key: str, hint: str) -> None:
    """The fault has the key's whole path, and the hint fits the section."""
    fault = next(fault for fault in faults(load, task(rest)) if fault.message.startswith("unknown key"))
    assert (fault.key, fault.hint) == (key, hint)


RULES = [
    ("name: x\ntask: task.py\nscript: train.py", "`task` and `script` exclude each other", [2, 3]),
    ("name: x", "nothing to run", [1]),
    (task("distributed: {workdir: src}"), "`distributed.workdir` goes with `script` or `module`", [3, 2]),
    (task("args: [a]"), "`args` goes with `script` or `module`", [3, 2]),
    (script("training: {max_steps: 1}"), "`training` goes with `task`, not with `script`", [3, 2]),
    ("name: x\nmodule: m\nparams: {a: 1}", "`params` goes with `task`, not with `module`", [3, 2]),
    (task("training:\n  epochs: 1\n  max_steps: 1"), "`max_steps` and `epochs` exclude", [4, 5]),
    (task("training:\n  global_batch_size: 10\n  micro_batch_size: 4"), "10 is not a multiple of", [4, 5]),
    (task("training:\n  strategy: async\n  num_workers: 2"), "does not go with `strategy: async`: a worker", [5, 4]),
    (
        task("training:\n  strategy: local\n  local: {period: 8}\ncheckpoint: {every_steps: 20}"),
        "`checkpoint.every_steps` 20 is no multiple of `local.period` 8",
        [6, 5],
    ),
    (task("resources:\n  accelerators: A100\n  instance_type: t"), "`accelerators` and `instance_type`", [5, 4]),
    (task("resources:\n  instances: 2\n  min_instances: 3"), "`min_instances` 3 is more than", [5, 4]),
    (task("resources:\n  min_instances: 3"), "`min_instances` 3 is more than `instances` 1", [4]),
    (task("notify:\n- on: [failed]"), "no receiver", [4]),
    (task("notify:\n- slack: env:A\n  email: a@b"), "`slack` and `email` exclude each other", [4, 5]),
    (task("env: {A: b}\nsecrets: [A]"), "`A` is in both `env` and `secrets`", [3, 4]),
    (task("vertex:\n  network: a\n  network_attachment: b"), "exclude each other", [5, 4]),
    (task("outputs:\n  a: /m\n  b: file:///m/"), "`outputs.a` and `outputs.b` are one place", [4, 5]),
    (task("checkpoint:\n  uri: s3://b-k/x\n  mirror: s3://b-k/x/"), "`checkpoint.mirror` are one place", [4, 5]),
    (script("on_stop: save\ndistributed:\n  stop_signal: SIGHUP"), "does not save at SIGHUP", [5, 3]),
]


@pytest.mark.parametrize(("text", "message", "lines"), RULES)
def test_rules_point_at_every_key(load: Load, text: str, message: str, lines: list[int]) -> None:
    """A rule about several keys is a single fault with the place of each key."""
    fault = only_fault(load, text)
    assert message in fault.message
    assert sorted(place.line for place in (fault.place, *fault.also) if place) == sorted(lines)


def test_faults_are_reported_once_in_file_order(load: Load) -> None:
    """First the file from top to bottom, then the command line; a consequence of a fault is not reported again."""
    text = "name: X\nnodes: 2\ntask: gone.py\nresources: {spot: on}\nimage: ${GONE}\n"
    found = faults(load, text, "resources.instances=0")
    assert [fault.place.line if fault.place else None for fault in found] == [1, 2, 3, 4, 5, 0]
    fault = only_fault(load, "name: ${GONE}\ntask: ${GONE_TOO:-task.py}\n")
    assert "`GONE` is not set" in fault.message


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("resources.instances=4", ("resources", "instances"), 4),
        ("training.optimizer.lr=3e-4", ("training", "optimizer", "lr"), 3e-4),
        ("env.A=1.10", ("env", "A"), "1.10"),
        ("resources={instances: 3}", ("resources", "instances"), 3),
        ("image=null", ("image",), None),
        ("tags.a=b=c", ("tags", "a"), "b=c"),
        ("name=${N}", ("name",), "from-env"),
    ],
)
def test_overrides_win_over_the_file(load: Load, override: str, path: tuple[str, ...], value: Any) -> None:
    """`--set` is parsed as YAML, creates mappings, and wins; an empty value removes the key."""
    found: Any = load(task("resources: {instances: 2}\nimage: a"), override, N="from-env")
    for step in path:
        found = found[step] if isinstance(found, dict) else getattr(found, step)
    assert found == value


def test_overrides_reach_into_lists_and_the_last_wins(load: Load) -> None:
    """A number is an item's index, and the next adds an item; the last override counts, and --backend wins over all."""
    job = load(task("notify: [{slack: env:A}]"), "notify.0.slack=env:B", "notify.1.email=a@b.c", "secrets.0=KEY")
    assert [entry.slack or entry.email for entry in job.notify] == ["env:B", "a@b.c"]
    assert job.secrets == ("KEY",)
    job = load(task(""), "resources.instances=2", "resources.instances=3", "backend=ssh", backend="vertex")
    assert (job.resources.instances, job.backend) == (3, "vertex")


@pytest.mark.parametrize(
    ("override", "message", "place"),
    [
        ("resources.instances=0", "expected at least 1", "--set resources.instances=0"),
        ("resources.instanecs=1", "unknown key `instanecs`", "--set resources.instanecs=1"),
        ("notify.3.slack=env:A", "no item `notify.3`", "--set notify.3.slack=env:A"),
        ("name=[", "not YAML", "--set name=["),
        ("name=${GONE}", "`GONE` is not set", "--set name=${GONE}"),
        ("secrets.0=K=hunter2", "a secret's value must not be", "--set secrets.0=..."),
        ("env.MY_TOKEN=[hunter2]", "expected text, found a list", "--set env.MY_TOKEN=..."),
    ],
)
def test_faults_of_overrides_name_the_override(load: Load, override: str, message: str, place: str) -> None:
    """A fault of the command line has neither a line of the file nor a secret."""
    fault = only_fault(load, task(""), override)
    assert message in fault.message
    assert f"  at {place}" in str(fault)
    assert "hunter2" not in str(fault)


@pytest.mark.parametrize("override", ["", "a", "=1", "a..b=1", ".=1"])
def test_override_without_an_assignment_is_refused(load: Load, override: str) -> None:
    """An override needs a key and a `=`."""
    assert "is not an assignment" in only_fault(load, task(""), override).message


@pytest.mark.parametrize(
    "override", ["local.price_per_hour= ", "budget.limit=", "secrets.0=", "image=#3", "limits.max_wait=${EMPTY:-}"]
)
def test_assignment_without_a_value_is_refused(load: Load, override: str) -> None:
    """An empty variable of a shell would otherwise unset a price or a limit in silence."""
    fault = only_fault(load, task(""), override)
    assert "has no value" in fault.message
    assert fault.hint.startswith(f"{override.partition('=')[0]}=null unsets it")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("gcp", "`vertex`"), ("aws", "`sagemaker`"), ("azure", "`azureml`"), ("azurml", "`azureml`")),
        ("nowhere", "there are"),
    ],
)
def test_vendors_name_is_answered_with_the_backend(load: Load, name: str, meant: str) -> None:
    """The fault names the option, though the file has the key `backend`."""
    (fault,) = faults(load, task("backend: local"), backend=name)
    assert str(fault.place) == f"--backend {name}"
    assert meant in fault.hint


@pytest.mark.parametrize("secrets", ["[KEY=hunter2]", "{KEY: hunter2}", "hunter2=", "[{KEY: hunter2}]", "[hunter-2]"])
def test_secrets_are_never_printed(load: Load, secrets: str) -> None:
    """A value under `secrets` is refused, and no part of the value is printed."""
    for fault in faults(load, task(f"secrets: {secrets}")):
        assert "hunter" not in str(fault)


def test_secret_variables_are_never_printed(load: Load) -> None:
    """A value from a secret variable is shown as written in the file."""
    found = faults(load, task("backend: ${API_TOKEN}\nlimits: {max_duration: '${API_TOKEN}'}"), API_TOKEN="sagemakr")
    assert "sagemakr" not in "".join(map(str, found))
    assert "`${API_TOKEN}`" in found[0].message


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("name: x\ntask: tsk.py", "no file `tsk.py`", "did you mean `task.py`?"),
        ("name: x\ntask: ../task.py", "outside the code folder", "code.dir"),
        ("name: x\nscript: /etc/x.py", "outside the code folder", "code.dir"),
        ("name: x\nscript: src", "no file `src`", ""),
        ("name: x\nscript: src/iner.py", "no file `src/iner.py`", "did you mean `src/inner.py`?"),
        ("name: x\nscript: src/inner.py\ncode: {dir: src}", "no file", "write `inner.py`"),
        ("name: x\nscript: a.py\ncode: {dir: gone}", "no folder `gone`", "relative to the config"),
        ("name: x\nscript: cloudtrain.yaml", "is not a Python file", "`.py`"),
        ("name: x\ntask: train.py", "has no `model(params)`, `dataset(params, split)`, `loss(model, batch)`", "holds"),
        (f"name: x\nscript: {'a' * 300}.py", "no file", ""),
        (
            "name: x\nscript: src/try.ipynb",
            "is a notebook",
            "jupyter nbconvert --to script src/try.ipynb; then write `script: src/try.py`",
        ),
        ("name: x\nscript: train.py\nrequirements: requirments.txt", "no file", "did you mean `requirements.txt`?"),
        ("name: x\nscript: train.py\nrequirements: environment.yml", "a file of conda", "requirements.txt by their"),
        ("name: x\nscript: train.py\nssh: {hosts: [a], requirements: environment.yml}", "a file of conda", "by their"),
        ("name: x\nscript: train.py\nrequirements: gone.toml[gpu]", "no file `gone.toml[gpu]`", "such as requirements"),
        ("name: x\nscript: train.py\nrequirements: numpy>=2", "no file `numpy>=2`", "`.txt` files there: `req"),
        ("name: x\nscript: train.py\nrequirements: numpy", "no file `numpy`", "`.txt` files there: `req"),
        ("name: x\nscript: train.py\nrequirements: src", "no file `src`", "one package a line"),
        ("name: x\nscript: train.py\nrequirements: [numpy]", "found a list", "packages into a file"),
        ("name: x\nscript: train.py\ndistributed: {workdir: srcc}", "no folder `srcc` in the code", "`code.dir`"),
        ("name: x\nscript: train.py\ndistributed: {workdir: train.py}", "no folder `train.py` in the code", ""),
        ("name: x\nmodule: sub.nope\ndistributed: {workdir: pkg}", "no module `sub.nope`", ""),
        ("name: x\nscript: train.py\nrequirements: ../up.txt", "outside the code folder", "code.dir"),
        ("name: x\nscript: train.py\nssh: {hosts: [a], requirements: nope.txt}", "no file `nope.txt`", "`.txt` files"),
        ("name: x\nmodule: pkg.trian", "holds no `pkg/trian.py`", "did you mean `pkg.train`?"),
        ("name: x\nmodule: pkg.sbu.deep", "holds no `pkg/sbu/`", "did you mean `pkg.sub.deep`?"),
        ("name: x\nmodule: pkg", "is a package without `__main__.py`", "`pkg.broken`, `pkg.relative`, `pkg.train`"),
        ("name: x\nmodule: bare.nope", "holds no `bare/nope.py`", ""),
        (
            "name: x\nmodule: pkg/train.py",
            "is not a valid module name",
            "`script: pkg/train.py`, or `module: pkg.train`",
        ),
        ("name: x\nmodule: train.py", "is not a valid module name", "`script: train.py`, or `module: train`"),
        ("name: x\nmodule: train.fit", "holds no `train/`", ""),
        (
            "name: x\nmodule: pkg.train.py",
            "is not a valid module name",
            "`script: pkg/train.py`, or `module: pkg.train`",
        ),
        ("name: x\nscript: python train.py --lr 1", "no file `python t", "write `script: train.py` and `args: --lr 1`"),
        ("name: x\nscript: -m pkg.train", "no file `-m pkg.train`", "write `module: pkg.train`"),
        *(
            (f"name: x\nbackend: local\nmodule: {rest}", "starts ranks of its own", hint)
            for rest, hint in (
                ("torch.distributed.run\nargs: [--nproc-per-node, 2, train.py, --lr, 0.10]", "`args: [--lr, 0.10]`"),
                ("accelerate.commands.launch\nargs: [train.py]", "write `script: train.py` in its place"),
                ("deepspeed.launcher.runner\nargs: {num_gpus: 2}", "name the program that it would start"),
            )
        ),
        ("name: x\nscript: pkg/relative.py", "a relative import works in a module", "write `module: pkg.relative`"),
        ("name: x\nscript: relative.py", "a relative import works in a module", "import without the dot"),
    ],
)
def test_files_are_checked(load: Load, text: str, message: str, hint: str) -> None:
    """A named file must be below the code folder, contain Python, and fit its key."""
    fault = only_fault(load, text)
    assert message in fault.message
    assert hint in fault.hint


@pytest.mark.parametrize("module", ["not.here", "pkg.train", "pkg.sub", "json.tool", "pytest"])
def test_module_outside_the_code_is_not_searched(load: Load, module: str) -> None:
    """A module may be installed only on the nodes; a folder hides no installed package."""
    assert load(f"name: x\nmodule: {module}").module == module


def test_syntax_errors_point_into_the_code(load: Load, tmp_path: Path) -> None:
    """A syntax error is reported with file and line of the script or module, and with the config's line."""
    (tmp_path / "train.py").write_text("x = 1\nif x\n")
    for text, name in ((script(""), "train.py"), ("name: x\nmodule: pkg.broken", "broken.py")):
        fault = only_fault(load, text)
        assert (Path(fault.place.file).name, fault.place.line) == (name, 2)
        assert fault.also[0].line == 2


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import model, dataset, loss",
        "from elsewhere import *",
        "import a as model\nloss = dataset = None",
        "try:\n  from a import model\nexcept ImportError:\n  model = None\ndataset, loss = 1, 2",
    ],
)
def test_task_functions_may_come_from_elsewhere(load: Load, tmp_path: Path, source: str) -> None:
    """An imported or assigned name counts as a function."""
    (tmp_path / "task.py").write_text(source)
    load(task(""))


def test_task_functions_are_checked_for_their_arguments(load: Load, tmp_path: Path) -> None:
    """A function with wrong arguments is named with its line; the check runs no code, and escapes cause no warning."""
    (tmp_path / "task.py").write_text(TASK.replace("def loss(model, batch)", "def loss(model, batch, extra)"))
    fault = only_fault(load, task(""))
    assert "`loss` cannot be called as `loss(model, batch)`" in fault.message
    assert fault.place.line == 3
    (tmp_path / "task.py").write_text("raise SystemExit('ran')\nx = '\\d'\n" + TASK)
    load(task(""))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"just words", "expected a mapping of keys, found the text `just words`"),
        (b"- a\n- b\n", "expected a mapping of keys, found a list"),
        (b"x" * 300_000, "larger than 256 kB"),
    ],
)
def test_file_that_is_not_a_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Any content gives an error message."""
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        config.load(tmp_path / "c.yaml", environ={})


def test_missing_file_names_a_similar_file_and_a_folder_is_refused(tmp_path: Path) -> None:
    """The hint has the name of a file beside the missing file; a folder in place of a file is called a folder."""
    (tmp_path / "cloudtrain.yml").write_text("")
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "cloudtrain.yaml")
    assert "cloudtrain.yml" in caught.value.faults[0].hint
    with pytest.raises(ConfigError, match="is a folder"):
        config.load(tmp_path)


YAMLISH = st.text(alphabet="name:xtskrc -[]{}'\"\n$&*!0.é#,=%\t", max_size=60)


@settings(max_examples=150)
@given(text=YAMLISH, override=YAMLISH, value=YAMLISH, key=st.sampled_from(sorted(model().model_fields)))
def test_any_text_gives_a_config_or_a_config_error(load: Load, text: str, override: str, value: str, key: str) -> None:
    """No file and no override ends in a traceback."""
    try:
        said = load(f"{key}: {value}\n{text}", override, f"{key}={value}").name
    except ConfigError as exc:
        said = str(exc)
    assert said


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=150)
@given(key=st.sampled_from(sorted(model().model_fields)), value=VALUES)
def test_any_value_of_any_key_gives_a_config_or_a_config_error(load: Load, key: str, value: Any) -> None:
    """A value of any shape at any key is accepted, and survives JSON, or is refused with a message."""
    try:
        job = load(json.dumps({"name": "x", "task": "task.py", key: value}))
    except ConfigError as exc:
        said = str(exc)
    else:
        said = "ok" * (dict(model().model_validate(job.model_dump(mode="json"))) == dict(job))
    assert said


def test_validate_reports_a_valid_file_and_lists_faults(load: Load, tmp_path: Path, cli: Any) -> None:
    """A valid file gives a line with backend and instances; `--json` prints the faults as data, with exit code 3."""
    load(task("resources: {instances: 2}"))
    result = CliRunner().invoke(command, ["-f", str(tmp_path / "cloudtrain.yaml")])
    assert result.output == f"{tmp_path / 'cloudtrain.yaml'}: ok (backend local, 2 instances)\n"
    load(task(""))
    result = cli("validate", "-f", tmp_path / "cloudtrain.yaml", "--json", "--set", "nodes=2")
    answer = json.loads(result.stdout)
    assert (result.code, answer["ok"]) == (3, False)
    assert answer["faults"][0]["hint"] == "it is `resources.instances` here"
    assert answer["faults"][0]["line"] is None


@pytest.mark.parametrize(("steps", "is_short"), [(160, True), (1600, False)])
def test_long_outer_momentum_in_a_short_job_has_a_warning(
    load: Load, tmp_path: Path, cli: Any, steps: int, is_short: bool
) -> None:
    """Momentum 0.9 remembers ten averages; the warning of `validate` gives their number."""
    load(task(f"training:\n  strategy: local\n  max_steps: {steps}\n  local: {{outer: {{lr: 0.7, momentum: 0.9}}}}"))
    warnings = cli("validate", "--json", cwd=tmp_path).json["warnings"]
    assert ["this job has 10: 0.6 loses less accuracy" in line for line in warnings] == [True] * is_short


@pytest.mark.parametrize(
    ("hosts", "what", "place"),
    [
        ("[fine, 'bad name', fine2]", "`bad name` is not a valid host name", (4, 16)),
        ("[fine, {host: 'bad name'}]", "`bad name` is not a valid host name", (4, 16)),
        ("\n    - fine\n    - bad name", "`bad name` is not a valid host name", (6, 7)),
        ("['b!d@fine']", "`b!d` is not a valid login name", (4, 10)),
    ],
)
def test_fault_of_a_list_item_has_its_line(
    load: Load, tmp_path: Path, cli: Any, hosts: str, what: str, place: Any
) -> None:
    """A backend's fault of an item is shown in the file, with line and column."""
    load("name: x\nscript: train.py\nssh:\n hosts: [fine]\n")
    text = f"name: x\nscript: train.py\nssh:\n hosts: {hosts}\n"
    (tmp_path / "cloudtrain.yaml").write_text(text)
    found = cli("validate", "--backend", "ssh", "--json", cwd=tmp_path).json["faults"]
    assert [(each["message"], each["line"], each["column"]) for each in found] == [(what, *place)]


def test_loading_imports_nothing_heavy(load: Load, tmp_path: Path) -> None:
    """Validation loads neither torch nor an SDK, nor the schema generator, nor HTTP."""
    load(task(""))
    probe = (
        "import sys\nfrom pathlib import Path\nfrom cloudtrain.launcher import config\n"
        f"config.load(Path({str(tmp_path / 'cloudtrain.yaml')!r}))\n"
        "heavy = {'torch', 'numpy', 'boto3', 'azure', 'google', 'asyncio', 'http.client', 'jinja2', 'rich'}\n"
        # A .pth file of google-cloud-aiplatform begins the namespace `google` in every process, empty.
        "print(sorted(name for name in heavy & set(sys.modules) if getattr(sys.modules[name], '__file__', None)))"
    )
    output = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_stored_config_is_read_back_equal(tmp_path: Path) -> None:
    """The registry stores the loaded config, even with `${` in values, and overrides apply to the stored config."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "c.yaml").write_text(
        "name: a\nscript: train.py\nenv: {X: '$${HOME} é', Y: '${VALUE}'}\nlimits: {max_duration: 90m}\n"
        "budget: {limit: 1.5 USD}\nargs: {lr: 3e-4, flag: true}\n"
    )
    loaded = config.load(tmp_path / "c.yaml", environ={"VALUE": 'a: "${HOME}\n\x7f\U0001f642'})
    data = loaded.model_dump(mode="json")
    assert config.stored(data) == loaded
    assert config.stored(data, overrides=["resources.instances=3"]).resources.instances == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples").glob("*/cloudtrain.yaml")), ids=lambda file: file.parent.name
)
def test_stored_job_can_be_resumed(file: Path, optimizer: str) -> None:
    """Stored defaults are no settings of the user, so no rule refuses them."""
    settings = [f"training.optimizer={{name: {optimizer}, lr: 1e-3}}"] if "task:" in file.read_text() else []
    loaded = config.load(file, overrides=settings)
    assert config.stored(loaded.model_dump(mode="json")) == loaded


@pytest.mark.parametrize("backend", ["sagemaker", "azureml", "vertex"])
@pytest.mark.parametrize("price", ["0", "0 USD", "$0.000"])
def test_cloud_machine_needs_a_price_above_zero(load: Load, backend: str, price: str) -> None:
    """A price of 0 would pass every budget and every question; only an own machine may be free."""
    found = only_fault(load, script(f"backend: {backend}\n{backend}: {{price_per_hour: {price!r}}}"))
    assert found.key == f"{backend}.price_per_hour"
    assert "a price above 0" in found.message
    assert load(script("local: {price_per_hour: 0 USD}")).local.price_per_hour == 0


@pytest.mark.parametrize(
    ("lines", "key", "write"),
    [
        ("script: src\\train.py", "script", "src/train.py"),
        ("script: .\\train.py", "script", "./train.py"),
        ("module: src\\train", "module", "script: src/train.py"),
        ("task: C:\\work\\task.py", "task", "/mnt/c/work/task.py"),
        ("script: a.py\ncode: {dir: ..\\src}", "code.dir", "../src"),
        ("script: a.py\ncode: {exclude: ['data\\raw']}", "code.exclude.0", "data/raw"),
        ("script: a.py\nrequirements: req\\base.txt", "requirements", "req/base.txt"),
        ("script: a.py\ndistributed: {workdir: src\\sub}", "distributed.workdir", "src/sub"),
        ("script: a.py\nkeep: ['out\\*.pt']", "keep.0", "out/*.pt"),
        ("script: a.py\ninputs: {train: .\\data}", "inputs.train", "./data"),
        ("script: a.py\ninputs: {train: 'D:\\data\\x'}", "inputs.train", "/mnt/d/data/x"),
        ("script: a.py\noutputs: {m: 's3://b\\m'}", "outputs.m", "s3://b/m"),
        ("script: a.py\ncheckpoint: {uri: ckpt\\a}", "checkpoint.uri", "ckpt/a"),
        ("script: a.py\ninit_from: old\\model", "init_from", "old/model"),
        ("script: a.py\ninit_from: {path: .\\old}", "init_from.path", "./old"),
    ],
)
def test_path_of_windows_is_refused_with_slashes(load: Load, lines: str, key: str, write: str) -> None:
    """Each path and pattern of the config; the hint has the path to write."""
    (fault,) = [fault for fault in faults(load, f"name: a\n{lines}\n") if fault.key == key]
    assert f"`{write}`" in fault.hint, fault


def test_script_in_utf_16_has_the_cure(tmp_path: Path) -> None:
    """Editors of Windows write UTF-16; Python's own words are of null bytes."""
    (tmp_path / "a.py").write_bytes("print(1)\n".encode("utf-16-le"))
    (tmp_path / "cloudtrain.yaml").write_text("name: x\nscript: a.py\n")
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "cloudtrain.yaml")
    assert [fault.hint for fault in caught.value.faults] == ["save the file as UTF-8"]
