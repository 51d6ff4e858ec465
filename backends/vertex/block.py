"""The Vertex AI backend's config block."""

from typing import Any, Literal

from cloudtrain.launcher.config.kinds import ENDPOINTS, PRICE, RAW, Price, Section, Text, key


class Vertex(Section):
    """Google Vertex AI custom jobs."""

    project: Text | None = key(None, "Project id. Default: GOOGLE_CLOUD_PROJECT, then gcloud's own.", "my-project")
    location: Text | None = key(None, "Region of the job. Default: gcloud's own.", "europe-west4")
    staging_bucket: Text | None = key(None, "Bucket for code, checkpoints and outputs.", "gs://my-bucket")
    prefix: Text = key("cloudtrain", "Folder in the bucket.", "teams/vision")
    machine_type: Text | None = key(
        None, "Machine that carries the `resources.accelerators`. Default: the smallest that may.", "n1-standard-16"
    )
    service_account: Text | None = key(None, "Account the job runs as.", "train@my-project.iam.gserviceaccount.com")
    scheduling: Literal["standard", "flex_start"] = key(
        "standard", "flex_start waits for all machines at a lower price; `resources.spot` asks for spot.", "flex_start"
    )
    boot_disk_type: Text | None = key(None, "Type of the boot disk.", "pd-ssd")
    network: Text | None = key(None, "VPC network to peer with.", "projects/123/global/networks/default")
    network_attachment: Text | None = key(
        None, "Private Service Connect attachment, in place of `network`.", "projects/p/regions/r/networkAttachments/a"
    )
    reservation: Text | None = key(None, "Reservation to use.", "projects/p/zones/z/reservations/r")
    kms_key: Text | None = key(None, "Key that encrypts the job.", "projects/p/locations/r/keyRings/k/cryptoKeys/c")
    tensorboard: Text | None = key(
        None, "TensorBoard to write to; needs `service_account`.", "projects/p/locations/r/tensorboards/1"
    )
    persistent_resource: Text | None = key(None, "Persistent resource to run on.", "pool-1")
    web_access: bool = key(False, "Allow a shell into the replicas.", True)
    input_mode: Literal["mount", "download"] = key(
        "mount",
        "How inputs reach the job: below /gcs as files, where the machine has that, or copied first.",
        "download",
    )
    price_per_hour: Price | None = key(None, PRICE, "2.50 USD")
    endpoints: dict[str, Text] = key({}, ENDPOINTS, {"aiplatform": "https://europe-west4-aiplatform.googleapis.com"})
    raw: dict[str, Any] = key({}, RAW, {"jobSpec": {"scheduling": {"disableRetries": True}}})
