"""The Azure ML backend's config block."""

import re
from typing import Annotated, Any, Literal

from cloudtrain.launcher.config.kinds import RAW, Duration, Many, Price, Section, Shorthand, SizeGb, Text, key


def _asset_name(value: object) -> object:
    """Return the name behind `azureml:`, the form of Azure's own YAML files."""
    return re.sub(r"(?i)^azureml:(?!//)", "", value) if isinstance(value, str) else value


AssetName = Annotated[Text, Shorthand("name with `azureml:`", _asset_name)]


class AzureML(Section):
    """Azure Machine Learning command jobs."""

    subscription: Text | None = key(
        None, "Subscription id. Default: AZURE_SUBSCRIPTION_ID.", "00000000-0000-0000-0000-000000000000"
    )
    resource_group: Text | None = key(None, "Resource group of the workspace.", "ml")
    workspace: Text | None = key(None, "Workspace.", "research")
    region: Text | None = key(None, "The workspace's region, for prices.", "eastus")
    cloud: Literal["AzureCloud", "AzureUSGovernment", "AzureChinaCloud"] = key(
        "AzureCloud", "Which Azure, by the names of `az cloud list`.", "AzureUSGovernment"
    )
    compute: AssetName | None = key(None, "Cluster to run on. Default: serverless compute.", "gpu-cluster")
    idle: Duration | None = key(
        None, "How long the cluster keeps idle machines, as it was made to; a budget counts them. Default: 2m.", "10m"
    )
    environment: Text | None = key(
        None,
        "Registered environment in place of `image`.",
        "azureml:my-env:3",
        "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
    )
    conda: dict[str, Any] | None = key(
        None,
        "Conda environment that Azure builds on top of `image`, as a conda file says it.",
        {"dependencies": ["python=3.11", {"pip": ["torch==2.8.0"]}]},
    )
    experiment: Text | None = key(None, "Experiment. Default: the job's name.", "resnet")
    datastore: AssetName = key("workspaceblobstore", "Datastore for checkpoints and outputs.", "workspaceblobstore")
    prefix: Text = key("cloudtrain", "Folder in the datastore.", "teams/vision")
    input_mode: Literal["ro_mount", "download"] = key(
        "ro_mount", "How inputs reach the job: streamed as files, or copied first.", "download"
    )
    identity: Literal["user", "managed", "aml_token"] | None = key(
        None, "The job's identity. Default: the compute's identity.", "managed"
    )
    services: Many[Literal["tensorboard", "jupyter_lab", "vs_code"]] = key(
        (), "Interactive endpoints into the running job, on every node.", ["tensorboard"]
    )
    shm_gb: SizeGb | None = key(
        None, "Shared memory of the container, in GB, of which Azure gives 2. Default: 8 for each rank.", 64
    )
    price_per_hour: Price | None = key(
        None, "Price of an instance for an hour, in US dollars; beats the price list.", "2.50 USD"
    )
    raw: dict[str, Any] = key({}, RAW, {"description": "night run"})
