"""Google Vertex AI custom jobs."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.vertex.block.Vertex",
    help="Google Vertex AI.",
    example={"project": "my-project", "location": "europe-west4"},
    aliases=("vertex-ai", "vertexai", "gcp", "google"),
    foreign_keys={"project": "project_id gcp_project"},
    siblings={"location": "region zone", "staging_bucket": "bucket"},
    exclusive=(("network", "network_attachment"),),
    queues=True,
    sizes_disks=True,
    derives_spot_prices=True,
    data_place="the staging bucket",
    data_copy="gcloud storage cp -r {path} gs://BUCKET/{name}",
    data_usd=0.020,  # Standard storage, us-central1; list price of 2025
)
