"""Azure Machine Learning command jobs."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.azureml.block.AzureML",
    help="Azure Machine Learning.",
    example={"workspace": "research", "compute": "gpu-cluster"},
    aliases=("azure-ml", "azure", "aml"),
    foreign_keys={"subscription": "subscription_id", "workspace": "workspace_name"},
    siblings={"region": "location"},
)
