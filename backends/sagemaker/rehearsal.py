"""A rehearsal of the training job on this machine: each instance's command, and SageMaker's files below /opt/ml.

Source of paths and names: "How Amazon SageMaker Provides Training Information" in the developer guide.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.contract import ContainerOrder
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.rehearsal.stage import NodeRun, Rehearsal, Stage

from .records import SageMakerSending
from .request import BUNDLE, CODE, JOB, SPEC

GRACE_S = 120.0  # from SIGTERM to SIGKILL, for a stop and for a spot machine
DONE, SAVED = 0, 75  # exit codes of entrypoints/container/container.py
_FOLDERS = ("input/config", "input/data", "checkpoints", "model", "output/data", "output/metrics")


def rehearsal(request: Request, stage: Stage) -> Rehearsal:
    """Prepare the instances. Raises ConfigError if the image's own toolkit would run the job."""
    algorithm = request.body["AlgorithmSpecification"]
    if "ContainerEntrypoint" not in algorithm:
        message = "what SageMaker's toolkit starts inside its image cannot be rehearsed without the image"
        raise ConfigError(message, where="sagemaker.distribution", hint="write `distribution: torchrun`")
    hosts = [f"algo-{number}" for number in range(1, len(stage.addresses) + 1)]
    checkpoints = request.body["CheckpointConfig"].get("LocalPath", "/opt/ml/checkpoints")
    plan = SageMakerSending.load(request.sending)
    order = plan.order
    job, mirrored = stage.with_own_mirror(order.job)
    variables = {
        "AWS_REGION": plan.region,
        "AWS_DEFAULT_REGION": plan.region,
        "AWS_EC2_METADATA_DISABLED": "true",  # hides this machine's credentials, if it is an EC2 machine
        "TRAINING_JOB_NAME": request.body["TrainingJobName"],
        **request.body.get("Environment", {}),
        **stage.secrets,
        **stage.variables,
    }
    nodes = []
    for number, host in enumerate(hosts):
        disk = stage.folder / host
        ml = disk / "ml"
        for name in _FOLDERS:
            (ml / name).mkdir(parents=True)
        (disk / "cloudtrain").mkdir()
        shown = hosts if stage.has_own_places else list(stage.addresses)
        _configure(ml / "input/config", request.body, shown, number)
        _fill(ml / "input/data", request, replace(order, job=job), stage)
        nodes.append(
            NodeRun(
                hostname=host,
                argv=(*algorithm["ContainerEntrypoint"], *algorithm.get("ContainerArguments", ())),
                env=stage.container_variables(number, shown[number], disk) | variables,
                agents=(ml / "cloudtrain",),
                places={"/opt/ml": ml, "/opt/cloudtrain": disk / "cloudtrain", **_inputs(order, stage), **mirrored},
                names=dict(zip(hosts, stage.addresses, strict=True)),
                copied=((ml / Path(checkpoints).relative_to("/opt/ml"), stage.kept / "checkpoints"),),
            )
        )
    return Rehearsal(
        tuple(nodes),
        notice="SIGTERM to every instance, SIGKILL after 120 s; new instances get what is in /opt/ml/checkpoints",
        grace_s=GRACE_S,
        checkpoints=stage.kept / "checkpoints",
        codes={"done": DONE, "interrupted": SAVED},
        replaced=(
            "S3: the channels and /opt/ml/checkpoints are folders here, copied at an instance's start and end",
            f"the image {algorithm.get('TrainingImage', '')}",
            *(["the role's permissions, Parameter Store"] if order.secrets else ["the role"]),
        ),
    )


def _configure(folder: Path, body: dict[str, Any], hosts: list[str], number: int) -> None:
    """Write the configuration files that SageMaker gives an instance."""
    asked = body["ResourceConfig"]
    kind = asked.get("InstanceType") or asked["InstancePreferences"][0]["InstanceType"]
    group = {"instance_group_name": "homogeneousCluster", "instance_type": kind, "hosts": hosts}
    resources = {
        "current_host": hosts[number],
        "current_instance_type": kind,
        "current_group_name": "homogeneousCluster",
        "hosts": sorted(hosts),
        "instance_groups": [group],
        "network_interface_name": "lo",
    }
    mode = body["AlgorithmSpecification"]["TrainingInputMode"]
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": channel.get("InputMode", mode),
            "S3DistributionType": channel["DataSource"]["S3DataSource"].get("S3DataDistributionType"),
            "RecordWrapperType": "None",
        }
        for channel in body["InputDataConfig"]
    }
    files = {
        "resourceconfig": resources,
        "hyperparameters": body.get("HyperParameters", {}),
        "inputdataconfig": channels,
        "checkpointconfig": {"LocalPath": "/opt/ml/checkpoints", **body["CheckpointConfig"]},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _fill(folder: Path, request: Request, order: ContainerOrder, stage: Stage) -> None:
    """Write our two channels, and an empty folder for every further channel."""
    for channel in request.body["InputDataConfig"]:
        (folder / channel["ChannelName"]).mkdir()
    for path in order.places.inputs.values():  # a single file
        if not (file := folder.parents[1] / path).is_dir() and file.parent.is_dir():
            file.touch()
    shutil.copyfile(stage.bundle.path, folder / CODE / BUNDLE)
    # A rehearsal passes secrets as variables, and copying to S3 from inside would need an account.
    order = replace(order, secrets=None, token=request.name, places=replace(order.places, copied_to=None))
    (folder / JOB / SPEC).write_text(json.dumps(order.dump()))


def _inputs(order: ContainerOrder, stage: Stage) -> dict[str, Path]:
    given = {path: stage.inputs[name] for name, path in order.places.inputs.items() if name in stage.inputs}
    is_folder = {path: path.endswith(f"input/data/{name}") for name, path in order.places.inputs.items()}
    return {
        f"/opt/ml/{path}" + (f"/{here.name}" if is_folder[path] and here.is_file() else ""): here
        for path, here in given.items()
    }
