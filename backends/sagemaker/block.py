"""The SageMaker backend's config block."""

from typing import Any, Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import ENDPOINTS, PRICE, RAW, Duration, Many, Price, Section, Text


class MetricDefinition(Section):
    """A number that SageMaker reads from the log."""

    name: Text = Field(description="Name of the metric.", examples=["loss"])
    regex: Text = Field(description="Regular expression; its first group is the number.", examples=["loss (\\S+)"])


class SageMaker(Section):
    """Amazon SageMaker training jobs."""

    region: Text | None = Field(None, description="AWS region. Default: the profile's.", examples=["eu-west-1"])
    role: Text | None = Field(
        None,
        description="ARN of the execution role that the job takes on.",
        examples=["arn:aws:iam::111122223333:role/train"],
    )
    bucket: Text | None = Field(
        None, description="S3 bucket for code, checkpoints and outputs.", examples=["my-bucket"]
    )
    prefix: Text = Field("cloudtrain", description="Folder in the bucket.", examples=["teams/vision"])
    profile: Text | None = Field(None, description="Named profile of the AWS config.", examples=["research"])
    distribution: Literal["torchrun", "pytorchddp", "smdistributed"] = Field(
        "torchrun",
        description="Who starts the ranks: our torchrun, or the container toolkit's older modes.",
        examples=["torchrun"],
    )
    input_mode: Literal["File", "FastFile", "Pipe"] = Field(
        "File",
        description="How inputs reach the job: copied first, streamed as files, or piped.",
        examples=["FastFile"],
    )
    subnets: Many[Text] = Field((), description="Subnets of the VPC to run in.", examples=[["subnet-0a1b"]])
    security_groups: Many[Text] = Field((), description="Security groups in the VPC.", examples=[["sg-0a1b"]])
    kms_key: Text | None = Field(None, description="KMS key for outputs.", examples=["alias/train"])
    volume_kms_key: Text | None = Field(
        None, description="KMS key for the instances' disks; not for types with local NVMe.", examples=["alias/train"]
    )
    encrypt_traffic: bool = Field(
        False, description="Encrypt traffic between instances; slows all-reduce.", examples=[True]
    )
    network_isolation: bool = Field(False, description="No network out of the containers.", examples=[True])
    keep_alive: Duration | None = Field(
        None, description="Keep the instances warm for the next job this long; the time is billed.", examples=["30m"]
    )
    price_per_hour: Price | None = Field(None, description=PRICE, examples=["2.50 USD"])
    training_plan: Text | None = Field(
        None,
        description="ARN of a reserved training plan.",
        examples=["arn:aws:sagemaker:us-east-1:111122223333:training-plan/p"],
    )
    remote_debug: bool = Field(False, description="Allow a shell into the containers by SSM.", examples=[True])
    metrics: Many[MetricDefinition] = Field(
        (),
        max_length=40,
        description="Numbers that SageMaker reads from the log for its own charts.",
        examples=[[{"name": "loss", "regex": "loss (\\S+)"}]],
    )
    endpoints: dict[str, Text] = Field(
        {},
        description=ENDPOINTS,
        examples=[{"sagemaker": "https://vpce-1.api.sagemaker.eu-west-1.vpce.amazonaws.com"}],
    )
    raw: dict[str, Any] = Field({}, description=RAW, examples=[{"InfraCheckConfig": {"EnableInfraCheck": True}}])
