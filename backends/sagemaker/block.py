"""The SageMaker backend's config block."""

from typing import Any, Literal

from cloudtrain.launcher.config.kinds import ENDPOINTS, PRICE, RAW, Duration, Many, Price, Section, Text, key


class MetricDefinition(Section):
    """A number that SageMaker reads from the log."""

    name: Text = key(..., "Name of the metric.", "loss")
    regex: Text = key(..., "Regular expression; its first group is the number.", "loss (\\S+)")


class SageMaker(Section):
    """Amazon SageMaker training jobs."""

    region: Text | None = key(None, "AWS region. Default: the profile's.", "eu-west-1")
    role: Text | None = key(
        None, "ARN of the execution role that the job takes on.", "arn:aws:iam::111122223333:role/train"
    )
    bucket: Text | None = key(None, "S3 bucket for code, checkpoints and outputs.", "my-bucket")
    prefix: Text = key("cloudtrain", "Folder in the bucket.", "teams/vision")
    profile: Text | None = key(None, "Named profile of the AWS config.", "research")
    distribution: Literal["torchrun", "pytorchddp", "smdistributed"] = key(
        "torchrun", "Who starts the ranks: our torchrun, or the container toolkit's older modes.", "torchrun"
    )
    input_mode: Literal["File", "FastFile", "Pipe"] = key(
        "File", "How inputs reach the job: copied first, streamed as files, or piped.", "FastFile"
    )
    subnets: Many[Text] = key((), "Subnets of the VPC to run in.", ["subnet-0a1b"])
    security_groups: Many[Text] = key((), "Security groups in the VPC.", ["sg-0a1b"])
    kms_key: Text | None = key(None, "KMS key for outputs.", "alias/train")
    volume_kms_key: Text | None = key(
        None, "KMS key for the instances' disks; not for types with local NVMe.", "alias/train"
    )
    encrypt_traffic: bool = key(False, "Encrypt traffic between instances; slows all-reduce.", True)
    network_isolation: bool = key(False, "No network out of the containers.", True)
    keep_alive: Duration | None = key(
        None, "Keep the instances warm for the next job this long; the time is billed.", "30m"
    )
    price_per_hour: Price | None = key(None, PRICE, "2.50 USD")
    training_plan: Text | None = key(
        None, "ARN of a reserved training plan.", "arn:aws:sagemaker:us-east-1:111122223333:training-plan/p"
    )
    remote_debug: bool = key(False, "Allow a shell into the containers by SSM.", True)
    metrics: Many[MetricDefinition] = key(
        (),
        "Numbers that SageMaker reads from the log for its own charts.",
        [{"name": "loss", "regex": "loss (\\S+)"}],
        max_length=40,
    )
    endpoints: dict[str, Text] = key(
        {}, ENDPOINTS, {"sagemaker": "https://vpce-1.api.sagemaker.eu-west-1.vpce.amazonaws.com"}
    )
    raw: dict[str, Any] = key({}, RAW, {"InfraCheckConfig": {"EnableInfraCheck": True}})
