"""The Vertex AI backend's config block."""

from typing import Any, Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import ENDPOINTS, PRICE, RAW, Price, Section, Text


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
    price_per_hour: Price | None = Field(None, description=PRICE, examples=["2.50 USD"])
    endpoints: dict[str, Text] = Field(
        {}, description=ENDPOINTS, examples=[{"aiplatform": "https://europe-west4-aiplatform.googleapis.com"}]
    )
    raw: dict[str, Any] = Field({}, description=RAW, examples=[{"jobSpec": {"scheduling": {"disableRetries": True}}}])
