"""The variables of SageMaker's training toolkit, for scripts that were written for the toolkit.

SageMaker itself sets TRAINING_JOB_NAME and AWS_REGION. The names SM_* come from the package `sagemaker-training` in
AWS's images, whose entrypoint a job of cloudtrain replaces. Names, values and JSON are the package's (version 5.1.4),
without cloudtrain's own channels.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from .. import atomic_json
from ..agent import gpus
from ..contract import RunSpec

_OPTION = re.compile(r"--?[^\W\d]")
_OWN_CHANNELS = ("code", "job")  # backends/sagemaker/request.py refuses inputs of these names


def variables(root: Path, own: Path, run: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the toolkit's variables; empty outside SageMaker, whose configuration files lie below `root`.

    `own`: cloudtrain's folder, with the code. Each folder that a variable names for files of the job is uploaded.
    """
    resources = atomic_json.read_json(root / "input/config/resourceconfig.json")
    if not isinstance(resources, dict):
        return {}
    name = run.target if run.kind in ("script", "task") else f"{run.target.replace('.', '/')}.py"
    facts = {
        **_machines(resources),
        **_folders(root),
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "hyperparameters": hyperparameters(run.args),
        "log_level": 20,
        "module_dir": str(own / "code"),
        "module_name": name.removesuffix(".py"),
        "user_entry_point": name,
    }
    training = {
        **facts,
        "additional_framework_parameters": {},
        "distribution_hosts": [],
        "is_master": facts["current_host"] == facts["hosts"][0],
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "job_name": environ.get("TRAINING_JOB_NAME"),
        "master_hostname": facts["hosts"][0],
        "topology": resources.get("topology", []),
    }
    values, channels = facts.pop("hyperparameters"), facts.pop("channel_input_dirs")
    shown = {
        **facts,
        "channels": sorted(channels),
        "framework_params": {},
        "hps": values,
        "training_env": training,
        "user_args": list(run.args),
        **{f"channel_{key}": path for key, path in channels.items()},
        **{f"hp_{key}": value for key, value in values.items()},
    }
    beside = {
        "CURRENT_HOST": facts["current_host"],
        "SAGEMAKER_JOB_NAME": environ.get("TRAINING_JOB_NAME", ""),
        "SAGEMAKER_REGION": environ.get("AWS_REGION", ""),
    }
    return {**{f"SM_{key.upper()}": _text(value) for key, value in shown.items()}, **beside}


def hyperparameters(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options among a command's words, each with its value: `--lr 0.1 --fast` is {"lr": 0.1, "fast": true}.

    The values are JSON where they can be, as the SDK sends them; an option with several values has a list.
    """
    values: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        option, is_set, value = word.partition("=")
        if _OPTION.match(option):
            name = option.lstrip("-")
            values[name] = [_value(value)] if is_set else []
        elif name:
            values[name].append(_value(word))
    return {name: True if not each else each[0] if len(each) == 1 else each for name, each in values.items()}


def _machines(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the instances, by SageMaker's file."""
    groups = {group["instance_group_name"]: group for group in resources.get("instance_groups", ())}
    current = resources.get("current_group_name", "homogeneousCluster")
    return {
        "current_host": resources["current_host"],
        "current_instance_group": current,
        "current_instance_group_hosts": groups.get(current, {}).get("hosts", []),
        "current_instance_type": resources.get("current_instance_type", "local"),
        "distribution_instance_groups": [],
        "hosts": resources["hosts"],
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "network_interface_name": resources.get("network_interface_name", "eth0"),
        "num_cpus": os.cpu_count(),
        "num_gpus": len(gpus.found()["gpus"]),
        "num_neurons": 0,
        "resource_config": resources,
    }


def _folders(root: Path) -> dict[str, Any]:
    """Return the platform's folders, and the channels of the job's own inputs."""
    config = atomic_json.read_json(root / "input/config/inputdataconfig.json") or {}
    channels = {name: each for name, each in config.items() if name not in _OWN_CHANNELS}
    intermediate = root / "output/intermediate"  # the toolkit copies the files to S3; here SageMaker does, at the end
    with contextlib.suppress(OSError):
        (root / "output/data/intermediate").mkdir(parents=True, exist_ok=True)
        intermediate.symlink_to(PurePath("data/intermediate"), target_is_directory=True)
    return {
        "channel_input_dirs": {name: str(root / "input/data" / name) for name in channels},
        "input_config_dir": str(root / "input/config"),
        "input_data_config": channels,
        "input_dir": str(root / "input"),
        "model_dir": str(root / "model"),
        "output_data_dir": str(root / "output/data"),
        "output_dir": str(root / "output"),
        "output_intermediate_dir": str(intermediate),
    }


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
