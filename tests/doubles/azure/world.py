"""The state of the stand-in: settings, faults, the journal of calls, tokens, blobs, assets, jobs, secrets."""

import itertools
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from doubles.azure.blobstore import Blobs
from doubles.azure.faults import Fault
from doubles.azure.jobs import Job
from doubles.azure.names import ACCOUNT, ARTIFACTS, CONTAINER, REGION
from doubles.azure.settings import Settings
from doubles.azure.signatures import sas
from doubles.azure.tokens import Tokens
from doubles.kit import world
from doubles.sandbox import Switch

SAS_S = 3600.0  # lifetime of a signature
COMPUTES: dict[str, dict[str, Any]] = {
    "cpu-cluster": {"vmSize": "Standard_DS3_v2", "vmPriority": "Dedicated", "maxNodeCount": 8},
    "gpu-cluster": {"vmSize": "Standard_NC24ads_A100_v4", "vmPriority": "Dedicated", "maxNodeCount": 8},
    "low-cluster": {"vmSize": "Standard_DS3_v2", "vmPriority": "LowPriority", "maxNodeCount": 8},
}


class World(world.World[Settings, Fault, Job]):
    """The tenant; each server has one tenant."""

    def __init__(self, state: Path, port: int, switch: Switch | None, ca: Path) -> None:
        super().__init__(state, switch, Settings, Fault)
        self.ca = ca
        self.container_url = f"http://127.0.0.1:{port}"  # of the proxy, from inside a container
        self.tokens, self.blobs = Tokens(), Blobs(state / "blobs")
        self.clear()

    def clear(self) -> None:
        """Forget all state."""
        super().clear()
        self.codes: dict[tuple[str, str], dict[str, Any]] = {}
        self.environments: dict[tuple[str, str], dict[str, Any]] = {}
        self.computes = {name: compute_properties(**told) for name, told in COMPUTES.items()}
        self.secrets: dict[str, list[dict[str, Any]]] = {}
        self.deleted_secrets: set[str] = set()
        self.blobs.clear()
        self.blobs.make(CONTAINER)
        self.blobs.make(ARTIFACTS)
        self._sas_serials: dict[str, int] = {}
        self._sas_numbers = itertools.count(1)

    def set_compute(self, name: str, told: dict[str, Any]) -> None:
        """Make or change a compute cluster."""
        self.computes[name] = compute_properties(**told)

    @property
    def sas_serial(self) -> int:
        """Return the number of the last issued signature."""
        return len(self._sas_serials)

    def sas_uri(self, container: str, blob: str | None, permissions: str = "r") -> str:
        """Return a URL with a fresh signature."""
        with self.lock:
            serial = next(self._sas_numbers)
            query = sas(container, blob, permissions, SAS_S, serial)
            self._sas_serials[parse_qs(query)["sig"][0]] = len(self._sas_serials) + 1
        path = container if blob is None else f"{container}/{quote(blob)}"
        return f"https://{ACCOUNT}.blob.core.windows.net/{path}?{query}"

    def serial_of_sas(self, signature: str | None) -> int | None:
        """Return the signature's number, 0 for a foreign signature."""
        return None if signature is None else self._sas_serials.get(signature, 0)

    def add(self, job: Job) -> None:
        """Store the job."""
        with self.lock:
            job.number = next(self._numbers)
            self.jobs[job.name] = job


def compute_properties(
    vmSize: str = "Standard_DS3_v2",
    vmPriority: str = "Dedicated",
    minNodeCount: int = 0,
    maxNodeCount: int = 4,
    nodeIdleTimeBeforeScaleDown: str = "PT120S",
    provisioningState: str = "Succeeded",
    computeType: str = "AmlCompute",
    location: str = REGION,
) -> dict[str, Any]:
    """Return a cluster's properties in ARM's form."""
    scale: dict[str, Any] = {"minNodeCount": minNodeCount, "maxNodeCount": maxNodeCount}
    scale |= {"nodeIdleTimeBeforeScaleDown": nodeIdleTimeBeforeScaleDown}
    states = ("preparing", "running", "idle", "leaving", "preempted", "unusable")
    return {
        "computeType": computeType,
        "computeLocation": location,
        "provisioningState": provisioningState,
        "provisioningErrors": None,
        "isAttachedCompute": False,
        "disableLocalAuth": True,
        "properties": {
            "osType": "Linux",
            "vmSize": vmSize,
            "vmPriority": vmPriority,
            "scaleSettings": scale,
            "allocationState": "Steady",
            "allocationStateTransitionTime": "2026-01-01T00:00:00+00:00",
            "currentNodeCount": 0,
            "targetNodeCount": 0,
            "nodeStateCounts": {f"{state}NodeCount": 0 for state in states},
            "isolatedNetwork": False,
            "remoteLoginPortPublicAccess": "Disabled",
        },
    }
