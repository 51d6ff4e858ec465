"""Settings of `accelerate config` as the variables that accelerate's launcher would set for each rank.

A test holds the table to the installed package (accelerate 1.15). The file's numbers of machines and processes, and its
addresses, are cloudtrain's own to choose.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cloudtrain.entrypoints import foreign

from ..errors import ConfigError
from .schema import JobConfig

KEY = "distributed.accelerate_config"
# A setting in its section, and the launcher's default; without a default and a value there is no variable.
_DYNAMO = "backend=no mode=default use_fullgraph=False use_dynamic=False use_regional_compilation=False"
_FSDP = """version=1 sharding_strategy=FULL_SHARD reshard_after_forward=true offload_params=false
min_num_params=100000000
auto_wrap_policy= transformer_layer_cls_to_wrap= backward_prefetch= state_dict_type= forward_prefetch=false
use_orig_params=true cpu_ram_efficient_loading=true sync_module_states=true activation_checkpointing=false
activation_checkpointing_offload=false ignored_modules="""
_DEEPSPEED = """zero_stage gradient_accumulation_steps gradient_clipping offload_optimizer_device offload_param_device
zero3_init_flag zero3_save_16bit_model deepspeed_config_file deepspeed_moe_layer_cls_names"""
# Of distributed_type; an unquoted NO is YAML's false.
_KINDS = re.compile("NO|FALSE|DEEPSPEED|FSDP|MULTI_(CPU|GPU|NPU|MLU|SDAA|MUSA|XPU|HPU|NEURON)")
# The launcher refuses other keys; the last line is of its earlier versions.
_KEYS = """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines
gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity
fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16
tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config
fp16 dynamo_backend ipex_config use_xpu use_mps_device"""


def applied(config: JobConfig, folder: Path) -> JobConfig:
    """Return the config with the variables of its accelerate file added to its own `env`. Raises ConfigError."""
    name = config.distributed.accelerate_config
    if name is None:
        return config
    try:
        variables = dict(variables_of(yaml.safe_load(foreign.read_text(folder / config.code.dir / name))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        words = f"{name} is no settings of `accelerate config`: {' '.join(str(error).split())}"
        raise ConfigError(words, where=KEY, hint="correct the file, or set its variables under `env`") from error
    return config.model_copy(update={"env": {**variables, **config.env}})


def is_settings(text: str) -> bool:
    """Return whether a file's text looks like settings of `accelerate config`."""
    keys = ("distributed_type", "(compute_environment|mixed_precision)")
    return all(re.search(f'{key}"?:', text) for key in keys)


def own_default() -> Path | None:
    """Return the file that `accelerate config` writes at home, if its settings change the training."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    for file in (home / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "json")):
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            variables = dict(variables_of(yaml.safe_load(foreign.read_text(file))))
            return file if variables != dict(variables_of({"distributed_type": "NO"})) else None
    return None


def variables_of(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the variables of the settings. Raises ValueError."""
    if not isinstance(settings, Mapping) or "distributed_type" not in settings:
        raise ValueError("`distributed_type` is missing")
    kind = str(settings["distributed_type"]).upper()
    mixed = settings.get("mixed_precision") or ("fp16" if settings.get("fp16") else None)
    precision = str(mixed or "no").lower()
    unknown = sorted(map(str, settings.keys() - set(_KEYS.split())))
    for found, words in (
        (settings.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE", "its compute_environment"),
        (not _KINDS.fullmatch(kind), f"distributed_type {kind}"),
        (precision not in ("no", "fp16", "bf16"), f"mixed_precision {precision}"),
        (settings.get("parallelism_config"), "parallelism_config"),
        (unknown, f"its {', '.join(unknown)}"),
    ):
        if found:
            raise ValueError(f"cloudtrain does not read {words}")
    yield "ACCELERATE_MIXED_PRECISION", precision
    # The launcher itself leaves out the file's enable_cpu_affinity.
    for flag, name, value in (("use_cpu", "USE_CPU", "True"), ("debug", "DEBUG_MODE", "true")):
        if settings.get(flag):
            yield f"ACCELERATE_{name}", value
    if kind == "DEEPSPEED":
        yield from _deepspeed({**settings, "mixed_precision": mixed})
        return
    dynamo = _section(settings, "dynamo_config", "dynamo_")
    if "dynamo_backend" in settings:  # the form of old files
        dynamo = {"backend": settings["dynamo_backend"]}
    for name, default in (word.split("=") for word in _DYNAMO.split()):
        value = str(dynamo.get(name) or default)  # `no` without quotes is false
        yield f"ACCELERATE_DYNAMO_{name.upper()}", value.upper() if name == "backend" else value
    if kind == "FSDP":
        fsdp = _section(settings, "fsdp_config", "fsdp_")
        yield "ACCELERATE_USE_FSDP", "true"
        for name, default in (word.split("=") for word in _FSDP.split()):
            if (setting := fsdp.get(name, default or None)) is not None:
                value = str(setting).lower() if default in ("true", "false") else str(setting)
                yield f"FSDP_{name.replace('layer_cls', 'cls').upper()}", value


def _deepspeed(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    section = _section(settings, "deepspeed_config", "")
    fields = [*section, *(["mixed_precision"] if settings.get("mixed_precision") else [])]
    yield "ACCELERATE_USE_DEEPSPEED", "true"
    yield "ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields).lower()
    for name in _DEEPSPEED.split():
        if (value := section.get(name)) is not None:
            prefix = "" if name.startswith(("deepspeed_", "gradient_")) else "DEEPSPEED_"
            variable = f"ACCELERATE_{prefix}{name.replace('zero3_init_flag', 'zero3_init').upper()}"
            yield variable, str(value) if name.startswith("deepspeed_") else str(value).lower()


def _section(settings: Mapping[str, Any], name: str, prefix: str) -> dict[str, Any]:
    """Return a section, its keys without the prefix. Raises ValueError."""
    section = settings.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"`{name}` is not a mapping")
    return {str(key).removeprefix(prefix): value for key, value in section.items()}
