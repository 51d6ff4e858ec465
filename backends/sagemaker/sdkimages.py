"""AWS's images by SageMaker's own SDK, if the SDK is installed: a second source beside our table."""

from __future__ import annotations

from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.extras import install

__all__ = ["newest"]

# The SDK's names for AWS's PyTorch images, the newer name first: `pytorch` ends at 2.10.
FRAMEWORKS = ("pytorch-amzn2023", "pytorch")


def newest(region: str, instance_type: str) -> str | None:
    """Return the newest training image for the type; None without the SDK, or if the SDK has no image for the region.

    Reads the SDK's own files, without a network; the SDK sends telemetry only for whole operations. Raises ConfigError
    if the SDK is installed but does not work.
    """
    try:
        from sagemaker.core import image_uris
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (
            "sagemaker",
            "sagemaker.core",
        ):  # version 2 has neither module
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
