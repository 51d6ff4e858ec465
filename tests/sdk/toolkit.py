"""The job for which SageMaker's toolkit and cloudtrain name the same variables; run, prints the toolkit's as JSON.

    SAGEMAKER_BASE_DIR=FOLDER python toolkit.py > toolkit.json

The Python needs the package sagemaker-training. FOLDER becomes BASE in the output.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HOSTS = ["algo-1", "algo-2"]
GROUP = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.g5.xlarge", "hosts": HOSTS}
RESOURCES = {
    "current_host": "algo-2",
    "current_instance_type": "ml.g5.xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": HOSTS,
    "instance_groups": [GROUP],
    "network_interface_name": "eth0",
}
CHANNEL = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
CHANNELS = {"train": CHANNEL, "Val": CHANNEL}
ARGS = ("--epochs", "3", "--lr", "0.1", "--opt", "adam", "--weight-decay", "-0.5")
ENVIRON = {"TRAINING_JOB_NAME": "demo-1", "AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-1"}
PROGRAM = {"sagemaker_program": '"train.py"', "sagemaker_job_name": '"demo-1"', "sagemaker_region": '"eu-west-1"'}
SHOWN = ("SM_", "SAGEMAKER_JOB_NAME", "SAGEMAKER_REGION", "CURRENT_HOST")


def lay_out(root: Path, own: dict[str, object]) -> None:
    """Write the platform's files below the folder; `own`: further channels."""
    values = {name.lstrip("-"): value for name, value in zip(ARGS[::2], ARGS[1::2], strict=True)}
    files = {
        "resourceconfig": RESOURCES,
        "inputdataconfig": {**own, **CHANNELS},
        "hyperparameters": {**values, "opt": '"adam"', **PROGRAM},
    }
    for name in ("input/config", "model", "output/data"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / f"input/config/{name}.json").write_text(json.dumps(content))


def main() -> None:
    """Print the variables that the toolkit gives to a script."""
    base = os.environ["SAGEMAKER_BASE_DIR"]
    lay_out(Path(base), {})
    os.environ.update(ENVIRON)
    from sagemaker_training import environment

    found = environment.Environment().to_env_vars()
    found |= {name: value for name, value in os.environ.items() if name in SHOWN}
    json.dump({name: value.replace(base, "BASE") for name, value in sorted(found.items())}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
