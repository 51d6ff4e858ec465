"""Faults for which Vertex AI would refuse a custom job, found without Google: by a table, and by rules between fields.

rules.json holds every field of a CustomJob with its type, required and read-only fields and enumerations
(tools/vertex_table.py writes the file from Google's description of the API). The table has no lengths, no patterns and
no rules between fields, so the rules below add them. A machine type newer than our table passes with a warning. A newer
accelerator does not pass, because Google's client refuses the value too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unicodedata import category

from cloudtrain.entrypoints.stores import STORES
from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning import render, request_rules
from cloudtrain.launcher.planning.request_rules import IMAGE, key_of, keys_of, listed, meant, part

from . import machine_types

Part = Mapping[str, Any]


class Violation(NamedTuple):
    """A fault, and its path in the job: `jobSpec.workerPoolSpecs[0].machineSpec.acceleratorCount`."""

    path: str
    message: str
    hint: str = ""
    is_warning: bool = False


# Source, unless a comment names a different page: the descriptions in the API's discovery document, revision 20261106,
# and docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/configure-compute.
MAX_POOLS = 4
MAX_NAME = 128
# Source: docs.cloud.google.com/vertex-ai/docs/training/containers-overview, step 4; 2026-11-30.
_REGISTRIES = r"((index|registry-1)\.)?docker\.io|([\w-]+\.)?gcr\.io|[\w-]+-docker\.pkg\.dev"
_ELSEWHERE = re.compile(rf"(?!({_REGISTRIES})/)([^/]*[.:][^/]*|localhost)/")
# Source: docs.cloud.google.com/resource-manager/docs/labels-overview.
MAX_LABELS, MAX_LABEL = 64, 63
# Source: the page "Schedule training jobs based on resource availability", training/schedule-jobs-dws.
MAX_FLEX_S = 7 * 86_400
FLEX_ACCELERATORS = (
    "NVIDIA_L4",
    "NVIDIA_TESLA_A100",
    "NVIDIA_A100_80GB",
    "NVIDIA_H100_80GB",
    "NVIDIA_H100_MEGA_80GB",
    "NVIDIA_H200_141GB",
    "NVIDIA_B200",
)
MAX_VARIABLES = MAX_PACKAGES = 100
DISK_GB = range(100, 64_001)
DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
HYPERDISK_ALONE = ("a3-ultragpu-", "a4-", "a4x-")
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
# Variables that Vertex sets in each replica. Source: the pages "Distributed training" and "Code requirements".
_VERTEXS_OWN = {"CLUSTER_SPEC", "TF_CONFIG", "CLOUD_ML_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
_MAX_ARGUMENT_BYTES = 131_072  # Linux's MAX_ARG_STRLEN, terminator included: with a longer argument no process starts

# Patterns of Google's names, to build further patterns with.
PROJECT = r"(?:(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+)"
REGION = r"[a-z]+-[a-z]+\d+"
ID = r"[a-zA-Z0-9_-]+"
BUCKET = f"gs://{STORES['gs'].bucket}"
_MACHINE = re.compile(r"[a-z][a-z0-9]*-[a-z0-9]+(-[a-z0-9]+)*")
_C_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
PREBUILT = re.compile(r"((us|europe|asia)-docker\.pkg\.dev/vertex-ai|gcr\.io/cloud-aiplatform)/training/.+")
_RESERVATION = re.compile(
    rf"projects/{PROJECT}/zones/{REGION}-[a-z]/reservations/{ID}"
    rf"(/reservationBlocks/{ID}(/reservationSubBlocks/{ID})?)?"
)
_SMALL_A3 = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
_IN_A_REGION = re.compile(rf"projects/[^/]+/(?:locations|regions|zones)/({REGION})(?:-[a-z])?(?:/|\Z)")

# For each field's path, the pattern of the whole value, and the same form in words.
_IN, _SAID = rf"projects/{PROJECT}/locations/{REGION}", "projects/PROJECT/locations/REGION"
_FORMS = {
    "encryptionSpec.kmsKeyName": (rf"{_IN}/keyRings/{ID}/cryptoKeys/{ID}", f"{_SAID}/keyRings/RING/cryptoKeys/KEY"),
    "jobSpec.serviceAccount": (
        r"[a-z0-9][a-z0-9-]*@([a-z0-9-]+\.)+gserviceaccount\.com",
        "NAME@PROJECT.iam.gserviceaccount.com",
    ),
    "jobSpec.network": (
        r"projects/\d+/global/networks/[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        "projects/NUMBER/global/networks/NAME, with the project's number and not its id",
    ),
    "jobSpec.tensorboard": (rf"{_IN}/tensorboards/{ID}", f"{_SAID}/tensorboards/ID"),
    "jobSpec.experiment": (rf"{_IN}/metadataStores/{ID}/contexts/{ID}", f"{_SAID}/metadataStores/STORE/contexts/NAME"),
    "jobSpec.baseOutputDirectory.outputUriPrefix": (rf"{BUCKET}(/.*)?", "gs://BUCKET/FOLDER"),
    "jobSpec.persistentResourceId": (r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and `-`, at most 63"),
    "jobSpec.protectedArtifactLocationId": (REGION, "a region, such as us-central1"),
    "jobSpec.pscInterfaceConfig.networkAttachment": (
        rf"(projects/{PROJECT}/regions/{REGION}/networkAttachments/)?[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?",
        "projects/PROJECT/regions/REGION/networkAttachments/NAME",
    ),
}
_FORMS["jobSpec.experimentRun"] = _FORMS["jobSpec.experiment"]

# How to fix a value that the table refuses, by the field's name.
_HINTS = {
    "acceleratorType": "update cloudtrain, if Google has a newer one",
    "timeout": "such as 43200s",
    "maxWaitDuration": "such as 7200s; 0s waits for ever",
    "labels": "only text: quote numbers, true and false",
    "env": "only text: quote numbers, true and false",
}


def faults(job: Any, location: str | None = None) -> Iterator[Fault]:
    """Yield the faults of a CustomJob, each under the config's key that sets the field, else under `vertex.raw`.

    `location`: the region of the job and of its resources; if None, all resources must lie in one region.
    """
    for path, message, hint, is_warning in violations(job, location):
        key = key_of(path, keys_of("vertex"), "vertex.raw")
        yield Fault(f"{path or 'the job'}: {message}", key, hint=hint, is_warning=is_warning)


def violations(job: Any, location: str | None = None) -> Iterator[Violation]:
    """Yield the violations with their paths; our rules add none at a path where the table has found a violation."""
    table = request_rules.read("vertex", "a CustomJob", "Google")
    found = request_rules.violations(table, job)
    in_table = [Violation(path, message, _hint(table, path, message), doubt) for path, message, doubt in found]
    yield from in_table
    if not isinstance(job, Mapping):
        return
    said = [each.path for each in in_table]
    for rules in (_names(job), _forms(job), _regions(job, location), _spec(part(job, "jobSpec"))):
        for each in rules:
            if not any(each.path == path or each.path.startswith((f"{path}.", f"{path}[")) for path in said):
                yield each


def _names(job: Part) -> Iterator[Violation]:
    name, labels = job.get("displayName"), part(job, "labels")
    hint = f"small letters, digits, `_` and `-`, a letter first; at most {MAX_LABEL}"
    if isinstance(name, str) and not 0 < len(name) <= MAX_NAME:
        yield Violation("displayName", f"{len(name)} characters, and Vertex keeps 1 to {MAX_NAME}", "shorten it")
    if len(labels) > MAX_LABELS:
        yield Violation("labels", f"{len(labels)} labels, and Google keeps {MAX_LABELS}", "leave some out")
    for key, value in labels.items():
        if not _is_label(str(key)) or not key or category(str(key)[0]) not in ("Ll", "Lo"):
            yield Violation(f"labels.{key}", f"`{str(key)[:80]}` is not a valid label key", hint)
        elif isinstance(value, str) and not _is_label(value):
            yield Violation(f"labels.{key}", f"`{value[:80]}` is not a valid label value", hint)


def _is_label(text: str) -> bool:
    """Return whether the text is legal in a label: lower-case letters of any script, digits, `_` and `-`."""
    return len(text) <= MAX_LABEL and all(each in "_-" or category(each) in ("Ll", "Lo", "Nd") for each in text)


def _forms(job: Part) -> Iterator[Violation]:
    for path, (pattern, said) in _FORMS.items():
        value = render.at(job, tuple(path.split(".")))
        if isinstance(value, str) and not re.fullmatch(pattern, value, re.DOTALL):
            yield Violation(path, f"`{value}` does not have the required form", said)


def _regions(job: Part, location: str | None) -> Iterator[Violation]:
    """Yield the resources outside the job's region, or outside the most frequent region if `location` is None."""
    places = {path: str(render.at(job, tuple(path.split(".")))) for path in _FORMS}
    for index, pool in enumerate(_mappings(part(job, "jobSpec"), "workerPoolSpecs")):
        for number, value in enumerate(listed(part(part(pool, "machineSpec"), "reservationAffinity"), "values")):
            at = f"jobSpec.workerPoolSpecs[{index}].machineSpec.reservationAffinity.values[{number}]"
            places[at] = str(value)
    found = {path: match[1] for path, value in places.items() if (match := _IN_A_REGION.match(value))}
    if not found:
        return
    here = location or Counter(found.values()).most_common(1)[0][0]
    for path, region in found.items():
        if region != here:
            whose = "the job" if location else "all else"
            yield Violation(path, f"is in {region}, and {whose} in {here}", "take one of the same region")


def _spec(spec: Part) -> Iterator[Violation]:
    at, pools = "jobSpec.workerPoolSpecs", spec.get("workerPoolSpecs")
    if isinstance(pools, list) and not 0 < len(pools) <= MAX_POOLS:
        yield Violation(at, f"{len(pools)} pools, and Vertex takes 1 to {MAX_POOLS}")
    for index, pool in enumerate(_mappings(spec, "workerPoolSpecs")):
        where = f"{at}[{index}]"
        yield from _pool(pool, index, where)
        yield from _provisioning(part(pool, "machineSpec"), spec, f"{where}.machineSpec")
        for kind in ("nfsMounts", "lustreMounts"):
            if pool.get(kind) and not (spec.get("network") or spec.get("pscInterfaceConfig")):
                yield Violation(f"{where}.{kind}", "needs a network that has the server", "set vertex.network")
    yield from _scheduling(spec)
    yield from _flex_start(spec)
    yield from _network(spec)
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        yield Violation("jobSpec.serviceAccount", "is required with a tensorboard", "set vertex.service_account")


def _scheduling(spec: Part) -> Iterator[Violation]:
    scheduling, at = part(spec, "scheduling"), "jobSpec.scheduling"
    timeout, strategy = _seconds(scheduling.get("timeout")), scheduling.get("strategy")
    if "timeout" not in scheduling:
        yield Violation(f"{at}.timeout", "without it a job runs, and costs, for 7 days", "set limits.max_duration")
    elif timeout is not None and timeout < 1:
        yield Violation(f"{at}.timeout", f"{timeout:g} s is too short", "raise limits.max_duration")
    elif timeout is not None and timeout > MAX_FLEX_S and strategy == "FLEX_START":
        message = f"{timeout:g} s is more than the 7 days that FLEX_START gives"
        yield Violation(f"{at}.timeout", message, "lower limits.max_duration")
    if "maxWaitDuration" in scheduling and strategy != "FLEX_START":
        yield Violation(f"{at}.maxWaitDuration", "is valid only with FLEX_START", "set vertex.scheduling: flex_start")


def _flex_start(spec: Part) -> Iterator[Violation]:
    if part(spec, "scheduling").get("strategy") != "FLEX_START":
        return
    machines = [dict(part(pool, "machineSpec")) for pool in _mappings(spec, "workerPoolSpecs")]
    for index, machine in enumerate(machines):
        machine.pop("reservationAffinity", None)  # FLEX_START excludes a reservation in every pool
        at = f"jobSpec.workerPoolSpecs[{index}].machineSpec"
        if index and machine != machines[0]:
            yield Violation(at, "FLEX_START needs one kind of machine in all pools", "as in the first pool")
        elif index == 0 and machine.get("acceleratorType") not in FLEX_ACCELERATORS:
            message = "FLEX_START has only machines with L4, A100, H100, H200 or B200"
            yield Violation("jobSpec.scheduling.strategy", message, "leave vertex.scheduling out")
    if spec.get("persistentResourceId"):
        message = "a persistent resource has its machines already, and FLEX_START waits for some"
        yield Violation("jobSpec.persistentResourceId", message, "keep one of the two")


def _network(spec: Part) -> Iterator[Violation]:
    psc, at = part(spec, "pscInterfaceConfig"), "jobSpec.pscInterfaceConfig"
    if spec.get("network") and "pscInterfaceConfig" in spec:
        yield Violation(at, "network and pscInterfaceConfig exclude each other", "keep one of them")
    elif "pscInterfaceConfig" in spec and not psc.get("networkAttachment"):
        yield Violation(f"{at}.networkAttachment", "is required", "set vertex.network_attachment")
    for number, peering in enumerate(_mappings(psc, "dnsPeeringConfigs")):
        domain = peering.get("domain")
        if isinstance(domain, str) and not re.fullmatch(r"([a-zA-Z0-9_-]+\.)+", domain):
            path = f"{at}.dnsPeeringConfigs[{number}].domain"
            yield Violation(path, f"`{domain}` is not a domain with a dot at its end", "such as corp.example.")
    if spec.get("reservedIpRanges") and not spec.get("network"):
        yield Violation("jobSpec.reservedIpRanges", "needs a network", "set vertex.network")


def _provisioning(machine: Part, spec: Part, at: str) -> Iterator[Violation]:
    """Yield the settings that a reservation excludes, and warnings about scarce machines.

    Source: the page "Use reservations with training", configure-compute, and Compute Engine's page on A3 machines.
    """
    strategy, kind = part(spec, "scheduling").get("strategy"), machine.get("machineType")
    affinity = part(machine, "reservationAffinity").get("reservationAffinityType")
    if affinity in ("ANY_RESERVATION", "SPECIFIC_RESERVATION") and strategy in ("SPOT", "FLEX_START"):
        message = f"{strategy} cannot use machines of a reservation"
        yield Violation(f"{at}.reservationAffinity", message, "keep one of the two")
    elif affinity in ("ANY_RESERVATION", "SPECIFIC_RESERVATION") and spec.get("persistentResourceId"):
        message = "a persistent resource has machines of its own"
        yield Violation(f"{at}.reservationAffinity", message, "keep one of the two")
    if machine.get("acceleratorType") == "NVIDIA_TESLA_P100":
        message = "Google's support of P100 ended on 2026-09-15"
        yield Violation(f"{at}.acceleratorType", message, "T4 or V100", is_warning=True)
    if kind in _SMALL_A3 and strategy not in ("SPOT", "FLEX_START"):
        message = f"{kind} is available only by spot and flex start"
        yield Violation(f"{at}.machineType", message, "set resources.spot, or vertex.scheduling", is_warning=True)
    if kind == "a4x-highgpu-4g" and "reservationAffinity" not in machine:
        yield Violation(f"{at}.machineType", f"{kind} is available only by reservation", "vertex.reservation", True)


def _pool(pool: Part, index: int, at: str) -> Iterator[Violation]:
    """Yield the violations of the pool with this index; `at` is the pool's path in the job."""
    if pool == {}:
        hint = "leave the pools at the end out" if index else "describe the first node"
        yield Violation(at, "the pool is empty, which gcloud refuses", hint)
        return
    yield from _replicas(pool, index, at)
    yield from _machine(part(pool, "machineSpec"), f"{at}.machineSpec")
    yield from _disk(pool, f"{at}.diskSpec")
    yield from _task(pool, at)
    for number, mount in enumerate(_mappings(pool, "nfsMounts")):
        path = mount.get("path")
        if isinstance(path, str) and not path.startswith("/"):
            yield Violation(f"{at}.nfsMounts[{number}].path", f"`{path}` does not begin with `/`", "the exported path")


def _replicas(pool: Part, index: int, at: str) -> Iterator[Violation]:
    count, path = pool.get("replicaCount"), f"{at}.replicaCount"
    if count is None:
        yield Violation(path, "is required", "say how many machines")
    elif index == 0 and str(count) != "1":
        yield Violation(path, f"{count}, and the first pool has 1 machine, always", "the others are pool 1's")
    elif re.fullmatch(r"0+|-\d+", str(count)):
        yield Violation(path, f"{count} machines run nothing", "leave the pool out")


def _machine(machine: Part, at: str) -> Iterator[Violation]:
    kind = machine.get("machineType")
    if kind is None:
        yield Violation(f"{at}.machineType", "is required", "set resources.instance_type")
    elif isinstance(kind, str) and not _MACHINE.fullmatch(kind):
        hint = "such as g2-standard-12 or a2-highgpu-8g"
        yield Violation(f"{at}.machineType", f"`{kind}` is not a Google machine type", hint)
    elif isinstance(kind, str) and kind.startswith(machine_types.TPU_FAMILIES):
        yield Violation(f"{at}.machineType", f"{kind} has TPUs, which cloudtrain does not support", "take GPUs")
    elif isinstance(kind, str):
        yield from _pair(machine, kind, at)
    if "tpuTopology" in machine:
        yield Violation(f"{at}.tpuTopology", "goes with TPUs, which cloudtrain does not support", "leave it out")
    if machine.get("gpuPartitionSize") and machine.get("acceleratorCount") != 1:
        yield Violation(f"{at}.gpuPartitionSize", "needs an acceleratorCount of 1", "leave it out")
    yield from _affinity(part(machine, "reservationAffinity"), f"{at}.reservationAffinity")


def _pair(machine: Part, kind: str, at: str) -> Iterator[Violation]:
    """Yield accelerators that do not match the machine."""
    word, count, fixed = machine.get("acceleratorType"), machine.get("acceleratorCount"), machine_types.FIXED.get(kind)
    at_type, at_count = f"{at}.acceleratorType", f"{at}.acceleratorCount"
    if kind not in machine_types.KNOWN:
        message = f"`{kind}` is not in our table of {machine_types.AS_OF}; Vertex may know it"
        yield Violation(f"{at}.machineType", message + meant(kind, machine_types.KNOWN), is_warning=True)
    if fixed is not None and word != fixed[0]:
        said = f"is required: {kind} has {fixed[0]}" if word is None else f"{kind} has {fixed[0]}, not {word}"
        yield Violation(at_type, said, f"set resources.accelerators, or acceleratorType: {fixed[0]}")
    elif fixed is not None and count != fixed[1]:
        yield Violation(at_count, f"{kind} has {fixed[1]} accelerators, not {count or 0}", f"{fixed[1]}")
    elif fixed is None and word is not None:
        yield from _attached(kind, str(word), count, at)
    elif fixed is None and count is not None:
        yield Violation(at_type, f"is required with an acceleratorCount of {count}", "say which accelerators")


def _attached(kind: str, word: str, count: Any, at: str) -> Iterator[Violation]:
    """Yield violations of accelerators on a machine without built-in accelerators, or on an unknown machine."""
    choices, at_count = machine_types.choices(kind), f"{at}.acceleratorCount"
    if machine_types.is_cpu(kind) and word not in choices:
        hint = f"it takes {', '.join(choices)}" if choices else "N1 machines take T4, V100, P100 and P4"
        yield Violation(f"{at}.acceleratorType", f"{kind} takes no {word}", hint)
    elif choices and count not in choices[word]:
        counts = ", ".join(map(str, choices[word]))
        yield Violation(at_count, f"{kind} takes {counts} of {word}, not {count or 0}", f"one of {counts}")
    elif not isinstance(count, int) or count < 1:
        yield Violation(at_count, f"{count or 0} of {word}: must be at least 1", "set resources.accelerators")


def _affinity(affinity: Part, at: str) -> Iterator[Violation]:
    key, values = affinity.get("key"), affinity.get("values")
    if affinity.get("reservationAffinityType") in ("ANY_RESERVATION", "NO_RESERVATION"):
        for name in affinity.keys() & {"key", "values"}:
            yield Violation(f"{at}.{name}", "is valid only with SPECIFIC_RESERVATION", "leave it out")
    if affinity.get("reservationAffinityType") != "SPECIFIC_RESERVATION":
        return
    if key != RESERVATION_KEY:
        said = "is required" if key is None else f"`{key}` names no reservation"
        yield Violation(f"{at}.key", said, RESERVATION_KEY)
    if not values:
        yield Violation(f"{at}.values", "is required: which reservation", "set vertex.reservation")
    for number, value in enumerate(listed(affinity, "values")):
        if isinstance(value, str) and not _RESERVATION.fullmatch(value):
            message = f"`{value}` does not have the required form"
            yield Violation(f"{at}.values[{number}]", message, "projects/PROJECT/zones/ZONE/reservations/NAME")


def _disk(pool: Part, at: str) -> Iterator[Violation]:
    disk, machine = part(pool, "diskSpec"), str(part(pool, "machineSpec").get("machineType"))
    kind, size = disk.get("bootDiskType"), disk.get("bootDiskSizeGb")
    if kind is not None and kind not in DISK_TYPES:
        yield Violation(f"{at}.bootDiskType", f"`{kind}` is not one of {', '.join(DISK_TYPES)}")
    elif kind in ("pd-ssd", "pd-standard") and machine.startswith(HYPERDISK_ALONE):
        yield Violation(f"{at}.bootDiskType", f"{machine} takes no {kind}", "hyperdisk-balanced")
    if isinstance(size, int) and size not in DISK_GB:
        message = f"{size} GB is not between {DISK_GB[0]} and {DISK_GB[-1]}"
        yield Violation(f"{at}.bootDiskSizeGb", message, "set resources.disk_gb")


def _task(pool: Part, at: str) -> Iterator[Violation]:
    tasks = [name for name in ("containerSpec", "pythonPackageSpec") if name in pool]
    if len(tasks) != 1:
        said = "and pythonPackageSpec exclude each other" if tasks else "or pythonPackageSpec is required"
        yield Violation(at, f"containerSpec {said}", "one of containerSpec and pythonPackageSpec")
    container, package = part(pool, "containerSpec"), part(pool, "pythonPackageSpec")
    image, executor, module = container.get("imageUri"), package.get("executorImageUri"), package.get("pythonModule")
    if isinstance(image, str) and not IMAGE.fullmatch(image):
        hint = "such as europe-docker.pkg.dev/my-project/images/train:1, without https://"
        yield Violation(f"{at}.containerSpec.imageUri", f"`{image}` is not a valid image name", hint)
    elif isinstance(image, str) and _ELSEWHERE.match(image):
        message = f"Vertex AI pulls from Artifact Registry and Docker Hub, and `{image}` is elsewhere"
        cure = "push the image to one of the two"
        yield Violation(f"{at}.containerSpec.imageUri", f"{message}: {cure}", is_warning=True)
    at_package = f"{at}.pythonPackageSpec"
    if isinstance(executor, str) and not (IMAGE.fullmatch(executor) and PREBUILT.fullmatch(executor)):
        message = f"`{executor}` is not one of Google's prebuilt images"
        hint = "us-docker.pkg.dev/vertex-ai/training/...; a containerSpec takes any image"
        yield Violation(f"{at_package}.executorImageUri", message, hint)
    if isinstance(module, str) and not all(_C_NAME.fullmatch(word) for word in module.split(".")):
        yield Violation(f"{at_package}.pythonModule", f"`{module}` is not a valid module name", "such as trainer.task")
    packages = package.get("packageUris")
    if isinstance(packages, list) and not 0 < len(packages) <= MAX_PACKAGES:
        message = f"{len(packages)} packages, and Vertex takes 1 to {MAX_PACKAGES}"
        yield Violation(f"{at_package}.packageUris", message)
    for number, uri in enumerate(listed(package, "packageUris")):
        if isinstance(uri, str) and not re.fullmatch(rf"{BUCKET}/.+", uri):
            message = f"`{uri}` is not a URI of Cloud Storage"
            yield Violation(f"{at_package}.packageUris[{number}]", message, "gs://BUCKET/FOLDER/FILE")
    for name in tasks:
        yield from _arguments(part(pool, name), f"{at}.{name}")


def _arguments(task: Part, at: str) -> Iterator[Violation]:
    """Yield arguments too long to start a process, and variables that are illegal, repeated or set by Vertex."""
    for kind in ("command", "args"):
        for number, word in enumerate(listed(task, kind)):
            if len(str(word).encode(errors="replace")) >= _MAX_ARGUMENT_BYTES:
                message = f"Linux starts nothing with an argument of {_MAX_ARGUMENT_BYTES} bytes"
                yield Violation(f"{at}.{kind}[{number}]", message, "put it into a file of the code folder")
    variables, seen = _mappings(task, "env"), set()
    if len(variables) > MAX_VARIABLES:
        hint = "put some into a file of the code folder"
        yield Violation(f"{at}.env", f"{len(variables)} variables, and Vertex takes {MAX_VARIABLES}", hint)
    for number, variable in enumerate(variables):
        here, name = f"{at}.env[{number}]", variable.get("name")
        if not isinstance(name, str):
            continue
        if not _C_NAME.fullmatch(name):
            yield Violation(f"{here}.name", f"`{name}` is not a valid variable name", "letters, digits and `_`")
        elif name in seen:
            yield Violation(f"{here}.name", f"{name} is listed twice", "keep one of them")
        elif name in _VERTEXS_OWN or name.startswith("AIP_"):
            yield Violation(f"{here}.name", f"Vertex sets {name} itself, in each replica its own", "leave it out")
        seen.add(name)
        if len(f"{name}={variable.get('value')}".encode(errors="replace")) >= _MAX_ARGUMENT_BYTES:
            message = f"Linux starts nothing with a variable of {_MAX_ARGUMENT_BYTES} bytes"
            yield Violation(f"{here}.value", message, "put it into a file of the code folder")


def _hint(table: request_rules.Table, path: str, message: str) -> str:
    """Return how to fix a violation: the path where a misplaced field belongs, or a value that the field takes."""
    name = re.sub(r"\[\d+\]", "", path).rpartition(".")[2]
    if "did you mean" not in message and message.startswith("is not a field"):
        places = [where for where in _places(table, table.root, "") if where.endswith(f".{name}") or where == name]
        return f"it belongs at {places[0]}" if places else ""
    return next((hint for field, hint in _HINTS.items() if field in re.split(r"[.\[]", path)), "")


def _places(table: request_rules.Table, shape: str, path: str) -> Iterator[str]:
    """Yield the path of every field that a job may have."""
    for name, rule in table.shapes[shape]["members"].items():
        where = f"{path}.{name}" if path else name
        yield where
        below, mark = (rule["of"], "[]") if isinstance(rule, dict) and rule["type"] == "list" else (rule, "")
        if isinstance(below, str) and "members" in table.shapes.get(below, {}):
            yield from _places(table, below, where + mark)


def _seconds(text: Any) -> float | None:
    return float(text[:-1]) if isinstance(text, str) and re.fullmatch(r"\d+(\.\d+)?s", text) else None


def _mappings(whole: Part, name: str) -> list[Part]:
    """Return the items of the list of this name, an empty mapping for an item that is no mapping."""
    return [item if isinstance(item, Mapping) else {} for item in listed(whole, name)]
