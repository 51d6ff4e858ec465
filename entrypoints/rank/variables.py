"""The job's own variables in a config's arguments and environment: their names, and their expansion on the node.

`$CLOUDTRAIN_JOB` and `${CLOUDTRAIN_JOB}` are replaced; `$$CLOUDTRAIN_JOB` becomes the text `$CLOUDTRAIN_JOB`. In
arguments, so are torchrun's variables, such as RANK and MASTER_ADDR. Every other `$` stays unchanged.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from functools import cache

PREFIX = "CLOUDTRAIN_"
# Besides these a job has CLOUDTRAIN_INPUT_<NAME> for each entry of `inputs`.
_NAMES = "ATTEMPT CHECKPOINT_DIR CODE_DIR DEADLINE JOB NODE_RANK NUM_NODES OUTPUT_DIR RESUME_PATH"
NAMES = tuple(f"{PREFIX}{name}" for name in _NAMES.split())
_REFERENCE = re.compile(rf"\$(\$?)(?:({PREFIX}\w*)|\{{({PREFIX}\w*)\}})", re.ASCII)
OF_TORCHRUN = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_OF_RANK = re.compile(rf"\$(\$?)(?:({'|'.join(OF_TORCHRUN)})\b|\{{({'|'.join(OF_TORCHRUN)})\}})", re.ASCII)
# The job's own PYTHONPATH, for user code alone: a module `random` there would break torchrun and the worker.
PYTHONPATH = f"{PREFIX}PYTHONPATH"
WORKDIR = f"{PREFIX}WORKDIR"  # the folder below the code in which a script or module starts; absent: the code folder

# By the backend's name: cloudtrain's own variables, each with the variables and paths in whose place it stands, which
# only the platform's jobs have (container/toolkit.py sets SM_*); `*` is the rest of a name. "": set by no backend.
OF_PLATFORMS = {
    "sagemaker": {
        "CLOUDTRAIN_OUTPUT_DIR": "SM_MODEL_DIR SM_OUTPUT_DIR SM_OUTPUT_DATA_DIR SM_OUTPUT_INTERMEDIATE_DIR "
        "/opt/ml/model /opt/ml/output/",
        "CLOUDTRAIN_CHECKPOINT_DIR": "/opt/ml/checkpoints",
        "CLOUDTRAIN_INPUT_*": "SM_CHANNEL_* /opt/ml/input/data/*",
        "LOCAL_WORLD_SIZE": "SM_NUM_GPUS",
        "CLOUDTRAIN_NUM_NODES": "SM_HOSTS",
        "CLOUDTRAIN_NODE_RANK": "SM_CURRENT_HOST",
        "CLOUDTRAIN_JOB": "TRAINING_JOB_NAME",
        "the options of `args`": "SM_HPS SM_HP_* SM_USER_ARGS",
        "": "SM_CHANNELS SM_INPUT_* SM_TRAINING_ENV SM_RESOURCE_CONFIG SM_NUM_CPUS SM_CURRENT_INSTANCE_* SM_LOG_LEVEL "
        "SM_INSTANCE_GROUPS SM_NETWORK_INTERFACE_NAME SM_FRAMEWORK_* SM_MODULE_* SM_USER_ENTRY_POINT "
        "/opt/ml/input/config/resourceconfig.json /opt/ml/input/config/inputdataconfig.json",
    },
    "azureml": {
        "CLOUDTRAIN_OUTPUT_DIR": "AZURE_ML_OUTPUT_output",
        "CLOUDTRAIN_CHECKPOINT_DIR": "AZURE_ML_OUTPUT_checkpoints",
        "CLOUDTRAIN_INPUT_*": "AZURE_ML_INPUT_*",
        "": "AZUREML_*",
    },
    "vertex": {
        "CLOUDTRAIN_OUTPUT_DIR": "AIP_MODEL_DIR AIP_TENSORBOARD_LOG_DIR",
        "CLOUDTRAIN_CHECKPOINT_DIR": "AIP_CHECKPOINT_DIR",
        "CLOUDTRAIN_OUTPUT_DIR or CLOUDTRAIN_INPUT_X": "/gcs/",
        "": "CLUSTER_SPEC CLOUD_ML_PROJECT_ID CLOUD_ML_JOB_ID",
    },
    "": {
        "CLOUDTRAIN_INPUT_*": "AIP_TRAINING_DATA_URI AIP_VALIDATION_DATA_URI AIP_TEST_DATA_URI AZUREML_DATAREFERENCE_*",
        "CLOUDTRAIN_OUTPUT_DIR": "AZURE_ML_OUTPUT_*",
        "the options of `args`": "/opt/ml/input/config/hyperparameters.json",
        "": "AIP_DATA_FORMAT",
    },
}


def deadline_s(environ: Mapping[str, str]) -> float | None:
    """Return the job's end on this process's monotonic clock, None without CLOUDTRAIN_DEADLINE.

    The first call reads the wall clock, and later calls do not: NTP may step that clock by hours. CLOCK_MONOTONIC, as
    in the agent, stands still while the machine sleeps. CLOCK_BOOTTIME would count the sleep as time of training, and
    end a job as soon as the machine wakes up.
    """
    deadline = environ.get("CLOUDTRAIN_DEADLINE")
    return _on_monotonic_clock(deadline) if deadline else None


@cache
def _on_monotonic_clock(unix_s: str) -> float:
    return time.monotonic() + float(unix_s) - time.time()


def references(text: str) -> Iterator[str]:
    """Yield the names of the variables that the text refers to."""
    for match in _REFERENCE.finditer(text):
        if not match[1]:
            yield match[2] or match[3]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its variables; a variable without a value becomes empty."""
    return _replaced(_REFERENCE, text, values)


def of_rank(text: str, values: Mapping[str, str]) -> str:
    """Return an argument with the values of the job's variables, and of the rank's."""
    return expanded(_replaced(_OF_RANK, text, values), values)


def _replaced(pattern: re.Pattern[str], text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[1] else values.get(match[2] or match[3], "")

    return pattern.sub(value, text)
