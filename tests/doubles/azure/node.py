"""One node of an attempt: its folders, its mounts, its container with the variables, and its output."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles import sandbox
from doubles.azure import names, node_init
from doubles.azure.bodies import place_of
from doubles.azure.joblogs import LogFiles, file_of
from doubles.azure.jobs import Job
from doubles.azure.world import World
from doubles.kit.differences import Heard, damage
from doubles.kit.handle import proxied
from doubles.kit.life import Machine

HOME, STORES = "/mnt/azureml", "/mnt/.stores"
_COPIED = ("Download", "Upload", "Direct")
MASTER_PORT = "6105"  # as users report it
CA = f"{HOME}/.ca.pem"
READ_BYTES = 1 << 16


class InputError(Exception):
    """The job's data is missing or unreadable; the message is the run's error."""


@dataclass(frozen=True)
class Volume:
    """A folder or file that is an input or output."""

    name: str
    mode: str
    container: str
    path: str
    is_output: bool


@dataclass(eq=False)
class Node(Machine):
    """One machine of one attempt, with an empty disk below `root`."""

    number: int
    address: str
    root: Path
    on_change: Callable[[], None]
    running: sandbox.Running | None = None
    is_ready: bool = False
    is_told: bool = False  # to terminate
    code: int | None = None
    ended_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """Return whether the container runs, or a part of its output has not been read."""
        return self.running is not None and self.code is None

    @property
    def disk(self) -> Path:
        """Return the folder that the container sees as /mnt/azureml."""
        return self.root / "azureml"

    def lay_out(self, job: Job, world: World, code: tuple[str, str] | None, data: list[Volume]) -> None:
        """Make the folders: a private copy of the code, and the folders of inputs and outputs."""
        work = self.disk / _inside(job) / "exe/wd"
        work.parent.mkdir(parents=True)
        if code is None:
            work.mkdir()
        else:
            source = world.blobs.make(code[0]) / code[1]
            shutil.copytree(source, work)
        shutil.copy(node_init.__file__, self.disk / ".node_init.py")
        shutil.copy(world.ca, self.disk / ".ca.pem")
        places = self.disk / _inside(job) / "cap/data-capability/wd"
        places.mkdir(parents=True)
        for volume in data:
            self._lay_out_volume(world, volume, places / volume.name)

    def start(self, job: Job, world: World, data: list[Volume], nodes: list[Node], logs: LogFiles) -> None:
        """Run the container, which dies with the calling thread."""
        cwd = f"{HOME}/{_inside(job)}/exe/wd"
        places = {one.name: place_inside(job, one.name) for one in data}
        bound = [one for one in data if one.mode not in _COPIED and sandbox.mode() != "none"]
        spec: dict[str, Any] = {
            "command": _command(job, places),
            "cwd": cwd,
            "env": process_environment(job, world, self.number, nodes[0].address, places),
            "stores": STORES if sandbox.mode() != "none" else None,
            "mounts": [
                (f"{STORES}/{one.container}/{one.path}", place_inside(job, one.name), one.mode.startswith("ReadOnly"))
                for one in bound
            ],
        }
        container = sandbox.Container(
            argv=[sys.executable, "-I", "-S", f"{HOME}/.node_init.py", json.dumps(spec)],
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            root=self.root / "container",
            hostname=f"node-{self.number}",
            private={HOME: self.disk, STORES: world.blobs.make(names.CONTAINER).parent},
            hosts={f"node-{node.number}": node.address for node in nodes},
            address=self.address if world.switch is not None else None,
        )
        self.running = sandbox.start(container, world.switch)
        threading.Thread(
            target=self._read, args=(job, world, logs, file_of(self.number, job.nodes)), daemon=True
        ).start()

    def terminate(self) -> None:
        """Send SIGTERM to the node's processes."""
        self.is_told = True
        if self.is_ready:
            super().terminate()

    def collect(self, job: Job, world: World, data: list[Volume]) -> None:
        """Copy outputs in mode Upload to their addresses."""
        for volume in data:
            if volume.is_output:
                damage(world.blobs.make(volume.container) / volume.path, world.settings.artifact_damage)
            if volume.is_output and volume.mode in _COPIED:
                source = self.disk / _inside(job) / "cap/data-capability/wd" / volume.name
                shutil.copytree(source, world.blobs.make(volume.container) / volume.path, dirs_exist_ok=True)

    def _lay_out_volume(self, world: World, volume: Volume, place: Path) -> None:
        source = world.blobs.make(volume.container) / volume.path
        if volume.is_output:
            source.mkdir(parents=True, exist_ok=True)
        if volume.mode in _COPIED:
            if volume.is_output:
                place.mkdir()
            elif source.is_dir():
                shutil.copytree(source, place)
            else:
                shutil.copy(source, place)
        elif sandbox.mode() == "none":
            place.symlink_to(source)

    def _read(self, job: Job, world: World, logs: LogFiles, file: str) -> None:
        """Pass the output on until the container has ended; without the byte READY the container could not start."""
        process = self.running.process
        heard = Heard(lambda: world.settings, world.killed, job.name, self.kill)
        while data := os.read(process.stdout.fileno(), READ_BYTES):
            if not self.is_ready and data.startswith(node_init.READY):
                self.is_ready, data = True, data.removeprefix(node_init.READY)
                if self.is_told:
                    self.running.terminate()
            logs.write(file, heard.read(data))
        logs.write(file, heard.read(b""))
        process.stdout.close()
        code = process.wait()
        self.ended_at, self.code = time.time(), code if code >= 0 else 128 - code
        self.on_change()


def place_inside(job: Job, name: str) -> str:
    """Return the path of an input or output in the container."""
    return f"{HOME}/{_inside(job)}/cap/data-capability/wd/{name}"


def volumes(job: Job, world: World) -> list[Volume]:
    """Return the job's folders and files. Raises InputError for a missing input."""
    asked, found = job.properties_of_body, []
    for name, told in (asked.get("inputs") or {}).items():
        if told["jobInputType"] == "literal":
            continue
        place = place_of(told.get("uri") or "")
        if place is None or not (world.blobs.make(place.container) / place.path).exists():
            raise InputError(
                f"The requested stream was not found. Please make sure the request uri is correct: input '{name}' at "
                f"{told.get('uri')} (NotFound)"
            )
        found.append(Volume(name, told.get("mode") or "ReadOnlyMount", place.container, place.path, False))
    for name, told in (asked.get("outputs") or {}).items():
        place = place_of(job.output_uri(name))
        if place is None:
            raise InputError(f"Output '{name}' is at {told.get('uri')}, which is no datastore of this workspace.")
        found.append(Volume(name, told.get("mode") or "ReadWriteMount", place.container, place.path, True))
    return found


def _inside(job: Job) -> str:
    return f"cr/j/{job.name}"


def _command(job: Job, places: dict[str, str]) -> str:
    """Return the command with paths and literals in place of the bindings."""
    asked = job.properties_of_body
    literals = {name: told["value"] for name, told in (asked.get("inputs") or {}).items() if "value" in told}
    text: str = asked["command"]
    for kind in ("inputs", "outputs"):
        for name, value in {**places, **literals}.items():
            text = text.replace(f"${{{{{kind}.{name}}}}}", str(value))
    return text


def process_environment(job: Job, world: World, node: int, master: str, places: dict[str, str]) -> dict[str, str]:
    """Return the environment of a node's process."""
    asked = job.properties_of_body
    ranks: dict[str, str] = {}
    if (asked.get("distribution") or {}).get("distributionType") == "PyTorch":
        ranks = {
            "MASTER_ADDR": master,
            "MASTER_PORT": MASTER_PORT,
            "WORLD_SIZE": str(job.nodes),
            "NODE_RANK": str(node),
            "RANK": str(node),
            "LOCAL_RANK": "0",
        }
    data = {f"AZURE_ML_OUTPUT_{name}": places[name] for name in asked.get("outputs") or {}}
    data |= {
        f"AZURE_ML_INPUT_{name}": places.get(name, str(told.get("value", "")))
        for name, told in (asked.get("inputs") or {}).items()
    }
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp" if sandbox.mode() != "none" else f"{HOME}/cr",
        "HOSTNAME": f"node-{node}",
        "LANG": "C.UTF-8",
        **_platform(job, node),
        **_network(world),
        **_identity(world, asked),
        **data,
        **ranks,
        **{name: str(value) for name, value in (asked.get("environmentVariables") or {}).items() if value is not None},
    }


def _platform(job: Job, node: int) -> dict[str, str]:
    host = f"https://{names.REGION}.api.azureml.ms"
    return {
        "AZUREML_RUN_ID": job.name,
        "AZUREML_ROOT_RUN_ID": job.name,
        "AZUREML_EXPERIMENT_NAME": job.experiment,
        "AZUREML_EXPERIMENT_SCOPE": f"{names.workspace_id()}/experiments/{job.experiment}",
        "AZUREML_ARM_SUBSCRIPTION": names.SUBSCRIPTION,
        "AZUREML_ARM_RESOURCEGROUP": names.GROUP,
        "AZUREML_ARM_WORKSPACE_NAME": names.WORKSPACE,
        "AZUREML_ARM_PROJECT_NAME": job.experiment,
        "AZUREML_WORKSPACE_ID": names.WORKSPACE_ID,
        "AZUREML_WORKSPACE_SCOPE": names.workspace_id(),
        "AZUREML_SERVICE_ENDPOINT": host,
        "AZUREML_NODE_COUNT": str(job.nodes),
        "AZUREML_CR_NODE_RANK": str(node),
        "MLFLOW_TRACKING_URI": f"azureml://{names.REGION}.api.azureml.ms/mlflow/v1.0{names.workspace_id()}",
        "MLFLOW_RUN_ID": job.name,
    }


def _network(world: World) -> dict[str, str]:
    """Return the variables for reaching the outer world: only through the proxy."""
    proxy = world.container_url
    none = f"localhost,127.0.0.1,{proxy.removeprefix('http://').partition(':')[0]}"
    return proxied(proxy, CA, none)


def _identity(world: World, asked: dict[str, Any]) -> dict[str, str]:
    """Return the address of the token endpoint, if the request has an identity."""
    kind = (asked.get("identity") or {}).get("identityType")
    if kind == "Managed":
        url = f"{world.container_url}/msi/token"
        own = (asked.get("identity") or {}).get("clientId")
        return {
            "MSI_ENDPOINT": url,
            "MSI_SECRET": names.MSI_SECRET,
            **({"DEFAULT_IDENTITY_CLIENT_ID": own} if own else {}),
        }
    return {}
