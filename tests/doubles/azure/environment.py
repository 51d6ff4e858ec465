"""The variables of a job's process: the platform's, and the request's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from doubles import sandbox
from doubles.azure.jobs import Job
from doubles.azure.names import GROUP, MSI_SECRET, REGION, SUBSCRIPTION, WORKSPACE, WORKSPACE_ID, workspace_id
from doubles.azure.world import World
from doubles.kit.handle import proxied

__all__ = ["process_environment"]

HOME = "/mnt/azureml"
MASTER_PORT = "6105"  # as users report it
CA = f"{HOME}/.ca.pem"


def process_environment(
    job: Job, world: World, node: int, local: int, master: str, nodes: int, processes: int, places: dict[str, str]
) -> dict[str, str]:
    """Return the environment of one process of one node."""
    asked = job.properties_of_body
    ranks: dict[str, str] = {}
    if (asked.get("distribution") or {}).get("distributionType") == "PyTorch":
        ranks = {
            "MASTER_ADDR": master,
            "MASTER_PORT": MASTER_PORT,
            "WORLD_SIZE": str(nodes * processes),
            "NODE_RANK": str(node),
            "RANK": str(node * processes + local),
            "LOCAL_RANK": str(local),
        }
    data = {f"AZURE_ML_OUTPUT_{name}": places[name] for name in asked.get("outputs") or {}}
    data |= {
        f"AZURE_ML_INPUT_{name}": places.get(name, str(told.get("value", "")))
        for name, told in (asked.get("inputs") or {}).items()
    }
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp" if sandbox.mode() != "none" else f"{HOME}/cr",
        "HOSTNAME": f"node-{node}",
        "LANG": "C.UTF-8",
        **_platform(job, nodes, node),
        **_network(world),
        **_identity(world, asked),
        **data,
        **ranks,
        **{name: str(value) for name, value in (asked.get("environmentVariables") or {}).items() if value is not None},
    }


def _platform(job: Job, nodes: int, node: int) -> dict[str, str]:
    host = f"https://{REGION}.api.azureml.ms"
    return {
        "AZUREML_RUN_ID": job.name,
        "AZUREML_ROOT_RUN_ID": job.name,
        "AZUREML_EXPERIMENT_NAME": job.experiment,
        "AZUREML_EXPERIMENT_SCOPE": f"{workspace_id()}/experiments/{job.experiment}",
        "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
        "AZUREML_ARM_RESOURCEGROUP": GROUP,
        "AZUREML_ARM_WORKSPACE_NAME": WORKSPACE,
        "AZUREML_ARM_PROJECT_NAME": job.experiment,
        "AZUREML_WORKSPACE_ID": WORKSPACE_ID,
        "AZUREML_WORKSPACE_SCOPE": workspace_id(),
        "AZUREML_SERVICE_ENDPOINT": host,
        "AZUREML_NODE_COUNT": str(nodes),
        "AZUREML_CR_NODE_RANK": str(node),
        "MLFLOW_TRACKING_URI": f"azureml://{REGION}.api.azureml.ms/mlflow/v1.0{workspace_id()}",
        "MLFLOW_RUN_ID": job.name,
    }


def _network(world: World) -> dict[str, str]:
    """Return the variables for reaching the outer world: only through the proxy."""
    proxy = world.container_url
    none = f"localhost,127.0.0.1,{proxy.removeprefix('http://').partition(':')[0]}"
    return proxied(proxy, CA, none)


def _identity(world: World, asked: dict[str, Any]) -> dict[str, str]:
    """Return the address of the token endpoint, if the request has an identity."""
    kind = (asked.get("identity") or {}).get("identityType")
    if kind == "Managed":
        url = f"{world.container_url}/msi/token"
        own = (asked.get("identity") or {}).get("clientId")
        return {"MSI_ENDPOINT": url, "MSI_SECRET": MSI_SECRET, **({"DEFAULT_IDENTITY_CLIENT_ID": own} if own else {})}
    if kind == "UserIdentity":
        return {"OBO_ENDPOINT": f"{world.container_url}/obo/token"}
    return {}
