"""From a request to a running job: all hosts are prepared, and then either all agents start or no agent.

The hosts are noted in the home folder before the first agent starts. A submit that dies leaves agents that wait for
each other and have started no worker. `find` adopts the agents if all have started; otherwise `find` closes admission
on each host, so that a start still under way is refused.
"""

from __future__ import annotations

import random
import secrets
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.contract import AgentSpec, EnvironmentSpec, JobSpec, PreparedEnvironment
from cloudtrain.launcher.backend import DamagedRecordError, FoundAttempt, JobRef, Request, Shipment
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import CapacityError, CloudtrainError, ConfigError, UnreachableError
from cloudtrain.launcher.planning.request_rules import own_mirror
from cloudtrain.launcher.store.home import identity, known_identity
from cloudtrain.launcher.text.terminal import say

from ..channel import archives
from ..channel.calls import Call, Fleet, HostAnswer
from ..channel.hosts import Host
from .hosts_placement import Assignment, address_of, assign_hosts, path_on, require_answers
from .records import SshNode, SshRef
from .request import of_config

SILENCE_S = 8.0  # after this silence a node is lost; recovery ends within 15 s, with the wait for the node's end
JOIN_S = 120.0
BUILD_S = 2400.0
START_S = 120.0
FETCH_S = 7200.0
TRIES = 3  # if several submits have each taken a part of the same hosts
WAIT_S = (0.5, 2.0)
KEEP_S, AGAIN_S = 10.0, 0.3  # the competing submits need a round trip each to give up


def ready(fleet: Fleet, request: Request, shipment: Shipment) -> None:
    """Open the channels that `send` uses. Raises an error if fewer hosts answer than the job needs."""
    require_answers(request.body, fleet)


def send(fleet: Fleet, request: Request, shipment: Shipment) -> JobRef:
    """Start one detached agent on each host, or no agent at all. Agents on spare hosts wait.

    Raises ConfigError, CredentialError or UnreachableError for faults of the hosts, CapacityError if their GPUs are
    held.
    """
    body = request.body
    shipment.sending.prepares()
    seats, count = _holder_first(fleet, body, assign_hosts(body, fleet)), JobSpec.load(body["spec"]).nodes
    try:
        ref, specs = _prepare(fleet, body, shipment, seats)
    except CloudtrainError as error:
        if len(seats) == count:
            raise
        say(f"no spare host waits in the job: {error}")
        seats = seats[:count]
        ref, specs = _prepare(fleet, body, shipment, seats)
    shipment.sending.creates()
    _start(fleet, seats, specs, body)
    return ref


def _prepare(
    fleet: Fleet, body: Mapping[str, Any], shipment: Shipment, seats: Sequence[Assignment]
) -> tuple[JobRef, list[AgentSpec]]:
    """Prepare the hosts, and note them in the home folder; return the handle, and the agents' messages."""
    nodes = [_node(fleet, number, seat, body) for number, seat in enumerate(seats)]
    job = JobSpec.load(body["spec"])
    spares = len(seats) - job.nodes
    can_shrink = (job.min_nodes or job.nodes) < len(seats)
    ref = SshRef(nodes, job.nproc_per_node, can_shrink, spares).dump()
    owner = identity(shipment.home)
    made_of = {"owner": owner, "record": {"record": dict(shipment.record), "ref": ref}}
    calls = {}
    for node in nodes:
        folders = [node.checkpoints, node.output, *node.outputs.values()]
        links = {f"{node.output}/{name}": target for name, target in node.outputs.items()}
        fresh = [node.checkpoints, node.mirror, *node.outputs.values()] if job.attempt == 1 else []
        asked = {"job": node.job, "root": node.root, "folders": folders, "links": links}
        calls[node.host] = Call("verbs.make", asked | made_of | {"fresh": fresh})
    _all(fleet, calls)
    paths = archives.ship(fleet, shipment.bundle, seats, body["ports"])
    archives.ship_data(fleet, shipment, seats, body["ports"])
    made = _environments(fleet, body, seats, nodes, paths, shipment.bundle.path)
    path = _noted(shipment.home, body["job"], body["attempt"])
    try:
        processes.make_private(path.parent)
        atomic_json.write_json(path, ref)
    except OSError as error:
        raise ConfigError(f"the job cannot be noted: {error.strerror}", where=str(path)) from error
    waits = {"spares": spares, "swaps": body["swaps"], "succeeds": True} if spares else {}
    return ref, [
        replace(agent_spec(number, seat, nodes[number], body, shipment, paths, made[number]), **waits)
        for number, seat in enumerate(seats)
    ]


def find(fleet: Fleet, request: Request, home: Path) -> JobRef | None:
    """Return the job if all its agents were started; otherwise close admission, so that None is final."""
    job, _, attempt = request.name.rpartition("-")
    noted = _noted(home, job, int(attempt))
    ref: JobRef | None = atomic_json.read_json(noted)
    if ref is None:
        if noted.exists():  # the job may have been started
            raise UnreachableError(f"where {request.name} was started cannot be read", hint=f"look at {noted}")
        return None
    roots = {node.host: node.root for node in SshRef.load(ref).nodes}
    calls = {host: Call("verbs.close_admission", {"root": root}) for host, root in roots.items()}
    answers = fleet.ask(calls, is_urgent=True)
    errors = [answer.error for answer in answers.values() if answer.error is not None]
    if all(answer.reply.get("started") for answer in answers.values() if answer.error is None):
        if errors:
            raise UnreachableError(f"whether {request.name} was started is not known: {errors[0]}")
        return ref
    # The agent of one host never joins, so no agent begins to work.
    calls = {host: Call("verbs.give_up", {"root": root, "for_ever": True}) for host, root in roots.items()}
    fleet.ask(calls, is_urgent=True)
    return None


def jobs(fleet: Fleet, config: JobConfig | None, home: Path) -> list[FoundAttempt]:
    """Return the attempts with a running agent on the config's hosts, else on the hosts of this home folder's jobs.

    A host that cannot be asked is named, and hides no further host. Raises UnreachableError if no host can be asked.
    """
    asked = of_config(config) if config is not None else []
    if not asked:
        notes = filter(None, map(atomic_json.read_json, (home / "ssh").glob("*/attempt-*.json")))
        asked = list(dict.fromkeys(node.host for note in notes for node in SshRef.load(note).nodes))
    found: dict[tuple[str, int], FoundAttempt] = {}
    answers = fleet.ask({host: Call("verbs.jobs", {}) for host in asked}, is_urgent=True)
    for host, answer in answers.items():
        if answer.error is not None:
            if all(each.error is not None for each in answers.values()):
                raise answer.error
            say(f"{host.name}: not asked for jobs: {answer.error.message}")
            continue
        for entry in answer.reply["jobs"]:
            is_own = entry["owner"] == known_identity(home)
            each = FoundAttempt(entry["job"], entry["attempt"], *_kept(entry.get("kept"), asked), is_own)
            found.setdefault((each.job_id, each.number), each)
    return list(found.values())


def _kept(kept: Any, asked: Sequence[Host]) -> tuple[JobRef, dict[str, Any] | None]:
    """Return the handle and the record that a host has kept; an empty handle unless all hosts of the handle were asked.

    Addresses come from `asked`, not from the kept record, because a host may be compromised.
    """
    known = {host.name: host.dump() for host in asked}
    try:
        nodes = [{**node, "host": known[node["host"]["name"]]} for node in kept["ref"]["nodes"]]
        return SshRef.load({**kept["ref"], "nodes": nodes}).dump(), kept["record"]
    except (LookupError, TypeError, DamagedRecordError):
        return {}, None


def _node(fleet: Fleet, number: int, seat: Assignment, body: Mapping[str, Any]) -> SshNode:
    """Return the node's folders as absolute paths on its host."""
    job = f"{seat.workdir}/jobs/{body['job']}"

    def there(places: Mapping[str, str]) -> dict[str, str]:
        return {name: path_on(fleet, seat.host, path) for name, path in places.items()}

    return SshNode(
        host=seat.host,
        job=job,
        root=f"{job}/attempt-{body['attempt']}/node-{number}",
        checkpoints=_checkpoints(fleet, seat.host, body),
        output=f"{job}/output",
        inputs={
            name: archives.data_place(seat.workdir, uri, lambda path: path_on(fleet, seat.host, path))
            for name, uri in body["inputs"].items()
        },
        outputs=there(body["outputs"]),
        mirror=own_mirror(JobSpec.load(body["spec"])),
    )


def _checkpoints(fleet: Fleet, host: Host, body: Mapping[str, Any]) -> str:
    own = f"{fleet.channel(host).about['workdir']}/jobs/{body['job']}/checkpoints"
    return path_on(fleet, host, body["checkpoint_dir"]) if body["checkpoint_dir"] else own


def _holder_first(fleet: Fleet, body: Mapping[str, Any], seats: list[Assignment]) -> list[Assignment]:
    """Return the hosts, first the host with the newest checkpoint: without a shared disk only that host has the files.

    If that host takes no part in this attempt, the first host fetches the checkpoint.
    """
    if body["attempt"] == 1:
        return seats
    hosts = [Host(**each) for each in body["hosts"]]
    there = {host: _checkpoints(fleet, host, body) for host in hosts if fleet.channel(host).about}
    answers = fleet.ask({host: Call("copying.newest", {"folder": folder}) for host, folder in there.items()})
    newest = {host: answer.reply for host, answer in answers.items() if answer.reply}
    if not newest:
        return seats
    best = max(newest, key=lambda host: (newest[host]["step"] or 0, newest[host]["mtime"]))
    same = [seat for seat in seats if newest.get(seat.host, {}).get("fingerprint") == newest[best]["fingerprint"]]
    if same:
        return [same[0], *(seat for seat in seats if seat is not same[0])]
    say(f"{seats[0].host.name} fetches what was saved on {best.name}, which takes no part this time")
    offer = {"folder": there[best], "address": address_of(fleet, best), "ports": body["ports"]}
    name = newest[best]["name"] if JobSpec.load(body["spec"]).run.kind == "task" else None
    fetch = {
        **fleet.call(best, "copying.offer", offer),
        "name": name,
        "into": there[seats[0].host],
        "note": _fetched_note(seats[0], body),
    }
    fleet.call(seats[0].host, "copying.fetch", fetch, limit_s=FETCH_S)
    return seats


def _environments(
    fleet: Fleet,
    body: Mapping[str, Any],
    seats: Sequence[Assignment],
    nodes: Sequence[SshNode],
    paths: Mapping[str, str],
    bundle: Path,
) -> list[PreparedEnvironment]:
    runs_in = body["runs_in"]
    if runs_in["kind"] != "none":
        say(f"preparing the job's environment ({runs_in['kind']})")
    if runs_in["kind"] == "venv":
        code = {"sha256": body["bundle"]}
        calls = {
            seat.host: Call("verbs.unpack", {**code, "path": paths[seat.host.name], "root": node.root})
            for seat, node in zip(seats, nodes, strict=True)
        }
        _all(fleet, calls)
        runs_in = {**runs_in, "requirements": _shipped_text(bundle, runs_in["requirements"])}
    asked = {}
    for seat, node in zip(seats, nodes, strict=True):
        spec = replace(
            EnvironmentSpec.load(runs_in),
            python=seat.host.python,
            workdir=seat.workdir,
            code=f"{node.root}/code",
            gpus=tuple(seat.takes) if body["gpus"] else (),
        )
        asked[seat.host] = Call("verbs.prepare", {"spec": spec.dump()})
    answers = _all(fleet, asked, BUILD_S)
    return [PreparedEnvironment.load(answers[seat.host].reply) for seat in seats]


def _shipped_text(bundle: Path, name: str) -> str:
    """Return the text of a file of the code. Raises ConfigError."""
    try:
        with tarfile.open(bundle) as archive:
            member = archive.extractfile(f"code/{name}")
            assert member is not None
            return member.read().decode()
    except (KeyError, AssertionError, OSError) as error:
        hint = "a path below code.dir, and not ignored"
        raise ConfigError(f"the code holds no file `{name}`", where="ssh.requirements", hint=hint) from error


def agent_spec(
    number: int,
    seat: Assignment,
    node: SshNode,
    body: Mapping[str, Any],
    shipment: Shipment,
    paths: Mapping[str, str],
    made: PreparedEnvironment,
) -> AgentSpec:
    """Return the message for the host's agent."""
    job, visible = JobSpec.load(body["spec"]), "" if not body["gpus"] else ",".join(seat.takes)
    places = {f"CLOUDTRAIN_INPUT_{name.upper()}": uri for name, uri in node.inputs.items()}
    places |= {"CLOUDTRAIN_CHECKPOINT_DIR": node.checkpoints, "CLOUDTRAIN_OUTPUT_DIR": node.output}
    written = [node.checkpoints, node.output, *node.outputs.values()]
    return AgentSpec(
        job=job,
        **{key: body[key] for key in ("max_duration_s", "limit_reason", "deadline_s", "grace_s", "ports")},
        node=number,
        address=seat.address,
        root=node.root,
        bundle=paths[seat.host.name],
        sha256=shipment.bundle.sha256,
        python=made.python,
        container=made.container,
        environment_lock=made.lock,
        mounts=(*((path, False) for path in written), *((path, True) for path in node.inputs.values())),  # read-only?
        gpus=tuple(seat.takes) if body["gpus"] else (),
        environment={"CUDA_VISIBLE_DEVICES": visible, **made.environment, **body["environment"], **places},
        secrets=dict(shipment.secrets),
        workdir=seat.workdir,
        silence_s=SILENCE_S,
        succeeds=job.nodes > 2,
        copies=_fetched_note(seat, body) if job.nodes > 1 else None,
        join_timeout_s=JOIN_S,
    )


def _fetched_note(seat: Assignment, body: Mapping[str, Any]) -> str:
    """Return the file where the host notes the checkpoints that it has fetched from its peers."""
    return f"{seat.workdir}/jobs/{body['job']}/fetched-{seat.name}.json"


def _start(fleet: Fleet, seats: Sequence[Assignment], specs: Sequence[AgentSpec], body: Mapping[str, Any]) -> None:
    """Start node 0's agent, then the rest; if a start fails, stop all. Raises CapacityError, and the agents' errors.

    If several submits have each taken a part of the same hosts, the job with the smallest name keeps its hosts and
    retries, and the remaining submits release their hosts: a single submit gets all hosts, in any order of the configs.
    """
    keep_until_s = time.monotonic() + KEEP_S
    for number in range(TRIES):
        busy: str | None = None
        try:
            busy = _start_all(fleet, seats, specs, body, keep_until_s)
        except BaseException:
            _give_up(fleet, seats, specs, for_ever=True)
            raise
        if busy is None:
            return
        is_last = number == TRIES - 1
        _give_up(fleet, seats, specs, for_ever=is_last)
        if is_last:
            raise CapacityError(busy, hint="`cloudtrain hosts` shows who holds what; try again, or name other hosts")
        time.sleep(random.uniform(*WAIT_S))


def _start_all(
    fleet: Fleet, seats: Sequence[Assignment], specs: Sequence[AgentSpec], body: Mapping[str, Any], keep_until_s: float
) -> str | None:
    """Start all agents; return the reason if a job holds a host, or None if all have started."""
    about, token, head = {"job": body["job"], "nodes": len(seats)}, secrets.token_hex(16), None
    needs = {seat.host.name: body["gpus"] or 1 for seat in seats}
    line = {"time_s": time.time(), "needs": needs, "holders": list(range(len(seats)))}

    def call(number: int) -> Call:
        seat, spec = seats[number], replace(specs[number], token=token, head=head)
        locks = {"folder": body["gpu_locks"], "names": seat.takes, "about": {**about, "labels": dict(seat.labels)}}
        if number >= spec.job.nodes:
            locks["spare"] = True
        if queue := body.get("queue"):
            locks["queue"] = {**queue, **line, "host": seat.host.name, "units": seat.takes}
        return Call("verbs.start", {"request": {"folder": spec.root, "nodes": [spec.dump()], "locks": locks}})

    waiting = list(range(len(seats)))
    while waiting:
        now = waiting[:1] if waiting[0] == 0 else waiting  # node 0's answer has the address for the remaining agents
        answers = _all(fleet, {seats[number].host: call(number) for number in now}, START_S)
        replies = {number: answers[seats[number].host].reply for number in now}
        head = replies.get(0, {}).get("head") or head
        refused = [number for number in now if not replies[number]["started"]]
        why = "; ".join(_why(seats[number], replies[number]) for number in refused)
        waiting = [number for number in waiting if number in refused or number not in now]
        if refused:
            if time.monotonic() > keep_until_s or not _comes_first(fleet, [seats[n] for n in refused], body):
                return why
            time.sleep(AGAIN_S)
    return None


def _comes_first(fleet: Fleet, seats: Sequence[Assignment], body: Mapping[str, Any]) -> bool:
    """Return whether the job's name sorts before the names of all jobs that hold these hosts."""
    asked = Call("survey.holders", {"lock_folder": body["gpu_locks"]})
    answers = fleet.ask({seat.host: asked for seat in seats}, is_urgent=True)
    taken = {seat.host: seat.takes for seat in seats}
    holders = [
        holder
        for host, answer in answers.items()
        for holder in answer.reply.get("holders") or ()
        if holder["name"] in taken[host]
    ]
    return all(body["job"] < holder.get("job", "") for holder in holders)


def _why(seat: Assignment, reply: Mapping[str, Any]) -> str:
    if not reply.get("busy"):
        hint = "set ssh.workdir to a local disk of the hosts" if reply.get("no_locks") else ""
        raise ConfigError(f"the agent on {seat.host.name} did not start: {reply['why']}", hint=hint)
    return f"{seat.host.name}: {reply['why']}"


def _give_up(fleet: Fleet, seats: Sequence[Assignment], specs: Sequence[AgentSpec], *, for_ever: bool) -> None:
    calls = {
        seat.host: Call("verbs.give_up", {"root": spec.root, "for_ever": for_ever})
        for seat, spec in zip(seats, specs, strict=True)
    }
    fleet.ask(calls, is_urgent=True)


def _all(fleet: Fleet, calls: Mapping[Host, Call], limit_s: float = START_S) -> dict[Host, HostAnswer]:
    """Return every host's answer; raises the first error, with the number of further failures."""
    answers = fleet.ask(calls, limit_s, is_urgent=True)
    errors = [answer.error for answer in answers.values() if answer.error is not None]
    if errors:
        first: CloudtrainError = errors[0]
        if len(errors) > 1:
            first.message = f"{first.message}\n  and {len(errors) - 1} more of {len(calls)} hosts failed"
        raise first
    return answers


def _noted(home: Path, job: str, attempt: int) -> Path:
    return home / "ssh" / job / f"attempt-{attempt}.json"
