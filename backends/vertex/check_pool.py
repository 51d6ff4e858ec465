"""Faults for which Vertex AI would refuse one worker pool of a custom job: its machines, its disk, its task.

Source, unless a comment names a different page: the descriptions in the API's discovery document, revision 20261106,
and docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/configure-compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain.launcher.planning.request_rules import IMAGE, listed, meant, part

from . import machine_types

Part = Mapping[str, Any]


class Violation(NamedTuple):
    """A fault, and its path in the job: `jobSpec.workerPoolSpecs[0].machineSpec.acceleratorCount`."""

    path: str
    message: str
    hint: str = ""
    is_warning: bool = False


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
BUCKET = r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_MACHINE = re.compile(r"[a-z][a-z0-9]*-[a-z0-9]+(-[a-z0-9]+)*")
_C_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PREBUILT = re.compile(r"((us|europe|asia)-docker\.pkg\.dev/vertex-ai|gcr\.io/cloud-aiplatform)/training/.+")
_RESERVATION = re.compile(
    rf"projects/{PROJECT}/zones/{REGION}-[a-z]/reservations/{ID}"
    rf"(/reservationBlocks/{ID}(/reservationSubBlocks/{ID})?)?"
)


def violations(pool: Part, index: int, at: str) -> Iterator[Violation]:
    """Yield the violations of the pool with this index; `at` is the pool's path in the job."""
    if pool == {}:
        hint = "leave the pools at the end out" if index else "describe the first node"
        yield Violation(at, "the pool is empty, which gcloud refuses", hint)
        return
    yield from _replicas(pool, index, at)
    yield from _machine(part(pool, "machineSpec"), f"{at}.machineSpec")
    yield from _disk(pool, f"{at}.diskSpec")
    yield from _task(pool, at)
    for number, mount in enumerate(listed(pool, "nfsMounts")):
        path = mapped(mount).get("path")
        if isinstance(path, str) and not path.startswith("/"):
            yield Violation(f"{at}.nfsMounts[{number}].path", f"`{path}` does not begin with `/`", "the exported path")


def mapped(found: Any) -> Part:
    """Return `found` if `found` is a mapping, else an empty mapping."""
    return found if isinstance(found, Mapping) else {}


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
    elif isinstance(kind, str) and machine_types.is_tpu(kind):
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
    word, count, fixed = machine.get("acceleratorType"), machine.get("acceleratorCount"), machine_types.fixed(kind)
    at_type, at_count = f"{at}.acceleratorType", f"{at}.acceleratorCount"
    if not machine_types.is_known(kind):
        message = f"`{kind}` is not in our table of {machine_types.AS_OF}; Vertex may know it"
        yield Violation(f"{at}.machineType", message + meant(kind, machine_types.known()), is_warning=True)
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
    choices = machine_types.choices(kind)
    if machine_types.is_cpu(kind) and word not in choices:
        hint = f"it takes {', '.join(choices)}" if choices else "N1 machines take T4, V100, P100 and P4"
        yield Violation(f"{at}.acceleratorType", f"{kind} takes no {word}", hint)
    elif choices and count not in choices[word]:
        counts = ", ".join(map(str, choices[word]))
        message = f"{kind} takes {counts} of {word}, not {count or 0}"
        yield Violation(f"{at}.acceleratorCount", message, f"one of {counts}")
    elif not isinstance(count, int) or count < 1:
        yield Violation(
            f"{at}.acceleratorCount", f"{count or 0} of {word}: must be at least 1", "set resources.accelerators"
        )


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
        said = (
            "containerSpec and pythonPackageSpec exclude each other"
            if tasks
            else "containerSpec or pythonPackageSpec is required"
        )
        yield Violation(at, said, "one of containerSpec and pythonPackageSpec")
    container, package = part(pool, "containerSpec"), part(pool, "pythonPackageSpec")
    image, executor, module = container.get("imageUri"), package.get("executorImageUri"), package.get("pythonModule")
    if isinstance(image, str) and not IMAGE.fullmatch(image):
        hint = "such as europe-docker.pkg.dev/my-project/images/train:1, without https://"
        yield Violation(f"{at}.containerSpec.imageUri", f"`{image}` is not a valid image name", hint)
    at_package = f"{at}.pythonPackageSpec"
    if isinstance(executor, str) and not (IMAGE.fullmatch(executor) and _PREBUILT.fullmatch(executor)):
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
    variables, seen = listed(task, "env"), set()
    if len(variables) > MAX_VARIABLES:
        hint = "put some into a file of the code folder"
        yield Violation(f"{at}.env", f"{len(variables)} variables, and Vertex takes {MAX_VARIABLES}", hint)
    for number, variable in enumerate(variables):
        here, name = f"{at}.env[{number}]", mapped(variable).get("name")
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
