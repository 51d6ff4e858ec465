"""The names of the account: one tenant, one subscription, one workspace, one storage account, one vault."""

from datetime import datetime, timezone

TENANT = "72f988bf-0000-4000-8000-000000000001"
CLIENT = "c11e0000-0000-4000-8000-000000000002"
CLIENT_SECRET = "client-secret"
JOB_CLIENT = "30b00000-0000-4000-8000-000000000003"  # the jobs' identity
MSI_SECRET = "msi-secret"
SUBSCRIPTION = "5ab50000-0000-4000-8000-000000000004"
GROUP = "cloudtrain-tests"
WORKSPACE = "cloudtrain"
WORKSPACE_ID = "30c50000-0000-4000-8000-000000000005"
REGION = "eastus"
ACCOUNT = "cloudtrainstore"
ACCOUNT_KEY = "c3RhbmQtaW4tYWNjb3VudC1rZXktMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMA=="
CONTAINER = f"azureml-blobstore-{WORKSPACE_ID}"  # of the datastore workspaceblobstore
ARTIFACTS = "azureml"  # the container of the datastore workspaceartifactstore
VAULT = "cloudtrainvault"


def workspace_id() -> str:
    """Return the workspace's ARM id."""
    return provider_id("Microsoft.MachineLearningServices", "workspaces", WORKSPACE)


def provider_id(provider: str, kind: str, name: str) -> str:
    """Return the ARM id of a resource in the tests' group."""
    return f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{provider}/{kind}/{name}"


def iso_time(moment: float | None) -> str | None:
    """Return a time in the format of ARM and run history."""
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f0+00:00")
