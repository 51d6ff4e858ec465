"""The requests of a SageMaker endpoint, for `aws sagemaker create-... --cli-input-json`.

The image holds the model: a model of SageMaker needs no files in S3 then, and its role no permission to read them.
"""

from __future__ import annotations

from cloudtrain.launcher.backend.model_files import ServedModel, ServingFiles
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.planning import serving
from cloudtrain.launcher.planning.serving import Blank

from .machine import account_of, block_of, named, region_of

MACHINE = "ml.m5.xlarge"  # 4 cores, 16 GB
_REGION = Blank("REGION", "the AWS region", "eu-west-1")
_ACCOUNT = Blank("ACCOUNT", "the number of your AWS account", "111122223333")
_ROLE = Blank("ROLE", "the ARN of the role that the endpoint takes on", "arn:aws:iam::111122223333:role/serve")
_VENDOR = serving.Vendor(
    "sagemaker",
    "SageMaker",
    {
        "create-model.json": "CreateModelInput",
        "create-endpoint-config.json": "CreateEndpointConfigInput",
        "create-endpoint.json": "CreateEndpointInput",
    },
    {
        "ExecutionRoleArn": "sagemaker.role",
        "VpcConfig.SecurityGroupIds": "sagemaker.security_groups",
        "VpcConfig": "sagemaker.subnets",
        "PrimaryContainer.Image": "sagemaker.region",
        "ProductionVariants.InstanceType": "--machine",
    },
    (_REGION, _ACCOUNT, _ROLE),
    growing="ProductionVariantInstanceType",
)


def files(model: ServedModel, config: JobConfig) -> ServingFiles:
    """Return the files; pure. Raises ConfigError for a value that SageMaker refuses."""
    block = block_of(config)
    known, role = region_of(block), block.role or _ROLE.mark
    region, account = known or _REGION.mark, account_of(role) or _ACCOUNT.mark
    machine = named(model.machine or MACHINE, known, 1, key="--machine")
    registry = f"{account}.dkr.ecr.{region}.amazonaws.com{'.cn' * region.startswith('cn-')}"
    values = {
        "version": f"{model.name}-{model.version}",
        "image": f"{registry}/{model.name}:{model.version}",
        "registry": registry,
        "region": region,
        "role": role,
        "machine": machine.instance_type,
        "subnets": list(block.subnets),
        "security_groups": list(block.security_groups),
        "is_isolated": block.network_isolation,
    }
    return serving.rendered(_VENDOR, model, values, gpus=machine.count, place=serving.PLACE)
