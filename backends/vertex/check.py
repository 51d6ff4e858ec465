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
from typing import Any
from unicodedata import category

from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning import render, request_rules
from cloudtrain.launcher.planning.request_rules import key_of, listed, part

from . import check_pool
from .check_pool import BUCKET, ID, PROJECT, REGION, Part, Violation, mapped

# Source: the descriptions in the API's discovery document, revision 20261106.
MAX_POOLS = 4
MAX_NAME = 128
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
_SMALL_A3 = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
_IN_A_REGION = re.compile(rf"projects/[^/]+/(?:locations|regions|zones)/({REGION})(?:-[a-z])?(?:/|\Z)")

# For each field's path, the pattern of the whole value, and the same form in words.
_FORMS = {
    "encryptionSpec.kmsKeyName": (
        rf"projects/{PROJECT}/locations/{REGION}/keyRings/{ID}/cryptoKeys/{ID}",
        "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY",
    ),
    "jobSpec.serviceAccount": (
        r"[a-z0-9][a-z0-9-]*@([a-z0-9-]+\.)+gserviceaccount\.com",
        "NAME@PROJECT.iam.gserviceaccount.com",
    ),
    "jobSpec.network": (
        r"projects/\d+/global/networks/[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        "projects/NUMBER/global/networks/NAME, with the project's number and not its id",
    ),
    "jobSpec.tensorboard": (
        rf"projects/{PROJECT}/locations/{REGION}/tensorboards/{ID}",
        "projects/PROJECT/locations/REGION/tensorboards/ID",
    ),
    "jobSpec.experiment": (
        rf"projects/{PROJECT}/locations/{REGION}/metadataStores/{ID}/contexts/{ID}",
        "projects/PROJECT/locations/REGION/metadataStores/STORE/contexts/NAME",
    ),
    "jobSpec.baseOutputDirectory.outputUriPrefix": (rf"{BUCKET}(/.*)?", "gs://BUCKET/FOLDER"),
    "jobSpec.persistentResourceId": (r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "small letters, digits and `-`, at most 63"),
    "jobSpec.protectedArtifactLocationId": (REGION, "a region, such as us-central1"),
    "jobSpec.pscInterfaceConfig.networkAttachment": (
        rf"(projects/{PROJECT}/regions/{REGION}/networkAttachments/)?[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?",
        "projects/PROJECT/regions/REGION/networkAttachments/NAME",
    ),
}
_FORMS["jobSpec.experimentRun"] = _FORMS["jobSpec.experiment"]

# For each part of the job, the key in the config that sets the part. Longest paths first; pools have no number here.
_KEYS = {
    "displayName": "name",
    "labels": "tags",
    "encryptionSpec": "vertex.kms_key",
    "jobSpec.workerPoolSpecs.replicaCount": "resources.instances",
    "jobSpec.workerPoolSpecs.machineSpec.machineType": "resources.instance_type",
    "jobSpec.workerPoolSpecs.machineSpec.acceleratorType": "resources.accelerators",
    "jobSpec.workerPoolSpecs.machineSpec.acceleratorCount": "resources.accelerators",
    "jobSpec.workerPoolSpecs.machineSpec.reservationAffinity": "vertex.reservation",
    "jobSpec.workerPoolSpecs.diskSpec.bootDiskSizeGb": "resources.disk_gb",
    "jobSpec.workerPoolSpecs.diskSpec.bootDiskType": "vertex.boot_disk_type",
    "jobSpec.workerPoolSpecs.containerSpec.imageUri": "image",
    "jobSpec.workerPoolSpecs.containerSpec.env": "env",
    "jobSpec.workerPoolSpecs.pythonPackageSpec.executorImageUri": "image",
    "jobSpec.workerPoolSpecs.pythonPackageSpec.env": "env",
    "jobSpec.scheduling.timeout": "limits.max_duration",
    "jobSpec.scheduling.maxWaitDuration": "limits.max_wait",
    "jobSpec.scheduling.strategy": "vertex.scheduling",
    "jobSpec.serviceAccount": "vertex.service_account",
    "jobSpec.network": "vertex.network",
    "jobSpec.pscInterfaceConfig": "vertex.network_attachment",
    "jobSpec.baseOutputDirectory": "vertex.staging_bucket",
    "jobSpec.tensorboard": "vertex.tensorboard",
    "jobSpec.persistentResourceId": "vertex.persistent_resource",
    "jobSpec.enableWebAccess": "vertex.web_access",
}
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
        key = key_of(path, _KEYS, "vertex.raw")
        yield Fault(f"{path or 'the job'}: {message}", key, hint=hint, is_warning=is_warning)


def violations(job: Any, location: str | None = None) -> Iterator[Violation]:
    """Yield the violations with their paths; our rules add none at a path where the table has found a violation."""
    table = request_rules.read("vertex", "a CustomJob", "Google")
    in_table = [
        Violation(*found[:2], _hint(table, *found[:2]), found[2]) for found in request_rules.violations(table, job)
    ]
    yield from in_table
    if not isinstance(job, Mapping):
        return
    said = [each.path for each in in_table]
    for rules in (_names(job), _labels(job), _forms(job), _regions(job, location), _spec(part(job, "jobSpec"))):
        for each in rules:
            if not any(each.path == path or each.path.startswith((f"{path}.", f"{path}[")) for path in said):
                yield each


def _names(job: Part) -> Iterator[Violation]:
    name = job.get("displayName")
    if isinstance(name, str) and not 0 < len(name) <= MAX_NAME:
        yield Violation("displayName", f"{len(name)} characters, and Vertex keeps 1 to {MAX_NAME}", "shorten it")


def _labels(job: Part) -> Iterator[Violation]:
    labels, hint = part(job, "labels"), "small letters, digits, `_` and `-`, a letter first"
    if len(labels) > MAX_LABELS:
        yield Violation("labels", f"{len(labels)} labels, and Google keeps {MAX_LABELS}", "leave some out")
    for key, value in labels.items():
        if not _is_label(str(key)) or not key or category(str(key)[0]) not in ("Ll", "Lo"):
            yield Violation(
                f"labels.{key}", f"`{str(key)[:80]}` is not a valid label key", f"{hint}; at most {MAX_LABEL}"
            )
        elif isinstance(value, str) and not _is_label(value):
            yield Violation(
                f"labels.{key}", f"`{value[:80]}` is not a valid label value", f"{hint}; at most {MAX_LABEL}"
            )


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
    for index, pool in enumerate(_pools(part(job, "jobSpec"))):
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
    for index, pool in enumerate(_pools(spec)):
        where = f"{at}[{index}]"
        yield from check_pool.violations(pool, index, where)
        for kind in ("nfsMounts", "lustreMounts"):
            if pool.get(kind) and not (spec.get("network") or spec.get("pscInterfaceConfig")):
                yield Violation(f"{where}.{kind}", "needs a network that has the server", "set vertex.network")
    yield from _reservations(spec)
    yield from _scheduling(spec)
    yield from _flex_start(spec)
    yield from _network(spec)
    yield from _doubts(spec)
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        yield Violation("jobSpec.serviceAccount", "is required with a tensorboard", "set vertex.service_account")


def _reservations(spec: Part) -> Iterator[Violation]:
    """Yield the settings that a reservation excludes. Source: the page "Use reservations with training"."""
    strategy = part(spec, "scheduling").get("strategy")
    for index, pool in enumerate(_pools(spec)):
        kind = part(part(pool, "machineSpec"), "reservationAffinity").get("reservationAffinityType")
        if kind not in ("ANY_RESERVATION", "SPECIFIC_RESERVATION"):
            continue
        at = f"jobSpec.workerPoolSpecs[{index}].machineSpec.reservationAffinity"
        if strategy in ("SPOT", "FLEX_START"):
            yield Violation(at, f"{strategy} cannot use machines of a reservation", "keep one of the two")
        elif spec.get("persistentResourceId"):
            yield Violation(at, "a persistent resource has machines of its own", "keep one of the two")


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
    machines = [dict(part(pool, "machineSpec")) for pool in _pools(spec)]
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
    for number, peering in enumerate(listed(psc, "dnsPeeringConfigs")):
        domain = mapped(peering).get("domain")
        if isinstance(domain, str) and not re.fullmatch(r"([a-zA-Z0-9_-]+\.)+", domain):
            path = f"{at}.dnsPeeringConfigs[{number}].domain"
            yield Violation(path, f"`{domain}` is not a domain with a dot at its end", "such as corp.example.")
    if spec.get("reservedIpRanges") and not spec.get("network"):
        yield Violation("jobSpec.reservedIpRanges", "needs a network", "set vertex.network")


def _doubts(spec: Part) -> Iterator[Violation]:
    """Yield warnings about scarce machines. Source: configure-compute, and Compute Engine's page on A3 machines."""
    strategy = part(spec, "scheduling").get("strategy")
    for index, pool in enumerate(_pools(spec)):
        machine, at = part(pool, "machineSpec"), f"jobSpec.workerPoolSpecs[{index}].machineSpec"
        kind, is_reserved = machine.get("machineType"), "reservationAffinity" in machine
        if machine.get("acceleratorType") == "NVIDIA_TESLA_P100":
            message = "Google's support of P100 ended on 2026-09-15"
            yield Violation(f"{at}.acceleratorType", message, "T4 or V100", is_warning=True)
        if kind in _SMALL_A3 and strategy not in ("SPOT", "FLEX_START"):
            message = f"{kind} is available only by spot and flex start"
            yield Violation(f"{at}.machineType", message, "set resources.spot, or vertex.scheduling", is_warning=True)
        if kind == "a4x-highgpu-4g" and not is_reserved:
            yield Violation(f"{at}.machineType", f"{kind} is available only by reservation", "vertex.reservation", True)


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


def _pools(spec: Part) -> list[Part]:
    return [pool if isinstance(pool, Mapping) else {"": pool} for pool in listed(spec, "workerPoolSpecs")]
