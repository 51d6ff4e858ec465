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
from pathlib import Path
from typing import Any

from .. import atomic_json
from ..agent import gpus
from ..contract import RunSpec

_OWN_CHANNELS = ("code", "job")  # backends/sagemaker/request.py refuses inputs of these names
_OPTION = re.compile(r"--?[^\W\d]")


def variables(root: Path, own: Path, run: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the toolkit's variables; empty outside SageMaker, whose configuration files lie below `root`.

    `own`: cloudtrain's folder, with the code. SageMaker uploads each folder that a variable names for files of the job.
    """
    told = atomic_json.read_json(root / "input/config/resourceconfig.json")
    if not isinstance(told, dict):
        return {}
    inputs = atomic_json.read_json(root / "input/config/inputdataconfig.json") or {}
    channels = {name: each for name, each in inputs.items() if name not in _OWN_CHANNELS}
    folders = {name: str(root / "input/data" / name) for name in channels}
    groups = {group["instance_group_name"]: group for group in told.get("instance_groups", ())}
    group = told.get("current_group_name", "homogeneousCluster")
    name = f"{run.target.replace('.', '/')}.py" if run.kind == "module" else run.target
    job, values = environ.get("TRAINING_JOB_NAME", ""), hyperparameters(run.args)
    _keep_intermediate(root / "output")
    facts = {
        "current_host": told["current_host"],
        "current_instance_group": group,
        "current_instance_group_hosts": groups.get(group, {}).get("hosts", []),
        "current_instance_type": told.get("current_instance_type", "local"),
        "distribution_instance_groups": [],
        "framework_module": environ.get("SAGEMAKER_TRAINING_MODULE"),
        "hosts": told["hosts"],
        "input_data_config": channels,
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "log_level": 20,
        "module_dir": str(own / "code"),
        "module_name": name.removesuffix(".py"),
        "network_interface_name": told.get("network_interface_name", "eth0"),
        "num_cpus": os.cpu_count(),
        "num_gpus": len(gpus.found()["gpus"]),
        "num_neurons": 0,
        "resource_config": told,
        "user_entry_point": name,
        **{f"{key}_dir": str(root / key.replace("_", "/")) for key in ("input", "input_config", "model", "output")},
        **{f"output_{key}_dir": str(root / "output" / key) for key in ("data", "intermediate")},
    }
    training = {
        **facts,
        **dict.fromkeys(("is_smddpmprun_installed", "is_smddprun_installed"), False),
        "additional_framework_parameters": {},
        "channel_input_dirs": folders,
        "distribution_hosts": [],
        "hyperparameters": values,
        "is_master": told["current_host"] == told["hosts"][0],
        "is_modelparallel_enabled": None,
        "job_name": job,
        "master_hostname": told["hosts"][0],
        "topology": told.get("topology", []),
    }
    own_names = {"channels": sorted(channels), "framework_params": {}, "hps": values, "user_args": list(run.args)}
    named = {f"channel_{key}": path for key, path in folders.items()}
    named |= {f"hp_{key}": each for key, each in values.items()}
    shown = {**facts, **own_names, **named, "training_env": training}
    beside = {"CURRENT_HOST": told["current_host"], "SAGEMAKER_REGION": environ.get("AWS_REGION", "")}
    return {f"SM_{key.upper()}": _text(each) for key, each in shown.items()} | beside | {"SAGEMAKER_JOB_NAME": job}


def _keep_intermediate(output: Path) -> None:
    """Let SageMaker upload the folder's files at the job's end; the toolkit copies these files at once."""
    with contextlib.suppress(OSError):
        (output / "data/intermediate").mkdir(parents=True, exist_ok=True)
        (output / "intermediate").symlink_to("data/intermediate", target_is_directory=True)


def hyperparameters(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options among a command's words, each with its value: `--lr 0.1 --fast` is {"lr": 0.1, "fast": true}.

    The values are JSON where they can be, as the SDK sends them; an option with several values has a list.
    """
    values: dict[str, list[Any]] = {"": []}
    name = ""
    for word in words:
        option, is_set, value = word.partition("=")
        if _OPTION.match(option):
            name = option.lstrip("-")
            values[name] = [_value(value)] if is_set else []
        else:
            values[name].append(_value(word))
    return {key: True if not each else each[0] if len(each) == 1 else each for key, each in values.items() if key}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
