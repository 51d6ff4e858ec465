"""One instance of a job: its folders as on the platform, its container, its lines in CloudWatch Logs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doubles import sandbox
from doubles.aws import storage
from doubles.aws.jobs import Job
from doubles.aws.storage import Mirror
from doubles.aws.wire import CONTAINER_KEY
from doubles.aws.world import World
from doubles.kit.differences import Heard
from doubles.kit.life import Machine

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
EVENT_BYTES = 262_118  # the longest line in one event: 256 KiB less CloudWatch's overhead
READ_BYTES = 1 << 16
_FOLDERS = ("input/config", "input/data", "checkpoints", "model", "output/data", "output/metrics")


class InputError(Exception):
    """The job's input is missing or unreadable; the message is the job's FailureReason."""


@dataclass(eq=False)
class Instance(Machine):
    """One machine of one attempt, with an empty disk below `root`."""

    name: str  # algo-N
    kind: str
    address: str
    root: Path
    stream: str
    on_end: Callable[[], None]
    running: sandbox.Running | None = None
    code: int | None = None
    ended_at: float | None = None
    mirrors: list[Mirror] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Return the name for peers: the instance's name, or its address if host names are the machine's own."""
        return self.name if sandbox.mode() != "none" else self.address

    @property
    def is_running(self) -> bool:
        """Return whether the container runs, or a part of its output has not been read."""
        return self.running is not None and self.code is None

    @property
    def ml(self) -> Path:
        """Return the folder that the container sees as /opt/ml."""
        return self.root / "ml"

    def failure(self) -> str:
        """Return the container's failure file, or an empty text."""
        path = self.ml / "output/failure"
        return path.read_text(errors="replace") if path.is_file() else ""

    def lay_out(self, job: Job, peers: list[Instance]) -> None:
        """Make the folders and the platform's files."""
        for folder in _FOLDERS:
            (self.ml / folder).mkdir(parents=True)
        (self.root / "cloudtrain").mkdir()
        for name, content in _config_files(self, job, peers).items():
            (self.ml / "input/config" / f"{name}.json").write_text(json.dumps(content))

    def fill(self, job: Job, inputs: dict[str, list[str]]) -> None:
        """Download the input, and the existing checkpoints."""
        for channel in job.request.get("InputDataConfig", ()):
            source = channel["DataSource"]["S3DataSource"]
            folder = self.ml / "input/data" / channel["ChannelName"]
            folder.mkdir()
            storage.download(source["S3Uri"], inputs[channel["ChannelName"]], folder)
        checkpoints = job.request.get("CheckpointConfig")
        if checkpoints is not None:
            folder = self._place(checkpoints.get("LocalPath", "/opt/ml/checkpoints"))
            self.mirrors.append(Mirror(folder, checkpoints["S3Uri"]))
            self.mirrors[-1].fill()

    def start(self, job: Job, world: World, peers: list[Instance]) -> None:
        """Run the container, which dies with the calling thread."""
        algorithm = job.request["AlgorithmSpecification"]
        argv = [*algorithm.get("ContainerEntrypoint", ("train",)), *algorithm.get("ContainerArguments", ())]
        container = sandbox.Container(
            argv=argv,
            env=_environment(job, world, self),
            root=self.root / "container",
            hostname=self.name,
            private={"/opt/ml": self.ml, "/opt/cloudtrain": self.root / "cloudtrain"},
            hosts={peer.name: peer.address for peer in peers},
            address=self.address if world.switch is not None else None,
        )
        self.running = sandbox.start(container, world.switch)
        threading.Thread(target=self._read, args=(world, job), daemon=True).start()

    def copy(self) -> None:
        """Copy new checkpoints to S3."""
        for mirror in self.mirrors:
            mirror.copy()

    def _place(self, path: str) -> Path:
        if not path.startswith("/opt/ml/"):
            raise InputError(f"InternalServerError: the stand-in has only /opt/ml, not {path}")
        folder = self.ml / path.removeprefix("/opt/ml/")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _read(self, world: World, job: Job) -> None:
        """Send the container's output to its log stream, line by line, until the container has ended."""
        process, rest = self.running.process, b""
        logs = world.logs(job.region)
        heard = Heard(lambda: world.settings, world.killed, job.name, self.kill)
        while data := os.read(process.stdout.fileno(), READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            while len(rest) > EVENT_BYTES:
                lines.append(rest[:EVENT_BYTES])
                rest = rest[EVENT_BYTES:]
            self._send(logs, heard.told(lines))
        self._send(logs, heard.told([rest]))
        process.stdout.close()
        code = process.wait()
        self.ended_at, self.code = time.time(), code if code >= 0 else 128 - code
        self.on_end()

    def _send(self, logs: Any, lines: Iterable[bytes]) -> None:
        # Docker's agent sends no empty lines, and CloudWatch accepts none.
        messages = [line.decode(errors="replace") for line in lines if line]
        if messages:
            logs.append(LOG_GROUP, self.stream, messages)


def find_inputs(job: Job) -> dict[str, list[str]]:
    """Return the keys of every channel. Raises InputError if input is missing or the stand-in cannot run the job."""
    for uri in _written_to(job):
        if not storage.has(storage.split(uri)[0]):
            raise InputError(f'ClientError: Unable to write to S3 URL "{uri}": The specified bucket does not exist')
    found: dict[str, list[str]] = {}
    for channel in job.request.get("InputDataConfig", ()):
        source = channel["DataSource"].get("S3DataSource")
        if source is None or source["S3DataType"] != "S3Prefix" or channel.get("InputMode") == "Pipe":
            raise InputError("InternalServerError: the stand-in reads S3Prefix channels in File or FastFile mode")
        keys = storage.keys(source["S3Uri"])
        if not keys:
            bucket = storage.split(source["S3Uri"])[0]
            raise InputError(
                f'ClientError: Data download failed:No S3 objects found under S3 URL "{source["S3Uri"]}" given in '
                f"input data source. Please ensure that the bucket exists in the selected region ({job.region}), that "
                f'objects exist under that S3 prefix, and that the role "{job.request["RoleArn"]}" has "s3:ListBucket" '
                f'permissions on bucket "{bucket}".'
            )
        found[channel["ChannelName"]] = keys
    return found


def _written_to(job: Job) -> list[str]:
    """Return the addresses that the platform will write."""
    named = {"OutputDataConfig": "S3OutputPath", "CheckpointConfig": "S3Uri"}
    return [job.request[name][key] for name, key in named.items() if name in job.request]


def _config_files(instance: Instance, job: Job, peers: list[Instance]) -> dict[str, Any]:
    """Return the contents of /opt/ml/input/config. Hosts are in the order of their text, algo-10 before algo-2."""
    hosts, group = sorted(peer.host for peer in peers), "homogeneousCluster"
    resources = {
        "current_host": instance.host,
        "current_instance_type": instance.kind,
        "current_group_name": group,
        "hosts": hosts,
        "instance_groups": [{"instance_group_name": group, "instance_type": instance.kind, "hosts": hosts}],
        "network_interface_name": "lo" if instance.address.startswith("127.") else "eth0",
    }
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": channel.get("InputMode", job.request["AlgorithmSpecification"]["TrainingInputMode"]),
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
        }
        for channel in job.request.get("InputDataConfig", ())
    }
    checkpoint = {"LocalPath": "/opt/ml/checkpoints", **job.request.get("CheckpointConfig", {})}
    return {
        "resourceconfig": resources,
        "hyperparameters": job.request.get("HyperParameters", {}),
        "inputdataconfig": channels,
        **({"checkpointconfig": checkpoint} if "CheckpointConfig" in job.request else {}),
    }


def _environment(job: Job, world: World, instance: Instance) -> dict[str, str]:
    """Return the container's variables: the platform's and the request's. Without a network the role is missing."""
    aws = {
        "AWS_ACCESS_KEY_ID": CONTAINER_KEY,
        "AWS_SECRET_ACCESS_KEY": "container-secret",
        "AWS_SESSION_TOKEN": "container-token",
        "AWS_ENDPOINT_URL": world.container_url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    isolated = job.request.get("EnableNetworkIsolation", False)
    home = "/tmp" if sandbox.mode() != "none" else str(instance.root)
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "HOSTNAME": instance.host,
        "LANG": "C.UTF-8",
        "AWS_REGION": job.region,
        "AWS_DEFAULT_REGION": job.region,
        "TRAINING_JOB_NAME": job.name,
        "TRAINING_JOB_ARN": job.arn,
        **({} if isolated else aws),
        **({"CLOUDTRAIN_ML_ROOT": str(instance.ml)} if sandbox.mode() == "none" else {}),
        **job.request.get("Environment", {}),
    }
