"""From a request to a job in Slurm's queue: the code and the agents' order on the shared disk, then one job.

A submit that dies leaves an attempt's folder, and perhaps a held job, which costs nothing. `find` adopts the job by its
name; otherwise `find` closes the attempt's door, so that a job still on its way does nothing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.contract import AgentSpec, JobSpec
from cloudtrain.launcher.backend import DamagedRecordError, FoundAttempt, JobRef, Request, Shipment
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CapacityError, ConfigError, UnreachableError
from cloudtrain.launcher.planning.request_rules import own_mirror
from cloudtrain.launcher.store.home import identity, known_identity
from cloudtrain.launcher.text.terminal import say

from ..channel import archives
from ..channel.calls import Fleet
from ..channel.hosts import Host
from . import jobs_submission as submission
from .block import Slurm
from .channel import Login, host_of
from .records import SlurmRef

SILENCE_S = 8.0  # after this silence a node is lost, as on the ssh backend
JOIN_S = 300.0  # a node's prologue may take minutes
TELL_S = 60.0  # of expected wait, from which on a message names the start


def ready(fleet: Fleet, request: Request, shipment: Shipment) -> None:
    """Ask Slurm whether the job can run, without a job. Raises ConfigError, UnreachableError, CredentialError."""
    try:
        start = submission.would_start(Login.at(fleet, host_of(request.body["settings"])), request.body)
    except CapacityError:  # the send, which may wait in line, says so
        return
    if start is None:
        say("Slurm has no such nodes up at the moment; the job waits for the nodes")
    elif start.at_s is not None and start.at_s > time.time() + TELL_S:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(start.at_s))
        say(f"Slurm would start the job at {at} on {start.nodes}")


def send(fleet: Fleet, request: Request, shipment: Shipment) -> JobRef:
    """Send code and order, and submit the job. Raises ConfigError or CapacityError if Slurm refuses the job."""
    body = request.body
    login = Login.at(fleet, host_of(body["settings"]))
    shipment.sending.prepares()
    ref = handle(login.host, body, login.about["workdir"], login.path)
    receiver = archives.Receiver(login.host, login.about["workdir"], "")
    bundle = archives.ship(fleet, shipment.bundle, [receiver])[login.host.name]
    order, attempt = body["order"], JobSpec.load(body["order"]["job"]).attempt
    archives.ship_data(fleet, shipment, [receiver])
    inputs = {name: archives.data_place(receiver.workdir, uri, login.path) for name, uri in order["inputs"].items()}
    made = {
        "owner": identity(shipment.home),
        "record": {"record": dict(shipment.record), "ref": ref.dump()},
        "folders": [ref.checkpoints, ref.output, *ref.outputs.values()],
        "links": {f"{ref.output}/{name}": target for name, target in ref.outputs.items()},
        "fresh": [ref.checkpoints, ref.mirror, *ref.outputs.values()] if attempt == 1 else [],
    }
    spec = agent_spec(ref, body, shipment, bundle, inputs=inputs, workdir=login.about["workdir"])
    files = {"order.json": json.dumps(spec.dump()), "job.sh": body["script"]}
    login.call("slurm.prepare", {"folder": ref.folder, "nodes": ref.nodes, "files": files, "request": made})
    path = shipment.home / "slurm" / f"{login.host.key}.json"  # for a registry that has lost the job
    try:
        processes.make_private(path.parent)
        atomic_json.write_json(path, login.host.dump())
    except OSError as error:
        raise ConfigError(f"the cluster cannot be noted: {error.strerror}", where=str(path)) from error
    shipment.sending.creates()
    if not submission.open_door(login.run, ref.folder):
        raise ConfigError(f"{ref.folder} was given up, or belongs to a different submit", hint="submit again")
    try:
        number = submission.submit(login.run, ref.folder, request.name, body["sbatch"])
    except (ConfigError, CapacityError):  # Slurm has no job
        login.call("slurm.discard", {"folder": ref.folder})
        shipment.sending.prepares()
        raise
    return replace(ref, number=number, sent_s=time.time()).dump()


def find(fleet: Fleet, request: Request, home: Path) -> JobRef | None:
    """Return the job if Slurm has the job; otherwise close the attempt's door, so that None is final."""
    login = Login.at(fleet, host_of(request.body["settings"]))
    ref = handle(login.host, request.body, login.about["workdir"], login.path)
    door = login.call("slurm.door", {"folder": ref.folder})
    if door["opened_ago_s"] is not None:
        number = door["number"]
        if number is None:
            patience_s = submission.patience_s(login.run) - door["opened_ago_s"]
            number = submission.find(login.run, request.name, max(patience_s, 0.0))
        if number is not None:
            submission.release(login.run, number)
            return replace(ref, number=number, sent_s=time.time() - door["opened_ago_s"]).dump()
    _close(login, ref)
    return None


def supersede(fleet: Fleet, request: Request, number: int) -> int:
    """Close the attempt's door: a run that Slurm starts later, as after an administrator's requeue, does nothing."""
    login = Login.at(fleet, host_of(request.body["settings"]))
    _close(login, handle(login.host, request.body, login.about["workdir"], login.path))
    return 0


def _close(login: Login, ref: SlurmRef) -> None:
    if not submission.close(login.run, ref.folder):
        raise UnreachableError(f"the folder {ref.folder} cannot be closed", hint="look at the disk of the login node")


def jobs(fleet: Fleet, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the attempts queued on the config's or this home's clusters. Raises UnreachableError, ConfigError."""
    if config is not None:
        asked = [host_of(config.block(Slurm).model_dump(mode="json"))]
    else:
        notes = sorted((home / "slurm").glob("*.json"))
        asked = [Host.load(found) for found in map(atomic_json.read_json, notes) if found]
    return [
        _found(login, entry, home)
        for login in (Login.at(fleet, host) for host in asked)
        for entry in login.call("slurm.jobs", {})["jobs"]
    ]


def _found(login: Login, entry: Mapping[str, Any], home: Path) -> FoundAttempt:
    """Return an attempt of the queue; the address comes from the config, not from the kept record."""
    ref, record = {}, None
    with contextlib.suppress(LookupError, TypeError, DamagedRecordError):
        ref = SlurmRef.load({**entry["kept"]["ref"], "login": login.host.dump(), "number": entry["number"]}).dump()
        record = entry["kept"]["record"]
    return FoundAttempt(entry["job"], entry["attempt"], ref, record, entry["owner"] == known_identity(home))


def handle(host: Host, body: Mapping[str, Any], workdir: str, path: Callable[[str], str]) -> SlurmRef:
    """Return the handle, without the job's number; `path` makes a path of the config absolute."""
    order = body["order"]
    job = JobSpec.load(order["job"])
    folder = f"{workdir}/jobs/{job.job}"
    return SlurmRef(
        login=host,
        folder=f"{folder}/attempt-{job.attempt}",
        checkpoints=path(order["checkpoint_dir"]) if order["checkpoint_dir"] else f"{folder}/checkpoints",
        output=f"{folder}/output",
        outputs={name: path(uri) for name, uri in order["outputs"].items()},
        mirror=own_mirror(job),
        nodes=job.nodes,
        nproc_per_node=job.nproc_per_node,
        python=path(body["settings"]["python"]),
        limit_reason=order["limit_reason"],
        can_shrink=(job.min_nodes or job.nodes) < job.nodes,
    )


def agent_spec(
    ref: SlurmRef, body: Mapping[str, Any], shipment: Shipment, bundle: str, *, inputs: Mapping[str, str], workdir: str
) -> AgentSpec:
    """Return the order for all nodes: an agent's message without the facts of one node."""
    order = body["order"]
    job = JobSpec.load(order["job"])
    places = {f"CLOUDTRAIN_INPUT_{name.upper()}": path for name, path in inputs.items()}
    places |= {"CLOUDTRAIN_CHECKPOINT_DIR": ref.checkpoints, "CLOUDTRAIN_OUTPUT_DIR": ref.output}
    return AgentSpec(
        job=job,
        **{key: order[key] for key in ("max_duration_s", "limit_reason", "deadline_s", "grace_s")},
        node=0,
        address="",
        root=ref.folder,
        bundle=bundle,
        sha256=shipment.bundle.sha256,
        python=ref.python,
        environment={**order["environment"], **places},
        secrets=dict(shipment.secrets),
        workdir=workdir,
        token=secrets.token_hex(16),
        silence_s=SILENCE_S,
        join_timeout_s=JOIN_S,
        succeeds=job.nodes > 2,
        requeues="--requeue" in body["sbatch"],
        shows_variables=bool(body["settings"].get("variables")),
    )
