"""The Azure ML backend's config block."""

from typing import Any, Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import RAW, Duration, Many, Price, Section, SizeGb, Text


class AzureML(Section):
    """Azure Machine Learning command jobs."""

    subscription: Text | None = Field(
        None,
        description="Subscription id. Default: AZURE_SUBSCRIPTION_ID.",
        examples=["00000000-0000-0000-0000-000000000000"],
    )
    resource_group: Text | None = Field(None, description="Resource group of the workspace.", examples=["ml"])
    workspace: Text | None = Field(None, description="Workspace.", examples=["research"])
    region: Text | None = Field(None, description="The workspace's region, for prices.", examples=["eastus"])
    cloud: Literal["AzureCloud", "AzureUSGovernment", "AzureChinaCloud"] = Field(
        "AzureCloud", description="Which Azure, by the names of `az cloud list`.", examples=["AzureUSGovernment"]
    )
    compute: Text | None = Field(
        None, description="Cluster to run on. Default: serverless compute.", examples=["gpu-cluster"]
    )
    idle: Duration | None = Field(
        None,
        description="How long the cluster keeps idle machines, as it was made to; a budget counts them. Default: 2m.",
        examples=["10m"],
    )
    environment: Text | None = Field(
        None,
        description="Registered environment in place of `image`.",
        examples=[
            "azureml:my-env:3",
            "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
        ],
    )
    conda: dict[str, Any] | None = Field(
        None,
        description="Conda environment that Azure builds on top of `image`, as a conda file says it.",
        examples=[{"dependencies": ["python=3.11", {"pip": ["torch==2.8.0"]}]}],
    )
    experiment: Text | None = Field(None, description="Experiment. Default: the job's name.", examples=["resnet"])
    datastore: Text = Field(
        "workspaceblobstore", description="Datastore for checkpoints and outputs.", examples=["workspaceblobstore"]
    )
    prefix: Text = Field("cloudtrain", description="Folder in the datastore.", examples=["teams/vision"])
    input_mode: Literal["ro_mount", "download"] = Field(
        "ro_mount", description="How inputs reach the job: streamed as files, or copied first.", examples=["download"]
    )
    identity: Literal["user", "managed", "aml_token"] | None = Field(
        None, description="The job's identity. Default: the compute's identity.", examples=["managed"]
    )
    services: Many[Literal["tensorboard", "jupyter_lab", "vs_code"]] = Field(
        (), description="Interactive endpoints into the running job, on every node.", examples=[["tensorboard"]]
    )
    shm_gb: SizeGb | None = Field(
        None,
        description="Shared memory of the container, in GB, of which Azure gives 2. Default: 8 for each rank.",
        examples=[64],
    )
    price_per_hour: Price | None = Field(
        None,
        description="Price of an instance for an hour, in US dollars; beats the price list.",
        examples=["2.50 USD"],
    )
    raw: dict[str, Any] = Field({}, description=RAW, examples=[{"description": "night run"}])
