"""The fields of a job's body, and the service's refusals that are not in a schema."""

import re
from dataclasses import dataclass
from typing import Any

from doubles.azure.arm import DATASTORES
from doubles.azure.errors import AzureError
from doubles.azure.names import ACCOUNT, REGION, workspace_id
from doubles.azure.world import World

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}")
DEFAULT_SIZE = "Standard_DS3_v2"  # for serverless jobs without a size; Azure's choice depends on the quota
_BINDING = re.compile(r"\$\{\{\s*(inputs|outputs)\.([^}\s]+?)\s*\}\}")
_DATASTORE = re.compile(r"azureml:(?://|/)?(?:.*/)?datastores/([^/]+)/(?:paths/)?(.*)")
_BLOB = re.compile(rf"https://{ACCOUNT}\.blob\.core\.windows\.net/([^/]+)/?(.*)")
_HADOOP = re.compile(rf"(?:wasbs|abfss)://([^@/]+)@{ACCOUNT}\.(?:blob|dfs)\.core\.windows\.net/?(.*)")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?")


@dataclass(frozen=True)
class Place:
    """A folder or file of the storage account."""

    container: str
    path: str  # without leading and trailing slashes


def check(world: World, name: str, body: Any) -> None:
    """Raise AzureError for a PUT of a new job that the service refuses. Texts are invented."""
    if not NAME.fullmatch(name):
        raise _refused(f"The job name '{name}' is invalid: letters, digits, - and _, at most 255 of them.")
    told = [f"{path}: {message}" for path, message, is_warning in _violations(body) if not is_warning]
    if told:
        raise _refused("The request is invalid. " + "; ".join(told), "ValidationError")
    asked = body["properties"]
    if asked.get("jobType") != "Command":
        raise _refused(f"The stand-in runs command jobs, no {asked.get('jobType')}")
    if (asked.get("distribution") or {}).get("processCountPerInstance") not in (None, 1):
        raise _refused("The stand-in runs one process on a node")
    _check_assets(world, asked)
    _check_compute(world, asked)
    for kind, bound in _BINDING.findall(asked["command"]):
        if bound.removesuffix(".path") not in (asked.get(kind) or {}):
            raise _refused(f"The command refers to {kind}.{bound}, which the job does not have.")


def compute_of(world: World, asked: dict[str, Any]) -> dict[str, Any]:
    """Return run history's description of the machines."""
    resources = asked.get("resources") or {}
    count = int(resources.get("instanceCount") or 1)
    name = (asked.get("computeId") or "").rpartition("/")[2]
    if name and name in world.computes:
        own = world.computes[name]["properties"]
        size, priority, kind = own["vmSize"], own["vmPriority"], "amlctrain"
    else:
        size, kind = resources.get("instanceType") or DEFAULT_SIZE, "serverless"
        priority = "LowPriority" if (asked.get("queueSettings") or {}).get("jobTier") == "Spot" else "Dedicated"
    told = {"target": name or "serverless", "targetType": kind, "vmSize": size, "instanceCount": count}
    return {**told, "gpuCount": _gpus(size), "priority": priority, "region": REGION}


def place_of(uri: str) -> Place | None:
    """Return the place of the uri, None if the stand-in does not have the place."""
    if found := _DATASTORE.fullmatch(uri):
        container = DATASTORES.get(found[1].lower())
        return None if container is None else Place(container, found[2].strip("/"))
    found = _BLOB.fullmatch(uri) or _HADOOP.fullmatch(uri)
    return Place(found[1], found[2].strip("/")) if found else None


def seconds(text: str | None) -> float | None:
    """Return the seconds of an ISO 8601 duration."""
    found = _DURATION.fullmatch(text or "-")
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(days * 86_400 + hours * 3600 + minutes * 60 + rest)


def _violations(body: Any) -> list[tuple[str, str, bool]]:
    if not isinstance(body, dict) or not isinstance(body.get("properties"), dict):
        return [("properties", "is required", False)]
    try:
        from cloudtrain.backends.azureml import check as rules
    except ModuleNotFoundError:
        return []
    return list(rules.violations(body))


def _check_assets(world: World, asked: dict[str, Any]) -> None:
    code = asked.get("codeId")
    if code:
        parts = code.split("/")
        if len(parts) < 4 or (parts[-3], parts[-1]) not in world.codes:
            raise _refused(f"Code asset {code} was not found.")
    environment = asked.get("environmentId") or ""
    mine = f"{workspace_id()}/environments/".lower()
    if environment.lower().startswith(mine):
        name, _, version = environment[len(mine) :].partition("/versions/")
        if (name, version) not in world.environments and not name.startswith("AzureML-"):
            raise _refused(f"Environment {name}:{version} was not found.")
    elif not environment.startswith("azureml://registries/"):
        raise _refused(f"Environment id '{environment}' is none.")


def _check_compute(world: World, asked: dict[str, Any]) -> None:
    name = (asked.get("computeId") or "").rpartition("/")[2]
    tier = (asked.get("queueSettings") or {}).get("jobTier")
    count = int((asked.get("resources") or {}).get("instanceCount") or 1)
    if count < 1:
        raise _refused("The instance count must be at least 1.")
    if not name or name.lower() == "serverless":
        return
    if name not in world.computes:
        raise AzureError(404, "UserError", f"Unknown compute target '{name}'.")
    if tier is not None and tier.lower() == "spot":
        raise _refused("Job tier Spot is for serverless compute; priority is a property of the cluster.")
    own = world.computes[name]
    if own["provisioningState"] != "Succeeded":
        raise _refused(f"Compute '{name}' is in the state {own['provisioningState']}.")
    most = own["properties"]["scaleSettings"]["maxNodeCount"]
    if count > most:
        raise _refused(f"The job asks for {count} nodes; the maximum of compute '{name}' is {most}.")


def _gpus(size: str) -> int:
    """Return the number of GPUs of a machine, derived from the machine's name."""
    found = re.match(r"Standard_N[CDV](\d+)", size, re.IGNORECASE)
    if found is None:
        return 0
    cores = int(found[1])
    if size.lower().startswith("standard_nd"):
        return 8 if cores >= 40 else 1
    return max(1, cores // 24) if cores >= 24 else max(1, cores // 6)


def _refused(message: str, code: str = "UserError") -> AzureError:
    return AzureError(400, code, message)
