"""AWS's container images for PyTorch training, as of IMAGES_AS_OF; the config's `image` overrides them.

Source: aws/deep-learning-containers, docs/src/data/pytorch*. Up to 2.10 the repository is `pytorch-training`, from 2.11
on `pytorch` with different tags.
"""

from __future__ import annotations

import re

from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.text.extras import install

IMAGES_AS_OF = "2026-08-21"
TORCH = "2.13"
# The SDK's names for AWS's PyTorch images, the newer name first: `pytorch` ends at 2.10.
FRAMEWORKS = ("pytorch-amzn2023", "pytorch")
_GPU_TAG, _CPU_TAG = f"{TORCH}-cu133-amzn2023-sagemaker", f"{TORCH}-cpu-amzn2023-sagemaker"

UNSERVED = ("V100", "GB200")  # on which the default image does not run: CUDA 13 ended with Volta; it is not for Arm
# Of regions without a registry account of their own (regions.txt).
_ACCOUNT = "763104351884"
# By a region's first words, else amazonaws.com. Source: botocore 1.44.5, data/partitions.json.
_DOMAINS = {
    "cn": "amazonaws.com.cn",
    "eu-isoe": "cloud.adc-e.uk",
    "eusc-de": "amazonaws.eu",
    "us-iso": "c2s.ic.gov",
    "us-isob": "sc2s.sgov.gov",
    "us-isof": "csp.hci.ic.gov",
}
_ECR = re.compile(
    rf"\d{{12}}\.dkr[.-]ecr(?:-fips)?\.([a-z0-9-]+)\.(?:on\.aws|amazonaws\.com|{'|'.join(_DOMAINS.values())})(?=/)"
)
# Where SageMaker's own all-reduce library (SMDDP) still works: its last release, 2.5.0 of October 2024, is for PyTorch
# up to 2.4.1 and these types; AWS's images of 2026 do not contain the library.
_SMDDP_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
_SMDDP_TORCH = (2, 4)


def default_image(region: str, gpus: int) -> str:
    """Return the image's address in the region's registry."""
    account = request_rules.regions("sagemaker").get(region) or _ACCOUNT
    domain = _DOMAINS.get(region.rsplit("-", 2)[0], "amazonaws.com")
    return f"{account}.dkr.ecr.{region}.{domain}/pytorch:{_GPU_TAG if gpus else _CPU_TAG}"


def refused(image: str, region: str | None, *, is_in_vpc: bool) -> tuple[str, str] | None:
    """Return why SageMaker refuses the image, and the cure; None if it takes the name.

    `is_in_vpc`: TrainingImageConfig lets it pull from a registry in the job's VPC. Sources: AWS's answers in
    kubeflow/pipelines#3728, aws/aws-sdk#117 and aws-samples/mlops-amazon-sagemaker#9.
    """
    if not request_rules.IMAGE.fullmatch(image):
        form = "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG, NAME in lower case"
        return f"`{image}` is not a valid image name", form
    there = _ECR.match(image)
    if there is None and is_in_vpc:
        return None
    if there is None:
        how = "push the image to ECR in the job's region, or leave `image` out for AWS's image of PyTorch"
        raw = "sagemaker.raw.AlgorithmSpecification.TrainingImageConfig: {TrainingRepositoryAccessMode: Vpc}"
        how = f"{how}; from a registry in your VPC: {raw}, and sagemaker.subnets with security_groups"
        return f"SageMaker pulls images from ECR, and `{image}` is elsewhere", how
    if region is None:
        return None
    ours = default_image(region, 0).partition("/")[0]
    near, known = image.replace(there[0], ours), request_rules.regions("sagemaker")
    of_aws = there[0][:12] in (_ACCOUNT, *known.values())
    if there[1] == region and of_aws and region in known and there[0][:12] != ours[:12]:
        return f"AWS's images for {region} are not in the account {there[0][:12]}", f"set `image: {near}`"
    if there[1] == region:
        return None
    how = f"set `image: {near}`" if of_aws else f"push the image to ECR in {region}, or let ECR replicate it"
    return f"`{image}` is in {there[1]}, and SageMaker pulls from the job's region, {region}", how


def has_smddp(image: str, instance_type: str) -> bool:
    """Return whether SMDDP may be in the image, by the PyTorch version in its tag, and runs on the type."""
    version = re.match(r"(\d+)\.(\d+)", image.rpartition(":")[2])
    return instance_type in _SMDDP_TYPES and version is not None and (int(version[1]), int(version[2])) <= _SMDDP_TORCH


def newest_of_sdk(region: str, instance_type: str) -> str | None:
    """Return the newest training image that SageMaker's own SDK knows for the type: a second source beside our table.

    None without the SDK, or if the SDK has no image for the region. Reads the SDK's own files, without a network; the
    SDK sends telemetry only for whole operations. Raises ConfigError if the SDK is installed but does not work.
    """
    try:
        from sagemaker.core import image_uris
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name in ("sagemaker", "sagemaker.core")
        if is_absent:  # version 2 has no sagemaker.core
            return None
        hint = f"{install('sagemaker-sdk')} --upgrade"
        raise ConfigError(f"the sagemaker SDK does not work here: {error}", hint=hint) from error
    for framework in FRAMEWORKS:
        for version in reversed(image_uris.list_versions(framework, "training")):
            try:
                found: str = image_uris.retrieve(
                    framework, region, version=version, instance_type=instance_type, image_scope="training"
                )
            except ValueError:  # a version that the region does not have yet
                continue
            return found
    return None
