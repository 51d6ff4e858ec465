"""The body of the PUT for a command job's file, made by a pure function in place of the SDK."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Job = Mapping[str, Any]

WORKSPACE = (
    "/subscriptions/{subscription}/resourceGroups/{resource_group}"
    "/providers/Microsoft.MachineLearningServices/workspaces/{workspace}"
)
# A workspace keeps environments that are defined inside a job under this name. Source: azure-ai-ml 1.35.2.
_ANONYMOUS = "CliV2AnonymousEnvironment"
_MODES = {
    "mount": "ReadWriteMount",
    "rw_mount": "ReadWriteMount",
    "ro_mount": "ReadOnlyMount",
    "upload": "Upload",
    "download": "Download",
    "direct": "Direct",
    "eval_mount": "EvalMount",
    "eval_download": "EvalDownload",
}
_DISTRIBUTIONS = {"pytorch": "PyTorch", "mpi": "Mpi", "tensorflow": "TensorFlow", "ray": "Ray"}
_IDENTITIES = {
    "managed": "Managed",
    "managed_identity": "Managed",
    "user_identity": "UserIdentity",
    "aml_token": "AMLToken",
}
_SERVICES = {"ssh": "SSH", "tensor_board": "TensorBoard", "vs_code": "VSCode", "jupyter_lab": "JupyterLab"}
_PRIORITIES = {"low": 1, "medium": 2, "high": 3}
# The SDK still accepts the older {inputs.x} for ${{inputs.x}}, and rewrites the form everywhere in the command.
SINGLE_BRACKETS = re.compile(r"(?<!\{)\{(inputs|outputs|search_space)\.([^}]*)\}(?!\})")
_ASSET = re.compile(r"azureml:(?P<name>[^/:@]+)(?::(?P<version>[^@]+)|@(?P<label>.+))")


def body_of(job: Job, workspace: str = WORKSPACE) -> dict[str, Any]:
    """Return the body that azure-ai-ml 1.35 would PUT for the job's file; the tests compare it with the SDK's.

    The job must be valid for load_job: check.faults tests the job first. `workspace` is the workspace's ARM id. Values
    that only a submit knows are in braces: `codes/{upload}` (the id of the uploaded code), an inline environment's
    `{hash}`, and the version behind a label, as `{latest}`. A local input keeps its path, which a submit uploads. The
    body omits the git properties that the SDK adds from the current folder, and the experiment's name if the file has
    none, which the SDK also takes from that folder. The job's name is in the URL, not in the body.
    """
    environment = job["environment"]
    environment_id: str | None = f"{workspace}/environments/{_ANONYMOUS}/versions/{{hash}}"
    if not isinstance(environment, Mapping):
        environment_id = _asset_id(environment, "environments", workspace, local=environment)
    body = {
        "description": job.get("description"),
        "properties": dict(job.get("properties", {})),
        "tags": dict(job.get("tags", {})),
        "computeId": _compute_id(job.get("compute"), workspace),
        "displayName": job.get("display_name") or job.get("name"),
        "experimentName": job.get("experiment_name"),
        "identity": _made(job, "identity", _identity),
        "isArchived": False,
        "services": _made(job, "services", lambda found: {name: _service(each) for name, each in found.items()}),
        "codeId": _asset_id(job.get("code"), "codes", workspace, local=f"{workspace}/codes/{{upload}}/versions/1"),
        "command": SINGLE_BRACKETS.sub(r"${{\1.\2}}", job["command"]),
        "distribution": _made(job, "distribution", _distribution),
        "environmentId": environment_id,
        "environmentVariables": dict(job.get("environment_variables", {})),
        "inputs": {name: _input(value, workspace) for name, value in job.get("inputs", {}).items()},
        "limits": _made(job, "limits", _limits),
        "outputs": {name: _output(value or {}) for name, value in job.get("outputs", {}).items()},
        "parentJobName": job.get("parent_job_name"),
        "queueSettings": _made(job, "queue_settings", _queue),
        "resources": _made(job, "resources", _resources),
        "jobType": "Command",
    }
    return {"properties": _present(**body)}


def duration(seconds: int) -> str:
    """Return the seconds as an ISO 8601 duration in the SDK's form: 43200 is PT12H, 90061 is P1DT1H1M1S."""
    minutes, second = divmod(abs(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    time = "".join(f"{count}{unit}" for count, unit in ((hour, "H"), (minute, "M"), (second, "S")) if count)
    text = "P" + (f"{days}D" if days else "") + (f"T{time}" if time else "")
    return ("-" if seconds < 0 else "") + (text if seconds else "P0D")


def _made(job: Job, name: str, make: Callable[[Job], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the body's part for a part of the file, None if the file lacks the part."""
    return None if job.get(name) is None else make(job[name])


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _asset_id(text: str | None, kind: str, workspace: str, local: str | None) -> str | None:
    """Return the ARM id of a registered asset (`azureml:NAME:VERSION`), or `local` for any other text."""
    if text is None:
        return None
    if text.startswith("azureml:/subscriptions/"):
        return text.removeprefix("azureml:")
    found = _ASSET.fullmatch(text)
    if found is None:
        return local
    version = found["version"] or f"{{{found['label']}}}"
    return f"{workspace}/{kind}/{found['name']}/versions/{version}"


def _compute_id(compute: str | None, workspace: str) -> str | None:
    if compute is None or compute == "local":
        return None
    name = compute.removeprefix("azureml:")
    return name if name.startswith("/") else f"{workspace}/computes/{name}"


def _input(value: Any, workspace: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and "value" in value:
        value = value["value"]
    if not isinstance(value, Mapping):
        return {"jobInputType": "literal", "value": str(value)}
    kind, mode = value.get("type", "uri_folder").lower(), value.get("mode")
    assets = "models" if kind in ("mlflow_model", "custom_model") else "data"
    return _present(
        jobInputType=kind,
        mode=_MODES[mode.lower()] if mode else None,
        uri=_asset_id(value.get("path"), assets, workspace, local=value.get("path")),
    )


def _output(value: Job) -> dict[str, Any]:
    mode = value.get("mode")
    return _present(
        jobOutputType=value.get("type", "uri_folder").lower(),
        mode=_MODES[mode.lower()] if mode else None,
        uri=value.get("path"),
        assetName=value.get("name"),
        assetVersion=value.get("version"),
    )


def _identity(identity: Job) -> dict[str, Any]:
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", identity["type"]).lower()
    ids = {"clientId": identity.get("client_id"), "objectId": identity.get("object_id")}
    return _present(identityType=_IDENTITIES[kind], **ids)


def _service(service: Job) -> dict[str, Any]:
    own = _present(logDir=service.get("log_dir"), sshPublicKeys=service.get("ssh_public_keys"))
    properties = {**service.get("properties", {}), **own}
    return _present(
        jobServiceType=_SERVICES.get(service.get("type", "").lower()),
        nodes={"nodesValueType": "All"} if service.get("nodes") else None,
        port=service.get("port"),
        properties=properties or service.get("properties"),
    )


def _distribution(distribution: Job) -> dict[str, Any]:
    kind = distribution["type"].lower()
    rest = {_camel(name): value for name, value in distribution.items() if name != "type"}
    servers = {"parameterServerCount": 0} if kind == "tensorflow" else {}
    return {"distributionType": _DISTRIBUTIONS[kind], **servers, **rest}


def _limits(limits: Job) -> dict[str, Any]:
    # The SDK treats a timeout of 0 as no timeout, and omits the field.
    timeout = limits.get("timeout")
    return {"jobLimitsType": "Command", **({"timeout": duration(timeout)} if timeout else {})}


def _queue(settings: Job) -> dict[str, Any]:
    tier, priority = settings.get("job_tier"), settings.get("priority")
    rank = _PRIORITIES[priority.lower()] if priority else None
    return _present(jobTier=tier.capitalize() if tier else None, priority=rank)


def _resources(resources: Job) -> dict[str, Any]:
    found = {_camel(name): value for name, value in resources.items()}
    if isinstance(found.get("dockerArgs"), list):
        found["dockerArgsList"] = found.pop("dockerArgs")
        # The SDK omits these two fields beside a list of arguments.
        found = {name: value for name, value in found.items() if name not in ("locations", "maxInstanceCount")}
    return {"properties": {}, **found}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)
