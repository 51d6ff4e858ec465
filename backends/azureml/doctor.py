"""What stands in the way of an Azure ML job: credentials, workspace, compute, datastore, vault, price."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.azureml import prices, rest, vault
from cloudtrain.backends.azureml.machine import block_of, choose, workspace_of
from cloudtrain.backends.azureml.workspace import Workspace
from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.config.schema_backends import AzureML
from cloudtrain.launcher.errors import CloudtrainError

if TYPE_CHECKING:
    from cloudtrain.launcher.catalog import Machine
    from cloudtrain.launcher.config.schema import Config

__all__ = ["checks"]

DIFFERENCE = 0.01  # of prices, from which on it is told


def checks(config: Config | None) -> list[Check]:
    """Return the checks, of a config's own job where there is one."""
    block = AzureML() if config is None else block_of(config)
    found = [_tried("credentials", _signed_in, block.cloud)]
    if found[0].verdict == "fail":  # nothing else can be asked
        return found
    try:
        workspace = workspace_of(block)
    except CloudtrainError as error:
        cure = (
            "set azureml.subscription, resource_group and workspace in the config, and name it: doctor azureml -f FILE"
        )
        return [*found, Check("workspace", "fail", error.message, cure)]
    found.append(_tried("workspace", _workspace, workspace))
    if found[-1].verdict == "fail" or config is None:
        return found
    return [*found, *_of_job(config, workspace)]


def _of_job(config: Config, workspace: Workspace) -> Iterator[Check]:
    block = block_of(config)
    try:
        machine = choose(config)
    except CloudtrainError as error:
        yield Check("config", "fail", error.message, error.hint)
        return
    if block.compute is not None:
        yield _tried("compute", _compute, workspace, block.compute, machine)
    yield _tried("datastore", _datastore, workspace, block.datastore)
    if config.secrets:
        yield _tried("key vault", _vault, workspace)
    if machine.instance_type and block.region:
        yield _tried("price", _price, machine, block.region, is_spot=config.resources.spot)


def _tried(name: str, ask: Callable[..., Check], *args: Any, **more: Any) -> Check:
    try:
        with rest.answers(f"look at the {name}"):
            return ask(*args, **more)
    except CloudtrainError as error:
        return Check(name, "fail", error.message, error.hint)


def _signed_in(cloud: str) -> Check:
    host = rest.hosts(cloud)[0]
    params = {"api-version": "2022-12-01"}
    told = rest.call("GET", f"https://{host}/subscriptions", cloud=cloud, audience=f"https://{host}", params=params)
    names = [str(each.get("displayName") or each.get("subscriptionId")) for each in told.json().get("value") or ()]
    if not names:
        return Check("credentials", "warn", "they see no subscription", "az account list, or ask for a role")
    return Check("credentials", "ok", f"{len(names)} subscription{'s' * (len(names) != 1)}: {', '.join(names[:3])}")


def _workspace(workspace: Workspace) -> Check:
    try:
        told = rest.get_json(workspace, "")
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        cure = "`az ml workspace list` shows yours"
        return Check("workspace", "fail", f"there is no {workspace.name} in {workspace.resource_group}", cure)
    return Check("workspace", "ok", f"{workspace.name} in {told.get('location', 'an unknown region')}")


def _compute(workspace: Workspace, name: str, machine: Machine) -> Check:
    try:
        told = rest.get_json(workspace, f"/computes/{name}")["properties"]
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        return Check("compute", "fail", f"there is no `{name}`", "mend azureml.compute, or leave it out for serverless")
    own = told.get("properties") or {}
    size, state = str(own.get("vmSize") or "?"), str(told.get("provisioningState") or "?")
    scale = own.get("scaleSettings") or {}
    room = f"up to {scale.get('maxNodeCount')} x {size}, {str(own.get('vmPriority') or 'dedicated').lower()}"
    if state != "Succeeded":
        return Check("compute", "warn", f"{name} is {state}", "look at it in the studio")
    if machine.instance_type and size.lower() != machine.instance_type.lower():
        return Check("compute", "fail", f"{name} has {size}", f"not {machine.instance_type}: mend resources")
    return Check("compute", "ok", f"{name}: {room}")


def _datastore(workspace: Workspace, name: str) -> Check:
    try:
        told = rest.get_json(workspace, f"/datastores/{name}")["properties"]
    except rest.AzureError as error:
        if not rest.is_absent(error):
            raise
        return Check("datastore", "fail", f"there is no `{name}`", "`az ml datastore list` shows those there are")
    kind = str(told.get("datastoreType") or "")
    if kind not in ("AzureBlob", "AzureDataLakeGen2"):
        return Check("datastore", "warn", f"{name} is {kind}", "checkpoints and outputs are tried on blob storage only")
    return Check("datastore", "ok", f"{name}: {told.get('accountName')}/{told.get('containerName')}")


def _vault(workspace: Workspace) -> Check:
    url = vault.url_of(workspace, "doctor")
    return Check("key vault", "ok", url.partition("/secrets/")[0])


def _price(machine: Machine, region: str, *, is_spot: bool) -> Check:
    """Compare our table with Azure's own list of today."""
    found = prices.of_machine(machine.instance_type, region)
    today, known = found.dedicated_usd, machine.hourly_usd
    low = f", low priority {found.low_priority_usd:.3f}" if found.low_priority_usd is not None else ""
    if today is None:
        return Check(
            "price", "warn", f"Azure lists none of {machine.instance_type} in {region}", "is it the right region?"
        )
    text = f"{machine.instance_type} in {region}: {today:.3f} USD an hour{low}, by Azure's list (since {found.as_of})"
    best = found.low_priority_usd if is_spot and found.low_priority_usd is not None else today
    if known is None or abs(best - known) > DIFFERENCE * known:
        ours = "knows none" if known is None else f"says {known:.3f}"
        return Check("price", "warn", text, f"our table {ours}: set azureml.price_per_hour: {best:.3f} USD")
    return Check("price", "ok", text)
