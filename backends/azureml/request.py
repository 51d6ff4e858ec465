"""The command job, in the form that `az ml job create -f` takes, and the sending plan beside it.

The code folder of the job holds only the bundle, so that Azure stores one copy for all jobs with the same code. The
container order is a variable, base64 of JSON, because Azure promises nothing about quotes and `${{...}}` in variables.
A send adds the variable CLOUDTRAIN_SENT, with values that only a send knows, and a tag with the sender.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from cloudtrain.entrypoints.contract import KeyVaultSecrets, Places
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import ConfigError, Fault, refuse, require_all
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.plan import Plan, Runtime
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import container_order, job_spec
from cloudtrain.launcher.planning.request_rules import notes_of, places, planned_of
from cloudtrain.launcher.text import addresses

from ..cloud import GOES_ALONG, unsupported, with_places
from .machine import block_of, choose, idle_s_of, unknown_region, workspace_of
from .records import AzureMLSending

BUNDLE = "bundle.tar.gz"
ORDER, SENT = "CLOUDTRAIN_ORDER", "CLOUDTRAIN_SENT"
CHECKPOINTS, OUTPUT, ENVIRONMENTS = "checkpoints", "output", "environments"
# From Azure's own registry, where no curated environment has a newer PyTorch. Source: Azure/azureml-assets, the folder
# assets/training/general/environments, whose Dockerfile of that day installs torch 2.10.0 under the name 2.8.
ENVIRONMENT_AS_OF = "2026-07-23"
ENVIRONMENT = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"
UNSERVED = "MI300X"  # of AMD: the environment's torch is built for CUDA
SHM_GB_A_RANK = 8
GRACE_S = 25  # from the signal to the kill; Azure documents no figure, and containers usually get 30 s
JOIN_TIMEOUT_S = 1800  # for the slowest node's image, which Azure may have to build

# An image needs only a shell, tar and python3. `-u`: printed text is in the log at once.
COMMAND = (
    "mkdir -p /tmp/cloudtrain && tar -xzf bundle.tar.gz -C /tmp/cloudtrain && "
    "exec env PYTHONPATH=/tmp/cloudtrain/runtime python3 -u -m cloudtrain.entrypoints.container . env:CLOUDTRAIN_ORDER"
)

_URI = re.compile(r"azureml:|https://[^/]+/.|abfss?://|wasbs?://")
_ASSET = re.compile(
    r"azureml://(?!.*datastores/).*/(data|models|environments|components|codes)/[^/]+/(?:versions|labels)/"
)
_BLOB = re.compile(r"https://[^/]+\.blob\.|abfss?://|wasbs?://")
_IDENTITIES = {"user": "user_identity", "managed": "managed", "aml_token": "aml_token"}
_SERVICES = {"tensorboard": "tensor_board", "jupyter_lab": "jupyter_lab", "vs_code": "vs_code"}


def require(config: JobConfig) -> None:
    """Raise ConfigError with all that the config lacks for a request."""
    require_all(lambda: workspace_of(block_of(config)), lambda: _chosen(config), lambda: refuse(_unreachable(config)))


def _chosen(config: JobConfig) -> Machine:
    """Return the machine type. Raises ConfigError for a type on which the default environment does not run."""
    machine = choose(config)
    if machine.accelerator == UNSERVED and _environment(config) == ENVIRONMENT:
        message = f"the default environment's torch is built for CUDA, and does not run on {UNSERVED}"
        hint = "set `image` to one for ROCm, as rocm/pytorch:TAG, or take other machines"
        raise ConfigError(message, key="resources", hint=hint)
    return machine


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request. Raises ConfigError if the config lacks a setting that the request needs."""
    block, workspace = block_of(config), workspace_of(block_of(config))
    prefix = f"{block.prefix.strip('/')}/".lstrip("/")
    root = f"azureml://datastores/{block.datastore}/paths/{prefix}".rstrip("/")
    config = with_places(config, root)
    refuse(_unreachable(config))
    name, machine, home = platform_name(job_id, attempt), _chosen(config), f"{root}/jobs/{job_id}"
    outputs = _outputs(config, home)
    spec, own = job_spec(plan, config, job_id, attempt), _own_order(plan, config)
    order = container_order(plan, config, spec, bundle_sha256, **own).dump()
    inputs = [{"name": key, "type": type_of(uri), "uri": uri} for key, uri in config.inputs.items()]
    project = {"cloudtrain.project": config.project.name} if config.project is not None else {}
    job = {
        "name": name,
        "display_name": f"{job_id}, attempt {attempt}",
        "experiment": block.experiment or config.name,
        "tags": {**config.tags, "cloudtrain.job": job_id, "cloudtrain.attempt": str(attempt), **project},
        "command": _command(inputs, outputs),
        "environment": _environment(config),
        "order": encoded(order),
        "compute": f"azureml:{block.compute}" if block.compute else None,
        "instance_type": machine.instance_type,
        "shm_size": f"{block.shm_gb or SHM_GB_A_RANK * plan.devices_per_node}g",
        "inputs": inputs,
        "outputs": [{"name": key, "uri": uri} for key, uri in outputs.items()],
        "identity": _IDENTITIES[block.identity] if block.identity else None,
        "services": [_service(kind) for kind in block.services],
    }
    planned = render.render_yaml("azureml/job.yml", job=job, plan=plan, block=block, spot=config.resources.spot)
    body, changes = render.overlaid(planned, block.raw)
    refuse(render.changed(planned, body, planned_of("azureml"), "azureml.raw"))
    has_price, is_counted = block.price_per_hour is not None, plan.price_micro is not None
    sending = AzureMLSending(
        workspace=workspace,
        compute=block.compute,
        instance_type=machine.instance_type,
        datastore=block.datastore,
        code_dir=config.code.dir,
        checkpoint_uri=outputs.get(CHECKPOINTS),
        output_uri=outputs[OUTPUT],
        secrets=list(config.secrets),
        nodes=plan.instances,
        nproc_per_node=plan.nproc_per_node,
        limit_s=plan.cap_s,
        limit_reason=plan.cap_reason,
        region=block.region,
        has_price=has_price,
        # A send compares both values with Azure's answers if the plan has a price: budgets use the plan.
        counted_idle_s=idle_s_of(block) if is_counted else None,
        priced_region=block.region if is_counted and not has_price else None,
    )
    text = render.as_yaml(body)
    files = {"job.yml": text, "order.json": render.as_json(order)}
    carried, notes, decoded = frozenset({"resources.spot"}), (*changes, *_notes(config)), {ORDER: files["order.json"]}
    archive, runtime = f"code/{BUNDLE}", _runtime(body)
    return Request(name, body, text, files, sending.dump(), notes, carried, archive, decoded, runtime)


def encoded(data: dict[str, Any]) -> str:
    """Return the object in a form that a variable can carry unchanged."""
    return base64.b64encode(json.dumps(data, separators=(",", ":"), sort_keys=True).encode()).decode()


def _notes(config: JobConfig) -> Iterator[str]:
    yield from notes_of(unknown_region(config))
    if block_of(config).conda:
        yield "a conda environment is built into an image first, which takes Azure 10 to 45 minutes, once"
    if config.secrets:
        yield "secrets go through the workspace's key vault, until the job's end is seen"


def _command(inputs: list[dict[str, str]], outputs: dict[str, str]) -> str:
    """Return the nodes' command; the service inserts the folders' paths."""
    places = [f'{name}="${{{{outputs.{name}}}}}"' for name in outputs]
    places += [f'input.{each["name"]}="${{{{inputs.{each["name"]}}}}}"' for each in inputs]
    return " ".join([COMMAND, *places])


def _own_order(plan: Plan, config: JobConfig) -> dict[str, Any]:
    """Return Azure ML's fields of the container order; paths begin at the code's folder."""
    identity = block_of(config).identity or "managed"
    return {
        "secrets": KeyVaultSecrets(tuple(config.secrets), identity) if config.secrets else None,
        "lead_s": plan.cap_s - plan.own_limit_s,
        "grace_s": GRACE_S,
        "join_timeout_s": JOIN_TIMEOUT_S,
        "log": "stamped",
        "places": Places(
            own="cloudtrain",
            bundle=BUNDLE,
            checkpoints="cloudtrain-checkpoints",
            output="cloudtrain-output",
            environments="cloudtrain-environments" if config.requirements else None,
        ),
    }


def _environment(config: JobConfig) -> Any:
    block = block_of(config)
    if block.environment is None and config.image is None and block.conda is None:
        return ENVIRONMENT
    if block.environment is not None:
        if config.image is not None or block.conda is not None:
            key = "image" if config.image is not None else "azureml.conda"
            message = f"`{key}` and `azureml.environment` exclude each other"
            raise ConfigError(message, key="azureml.environment", hint="keep one")
        return block.environment
    if config.image is None:
        hint = "as in image: mcr.microsoft.com/azureml/openmpi5.0-cuda12.6-ubuntu24.04"
        raise ConfigError("a conda environment needs an `image` to be built upon", key="azureml.conda", hint=hint)
    return {"image": config.image, **({"conda_file": block.conda} if block.conda else {})}


def _runtime(body: dict[str, Any]) -> Runtime | None:
    """Return what runs the job, by the request as `raw` leaves it."""
    environment = body.get("environment")
    if isinstance(environment, str):
        if environment == ENVIRONMENT:
            return images.of(environment, f"Azure's curated environment, as of {ENVIRONMENT_AS_OF}")
        return images.of(environment, "a registered environment", "azureml.environment")
    if not isinstance(environment, dict) or not isinstance(image := environment.get("image"), str):
        return None
    if isinstance(conda := environment.get("conda_file"), dict):
        return images.of_conda(image, conda, "built by Azure", "azureml.conda")
    return images.of(image, "yours")


def _outputs(config: JobConfig, home: str) -> dict[str, str]:
    """Return name -> URI. Without a mount the trainer copies its checkpoints to the mirror, and back."""
    output = next(iter(config.outputs.values()), None) or f"{home}/output"
    is_mirrored = config.checkpoint.uri is None and bool(_BLOB.match(config.checkpoint.mirror or ""))
    uris = {} if is_mirrored else {CHECKPOINTS: config.checkpoint.uri or f"{home}/checkpoints"}
    uris[OUTPUT] = output
    if config.requirements:  # shared by jobs
        uris[ENVIRONMENTS] = f"{home.rpartition('jobs/')[0]}{ENVIRONMENTS}"
    return uris


def _unreachable(config: JobConfig) -> Iterator[Fault]:
    """Yield a fault for each place that a container on Azure cannot reach."""
    for key, uri in places(config.checkpoint.uri, config.inputs, config.outputs).items():
        if not _URI.match(uri):
            hint = "as in azureml://datastores/workspaceblobstore/paths/x, or https://ACCOUNT.blob.core.windows.net/C/x"
            hint += f"; {GOES_ALONG}" if key.startswith("inputs.") and "://" not in uri else ""
            yield Fault(f"Azure ML cannot mount `{uri}`", key=key, hint=hint)
        else:
            yield from _malformed(key, uri)
    store = re.sub(r"^azureml:(//datastores/)?|/.*$", "", block_of(config).datastore)
    if not re.fullmatch(r"\w+", block_of(config).datastore, re.ASCII):
        hint = f"letters, digits and `_`: did you mean `{store}`?"
        yield Fault(f"`{block_of(config).datastore}` is not a datastore's name", key="azureml.datastore", hint=hint)
    mirror = config.checkpoint.mirror
    if mirror is not None and "://" not in mirror:
        hint = "name a place in blob storage, or leave it out: checkpoint.uri is mounted from there anyway"
        yield Fault("a mirror on Azure ML would end with the container", key="checkpoint.mirror", hint=hint)
    yield from unsupported(config, "Azure ML")
    if config.resources.spot and block_of(config).compute:
        message = "whether a cluster's machines are low priority is the cluster's own, not a job's"
        hint = "leave out `spot` for a low-priority cluster, or leave out azureml.compute"
        hint += ": serverless machines can be spot"
        yield Fault(message, key="resources.spot", hint=hint)
    if config.secrets and block_of(config).identity not in ("managed", "user"):
        message = "to read its secrets from the key vault the job needs an identity"
        yield Fault(message, key="azureml.identity", hint="write `identity: managed` or `identity: user`")


def _malformed(key: str, uri: str) -> Iterator[Fault]:
    """Yield the fault of an address that has the beginning of an address of Azure, and no right form."""
    scheme, is_input = uri.partition(":")[0], key.startswith("inputs.")
    asset, message, hint = _ASSET.match(uri), "", ""
    if asset and not (is_input and asset[1] in ("data", "models")):
        takes = "reads data or a model" if is_input else "writes none"
        message = f"`{uri}` is a version of an asset, and a job {takes}"
        hint = "azureml:NAME:VERSION of a data asset" if is_input else "azureml://datastores/NAME/paths/..."
    elif uri.startswith("azureml://datastores/") and not re.match(r"azureml://datastores/\w+/paths/", uri):
        message, hint = f"`{uri}` is not a path of a datastore", "azureml://datastores/NAME/paths/..."
    elif scheme in ("abfss", "wasbs") or (scheme == "https" and (".blob." in uri or not is_input)):
        # An input may have a signature, and may be any file of the web.
        message, hint = addresses.at_azure(scheme, (uri.partition("?")[0] if is_input else uri)[len(scheme) + 1 :])
    if message:
        yield Fault(message, key=key, hint=hint)


def type_of(uri: str) -> str:
    """Return the type of an input by its address; `azureml:NAME:VERSION` may be of another, as a submit finds out."""
    asset = _ASSET.match(uri)
    if asset and asset[1] == "models":
        return "custom_model"
    return "uri_file" if addresses.is_file(uri) and not asset else "uri_folder"


def _service(kind: str) -> dict[str, str | None]:
    log_dir = "cloudtrain-output/tensorboard" if kind == "tensorboard" else None
    return {"name": kind, "type": _SERVICES[kind], "log_dir": log_dir}
