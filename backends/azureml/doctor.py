"""Checks for an Azure ML job: credentials, workspace, compute, datastore, vault, price."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial

from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CloudtrainError
from cloudtrain.launcher.metering.rate import Kind, Machine
from cloudtrain.launcher.planning.request_rules import part
from cloudtrain.launcher.prices.refreshing import compared
from cloudtrain.launcher.text import addresses

from ..cloud import tried, unasked
from . import api, files, jobs, machine_cluster, prices, request
from .api import Azure, AzureAccess
from .machine import block_of, choose, workspace_of
from .records import plain_region

_tried = partial(tried, api.answers)


def checks(azure: Azure, config: JobConfig | None) -> list[Check]:
    """Return the checks; with a config, also the checks of its job."""
    block = block_of(config)
    found = [_tried("credentials", _signed_in, azure, block.cloud)]
    if found[0].verdict == "fail":  # without credentials, every later check would fail
        names = "workspace, compute, datastore, key vault, price"
        return [*found, *unasked(names, config, lambda config: workspace_of(block_of(config)), choose)]
    try:
        access = AzureAccess(workspace_of(block), azure)
    except CloudtrainError as error:
        cure = "set azureml.subscription, resource_group and workspace in the config"
        cure += ", and name it: doctor azureml -f FILE" if config is None else ""
        return [*found, Check("workspace", "fail", error.message, cure)]
    found.append(_tried("workspace", _workspace, access, block.region))
    if found[-1].verdict == "fail" or config is None:
        return found
    return [*found, *_of_job(config, access)]


def _of_job(config: JobConfig, access: AzureAccess) -> Iterator[Check]:
    block = block_of(config)
    try:
        machine = choose(config)
    except CloudtrainError as error:
        yield Check.failed("config", error)
        return
    if block.compute is not None:
        yield _tried("compute", _compute, access, block.compute, machine, config.resources.instances)
    yield _tried("datastore", _datastore, access, block.datastore)
    if config.secrets:
        yield _tried("key vault", _vault, access)
    for name, uri in config.inputs.items():
        if addresses.is_beside(uri):  # it goes along with the submit
            continue
        entry = {"path": uri, "type": request.type_of(uri), **part(part(block.raw, "inputs"), name)}
        yield _tried(f"input {name}", files.look, access, name, entry)
    if machine.instance_type and (region := block.region):
        kind: Kind = "spot" if config.resources.spot else "on_demand"
        yield compared(lambda: prices.quotes(access.azure, None, region, (machine.instance_type,)), machine.rates, kind)


def _signed_in(azure: Azure, cloud: str) -> Check:
    """Ask for a token; the next checks show its permissions."""
    azure.token(cloud, f"https://{api.HOSTS[cloud][0]}")
    return Check("credentials", "ok", "Azure has given a token")


def _workspace(access: AzureAccess, region: str | None) -> Check:
    try:
        answer = api.get_json(access, "")
    except api.AbsentError:
        found = f"there is no {access.workspace.name} in {access.workspace.resource_group}"
        return Check("workspace", "fail", found, "`az ml workspace list` shows yours")
    there = str(answer.get("location") or "an unknown region")
    if region is not None and plain_region(region) != plain_region(there):
        cure = f"write azureml.region: {there}; the price hangs on it"
        return Check("workspace", "warn", f"{access.workspace.name} is in {there}, not in {region}", cure)
    return Check("workspace", "ok", f"{access.workspace.name} in {there}")


def _compute(access: AzureAccess, name: str, machine: Machine, instances: int) -> Check:
    found = machine_cluster.fitting(access, name, machine.instance_type, instances)
    if found.state != "Succeeded":
        return Check("compute", "warn", f"{name} is {found.state}", "look at it in the studio")
    return Check("compute", "ok", f"{name}: up to {found.most} x {found.size or '?'}, {found.priority}")


def _datastore(access: AzureAccess, name: str) -> Check:
    url, container = files.datastore_of(access, name)
    return Check("datastore", "ok", f"{name}: {url}/{container}")


def _vault(access: AzureAccess) -> Check:
    """Store an entry and remove it: only a write proves the permission to write."""
    url = jobs.vault_url(access, f"doctor-{secrets.token_hex(4)}")  # a vault keeps removed names
    with api.answers("store secrets in the key vault", needs=jobs.VAULT_ROLE):
        jobs.put_secrets(access, url, {})
        jobs.remove_secrets(access, url)
    place = url.partition("/secrets/")[0]
    return Check("key vault", "ok", f"{place}; the job's identity needs the role Key Vault Secrets User there")
