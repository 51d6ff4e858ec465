"""The backend, by the protocol `cloudtrain.launcher.backend.Backend`.

The nodes run cloudtrain's agents on this machine. State, logs and files are therefore the methods of the backend
`local`; the block, the prices, the checks, the start and the detection of nodes are this package's own.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.local.backend import LocalBackend, agent_spec, interpreter
from cloudtrain.backends.local.records import LocalRef
from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.agent import node_folder
from cloudtrain.entrypoints.contract import RECORD
from cloudtrain.launcher.backend import Capacity, Check, FoundAttempt, JobRef, Request, Shipment, Terms
from cloudtrain.launcher.errors import CapacityError, ConfigError, Fault, UsageError
from cloudtrain.launcher.planning import render

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.plan import Plan

__all__ = ["ProcessesBackend"]

NAME, LOCAL = "processes", LocalBackend()
TERMS = Terms(tail_s=20)  # as for `local`: node 0 ends the job, and the other nodes notice within 15 s


class ProcessesBackend:
    """The backend of the name `processes`."""

    state, pace, stop = LOCAL.state, LOCAL.pace, LOCAL.stop
    logs, logs_from = LOCAL.logs, LOCAL.logs_from
    artifacts, saved = LOCAL.artifacts, LOCAL.saved
    checkpoints, checkpoint_place = LOCAL.checkpoints, LOCAL.checkpoint_place

    def capacity(self, config: JobConfig) -> Capacity:
        """Return a node of the partition, which has no GPU, with the price of the block or of the partition."""
        from cloudtrain_processes.block import PARTITIONS, Processes  # a poll of a job's state needs no config

        block = config.block(Processes)
        micro, source = PARTITIONS[block.partition].price_micro, f"the partition `{block.partition}`"
        if block.price_per_hour is not None:
            micro, source = block.price_per_hour, f"{NAME}.price_per_hour"
        return Capacity(0, micro / 1e6, source, TERMS, machine=block.partition)

    def request(self, plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
        """Return the message for each node, as for `local`, with the partition."""
        from cloudtrain_processes.block import Processes

        block, found = config.block(Processes), LOCAL.request(plan, config, job_id, attempt, bundle_sha256)
        body = {**found.body, "python": block.python, "partition": block.partition}
        text = render.as_json(body)
        return replace(found, body=body, text=text, files={"request.json": text})

    def check(self, request: Request) -> list[Fault]:
        """Return the faults for which the scheduler would refuse the request."""
        from cloudtrain_processes.block import PARTITIONS

        faults = LOCAL.check(request)
        name, wanted = request.body["partition"], len(request.body["nodes"])
        if wanted > PARTITIONS[name].nodes:
            message = f"the partition `{name}` has {PARTITIONS[name].nodes} nodes, and the job needs {wanted}"
            faults.append(Fault(message, f"{NAME}.partition", hint="choose a larger partition, or fewer instances"))
        return faults

    def ready(self, request: Request, shipment: Shipment) -> None:
        """Raise ConfigError if no interpreter with torch exists."""
        interpreter(request.body["python"], shipment.base)

    def send(self, request: Request, shipment: Shipment) -> JobRef:
        """Start the job's nodes."""
        body = request.body
        shipment.sending.prepares()
        python = interpreter(body["python"], shipment.base)
        job_folder = shipment.home / NAME / body["job"]
        folder, output = job_folder / f"attempt-{body['attempt']}", job_folder / "output"
        saved = shipment.base / (body["checkpoint_dir"] or job_folder / "checkpoints")
        ref = LocalRef(str(folder), len(body["nodes"]), str(saved)).dump()
        try:
            processes.make_private(job_folder)
            for each in (folder, output, saved):
                each.mkdir(mode=0o700, parents=True, exist_ok=each is not folder)
            atomic_json.write_json(folder / RECORD, dict(shipment.record))
            atomic_json.write_json(folder / "ref.json", ref)
        except FileExistsError as error:
            raise UsageError(f"a folder of an earlier job has the name `{body['job']}`", where=str(folder)) from error
        except OSError as error:
            raise ConfigError(f"the job's folder cannot be made: {error.strerror}", where=error.filename) from error
        environment = {
            **body["environment"],
            **{f"CLOUDTRAIN_INPUT_{name.upper()}": str(shipment.base / uri) for name, uri in body["inputs"].items()},
            "CLOUDTRAIN_CHECKPOINT_DIR": str(saved),
            "CLOUDTRAIN_OUTPUT_DIR": str(output),
        }
        token = secrets.token_hex(16)
        specs = [
            replace(agent_spec(node, body, shipment, environment, python, folder), token=token)
            for node in body["nodes"]
        ]
        from cloudtrain_processes import scheduler

        shipment.sending.creates()
        scheduler.start(folder, specs)
        if not scheduler.has_started(folder):
            raise CapacityError("the scheduler has started no node", where=str(folder))
        return ref

    def find(self, request: Request, home: Path) -> JobRef | None:
        """Return the job if its nodes have started; after None, no node can start."""
        from cloudtrain_processes import scheduler

        job, _, attempt = request.name.rpartition("-")
        folder = home / NAME / job / f"attempt-{attempt}"
        if not folder.is_dir() or not scheduler.has_started(folder):
            return None
        ref: JobRef = atomic_json.read_json(folder / "ref.json")
        return ref

    def jobs(self, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
        """Return the attempts of this home folder with a running agent."""
        found = []
        for path in sorted((home / NAME).glob("*/attempt-*/ref.json")):
            ref, record = atomic_json.read_json(path), atomic_json.read_json(path.parent / RECORD)
            if ref and any(map(node_folder.agent_pid, LocalRef.load(ref).roots)):
                number = int(path.parent.name.removeprefix("attempt-"))
                found.append(FoundAttempt(path.parent.parent.name, number, ref, record))
        return found

    def doctor(self, config: JobConfig | None) -> list[Check]:
        """Return the checks of this machine, and the size of the config's partition."""
        from cloudtrain_processes.block import PARTITIONS, Processes

        name = config.block(Processes).partition if config is not None else next(iter(PARTITIONS))
        return [*LOCAL.doctor(config), Check("partition", "ok", f"{name}: {PARTITIONS[name].nodes} nodes")]
