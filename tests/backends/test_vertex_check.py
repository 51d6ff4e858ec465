"""Vertex AI's custom jobs, checked offline: against Google's description of the API, and Google's own parser."""

import copy
import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import googleapiclient
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.backends.vertex import check, machine_types
from cloudtrain.launcher.planning import request_rules

ROOT = Path(__file__).resolve().parents[2]
KEY = "projects/my-project/locations/europe-west4/keyRings/ring/cryptoKeys/key"
BOARD = "projects/12345/locations/europe-west4/tensorboards/678"
ACCOUNT = "train@my-project.iam.gserviceaccount.com"
RESERVATION = "projects/my-project/zones/europe-west4-b/reservations/mine"
ATTACHMENT = "projects/my-project/regions/europe-west4/networkAttachments/mine"
RESERVED = {
    "reservationAffinityType": "SPECIFIC_RESERVATION",
    "key": "compute.googleapis.com/reservation-name",
    "values": [RESERVATION],
}
PACKAGE = {
    "executorImageUri": "us-docker.pkg.dev/vertex-ai/training/pytorch-gpu.2-4.py310:latest",
    "packageUris": ["gs://my-bucket/code/boot-1-py3-none-any.whl"],
    "pythonModule": "cloudtrain_boot.run",
    "args": ["gs://my-bucket/code"],
    "env": [{"name": "A", "value": ""}],
}
CONTAINER = {
    "imageUri": "docker.io/pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime",
    "command": ["python3", "-u", "-c", "print('é')"],
    "args": ["gs://my-bucket/code/bundle.tar.gz"],
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "A", "value": "1"}],
}
MACHINE = {"machineType": "a2-highgpu-8g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 8}
TPU = {"machineType": "cloud-tpu", "acceleratorType": "TPU_V3", "acceleratorCount": 8}
PSC = {"networkAttachment": ATTACHMENT}
DNS = {"domain": "corp.example.", "targetProject": "my-project", "targetNetwork": "default"}
NFS = {"server": "10.0.0.2", "path": "/data", "mountPoint": "data"}
LUSTRE = {"instanceIp": "10.0.0.3", "volumeHandle": "h", "filesystem": "f", "mountPoint": "m"}
POOL, POOL1 = "jobSpec.workerPoolSpecs[0]", "jobSpec.workerPoolSpecs[1]"
FLEX = {"timeout": "604800s", "strategy": "FLEX_START", "maxWaitDuration": "7200s"}


def _pool(count: Any) -> dict[str, Any]:
    disk = {"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200}
    return {"replicaCount": count, "machineSpec": MACHINE, "diskSpec": disk, "containerSpec": CONTAINER}


NODES: dict[str, Any] = {
    "displayName": "digits-abcde-1",
    "labels": {"cloudtrain_run": "digits-abcde-1", "team": "vision", "état": "été_1", "empty": ""},
    "encryptionSpec": {"kmsKeyName": KEY},
    "jobSpec": {
        "workerPoolSpecs": [_pool(1), _pool("3")],
        "scheduling": {"timeout": "43200s", "restartJobOnWorkerRestart": True},
        "serviceAccount": ACCOUNT,
        "network": "projects/12345/global/networks/default",
        "reservedIpRanges": ["vertex-range"],
        "baseOutputDirectory": {"outputUriPrefix": "gs://my-bucket/cloudtrain/jobs/digits-abcde"},
        "tensorboard": BOARD,
        "enableWebAccess": True,
    },
}


def _changed(job: dict[str, Any], *changes: tuple[str, Any]) -> dict[str, Any]:
    """Return the job with values set at paths in the check's notation, or removed for the value `...`."""
    job = json.loads(json.dumps(job))  # unlike a deep copy, pools share no objects
    for path, value in changes:
        *parents, last = (int(name) if name.isdigit() else name for name in re.findall(r"[^.\[\]]+", path))
        node: Any = job
        for name in parents:
            node = node[name] if isinstance(name, int) else node.setdefault(name, {})
        if value is ...:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return job


def _on(machine: dict[str, Any], **disk: Any) -> list[tuple[str, Any]]:
    """Return the changes that put both pools on the machine."""
    both = [(f"{pool}.machineSpec", machine) for pool in (POOL, POOL1)]
    return both + [(f"{pool}.diskSpec", disk) for pool in (POOL, POOL1)]


L4 = {"machineType": "g2-standard-24", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 2}
B200 = {"machineType": "a4-highgpu-8g", "acceleratorType": "NVIDIA_B200", "acceleratorCount": 8}
T4 = {"machineType": "n1-standard-16", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 4}
FROM_PSC = [("jobSpec.network", ...), ("jobSpec.reservedIpRanges", ...), ("jobSpec.pscInterfaceConfig", PSC)]
# Jobs that Vertex AI accepts, one for each form that we render or that `raw` may add.
GOOD: dict[str, dict[str, Any]] = {
    "nodes": NODES,
    "cpu": {
        "displayName": "Ziffern, erster Versuch",
        "jobSpec": {
            "workerPoolSpecs": [
                {
                    "replicaCount": "1",
                    "machineSpec": {"machineType": "n2-highmem-8"},
                    "containerSpec": {"imageUri": "europe-docker.pkg.dev/my-project/images/train@sha256:" + "0a" * 32},
                }
            ],
            "scheduling": {"timeout": "0000090.500000000s"},
        },
    },
    "t4": _changed(NODES, *_on(T4)),
    "n1 without": _changed(NODES, *_on({"machineType": "n1-highmem-2"})),
    "flex": _changed(NODES, *_on(L4), ("jobSpec.scheduling", FLEX)),
    "flex for ever": _changed(NODES, ("jobSpec.scheduling", {**FLEX, "maxWaitDuration": "0s"})),
    "spot": _changed(NODES, ("jobSpec.scheduling.strategy", "SPOT"), ("jobSpec.scheduling.disableRetries", True)),
    "reserved": _changed(NODES, *_on({**MACHINE, "reservationAffinity": RESERVED})),
    "any": _changed(NODES, *_on({**MACHINE, "reservationAffinity": {"reservationAffinityType": "ANY_RESERVATION"}})),
    "blackwell": _changed(NODES, *_on(B200, bootDiskType="hyperdisk-balanced", bootDiskSizeGb=64_000)),
    "psc": _changed(NODES, *FROM_PSC, ("jobSpec.pscInterfaceConfig.dnsPeeringConfigs", [DNS])),
    "package": _changed(NODES, *((f"{p}.{k}", v) for p in (POOL, POOL1) for k, v in [("containerSpec", ...)])),
    "pool": _changed(NODES, ("jobSpec.persistentResourceId", "pool-1"), ("jobSpec.scheduling.strategy", "STANDARD")),
    "reduction": _changed(
        NODES,
        ("jobSpec.workerPoolSpecs", [*NODES["jobSpec"]["workerPoolSpecs"], {**_pool(4), "machineSpec": {}}]),
        ("jobSpec.workerPoolSpecs[2].machineSpec.machineType", "n1-highcpu-16"),
    ),
    "raw": _changed(
        NODES,
        (f"{POOL}.nfsMounts", [NFS]),
        (f"{POOL}.lustreMounts", [LUSTRE]),
        ("jobSpec.experiment", "projects/p-12345/locations/europe-west4/metadataStores/default/contexts/mine"),
        ("jobSpec.models", ["projects/p/locations/r/models/m@2"]),
        ("jobSpec.protectedArtifactLocationId", "us-central1"),
        ("jobSpec.enableDashboardAccess", False),
    ),
}
for _path in (POOL, POOL1):
    GOOD["package"] = _changed(GOOD["package"], (f"{_path}.pythonPackageSpec", PACKAGE))

VARIABLES = [{"name": f"A{number}", "value": "x"} for number in range(101)]
SPEC = NODES["jobSpec"]
# Jobs that Vertex AI, its client or gcloud refuses, or that would run wrongly: the good job, the change, the fault's
# place if different, and the fault's words.
BROKEN: list[tuple[str, str, Any, str, str]] = [
    # keys: unknown, misplaced, in Python's spelling, set only by Google
    ("nodes", "displayname", "x", "", "did you mean `displayName`?"),
    ("nodes", "display_name", "x", "", "is not a field of a CustomJob; did you mean `displayName`?"),
    ("nodes", f"{POOL}.machine_spec", MACHINE, "", "did you mean `machineSpec`?"),
    ("nodes", f"{POOL}.machineSpec.accelerator_count", 8, "", "did you mean `acceleratorCount`?"),
    ("nodes", "jobSpec.scheduling.restart_job_on_worker_restart", True, "", "did you mean `restartJobOnWorker"),
    ("nodes", "workerPoolSpecs", SPEC["workerPoolSpecs"], "", "is not a field of a CustomJob"),
    ("nodes", "jobSpec.displayName", "x", "", "is not a field of a CustomJob"),
    ("nodes", "jobSpec.labels", {"a": "b"}, "", "is not a field of a CustomJob"),
    ("nodes", "jobSpec.jobSpec", SPEC, "", "is not a field of a CustomJob"),
    ("nodes", "jobSpec.timeout", "3600s", "", "is not a field of a CustomJob"),
    ("nodes", f"{POOL}.imageUri", "x:1", "", "is not a field of a CustomJob"),
    ("nodes", f"{POOL}.machineType", "n1-standard-4", "", "is not a field of a CustomJob"),
    ("nodes", "jobSpec.scheduling.maxRetryCount", 3, "", "is not a field of a CustomJob"),
    ("nodes", "name", "projects/1/locations/r/customJobs/2", "", "is set by Google"),
    ("nodes", "state", "JOB_STATE_PENDING", "", "is set by Google"),
    ("nodes", "createTime", "2026-11-22T00:00:00Z", "", "is set by Google"),
    ("nodes", "error", {"code": 3}, "", "is set by Google"),
    ("nodes", "webAccessUris", {}, "", "is set by Google"),
    # required fields
    ("nodes", "displayName", ..., "", "is required"),
    ("nodes", "jobSpec", ..., "", "is required"),
    ("nodes", "jobSpec.workerPoolSpecs", ..., "", "is required"),
    ("nodes", f"{POOL}.containerSpec.imageUri", ..., "", "is required"),
    ("nodes", f"{POOL}.containerSpec.env[0].value", ..., "", "is required"),
    ("nodes", f"{POOL}.machineSpec", ..., f"{POOL}.machineSpec.machineType", "is required"),
    ("nodes", f"{POOL}.machineSpec.machineType", ..., "", "is required"),
    ("nodes", f"{POOL}.replicaCount", ..., "", "is required"),
    ("nodes", "encryptionSpec", {}, "encryptionSpec.kmsKeyName", "is required"),
    ("nodes", "jobSpec.baseOutputDirectory", {}, "jobSpec.baseOutputDirectory.outputUriPrefix", "is required"),
    ("nodes", "jobSpec.scheduling.timeout", ..., "", "costs, for 7 days"),
    ("nodes", "jobSpec.scheduling", ..., "jobSpec.scheduling.timeout", "costs, for 7 days"),
    ("package", f"{POOL}.pythonPackageSpec.pythonModule", ..., "", "is required"),
    ("package", f"{POOL}.pythonPackageSpec.packageUris", ..., "", "is required"),
    ("psc", "jobSpec.pscInterfaceConfig", {}, "jobSpec.pscInterfaceConfig.networkAttachment", "is required"),
    ("raw", f"{POOL}.nfsMounts[0].server", ..., "", "is required"),
    # types
    ("nodes", "displayName", 7, "", "expected a string, found 7"),
    ("nodes", "displayName", None, "", "expected a string, found null"),
    ("nodes", "labels.team", 1, "", "expected a string, found 1"),
    ("nodes", "labels", ["team"], "", "expected a mapping"),
    ("nodes", "jobSpec", [], "", "expected a mapping, found []"),
    ("nodes", "jobSpec.workerPoolSpecs", {"machineSpec": MACHINE}, "", "expected a list"),
    ("nodes", POOL1, "x", "", "expected a mapping"),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", "eight", "", 'expected an integer, found "eight"'),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", 8.5, "", "expected an integer, found 8.5"),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", 2**31, "", "is more than 2147483647"),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", True, "", "expected an integer, found true"),
    ("nodes", f"{POOL1}.replicaCount", "three", "", "`three` is not a valid whole number"),
    ("nodes", f"{POOL1}.replicaCount", 1.5, "", "expected an integer"),
    ("nodes", f"{POOL}.containerSpec.command", "python train.py", "", "expected a list"),
    ("nodes", f"{POOL}.containerSpec.args[0]", 5, "", "expected a string, found 5"),
    ("nodes", f"{POOL}.containerSpec.env", {"A": "1"}, "", "expected a list"),
    ("nodes", f"{POOL}.containerSpec.env[0].value", 1, "", "expected a string, found 1"),
    ("nodes", "jobSpec.scheduling.restartJobOnWorkerRestart", "true", "", "expected true or false"),
    ("nodes", "jobSpec.scheduling.disableRetries", 1, "", "expected true or false"),
    ("nodes", "jobSpec.enableWebAccess", "yes", "", "expected true or false"),
    ("nodes", "jobSpec.scheduling.timeout", 43_200, "", "expected a string, found 43200"),
    ("nodes", "jobSpec.scheduling.timeout", "12h", "", "`12h` is not a valid duration in seconds"),
    ("nodes", "jobSpec.scheduling.timeout", "PT12H", "", "is not a valid duration in seconds"),
    ("nodes", "jobSpec.scheduling.timeout", "43200", "", "is not a valid duration in seconds"),
    ("nodes", "jobSpec.scheduling.timeout", "-5s", "", "is not a valid duration in seconds"),
    ("nodes", "jobSpec.scheduling.timeout", "1.0123456789s", "", "is not a valid duration in seconds"),
    # enum values
    ("nodes", "jobSpec.scheduling.strategy", "PREEMPTIBLE", "", "is not one of STANDARD, SPOT, FLEX_START"),
    ("nodes", "jobSpec.scheduling.strategy", "spot", "", "did you mean `SPOT`?"),
    ("nodes", "jobSpec.scheduling.strategy", 4, "", "expected a string, found 4"),
    ("nodes", "jobSpec.scheduling.strategy", "STRATEGY_UNSPECIFIED", "", "is not one of"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_A100", "", "`NVIDIA_A100` is not one of"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", "nvidia-tesla-a100", "", "did you mean `NVIDIA_TESLA_A100`?"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_TESLA_K80", "", "is not one of"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", "TPU_V6E", "", "is not one of"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.reservationAffinityType", "SPECIFIC", "", "is not one of"),
    # names and labels
    ("nodes", "displayName", "", "", "0 characters, and Vertex keeps 1 to 128"),
    ("nodes", "displayName", "x" * 129, "", "129 characters"),
    ("nodes", "labels.Team", "x", "", "`Team` is not a valid label key"),
    ("nodes", "labels.1st", "x", "", "`1st` is not a valid label key"),
    ("nodes", "labels.team", "Computer Vision", "", "is not a valid label value"),
    ("nodes", "labels.team", "É", "", "is not a valid label value"),
    ("nodes", "labels.team", "x" * 64, "", "is not a valid label value"),
    ("nodes", "labels." + "x" * 64, "x", "", "is not a valid label key"),
    ("nodes", "labels", {f"a{number}": "x" for number in range(65)}, "", "65 labels, and Google keeps 64"),
    # pools
    ("nodes", "jobSpec.workerPoolSpecs", [], "", "0 pools, and Vertex takes 1 to 4"),
    ("nodes", "jobSpec.workerPoolSpecs", [_pool(1)] * 5, "", "5 pools"),
    ("nodes", f"{POOL}.replicaCount", 4, "", "the first pool has 1 machine, always"),
    ("nodes", f"{POOL}.replicaCount", "0", "", "the first pool has 1 machine, always"),
    ("nodes", f"{POOL1}.replicaCount", 0, "", "0 machines run nothing"),
    ("nodes", f"{POOL1}.replicaCount", "-1", "", "-1 machines run nothing"),
    ("nodes", POOL1, {}, "", "the pool is empty, which gcloud refuses"),
    ("nodes", f"{POOL}.containerSpec", ..., POOL, "containerSpec or pythonPackageSpec is required"),
    ("nodes", f"{POOL}.pythonPackageSpec", PACKAGE, POOL, "exclude each other"),
    # machines
    ("nodes", f"{POOL}.machineSpec.machineType", "A100:8", "", "is not a Google machine type"),
    ("cpu", f"{POOL}.machineSpec.machineType", "Standard_D4", "", "is not a Google machine type"),
    ("cpu", f"{POOL}.machineSpec.machineType", "MACHINE_TYPE", "", "is not a Google machine type"),
    ("nodes", f"{POOL}.machineSpec", TPU, f"{POOL}.machineSpec.machineType", "has TPUs"),
    ("cpu", f"{POOL}.machineSpec.machineType", "ct6e-standard-4t", "", "has TPUs"),
    ("cpu", f"{POOL}.machineSpec.tpuTopology", "2x2", "", "goes with TPUs"),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", 4, "", "a2-highgpu-8g has 8 accelerators, not 4"),
    ("nodes", f"{POOL}.machineSpec.acceleratorCount", ..., "", "a2-highgpu-8g has 8 accelerators, not 0"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_A100_80GB", "", "has NVIDIA_TESLA_A100, not"),
    ("nodes", f"{POOL}.machineSpec.acceleratorType", ..., "", "is required: a2-highgpu-8g has NVIDIA_TESLA_A100"),
    ("blackwell", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_H200_141GB", "", "has NVIDIA_B200, not"),
    ("t4", f"{POOL}.machineSpec.acceleratorCount", 3, "", "n1-standard-16 takes 1, 2, 4 of NVIDIA_TESLA_T4, not 3"),
    ("t4", f"{POOL}.machineSpec.acceleratorCount", 0, "", "takes 1, 2, 4 of NVIDIA_TESLA_T4, not 0"),
    ("t4", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_TESLA_A100", "", "n1-standard-16 takes no NVIDIA_TESLA_A100"),
    ("t4", f"{POOL}.machineSpec.acceleratorType", ..., "", "is required with an acceleratorCount of 4"),
    ("t4", f"{POOL}.machineSpec.machineType", "n1-standard-5x", f"{POOL}.machineSpec.acceleratorType", "takes no"),
    ("t4", f"{POOL}.machineSpec.machineType", "n2-standard-16", f"{POOL}.machineSpec.acceleratorType", "takes no"),
    ("cpu", f"{POOL}.machineSpec.acceleratorType", "NVIDIA_L4", "", "n2-highmem-8 takes no NVIDIA_L4"),
    ("nodes", f"{POOL}.machineSpec.gpuPartitionSize", "1g.5gb", "", "needs an acceleratorCount of 1"),
    # disks
    ("nodes", f"{POOL}.diskSpec.bootDiskSizeGb", 99, "", "99 GB is not between 100 and 64000"),
    ("nodes", f"{POOL}.diskSpec.bootDiskSizeGb", 64_001, "", "is not between 100 and 64000"),
    ("nodes", f"{POOL}.diskSpec.bootDiskType", "ssd", "", "`ssd` is not one of pd-ssd"),
    ("blackwell", f"{POOL}.diskSpec.bootDiskType", "pd-ssd", "", "a4-highgpu-8g takes no pd-ssd"),
    # containers and packages
    ("nodes", f"{POOL}.containerSpec.imageUri", "", "", "is not a valid image name"),
    ("nodes", f"{POOL}.containerSpec.imageUri", "https://docker.io/x:1", "", "is not a valid image name"),
    ("nodes", f"{POOL}.containerSpec.imageUri", "IMAGE_URI", "", "is not a valid image name"),
    ("nodes", f"{POOL}.containerSpec.imageUri", "gcr.io/p/<image>", "", "is not a valid image name"),
    ("nodes", f"{POOL}.containerSpec.env", VARIABLES, "", "101 variables, and Vertex takes 100"),
    ("nodes", f"{POOL}.containerSpec.env[1].name", "NCCL_DEBUG", "", "NCCL_DEBUG is listed twice"),
    ("nodes", f"{POOL}.containerSpec.env[1].name", "1A", "", "is not a valid variable name"),
    ("nodes", f"{POOL}.containerSpec.env[1].name", "MY-VAR", "", "is not a valid variable name"),
    ("nodes", f"{POOL}.containerSpec.env[1].name", "CLUSTER_SPEC", "", "Vertex sets CLUSTER_SPEC itself"),
    ("nodes", f"{POOL}.containerSpec.env[1].name", "AIP_MODEL_DIR", "", "Vertex sets AIP_MODEL_DIR itself"),
    ("nodes", f"{POOL}.containerSpec.env[1].value", "x" * 131_070, "", "Linux starts nothing"),
    ("nodes", f"{POOL}.containerSpec.args[0]", "é" * 65_536, "", "Linux starts nothing"),
    ("package", f"{POOL}.pythonPackageSpec.executorImageUri", "docker.io/pytorch/pytorch", "", "not one of Google's"),
    ("package", f"{POOL}.pythonPackageSpec.packageUris", [], "", "0 packages, and Vertex takes 1 to 100"),
    ("package", f"{POOL}.pythonPackageSpec.packageUris", ["gs://my-bucket/a"] * 101, "", "101 packages"),
    ("package", f"{POOL}.pythonPackageSpec.packageUris[0]", "./dist/boot.whl", "", "is not a URI of Cloud Storage"),
    ("package", f"{POOL}.pythonPackageSpec.packageUris[0]", "gs://my-bucket/", "", "is not a URI of Cloud Storage"),
    ("package", f"{POOL}.pythonPackageSpec.pythonModule", "trainer/task.py", "", "is not a valid module name"),
    ("raw", f"{POOL}.nfsMounts[0].path", "data", "", "does not begin with `/`"),
    # times
    ("nodes", "jobSpec.scheduling.timeout", "0s", "", "0 s is too short"),
    ("nodes", "jobSpec.scheduling.timeout", "0.5s", "", "0.5 s is too short"),
    ("nodes", "jobSpec.scheduling.maxWaitDuration", "7200s", "", "is valid only with FLEX_START"),
    ("spot", "jobSpec.scheduling.maxWaitDuration", "7200s", "", "is valid only with FLEX_START"),
    ("flex", "jobSpec.scheduling.timeout", "604801s", "", "more than the 7 days that FLEX_START gives"),
    ("flex", "jobSpec.scheduling.maxWaitDuration", "2h", "", "is not a valid duration in seconds"),
    ("t4", "jobSpec.scheduling.strategy", "FLEX_START", "", "FLEX_START has only machines with"),
    ("cpu", "jobSpec.scheduling.strategy", "FLEX_START", "", "FLEX_START has only machines with"),
    ("flex", f"{POOL1}.machineSpec", MACHINE, "", "one kind of machine in all pools"),
    ("flex", "jobSpec.persistentResourceId", "pool-1", "", "FLEX_START waits for some"),
    # reservations
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.values", [], "", "is required: which reservation"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.values", ..., "", "is required: which reservation"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.key", ..., "", "is required"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.key", "reservation-name", "", "names no reservation"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.values[0]", "mine", "", "not have the required form"),
    ("reserved", f"{POOL}.machineSpec.reservationAffinity.reservationAffinityType", ..., "", "is required"),
    ("any", f"{POOL}.machineSpec.reservationAffinity.values", [RESERVATION], "", "only with SPECIFIC_RESERVATION"),
    ("flex", f"{POOL}.machineSpec.reservationAffinity", RESERVED, "", "FLEX_START cannot use machines"),
    ("spot", f"{POOL}.machineSpec.reservationAffinity", RESERVED, "", "SPOT cannot use machines"),
    ("pool", f"{POOL}.machineSpec.reservationAffinity", RESERVED, "", "has machines of its own"),
    # service account and network
    ("nodes", "jobSpec.serviceAccount", ..., "", "is required with a tensorboard"),
    ("nodes", "jobSpec.serviceAccount", "train", "", "not have the required form"),
    ("nodes", "jobSpec.serviceAccount", "me@example.com", "", "not have the required form"),
    ("nodes", "jobSpec.serviceAccount", "SERVICE_ACCOUNT", "", "not have the required form"),
    ("nodes", "jobSpec.network", "default", "", "not have the required form"),
    ("nodes", "jobSpec.network", "projects/my-project/global/networks/default", "", "not have the required form"),
    ("nodes", "jobSpec.network", ..., "jobSpec.reservedIpRanges", "needs a network"),
    ("nodes", "jobSpec.pscInterfaceConfig", PSC, "", "exclude each other"),
    ("psc", "jobSpec.pscInterfaceConfig.networkAttachment", "projects/p/x", "", "not have the required form"),
    ("psc", "jobSpec.pscInterfaceConfig.dnsPeeringConfigs[0].domain", "corp.example", "", "a dot at its end"),
    ("psc", f"{POOL}.nfsMounts", NFS, "", "expected a list"),
    ("cpu", f"{POOL}.nfsMounts", [NFS], "", "needs a network"),
    # places
    ("nodes", "jobSpec.baseOutputDirectory.outputUriPrefix", "s3://my-bucket/x", "", "not have the required form"),
    ("nodes", "jobSpec.baseOutputDirectory.outputUriPrefix", "my-bucket/x", "", "not have the required form"),
    ("nodes", "jobSpec.baseOutputDirectory.outputUriPrefix", "gs://BUCKET/x", "", "not have the required form"),
    ("nodes", "encryptionSpec.kmsKeyName", "key", "", "not have the required form"),
    ("nodes", "encryptionSpec.kmsKeyName", f"{KEY}/cryptoKeyVersions/1", "", "not have the required form"),
    ("reserved", "encryptionSpec.kmsKeyName", KEY.replace("europe-west4", "us-central1"), "", "is in us-central1"),
    ("nodes", "jobSpec.tensorboard", "678", "", "not have the required form"),
    ("reserved", "jobSpec.tensorboard", BOARD.replace("europe-west4", "us-east1"), "", "is in us-east1"),
    ("psc", "jobSpec.pscInterfaceConfig.networkAttachment", ATTACHMENT.replace("west4", "west1"), "", "europe-west1"),
    ("nodes", "jobSpec.persistentResourceId", "Pool_1", "", "not have the required form"),
    ("raw", "jobSpec.experiment", "mine", "", "not have the required form"),
    ("raw", "jobSpec.protectedArtifactLocationId", "us", "", "not have the required form"),
]


def _refused(job: Any, location: str | None = None) -> list[check.Violation]:
    return [each for each in check.violations(job, location) if not each.is_warning]


def _parse(job: dict[str, Any]) -> None:
    """Parse the job with Google's own client, as a send does."""
    from google.cloud.aiplatform_v1.types import CustomJob
    from google.protobuf import json_format

    json_format.ParseDict(job, CustomJob.pb(CustomJob()))


def checked_table(*description: Path) -> subprocess.CompletedProcess[str]:
    """Return the result of the table's check against a description, by default the installed client's."""
    command = [sys.executable, ROOT / "tools" / "vertex_table.py", "--check", *description]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_table_equals_googles_description(tmp_path: Path) -> None:
    """rules.json equals the installed client's description of the API, word for word; a new word gives a difference."""
    done = checked_table()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    documents = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
    newer = tmp_path / "newer.json"
    text = (documents / "aiplatform.v1.json").read_text()
    newer.write_text(
        text.replace('"NVIDIA_GB200",', '"NVIDIA_GB200",\n"NVIDIA_GB300",').replace('"enumDeprecated"', '"x"')
    )
    done = checked_table(newer)
    assert (done.returncode, "is not what this description says" in done.stdout) == (1, True), done.stderr


@pytest.mark.parametrize("name", GOOD)
def test_good_job_passes(name: str) -> None:
    """Neither the table nor the rules between fields give a fault or a warning; Google's client accepts the job."""
    assert list(check.violations(GOOD[name])) == []
    assert list(check.violations(GOOD[name], "europe-west4")) == []
    _parse(GOOD[name])


@pytest.mark.parametrize(("base", "path", "value", "where", "said"), BROKEN, ids=lambda value: str(value)[-60:])
def test_broken_job_is_refused(base: str, path: str, value: Any, where: str, said: str) -> None:
    """Each job is one fault away from a good job; only that fault is named, at its place."""
    found = _refused(_changed(GOOD[base], (path, value)))
    assert {each.path for each in found} == {where or path}, found
    assert any(said in each.message for each in found), found
    assert not any("\n" in each.message for each in found)


SMALL_A3 = {"machineType": "a3-highgpu-2g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 2}
A4X = {"machineType": "a4x-highgpu-4g", "acceleratorType": "NVIDIA_GB200", "acceleratorCount": 4}


@pytest.mark.parametrize(
    ("machine", "field", "said"),
    [
        ({"machineType": "n1-standard-5"}, "machineType", "did you mean"),
        ({"machineType": "a9-hypergpu-8g"}, "machineType", "may know it"),
        ({**T4, "acceleratorType": "NVIDIA_TESLA_P100"}, "acceleratorType", "support of P100 ended"),
        (SMALL_A3, "machineType", "only by spot and flex start"),
        (A4X, "machineType", "only by reservation"),
    ],
)
def test_doubtful_machine_is_a_warning(machine: dict[str, Any], field: str, said: str) -> None:
    """Google adds machines, and scarce machines may still be available."""
    (found,) = check.violations(_changed(GOOD["cpu"], (f"{POOL}.machineSpec", machine)))
    assert (found.path, found.is_warning) == (f"{POOL}.machineSpec.{field}", True)
    assert said in found.message


def test_new_machine_accepts_known_accelerators() -> None:
    """The table cannot know the number of accelerators of a newer machine type, but 0 is wrong."""
    at = f"{POOL}.machineSpec"
    new = {"machineType": "a9-hypergpu-6g", "acceleratorType": "NVIDIA_B200", "acceleratorCount": 6}
    assert _refused(_changed(GOOD["cpu"], (at, new))) == []
    (found,) = _refused(_changed(GOOD["cpu"], (at, {**new, "acceleratorCount": 0})))
    assert found.path == f"{at}.acceleratorCount"


def test_region_of_the_job_decides() -> None:
    """If the region is known, every resource in a different region is refused, even if several agree."""
    found = _refused(GOOD["reserved"], "us-central1")
    both = [f"{pool}.machineSpec.reservationAffinity.values[0]" for pool in (POOL, POOL1)]
    assert {each.path for each in found} == {"encryptionSpec.kmsKeyName", "jobSpec.tensorboard", *both}


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("displayName", "", "name"),
        ("labels.Team", "x", "tags"),
        (f"{POOL}.containerSpec.env[1].name", "1A", "env"),
        (f"{POOL}.machineSpec.acceleratorCount", 4, "resources.accelerators"),
        (f"{POOL1}.replicaCount", 0, "resources.instances"),
        ("jobSpec.scheduling.timeout", ..., "limits.max_duration"),
        ("jobSpec.networks", "x", "vertex.raw"),
        (POOL1, {}, "vertex.raw"),
    ],
)
def test_fault_is_reported_at_the_configs_key(path: str, value: Any, key: str) -> None:
    """A fault without a key of its own is under `raw`; the message begins with the place in the job."""
    (fault,) = check.faults(_changed(NODES, (path, value)))
    assert (fault.key, fault.message.startswith(f"{path}: "), fault.is_warning) == (key, True, False)


@pytest.mark.parametrize("registry", ["nvcr.io/nvidia/", "ghcr.io/a/", "1.dkr.ecr.us-east-1.amazonaws.com/", "a:5000/"])
def test_image_of_another_registry_is_a_warning(registry: str) -> None:
    """Google's pages name Artifact Registry and Docker Hub; the warning has the cure."""
    (fault,) = check.faults(_changed(NODES, (f"{POOL}.containerSpec.imageUri", f"{registry}train:1")))
    assert (fault.key, fault.is_warning, "push the image to one of the two" in fault.message) == ("image", True, True)


@pytest.mark.parametrize(
    "name", ["pytorch/pytorch:2", "docker.io/a/b:1", "gcr.io/p/x:1", "us-docker.pkg.dev/p/r/x:1", "x"]
)
def test_images_that_vertex_pulls_are_accepted(name: str) -> None:
    """Names without a host are of Docker Hub."""
    assert list(check.faults(_changed(NODES, (f"{POOL}.containerSpec.imageUri", name)))) == []


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("jobSpec.timeout", "3600s", "it belongs at jobSpec.scheduling.timeout"),
        ("workerPoolSpecs", [], "it belongs at jobSpec.workerPoolSpecs"),
        ("jobSpec.displayName", "x", "it belongs at displayName"),
        (f"{POOL}.imageUri", "x:1", "it belongs at jobSpec.workerPoolSpecs[].containerSpec.imageUri"),
        (f"{POOL}.machineSpec.acceleratorType", "NVIDIA_B300", "update cloudtrain, if Google has a newer one"),
    ],
)
def test_hint_gives_the_right_place(path: str, value: Any, hint: str) -> None:
    """A misplaced field has its place in the hint, and a new accelerator may need a newer table."""
    assert hint in [fault.hint for fault in check.faults(_changed(NODES, (path, value)))]


def test_all_faults_come_at_once() -> None:
    """Faults of the table and of the rules, in all parts of the job, are reported together."""
    changes = [("displayName", 7), ("labels.A", "x"), (f"{POOL1}.replicaCount", 0), ("jobSpec.network", "x")]
    assert {each.path for each in _refused(_changed(NODES, *changes))} == {path for path, _ in changes}


@settings(max_examples=400)
@given(data=st.data())
def test_any_garbage_is_a_fault_and_no_crash(data: st.DataObject) -> None:
    """For any value of `raw` at any place in the job, the check answers with faults."""
    job = copy.deepcopy(GOOD[data.draw(st.sampled_from(sorted(GOOD)))])
    junk: list[Any] = [None, 0, -1, 1.5, True, "", "x", "0s", [], ["x"], [[]], {}, {"key": {}}, {"x": {}}, {1: 2}]
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = job
        while True:
            key = data.draw(st.sampled_from(sorted(node, key=str) if isinstance(node, dict) else range(len(node))))
            if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
                break
            node = node[key]
        node[key] = copy.deepcopy(data.draw(st.sampled_from(junk)))
    for fault in check.faults(job):
        assert fault.message
        assert fault.key


@pytest.mark.parametrize("job", [None, [], "x", {}, {1: 2}])
def test_non_job_is_a_fault(job: Any) -> None:
    """Even a value that is no mapping gives faults."""
    assert _refused(job)


def test_check_stays_light() -> None:
    """A dry run has a quarter of a second in all: no Google library, no network library."""
    code = "import sys; from cloudtrain.backends.vertex import check; list(check.faults({})); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = (
        *("google.protobuf", "google.api_core", "googleapiclient", "grpc", "requests", "pydantic", "yaml"),
        *("ssl", "asyncio"),
    )
    assert [name for name in done.stdout.split() if name.startswith(heavy)] == []


def test_check_is_quick() -> None:
    """A read of the table and a check of a job with many nodes take less than 20 ms of processor time."""
    job = _changed(NODES, (f"{POOL}.containerSpec.env", VARIABLES[:100]))
    took = []
    for _ in range(3):  # the minimum of three, as a run may wait for memory
        request_rules.read.cache_clear()
        begin = time.process_time()
        assert list(check.faults(job)) == []
        took.append(time.process_time() - begin)
    assert min(took) < 0.02, took


def test_pairs_know_every_machine_of_the_price_list() -> None:
    """The price list's accelerators and counts equal the machine's, or the machine is a host that can attach some."""
    rows = csv.DictReader((ROOT / "backends" / "vertex" / "instances.csv").read_text().splitlines())
    seen = 0
    for row in (row for row in rows if row["backend"] == "vertex"):
        (kind, _, attached), name, count = row["instance_type"].partition(" + "), row["accelerator"], int(row["count"])
        seen += 1
        assert kind in machine_types.KNOWN, kind
        if attached:
            assert attached == f"{count} x {machine_types.enum_of(name, kind)}", row
            continue
        if not count:
            assert {
                word for name in ("T4", "V100", "P100", "P4") if (word := machine_types.enum_of(name, kind))
            } == set(machine_types.choices(kind)), kind
            continue
        word = machine_types.enum_of(name, kind)
        assert (word, count) == machine_types.FIXED.get(kind), row
        assert ("80GB" in str(word)) == (row["accelerator_memory_gib"] == "80"), row
    assert seen > 50


def test_pairs_are_words_of_the_table() -> None:
    """Every accelerator of a machine is a word of the API, and every GPU of the API is on some machine."""
    words = json.loads((ROOT / "backends" / "vertex" / "rules.json").read_text())["shapes"]["MachineSpec"]["members"]
    known = {word for word in words["acceleratorType"]["enum"] if word.startswith("NVIDIA")}
    built_in = {found[0] for kind in machine_types.KNOWN if (found := machine_types.FIXED.get(kind))}
    attached = {word for kind in machine_types.KNOWN for word in machine_types.choices(kind)}
    assert built_in | attached == known
    assert built_in & attached == set()


@pytest.mark.parametrize(
    ("name", "machine_type", "word"),
    [
        ("A100", None, "NVIDIA_TESLA_A100"),
        ("A100-80GB", None, "NVIDIA_A100_80GB"),
        ("A100", "a2-ultragpu-8g", "NVIDIA_A100_80GB"),
        ("A100-80GB", "a2-highgpu-8g", None),
        ("H100", None, "NVIDIA_H100_80GB"),
        ("H100", "a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB"),
        ("h200", None, "NVIDIA_H200_141GB"),
        ("B200", None, "NVIDIA_B200"),
        ("L4", "g2-standard-4", "NVIDIA_L4"),
        ("T4", "n1-standard-4", "NVIDIA_TESLA_T4"),
        ("T4", "n2-standard-4", None),
        ("P100", "n1-standard-96", None),
        ("RTX PRO 6000", None, "NVIDIA_RTX_PRO_6000"),
        ("NVIDIA_TESLA_V100", None, "NVIDIA_TESLA_V100"),
        ("nvidia-tesla-a100", "a2-highgpu-8g", "NVIDIA_TESLA_A100"),
        ("nvidia-tesla-a100", "a2-ultragpu-8g", None),
        ("nvidia-a100-80gb", None, "NVIDIA_A100_80GB"),
        ("Nvidia-L4", None, "NVIDIA_L4"),
        ("B200", "a9-hypergpu-8g", "NVIDIA_B200"),
        ("MI300X", None, None),
    ],
)
def test_accelerator_has_a_word_of_the_api(name: str, machine_type: str | None, word: str | None) -> None:
    """The word follows from the config's name, and from the machine if two accelerators share a name."""
    assert machine_types.enum_of(name, machine_type) == word


def test_hosts_come_smallest_first() -> None:
    """The first host is enough; larger hosts need more GPUs."""
    assert machine_types.hosts_for("NVIDIA_TESLA_T4", 1)[:3] == ["n1-standard-4", "n1-highmem-4", "n1-standard-8"]
    assert machine_types.hosts_for("NVIDIA_TESLA_P100", 4)[-1] == "n1-highcpu-64"
    assert "n1-standard-16" not in machine_types.hosts_for("NVIDIA_TESLA_V100", 1)
    assert machine_types.hosts_for("NVIDIA_TESLA_T4", 8) == []
    assert machine_types.hosts_for("NVIDIA_L4", 1)[:2] == ["g2-standard-4", "g2-standard-8"]
    assert machine_types.hosts_for("NVIDIA_A100_80GB", 4) == ["a2-ultragpu-4g"]
    assert machine_types.hosts_for("NVIDIA_H100_MEGA_80GB", 1) == []
