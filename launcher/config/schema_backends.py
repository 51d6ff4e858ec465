"""The config's blocks for the backends. A block describes the platform; all backends share the remaining keys.

No key of a block is required by the schema: each backend checks its own required keys.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cloudtrain.launcher.config.kinds import Duration, Many, Money, Price, RelativePath, Shorthand, SizeGb, Text

__all__ = ["AzureML", "Local", "SageMaker", "Section", "Ssh", "SshHost", "Vertex"]

_RAW = "Merged last, deep, into the rendered request; the dry run shows the changes."
_ENDPOINTS = "Addresses in place of the vendor's own, by service; for private endpoints and tests."


class Section(BaseModel):
    """A mapping of the config: unknown keys are refused, and no value is converted to the wanted type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, allow_inf_nan=False, protected_namespaces=()
    )


class Local(Section):
    """This machine; every instance is a process tree of its own."""

    python: Text | None = Field(
        None,
        description="Interpreter that runs the job. Default: cloudtrain's own interpreter.",
        examples=["/opt/venv/bin/python"],
    )
    price_per_hour: Money | None = Field(
        None,
        description="Price of an instance for an hour, in US dollars; without a price no budget applies here.",
        examples=["0.10 USD"],
    )


class SshHost(Section):
    """One machine reached by the system's `ssh`; what is left out comes from ssh's own config."""

    host: Text = Field(description="Host name, address or alias in ssh's config.", examples=["gpu1"])
    user: Text | None = Field(None, description="Login name.", examples=["me"])
    port: int | None = Field(None, ge=1, le=65535, description="Port of sshd.", examples=[2222])
    python: Text | None = Field(
        None, description="Interpreter on this host. Default: the block's `python`.", examples=["/opt/py/bin/python"]
    )
    address: Text | None = Field(
        None,
        description="Address for the other hosts while training. Default: found from the host.",
        examples=["10.0.0.4"],
    )
    interface: Text | None = Field(
        None, description="Network interface for training on this host. Default: the block's.", examples=["eth0"]
    )
    workdir: Text | None = Field(
        None, description="Folder for jobs on this host. Default: the block's `workdir`.", examples=["/data/cloudtrain"]
    )


def _host(value: Any) -> Any:
    """Return `user@host:port` as a mapping; a host with several colons is an IPv6 address."""
    if not isinstance(value, str):
        return value
    user, _, address = value.strip().rpartition("@")
    host, _, port = address.rpartition(":")
    has_port = port.isascii() and port.isdigit() and bool(host) and ":" not in host and len(port) < 6
    return {
        "host": host if has_port else address,
        **({"port": int(port)} if has_port else {}),
        **({"user": user} if user else {}),
    }


class Ssh(Section):
    """Your own machines over ssh."""

    hosts: Many[Annotated[SshHost, Shorthand("text", _host, {"type": "string"})]] = Field(
        (),
        description="The machines, one an instance: `host`, `user@host:port`, or a mapping.",
        examples=[["gpu1", {"host": "gpu2", "python": "/opt/py/bin/python"}]],
    )
    user: Text | None = Field(None, description="Login name on every host.", examples=["me"])
    python: Text = Field("python3", description="Interpreter on every host.", examples=["/opt/py/bin/python"])
    workdir: Text = Field("~/.cloudtrain", description="Folder for jobs on every host.", examples=["/data/cloudtrain"])
    interface: Text | None = Field(
        None,
        description="Network interface for training. Default: the interface to the first host.",
        examples=["eth0"],
    )
    ssh_config: Text | None = Field(
        None, description="ssh's config file. Default: ssh's own choice.", examples=["~/.ssh/config"]
    )
    price_per_hour: Money | None = Field(
        None,
        description="Price of a host for an hour, in US dollars; without a price no budget applies.",
        examples=["2.50 USD"],
    )
    environment: Literal["none", "venv", "conda", "docker", "podman"] = Field(
        "none",
        description="What the job runs in: the `python` as it is; a venv of `requirements`, built once a host; "
        "the `conda` environment; a container of the top-level `image`, named by its digest.",
        examples=["venv"],
    )
    requirements: RelativePath | None = Field(
        None, description="pip's requirements file for `venv`, in the code folder.", examples=["requirements.txt"]
    )
    system_site_packages: bool = Field(
        False, description="Let the venv see the packages of `python`, such as its torch.", examples=[True]
    )
    conda: Text | None = Field(None, description="Conda environment: name or folder.", examples=["train"])
    ports: Text = Field(
        "20000-27999", description="Ports for training between the hosts, for a firewall.", examples=["29400-29499"]
    )
    gpu_locks: Text | None = Field(
        None,
        description="Folder of the GPU locks on every host. Default: a folder that all users share.",
        examples=["/var/lock/cloudtrain"],
    )
    allow_busy: bool = Field(
        False,
        description="Start although others' processes use the GPUs; jobs of cloudtrain never share.",
        examples=[True],
    )
    accept_new_host_keys: bool = Field(
        False, description="Trust the key of a host that is not known yet; a changed key never.", examples=[True]
    )


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
    price_per_hour: Price | None = Field(
        None,
        description="Price of an instance with disk for an hour, in US dollars; beats the price list.",
        examples=["2.50 USD"],
    )
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
        description=_ENDPOINTS,
        examples=[{"sagemaker": "https://vpce-1.api.sagemaker.eu-west-1.vpce.amazonaws.com"}],
    )
    raw: dict[str, Any] = Field({}, description=_RAW, examples=[{"InfraCheckConfig": {"EnableInfraCheck": True}}])


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
    raw: dict[str, Any] = Field({}, description=_RAW, examples=[{"description": "night run"}])


class Vertex(Section):
    """Google Vertex AI custom jobs."""

    project: Text | None = Field(
        None, description="Project id. Default: GOOGLE_CLOUD_PROJECT, then gcloud's own.", examples=["my-project"]
    )
    location: Text | None = Field(
        None, description="Region of the job. Default: gcloud's own.", examples=["europe-west4"]
    )
    staging_bucket: Text | None = Field(
        None, description="Bucket for code, checkpoints and outputs.", examples=["gs://my-bucket"]
    )
    prefix: Text = Field("cloudtrain", description="Folder in the bucket.", examples=["teams/vision"])
    machine_type: Text | None = Field(
        None,
        description="Machine that carries the `resources.accelerators`. Default: the smallest that may.",
        examples=["n1-standard-16"],
    )
    service_account: Text | None = Field(
        None, description="Account the job runs as.", examples=["train@my-project.iam.gserviceaccount.com"]
    )
    scheduling: Literal["standard", "flex_start"] = Field(
        "standard",
        description="flex_start waits for all machines at a lower price; `resources.spot` asks for spot.",
        examples=["flex_start"],
    )
    boot_disk_type: Text | None = Field(None, description="Type of the boot disk.", examples=["pd-ssd"])
    network: Text | None = Field(
        None, description="VPC network to peer with.", examples=["projects/123/global/networks/default"]
    )
    network_attachment: Text | None = Field(
        None,
        description="Private Service Connect attachment, in place of `network`.",
        examples=["projects/p/regions/r/networkAttachments/a"],
    )
    reservation: Text | None = Field(
        None, description="Reservation to use.", examples=["projects/p/zones/z/reservations/r"]
    )
    kms_key: Text | None = Field(
        None, description="Key that encrypts the job.", examples=["projects/p/locations/r/keyRings/k/cryptoKeys/c"]
    )
    tensorboard: Text | None = Field(
        None,
        description="TensorBoard to write to; needs `service_account`.",
        examples=["projects/p/locations/r/tensorboards/1"],
    )
    persistent_resource: Text | None = Field(None, description="Persistent resource to run on.", examples=["pool-1"])
    web_access: bool = Field(False, description="Allow a shell into the replicas.", examples=[True])
    input_mode: Literal["mount", "download"] = Field(
        "mount",
        description="How inputs reach the job: below /gcs as files, where the machine has that, or copied first.",
        examples=["download"],
    )
    price_per_hour: Price | None = Field(
        None,
        description="Price of an instance with disk for an hour, in US dollars; beats the price list.",
        examples=["2.50 USD"],
    )
    endpoints: dict[str, Text] = Field(
        {}, description=_ENDPOINTS, examples=[{"aiplatform": "https://europe-west4-aiplatform.googleapis.com"}]
    )
    raw: dict[str, Any] = Field({}, description=_RAW, examples=[{"jobSpec": {"scheduling": {"disableRetries": True}}}])
