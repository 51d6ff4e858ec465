"""Azure Machine Learning command jobs."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.azureml.block.AzureML",
    help="Azure Machine Learning.",
    example={"workspace": "research", "compute": "gpu-cluster"},
    aliases=("azure-ml", "azure", "aml"),
    foreign_keys={"subscription": "subscription_id", "workspace": "workspace_name"},
    siblings={"region": "location"},
    queues=True,
    data_place="the datastore",
    data_copy="az storage blob upload-batch -s {path} -d CONTAINER --destination-path {name} --account-name ACCOUNT",
    data_usd=0.021,  # Blob Storage, hot, LRS, East US; list price of 2025
)
