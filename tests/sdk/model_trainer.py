"""Jobs for SageMaker's own SDK; test_parity.py has the same jobs for cloudtrain.

    AWS_ENDPOINT_URL=http://127.0.0.1:PORT python model_trainer.py CASE SOURCE_DIR

Runs as a separate process, because the SDK warns, logs and reads its settings during its import. The process may reach
only this machine, and prints, as JSON, all other hosts that the SDK tried to reach.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from sagemaker.core import image_uris
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import MetricDefinition, RemoteDebugConfig, RetryStrategy, Tag, TensorBoardOutputConfig
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    Networking,
    OutputDataConfig,
    SourceCode,
    StoppingCondition,
)
from sagemaker.train.distributed import Torchrun

REGION, ROLE = "us-west-2", "arn:aws:iam::123456789012:role/cloudtrain"
MINE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"


def session() -> Session:
    """Return a session with a bucket: for a generated bucket name the SDK calls STS, past the configured endpoint."""
    return Session(default_bucket="my-bucket")


def plain(source_dir: str) -> ModelTrainer:
    """Return a job with two machines and a script, and the SDK's defaults for all other settings."""
    kind = "ml.g5.12xlarge"
    where = {"framework": "pytorch-amzn2023", "image_scope": "training"}
    return ModelTrainer(
        sagemaker_session=session(),
        training_image=image_uris.retrieve(region=REGION, version="2.13", instance_type=kind, **where),
        role=ROLE,
        source_code=SourceCode(source_dir=source_dir, entry_script="train.py"),
        distributed=Torchrun(),
        compute=Compute(instance_type=kind, instance_count=2),
        hyperparameters={"steps": 10},
    )


def spot(source_dir: str) -> ModelTrainer:
    """Return a job on spot machines, without a network."""
    return ModelTrainer(
        sagemaker_session=session(),
        training_image=MINE,
        role=ROLE,
        source_code=SourceCode(source_dir=source_dir, entry_script="train.py"),
        distributed=Torchrun(),
        compute=Compute(
            instance_type="ml.p4d.24xlarge", instance_count=2, volume_size_in_gb=500, enable_managed_spot_training=True
        ),
        networking=Networking(enable_network_isolation=True),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=12 * 3600, max_wait_time_in_seconds=14 * 3600),
        checkpoint_config=CheckpointConfig(s3_uri="s3://my-bucket/ck"),
        input_data_config=[InputData(channel_name="train", data_source="s3://my-bucket/train")],
        tags=[Tag(key="team", value="vision")],
    )


def everything(source_dir: str) -> ModelTrainer:
    """Return a job with all settings that both sides support, except spot machines."""
    trainer = ModelTrainer(
        sagemaker_session=session(),
        training_image=MINE,
        role=ROLE,
        source_code=SourceCode(source_dir=source_dir, entry_script="task.py"),
        distributed=Torchrun(),
        compute=Compute(
            instance_type="ml.m5.xlarge",
            instance_count=2,
            volume_size_in_gb=200,
            volume_kms_key_id="alias/disk",
            keep_alive_period_in_seconds=1800,
            training_plan_arn="arn:aws:sagemaker:us-west-2:123456789012:training-plan/p",
        ),
        networking=Networking(
            subnets=["subnet-0a1b", "subnet-0c2d"],
            security_group_ids=["sg-0a1b"],
            enable_inter_container_traffic_encryption=True,
        ),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=7200),
        output_data_config=OutputDataConfig(s3_output_path="s3://my-bucket/out", kms_key_id="alias/train"),
        checkpoint_config=CheckpointConfig(s3_uri="s3://my-bucket/ck"),
        input_data_config=[
            InputData(channel_name="train", data_source="s3://my-bucket/train"),
            InputData(channel_name="val", data_source="s3://my-bucket/val"),
        ],
        training_input_mode="FastFile",
        environment={"NCCL_DEBUG": "WARN"},
        tags=[Tag(key="team", value="vision"), Tag(key="cost centre", value="4711")],
    )
    trainer.with_retry_strategy(RetryStrategy(maximum_retry_attempts=2))
    trainer.with_remote_debug_config(RemoteDebugConfig(enable_remote_debug=True))
    trainer.with_metric_definitions([MetricDefinition(name="acc", regex=r"acc (\S+)")])
    where = "s3://my-bucket/teams/vision/jobs/digits-abcde/tensorboard"
    return trainer.with_tensorboard_output_config(
        TensorBoardOutputConfig(s3_output_path=where, local_path="/opt/ml/model/tensorboard")
    )


def refuse_network() -> list[Any]:
    """Refuse every connection to another machine, and every look-up; return the list of refused hosts."""
    tried: list[Any] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("socket.connect", "socket.getaddrinfo"):
            return
        host = args[1][0] if event == "socket.connect" else args[0]
        if host != "127.0.0.1":
            tried.append(host)
            raise OSError(f"{host} is not this machine")

    sys.addaudithook(hook)
    return tried


if __name__ == "__main__":
    tried = refuse_network()
    case, source_dir = sys.argv[1:]
    {"plain": plain, "spot": spot, "everything": everything}[case](source_dir).train(wait=False, logs=False)
    for thread in threading.enumerate():  # the SDK sends enabled telemetry in a separate thread
        if thread is not threading.current_thread():
            thread.join(timeout=10)
    print(json.dumps(tried))
