"""Settings of `accelerate config`: the variables are those of accelerate's own launcher."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.config import accelerate, codenotes
from cloudtrain.launcher.errors import ConfigError

FSDP = {"fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_version": 2}
FSDP |= {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
DEEPSPEED = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "zero3_init_flag": True}
CASES: list[dict[str, Any]] = [
    {"distributed_type": "NO", "mixed_precision": "bf16"},
    {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16", "enable_cpu_affinity": True},
    {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {}},
    {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": FSDP, "debug": True},
    {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "deepspeed_config": {**DEEPSPEED, "offload_optimizer_device": "CPU"},
    },
    {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"deepspeed_config_file": "Zero.json"}},
    {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
    },
    {"distributed_type": "MULTI_GPU", "num_processes": 2, "dynamo_backend": "EAGER"},
    {"distributed_type": "DEEPSPEED", "num_processes": 2, "fp16": True, "deepspeed_config": {"zero_stage": 2}},
    {"distributed_type": "MULTI_XPU", "num_processes": 2, "mixed_precision": "bf16"},
]
# Of the launch itself, which is cloudtrain's; on a machine without GPUs cloudtrain sets USE_CPU.
OF_THE_LAUNCH = {"OMP_NUM_THREADS", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"}


def launchers_own(file: Path) -> dict[str, str]:
    """Return the variables that the installed launcher sets for the settings."""
    from accelerate.commands import launch
    from accelerate.utils import launch as making

    args = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    args, defaults, from_config = launch._validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = making.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        made = making.prepare_multi_gpu_env(args)
    else:
        made = making.prepare_simple_launcher_cmd_env(args)[1]
    return {name: value for name, value in made.items() if os.environ.get(name) != value and name not in OF_THE_LAUNCH}


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: "-".join(list(settings)[:3]))
def test_variables_are_the_launchers(settings: dict[str, Any], tmp_path: Path) -> None:
    """The table equals the installed package."""
    pytest.importorskip("accelerate", reason="accelerate is in the extra `bench`")
    file = tmp_path / "accelerate_config.yaml"
    file.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **settings}))
    assert dict(accelerate.variables_of(yaml.safe_load(file.read_text()))) == launchers_own(file)


def job(folder: Path, more: str = "") -> Path:
    """Return the config file of a script that uses Accelerate, with settings beside it."""
    (folder / "train.py").write_text("from accelerate import Accelerator\n")
    (folder / "own.yaml").write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    (folder / "cloudtrain.yaml").write_text(f"name: a\nscript: train.py\n{more}")
    return folder / "cloudtrain.yaml"


def test_file_sets_variables_of_the_job(tmp_path: Path) -> None:
    """The job's own `env` wins over the file."""
    more = "distributed: {accelerate_config: own.yaml}\nenv: {ACCELERATE_DYNAMO_BACKEND: EAGER}\n"
    env = configs.load(job(tmp_path, more)).env
    assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_DYNAMO_BACKEND"]) == ("bf16", "EAGER")


def test_keys_are_the_launchers() -> None:
    """No key of the installed package is refused as unknown."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="it is in the extra `bench`")
    assert config_args.ClusterConfig.__dataclass_fields__.keys() <= set(accelerate._KEYS.split())


HUGGING = "from transformers import AutoModel, Trainer\n"


@pytest.mark.parametrize(
    ("script", "places", "end"),
    [
        (None, ["own.yaml"], "nothing reads own.yaml, which `accelerate launch` would: set `{}: own.yaml`"),
        (HUGGING, ["accelerate_configs/a.yml"], "accelerate_configs/a.yml, which {launch}: set `{}: "),
        (None, ["configs/a.json", "b.yaml"], "reads b.yaml, nor 1 more, which {launch}: set `{}` to the right file"),
        (None, ["~"], "default_config.yaml, which {launch}: copy it into the code, and set `{}: default_config.yaml`"),
        (HUGGING.replace("Trainer", "AutoTokenizer"), ["own.yaml", "~"], None),
        (None, ["data/a.yaml"], None),
    ],
)
def test_unread_settings_are_noted(
    script: str | None, places: list[str], end: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key a note names the file, in the code or at home, and the key."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = job(tmp_path)
    (tmp_path / "own.yaml").unlink()
    (tmp_path / "train.py").write_text(script or "from accelerate import Accelerator\n")
    for place in places:
        own = tmp_path / place.replace("~", "hf/accelerate/default_config.yaml")
        own.parent.mkdir(parents=True, exist_ok=True)
        text = {"distributed_type": "NO", "mixed_precision": "bf16"}
        own.write_text(json.dumps(text) if own.suffix == ".json" else yaml.safe_dump(text))
    notes = [note for note in codenotes.notes_of(configs.load(file), tmp_path) if note.startswith("nothing reads")]
    assert len(notes) == (end is not None)
    assert not end or end.format(accelerate.KEY, launch="`accelerate launch` would") in notes[0]


@pytest.mark.parametrize(
    ("named", "is_noted"),
    [("own.yaml", False), ("no.json", True), ("/own.json", True), ("$CLOUDTRAIN_CODE_DIR/a", False)],
)
def test_missing_file_of_deepspeed_is_noted(named: str, is_noted: bool, tmp_path: Path) -> None:
    """The settings may name a second file, which must be in the code too."""
    file = job(tmp_path, "distributed: {accelerate_config: own.yaml}\n")
    more = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {named}}}\n"
    (tmp_path / "own.yaml").write_text(more)
    notes = [*codenotes.notes_of(configs.load(file), tmp_path)]
    assert any("is not in the shipped code" in note for note in notes) == is_noted


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: MEGATRON_LM",
        "[1]",
        "a: [",
        "distributed_type: FSDP\nfsdp_config: 3",
        "distributed_type: FSPD",
        "distributed_type: MULTI_GPU\nmixed_precision: bfloat16",
        "distributed_type: MULTI_GPU\nmixed_precison: bf16",
    ],
)
def test_settings_that_are_not_read_are_refused(text: str, tmp_path: Path) -> None:
    """Nothing of the file is left out without a word."""
    file = job(tmp_path, "distributed: {accelerate_config: own.yaml}\n")
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.yaml"):
        configs.load(file)
