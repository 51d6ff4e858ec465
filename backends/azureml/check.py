"""Faults for which Azure ML or its SDK would refuse a command job, found without either: two tables, and rules.

rules.json holds the fields that the SDK reads from a job's file, and the fields of the body of its PUT
(tools/azureml_table.py writes both from azure-ai-ml). The rules below find faults that the SDK and the service report
only after the job's start, or never. A job tier newer than the table passes with a warning, a misspelt field does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.planning.request_rules import IMAGE, Found, key_of, keys_of, part

from . import request_body

Job = Mapping[str, Any]

# The enumeration that Azure extends: an unknown word may be newer than the table.
_GROWING = "JobTier"

# Limits of a run's texts. Source: learn.microsoft.com, azure/machine-learning/resource-limits-capacity, "Runs" and
# "Experiments", 2023-09-13.
_LENGTHS = {"display_name": 256, "experiment_name": 256, "description": 5000}
_ENTRIES = {"tags": 50, "properties": 50, "inputs": 200, "outputs": 20}
_KEY_LENGTH, _VALUE_LENGTH = 100, 1000
# The longest run of a job. Source: learn.microsoft.com, azure/machine-learning/how-to-manage-quotas, "Job lifetime".
MAX_RUNTIME_S, MAX_SPOT_RUNTIME_S = 21 * 86_400, 7 * 86_400
MIN_RUNTIME_S = 60  # our own limit: the pull of an image alone takes longer
# Source: the published ARM schema, resourceDefinitions.workspaces_computes.
_COMPUTE = re.compile(r"[a-zA-Z](?![a-zA-Z0-9-]*-\d+\Z)[a-zA-Z0-9-]{2,23}")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")  # the SDK's rule for inputs and outputs, and the shell's for variables
_EXPRESSION = re.compile(r"\$\{\{\s*([^}]*?)\s*\}\}")
_ENVIRONMENT = re.compile(
    r"azureml:([^/:@\s]+(:[^/:@\s]+|@[^/:@\s]+)"
    r"|//registries/[^/\s]+/environments/[^/\s]+/(versions|labels)/[^/\s]+"
    r"|/subscriptions/\S+/environments/[^/\s]+/versions/[^/\s]+)"
)
_CLOUD_URI = re.compile(r"(azureml://(datastores|subscriptions|registries|locations)/.|(https?|wasbs?|abfss?|adl)://.)")
_ASSET_PATH = re.compile(r"azureml:([^/:@\s]+(:[^/:@\s]+|@[^/:@\s]+)|/subscriptions/\S+)")
# Azure sets these variables in each process of a job with `distribution`. Source: learn.microsoft.com,
# azure/machine-learning/how-to-train-distributed-gpu.
_AZURES_OWN = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
MAX_VARIABLE_BYTES = 131_072  # Linux's MAX_ARG_STRLEN, for `NAME=value` and its end: beyond, no process starts
_SERVICES = ("jupyter_lab", "ssh", "tensor_board", "vs_code")

# How to fix a value that a table refuses, by the config's key.
_HINTS = {
    "resources.instances": "a whole number",
    "resources.spot": "true or false",
    "azureml.shm_gb": "a whole number of GB, such as 64",
    "azureml.identity": "user, managed or aml_token",
    "limits.max_duration": "such as 12h",
    "inputs": "a value, or {type: uri_folder, path: azureml://..., mode: ro_mount}",
    "outputs": "{type: uri_folder, path: azureml://..., mode: rw_mount}",
    "checkpoint.uri": "{type: uri_folder, path: azureml://..., mode: rw_mount}",
    "env": "only text: quote numbers, true and false",
    "tags": "only text: quote numbers, true and false",
    "azureml.raw": "cloudtrain renders this part by itself: look at what azureml.raw changes",
}


def faults(job: Job) -> Iterator[Fault]:
    """Yield the faults of a job's file, each under the config's key that sets the field, else under `azureml.raw`."""
    in_file = list(request_rules.violations(_table(), job, "JobFile"))
    for path, message, is_warning in in_file:
        yield _by_table(path, path or "the job", message, is_warning)
    if not isinstance(job, Mapping):
        return
    if not in_file:  # load_job makes no body from a file that it refuses
        for path, message, is_warning in violations(request_body.body_of(job)):
            name = re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", path.removeprefix("properties."))
            yield _by_table(name, path, message, is_warning)
    for rules in (_naming, _sizes, _command, _machines, _time, _processes, _environment, _variables, _mounts, _rest):
        yield from rules(job)


def violations(body: Job) -> Iterator[Found]:
    """Yield (path, message, is it only a warning?) for each breach of the table by the ARM body of a job's PUT."""
    return request_rules.violations(_table(), body)


def _naming(job: Job) -> Iterator[Fault]:
    """Yield faults of the name, which is in the URL and not in the body, and of values that a folder would decide."""
    name = job.get("name")
    if name is None:
        yield _at("name", "without a name Azure makes one up, and a job sent twice is two jobs", "set name")
    elif isinstance(name, str):
        for _, message, _ in request_rules.violations(_table(), name, "JobName"):
            yield _at("name", f"the job's name: {message}", "letters, digits, `-` and `_`, at most 255")
    if "experiment_name" not in job:
        message = "without experiment_name the SDK takes the name of the folder that submits"
        yield _at("experiment_name", message, "set azureml.experiment")
    if job.get("type") != "command":
        yield _at("type", f"`{job.get('type')}` is not a command job", "leave `type: command`")
    code = job.get("code")
    if code is None:
        yield _at("code", "without `code` cloudtrain's code does not reach the job", "leave `code` as it is")
    elif isinstance(code, str) and code.startswith("git+"):
        yield _at("code", "the SDK takes no git path", "leave `code` as it is")


def _sizes(job: Job) -> Iterator[Fault]:
    for name, most in _LENGTHS.items():
        if isinstance(job.get(name), str) and not 0 < len(job[name]) <= most:
            yield _at(name, f"{name} has {len(job[name])} characters; Azure keeps 1 to {most}", "shorten it")
    for name, most in _ENTRIES.items():
        if len(part(job, name)) > most:
            yield _at(name, f"{name} has {len(part(job, name))} entries; Azure keeps {most}", "leave some out")
    for name in ("tags", "properties"):
        for key, value in part(job, name).items():
            if not 0 < len(str(key)) <= _KEY_LENGTH:
                yield _at(name, f"{name}: `{str(key)[:40]}` has {len(str(key))} characters, not 1 to {_KEY_LENGTH}")
            if len(str(value)) > _VALUE_LENGTH:
                message = f"{name}.{key} has {len(str(value))} characters, more than {_VALUE_LENGTH}"
                yield _at(name, message, "shorten it")


def _command(job: Job) -> Iterator[Fault]:
    """Yield unknown references, which Azure would pass to the shell, and mounts that the command does not use."""
    command = job.get("command")
    if not isinstance(command, str):
        return
    seen = set()
    for expression in _EXPRESSION.findall(request_body.SINGLE_BRACKETS.sub(r"${{\1.\2}}", command)):
        kind, _, name = expression.partition(".")
        seen.add((kind, name))
        if kind not in ("inputs", "outputs"):
            hint = "a command job knows inputs.NAME and outputs.NAME"
            yield _at("command", f"command: ${{{{{expression}}}}} belongs to other kinds of job", hint)
        elif name not in part(job, kind):
            message = f"command: ${{{{{expression}}}}} is not defined{request_rules.meant(name, part(job, kind))}"
            yield _at(kind, message, f"add `{name}` to {kind}")
    for kind in ("inputs", "outputs"):
        for name in part(job, kind):
            if (kind, name) not in seen:
                message = f"{kind}.{name}: the command does not use it"
                yield _at(f"{kind}.{name}", message, f"${{{{{kind}.{name}}}}} in the command", is_warning=True)


def _machines(job: Job) -> Iterator[Fault]:
    resources, compute = part(job, "resources"), job.get("compute")
    kind, count = resources.get("instance_type"), resources.get("instance_count", 1)
    if compute is None and kind is None:
        hint = "set resources.instance_type, or azureml.compute"
        yield _at("resources.instance_type", "neither a cluster nor an instance type says what to run on", hint)
    if compute is None and isinstance(kind, str) and not kind.lower().startswith("standard_"):
        hint = f"did you mean `Standard_{kind}`?"
        yield _at("resources.instance_type", f"`{kind}` is not an Azure machine size: Standard_...", hint)
    if isinstance(count, int) and count < 1:
        yield _at("resources.instance_count", f"{count} instances run nothing", "at least 1")
    if isinstance(compute, str):
        name = compute.removeprefix("azureml:")
        if name == "local":
            yield _at("compute", "`local` runs on this machine, in Docker, and not on Azure", "name a cluster")
        elif not _COMPUTE.fullmatch(name) and not name.startswith("/subscriptions/"):
            hint = "3 to 24 letters, digits and `-`, a letter first, and no `-` with a number last"
            yield _at("compute", f"`{name}` cannot be a cluster's name", hint)
        if "queue_settings" in job:
            message = "a job tier is for serverless compute"
            message += f"; whether `{name}` is low-priority was said when it was made"
            yield _at("queue_settings.job_tier", message, "leave out azureml.compute, or resources.spot")
    shm = resources.get("shm_size")
    if isinstance(shm, str) and re.fullmatch(r"0+[bkmgBKMG]", shm):
        yield _at("resources.shm_size", f"shared memory of `{shm}` is zero", "leave shm_gb out for Azure's 2g")
    arguments = resources.get("docker_args")
    words = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments or "")
    if re.search(r"--shm-size\b", words):
        yield _at("resources.docker_args", "--shm-size in docker_args and shm_size overrule each other", "set shm_gb")


def _time(job: Job) -> Iterator[Fault]:
    timeout = part(job, "limits").get("timeout")
    is_spot = str(part(job, "queue_settings").get("job_tier")).lower() == "spot"
    most, whom = (MAX_SPOT_RUNTIME_S, "spot machines") if is_spot else (MAX_RUNTIME_S, "a job")
    if timeout is None:
        yield _at("limits", "without limits.timeout nothing ends the job in time", "set limits.max_duration")
    elif isinstance(timeout, int) and timeout < MIN_RUNTIME_S:
        # 0 means no limit: the SDK omits the field.
        yield _at("limits", f"a timeout of {timeout} s is less than {MIN_RUNTIME_S}", "raise limits.max_duration")
    elif isinstance(timeout, int) and timeout > most:
        message = f"a timeout of {timeout} s is more than the {most // 86_400} days that Azure gives {whom}"
        yield _at("limits", message, "lower limits.max_duration")


def _processes(job: Job) -> Iterator[Fault]:
    """Yield faults of the distribution: our agent runs once on each node, and starts the ranks itself."""
    distribution, hint = part(job, "distribution"), "{type: pytorch, process_count_per_instance: 1}"
    kind, processes = str(distribution.get("type")).lower(), distribution.get("process_count_per_instance", 1)
    if "distribution" not in job:
        count = part(job, "resources").get("instance_count", 1)
        if isinstance(count, int) and count > 1:
            yield _at("distribution", f"without a distribution only one of {count} nodes starts anything", hint)
    elif kind in ("mpi", "tensorflow", "ray"):
        yield _at("distribution", f"`{kind}` sets no NODE_RANK and MASTER_ADDR, which our agent reads", hint)
    elif isinstance(processes, int) and processes != 1:
        yield _at("distribution", f"{processes} agents on each node, where one starts all ranks", hint)


def _environment(job: Job) -> Iterator[Fault]:
    environment = job.get("environment")
    if isinstance(environment, str) and not _ENVIRONMENT.fullmatch(environment):
        if environment.startswith("azureml:"):
            hint = "azureml:NAME:VERSION, azureml:NAME@latest, or azureml://registries/.../environments/NAME/versions/V"
            yield _at("environment", f"`{environment}` names no version of an environment", hint)
        elif "/" in environment[1:] and not environment.startswith("/subscriptions/"):
            yield _at("environment", f"`{environment}` is an image, not an environment", "set `image` instead")
        else:
            hint = f"azureml:{environment}" + ("" if re.search("[:@/]", environment) else "@latest")
            yield _at("environment", f"`{environment}` lacks the `azureml:` before it", hint)
    if not isinstance(environment, Mapping):
        return
    image = environment.get("image")
    if ("image" in environment) == ("build" in environment):
        said = "both an image and a build" if image else "no image"
        yield _at("environment.image", f"the environment has {said}", "set image, or azureml.environment")
    if isinstance(image, str) and not IMAGE.fullmatch(image):
        yield _at("environment.image", f"`{image}` is not a valid image name", "such as mcr.microsoft.com/azureml/x:1")
    rows = part(environment, "conda_file").get("dependencies") or []
    pips = [row.get("pip") or [] for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else [rows]
    if not all(isinstance(each, list) for each in pips):
        hint = "as in {dependencies: [python=3.11, pip, {pip: [torch==2.8.0]}]}"
        yield _at("environment.conda_file", "`dependencies`, and `pip` in it, are lists of packages", hint)
    for key in ("name", "version"):
        if key in environment:
            message = f"environment.{key}: the SDK drops it from an environment defined in the job"
            yield _at("environment", message, f"leave {key} out", is_warning=True)


def _variables(job: Job) -> Iterator[Fault]:
    for name, value in part(job, "environment_variables").items():
        if not _NAME.fullmatch(str(name)):
            yield _at("environment_variables", f"`{name}` is not a valid variable name", "letters, digits and `_`")
        elif name in _AZURES_OWN:
            yield _at("environment_variables", f"Azure sets {name} itself, on each node its own", "leave it out")
        size = len(f"{name}={value}".encode(errors="replace")) + 1
        if size > MAX_VARIABLE_BYTES:
            message = f"{name} has {size} bytes, and Linux starts nothing with more than {MAX_VARIABLE_BYTES}"
            yield _at("environment_variables", message, "put it into a file of the code folder")
        if isinstance(value, str) and _EXPRESSION.search(value):
            message = f"{name}: Azure is known to fill in expressions only in the command"
            yield _at("environment_variables", message, "", is_warning=True)


def _mounts(job: Job) -> Iterator[Fault]:
    places: dict[str, str] = {}
    names: dict[str, str] = {}
    for kind in ("inputs", "outputs"):
        for name, value in part(job, kind).items():
            path, full = value.get("path") if isinstance(value, Mapping) else None, f"{kind}.{name}"
            if not _NAME.fullmatch(str(name)):
                yield _at(full, f"`{name}` cannot name one of the {kind}", "letters, digits and `_`, no digit first")
            if names.setdefault(str(name).lower(), full) != full:
                message = f"{full} and {names[str(name).lower()]} have one name"
                yield _at(full, message, "the variables that Azure sets for them would overwrite each other")
            if kind == "outputs" and isinstance(path, str):
                if places.setdefault(path.rstrip("/"), full) != full:
                    yield _at(full, f"{full} and {places[path.rstrip('/')]} are one place", "give each its own")
                if not _CLOUD_URI.match(path):
                    yield _at(full, f"`{path}` is not a URI of Azure storage", "azureml://datastores/NAME/paths/...")
            elif kind == "inputs" and isinstance(value, Mapping) and "value" not in value:
                yield from _input(full, path)
    if "checkpoints" in part(job, "outputs"):
        yield from _checkpoints(part(job, "outputs"))


def _input(full: str, path: Any) -> Iterator[Fault]:
    hint = "azureml://datastores/NAME/paths/..., azureml:NAME:VERSION, or an address of Azure's storage"
    if not path:
        yield _at(full, f"{full} has no path", hint)
    elif isinstance(path, str) and path.startswith("azureml://") and re.search("[:@]", path[10:]):
        # load_job removes `azureml:` before a text that looks like NAME:VERSION, and then looks for a local folder.
        yield _at(full, f"{full}: the SDK takes what follows `:` or `@` in `{path}` for a version", "rename the folder")
    elif isinstance(path, str) and not _CLOUD_URI.match(path) and not _ASSET_PATH.fullmatch(path):
        yield _at(full, f"{full}: `{path}` is not a URI of Azure storage", hint)


def _checkpoints(outputs: Job) -> Iterator[Fault]:
    """Yield faults that would hide this attempt's checkpoints from the next attempt."""
    output, hint = part(outputs, "checkpoints"), "a place of the job's own, the same for each attempt"
    path = output.get("path")
    if not path:
        yield _at("outputs.checkpoints", "without a path each run stores its checkpoints in another place", hint)
    elif "name" in _EXPRESSION.findall(str(path)):
        yield _at("outputs.checkpoints", f"`{path}` is another place in each run", hint)
    mode, kind = (str(output.get(*each)).lower() for each in (("mode", "rw_mount"), ("type", "uri_folder")))
    if mode not in ("rw_mount", "mount"):
        message = f"with `mode: {mode}` checkpoints reach the store at the end, or never"
        yield _at("outputs.checkpoints", message, "mode: rw_mount")
    if kind != "uri_folder":
        yield _at("outputs.checkpoints", "checkpoints are a folder", "type: uri_folder")


def _rest(job: Job) -> Iterator[Fault]:
    """Yield parts on which load_job fails, or which load_job drops without a message."""
    for name, service in part(job, "services").items():
        kind, nodes = service.get("type") if isinstance(service, Mapping) else None, "nodes"
        if str(kind).lower() not in _SERVICES:
            yield _at("services", f"services.{name}: `{kind}` is not one of {', '.join(_SERVICES)}", "name one of them")
        if isinstance(service, Mapping) and service.get(nodes, "all") != "all":
            yield _at("services", f"services.{name}.nodes is `all` or left out", "left out means node 0")
    if "msi_resource_id" in part(job, "identity"):
        yield _at("identity", "load_job breaks on identity.msi_resource_id", "give client_id")


def _by_table(path: str, said: str, message: str, is_warning: bool) -> Fault:
    key = key_of(path, keys_of("azureml"), "azureml.raw")
    return Fault(f"{said}: {message}", key, hint=_HINTS.get(key, ""), is_warning=is_warning)


def _at(path: str, message: str, hint: str = "", *, is_warning: bool = False) -> Fault:
    return Fault(message, key_of(path, keys_of("azureml"), "azureml.raw"), hint=hint, is_warning=is_warning)


def _table() -> request_rules.Table:
    return request_rules.read("azureml", "a command job", "Azure", _GROWING)
