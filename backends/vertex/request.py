"""The CustomJob, and the sending plan beside it.

Each replica runs entrypoints/container/bucket_boot.py, with the source as an argument: the boot fetches the bundle
(shared by all jobs with the same code) from the bucket and becomes our container, which fetches the job's order. Any
image with python3 will do, no image is built, and a late job stops if its order was retracted or went to another send
of the job. Google's prebuilt images run Python packages instead, so for them the boot is packed as a wheel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from shlex import quote
from typing import Any

from cloudtrain.entrypoints import contract
from cloudtrain.entrypoints.contract import ContainerOrder, ExitCodes, FetchedInput, Places, SyncedFolder
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.errors import Fault, refuse, require_all
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import container_order, job_spec
from cloudtrain.launcher.planning.request_rules import below, notes_of, places, planned_of
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.units import format_duration

from ..cloud import GOES_ALONG, unsupported, with_places
from . import machine_types
from .check import PREBUILT
from .machine import Kind, MachineChoice, block_of, choose, disk_of, kind_of, place_of, unknown_region
from .records import VertexSending

BOOT_MODULE = "cloudtrain_boot"  # of `wheel`
_INFO = f"{BOOT_MODULE}-1.dist-info"
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store
BUNDLE, ORDER = "bundle.tar.gz", "order.json"
RUN_LABEL = "cloudtrain_run"  # the attempt's name: CreateCustomJob takes no name, so this label identifies jobs
# On Docker Hub, read 2026-11-30: the newest PyTorch, with gcc for torch.compile (images from 2.11 on). CUDA 12.6 builds
# support GPUs up to Hopper with any driver for CUDA 12. Blackwell needs 12.8, and the newest such build is of 2.11:
# 2.13 has 12.6, 13.0 and 13.2, and CUDA 13 needs driver 580. Neither image was tried on Vertex AI (docs/vertex.md).
IMAGE = "docker.io/pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime"
BLACKWELL_IMAGE = "docker.io/pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime"
FLEX_WAIT_S = 86_400  # the wait for machines if the config sets none; Vertex AI's own default
GRACE_S = 25  # from the signal to the kill; Google documents no figure, and containers usually get 30 s
JOIN_TIMEOUT_S = 1800  # replicas start when their machines arrive, possibly minutes apart
FAULTS = ["signal", "lost", "rendezvous", "hang"]  # kinds of failure of possibly correct code, as in coordinate.py
PERMANENT, AGAIN = 1, 143  # exit codes: after PERMANENT Vertex AI ends the job, after AGAIN it may restart the job

_BLACKWELL = re.compile(r"NVIDIA_(B\d|GB\d|RTX_PRO)")

_RETRIES = ("jobSpec", "scheduling", "disableRetries")


def require(config: JobConfig) -> None:
    """Raise ConfigError with all that the config lacks for a request."""
    require_all(lambda: place_of(config), lambda: kind_of(config), lambda: refuse(_impossible(config, choose(config))))


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request. Raises ConfigError if the config lacks a setting that the request needs."""
    place, choice, kind = place_of(config), choose(config), kind_of(config)
    config = with_places(config, place.root)
    refuse(_impossible(config, choice))
    name, home = platform_name(job_id, attempt), f"{place.root}/jobs/{job_id}"
    order_uri, code_uri = f"{home}/attempt-{attempt}/{ORDER}", f"{place.root}/code/{bundle_sha256}/{BUNDLE}"
    uri, default = config.checkpoint.uri or "", config.checkpoint.mirror or f"{place.root}/checkpoints"
    checkpoint_uri = uri if uri.endswith(f"/{job_id}") else below(uri or default, job_id)
    output_uri = next(iter(config.outputs.values()), None) or f"{home}/output"
    # Vertex AI's AIP_MODEL_DIR, AIP_CHECKPOINT_DIR, AIP_TENSORBOARD_LOG_DIR lie there: `artifacts` has the files.
    order = container_order(
        plan,
        config,
        job_spec(plan, config, job_id, attempt),
        bundle_sha256,
        **_own_order(plan, config, name),
        carried=_carried(config, checkpoint_uri, output_uri),
        ended_uri=f"{home}/attempt-{attempt}/ended",
        kept_in=f"{home}/attempt-{attempt}",
        fence=name,  # for files sent by hand; each send by cloudtrain writes a new fence here and into the arguments
    )
    labels, renamed = _labels(config, job_id, attempt)
    file, data = wheel(boot_source())
    wheel_uri = f"{place.root}/code/{hashlib.sha256(data).hexdigest()}/{file}" if _is_prebuilt(config) else None
    job = {
        **_asked(plan, config, choice, kind),
        "name": name,
        "labels": labels,
        "package": wheel_uri,
        "module": BOOT_MODULE,
        "command": ["python3", "-u", "-c", boot_source()],
        "args": [code_uri, order_uri, name, *filter(None, [block_of(config).endpoints.get("storage")])],
        "output_uri": output_uri,
    }
    planned = render.render_yaml("vertex/job.yml", job=job, machine=choice, block=block_of(config))
    body, changes = render.overlaid(planned, block_of(config).raw)
    refuse(_unplanned(planned, body, has_price=plan.price_micro is not None))
    sending = VertexSending(
        project=place.project,
        location=place.location,
        endpoints=dict(block_of(config).endpoints),
        code_uri=code_uri,
        wheel_uri=wheel_uri,
        order_uri=order_uri,
        owner_uri=f"{home}/owner",
        checkpoint_uri=checkpoint_uri if checkpoint_uri.startswith("gs://") else None,
        output_uri=output_uri,
        order=_without_shared_disk(plan, config, order, checkpoint_uri),
        limit_s=plan.cap_s,
        kind=kind,
    )
    notes = (*changes, *renamed, *_notes(config, kind))
    carried = {"resources.disk_gb", "resources.spot", *(["limits.max_wait"] if kind == "flex_start" else [])}
    text, written = render.as_yaml(body, repeats=False), _files(body, sending)
    whose = "yours" if config.image else "cloudtrain's default, from Docker Hub"
    pool = body["jobSpec"]["workerPoolSpecs"][0]  # as `raw` leaves it
    image = render.at(pool, ("containerSpec", "imageUri")) or render.at(pool, ("pythonPackageSpec", "executorImageUri"))
    own, runtime, archive = frozenset(carried), images.of(str(image), whose), f"code/{bundle_sha256}/{BUNDLE}"
    return Request(name, body, text, written, sending.dump(), notes, own, archive=archive, runtime=runtime)


def with_fence(body: dict[str, Any], fence: str) -> dict[str, Any]:
    """Return the body with a send's mark among the boot's arguments; the order holds the same mark."""
    pools = []
    for pool in body["jobSpec"]["workerPoolSpecs"]:
        name = "containerSpec" if "containerSpec" in pool else "pythonPackageSpec"
        args = list(pool.get(name, {}).get("args", ()))
        if len(args) > 2 and str(args[1]).endswith(f"/{ORDER}"):  # a pool of the user's own has different arguments
            args[2] = fence
            pool = {**pool, name: {**pool[name], "args": args}}
        pools.append(pool)
    return {**body, "jobSpec": {**body["jobSpec"], "workerPoolSpecs": pools}}


def boot_source() -> str:
    """Return the source of the program that every replica starts with."""
    return (files("cloudtrain.entrypoints") / "container" / "bucket_boot.py").read_text(encoding="utf-8")


def wheel(source: str) -> tuple[str, bytes]:
    """Return the file name and the bytes of the boot as a package: prebuilt images install packages by pip.

    No network is needed. A wheel is a zip archive with three files of metadata (PEP 427), the same bytes for the same
    source.
    """
    parts = {
        f"{BOOT_MODULE}.py": source,
        f"{_INFO}/METADATA": f"Metadata-Version: 2.1\nName: {BOOT_MODULE.replace('_', '-')}\nVersion: 1\n",
        f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: cloudtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    for name, text in parts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(text.encode())}")
    parts[f"{_INFO}/RECORD"] = "\n".join([*record, f"{_INFO}/RECORD,,"]) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in parts.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), text)
    return f"{BOOT_MODULE}-1-py3-none-any.whl", buffer.getvalue()


def _is_prebuilt(config: JobConfig) -> bool:
    return config.image is not None and bool(PREBUILT.fullmatch(config.image))


def _asked(plan: Plan, config: JobConfig, choice: MachineChoice, kind: Kind) -> dict[str, Any]:
    """Return the template's values that follow from the plan, the config and the machine together."""
    blackwell = bool(choice.accelerator and _BLACKWELL.match(choice.accelerator))
    disk_type, disk_gb = disk_of(config, choice)
    max_wait_s = config.limits.max_wait or FLEX_WAIT_S
    return {
        "pools": [1, plan.instances - 1] if plan.instances > 1 else [1],
        "image": config.image or (BLACKWELL_IMAGE if blackwell else IMAGE),
        "env": [{"name": key, "value": value} for key, value in config.env.items()],
        "disk_type": disk_type,
        "disk_gb": disk_gb,
        "timeout": f"{plan.cap_s}s",
        "strategy": {"spot": "SPOT", "flex_start": "FLEX_START"}.get(kind),
        "max_wait": f"{max_wait_s}s" if kind == "flex_start" else None,
        # NCCL's communicators break when a member leaves: after a replacement of a machine all replicas must restart.
        "restart_all": plan.instances > 1,
        # Google does not document whether the time limit spans Vertex AI's restarts: an enforced budget allows none.
        "disable_retries": plan.terms.starts == 1,
    }


def _own_order(plan: Plan, config: JobConfig, name: str) -> dict[str, Any]:
    """Return Vertex AI's fields of the container order; paths begin at the boot's folder."""
    block, place = block_of(config), place_of(config)
    secret = f"projects/{place.project}/secrets/{name}"
    secrets = contract.SecretManagerSecrets(tuple(config.secrets), secret, block.endpoints.get("secretmanager"))
    is_mounted = block.input_mode == "mount"
    return {
        "secrets": secrets if config.secrets else None,
        "lead_s": plan.cap_s - plan.own_limit_s,
        "grace_s": GRACE_S,
        "join_timeout_s": JOIN_TIMEOUT_S,
        "log": "json",
        "exit_codes": ExitCodes(PERMANENT, AGAIN),
        "fetched": {
            key: FetchedInput(uri, f"/gcs/{uri.removeprefix('gs://')}" if is_mounted else None)
            for key, uri in config.inputs.items()
        },
        "environments_in": f"{place.root}/environments" if config.requirements else None,
        "places": Places(own="cloudtrain", bundle=BUNDLE, checkpoints="checkpoints", output="output"),
    }


def _without_shared_disk(plan: Plan, config: JobConfig, order: ContainerOrder, checkpoint_uri: str) -> ContainerOrder:
    """Return the order with the changes for replicas that have a disk of their own."""
    job = order.job
    if config.task:  # the trainer itself copies its checkpoints to the bucket
        mirror = config.checkpoint.mirror or checkpoint_uri.rpartition("/")[0]
        return replace(order, job=replace(job, checkpoint=replace(job.checkpoint, mirror=mirror)))
    if plan.instances > 1 and config.distributed.max_restarts:
        # A script's checkpoint on one replica reaches the remaining replicas only after a restart of all.
        return replace(order, job=replace(job, max_restarts=0), exit_codes=ExitCodes(PERMANENT, AGAIN, tuple(FAULTS)))
    return order


def _carried(config: JobConfig, checkpoint_uri: str, output_uri: str) -> tuple[SyncedFolder, ...]:
    """Return the folders that each node copies to the bucket and, with `back`, from the bucket at a start.

    A task's checkpoint folder is not among them: the trainer copies its checkpoints itself (checkpoint.mirror).
    """
    folders = [SyncedFolder("output", output_uri)]
    if not config.task:
        folders.append(SyncedFolder("checkpoints", checkpoint_uri, back=True))
    if block_of(config).tensorboard:  # TensorBoard reads the files below AIP_TENSORBOARD_LOG_DIR
        folders.append(SyncedFolder("output/tensorboard", f"{output_uri.rstrip('/')}/logs"))
    return tuple(folders)


def _labels(config: JobConfig, job_id: str, attempt: int) -> tuple[dict[str, str], list[str]]:
    """Return the job's labels, and a sentence for each changed tag: labels allow no capitals."""
    labels, notices = {}, []
    for key, value in config.tags.items():
        plain_key, plain = _as_label(key), _as_label(value)
        if not plain_key[:1].isalpha():
            plain_key = f"tag_{plain_key}"[:63]
        if (plain_key, plain) != (key, value):
            notices.append(f"the tag `{key}: {value}` becomes the label `{plain_key}: {plain}`")
        if plain_key in labels:
            notices.append(f"so the tag `{key}` replaces another tag")
        labels[plain_key] = plain
    own = {"cloudtrain_job": job_id, RUN_LABEL: platform_name(job_id, attempt), "cloudtrain_attempt": str(attempt)}
    if config.project is not None:
        own["cloudtrain_project"] = config.project.name  # project names are legal labels
    return {**labels, **own}, notices


def _as_label(text: str) -> str:
    return re.sub(r"[^\w-]", "_", text.lower())[:63]


def _notes(config: JobConfig, kind: Kind) -> Iterator[str]:
    yield from notes_of(unknown_region(config))
    if kind == "flex_start":
        yield f"flex start: it may wait for its machines up to {format_duration(config.limits.max_wait or FLEX_WAIT_S)}"
    if config.secrets:
        yield "secrets go through Secret Manager, until the job's end is seen"
    if _is_prebuilt(config):
        yield "Google's prebuilt images lag far behind PyTorch: an image of your own, or none, is the better choice"
    if block_of(config).input_mode == "mount" and config.inputs:
        yield "inputs are read below /gcs as they are; where a machine has no /gcs they are copied first"


def _files(body: dict[str, Any], sending: VertexSending) -> dict[str, str]:
    """Return the files that `-o DIR` writes: the spec in gcloud's form, the order, and the commands that send both."""
    labels = ",".join(f"{key}={value}" for key, value in body.get("labels", {}).items())
    kms = (body.get("encryptionSpec") or {}).get("kmsKeyName")
    commands = [
        "#!/bin/sh -e",
        "# Sends the job as `cloudtrain submit` does, with Google's own command line; cloudtrain does not follow it.",
        'cd "$(dirname "$0")"',
        f"gcloud storage cp --no-clobber code/*/{BUNDLE} {quote(sending.code_uri)}",
        *([f"gcloud storage cp --no-clobber code/*.whl {quote(sending.wheel_uri)}"] if sending.wheel_uri else []),
        f"gcloud storage cp {ORDER} {quote(sending.order_uri)}",
        "gcloud ai custom-jobs create --config job-spec.yml \\",
        f"  --project {sending.project} --region {sending.location} --display-name {quote(body['displayName'])} \\",
        f"  --labels {quote(labels)}" + (f" --kms-key {quote(kms)}" if kms else ""),
    ]
    return {
        "job-spec.yml": render.as_yaml(body["jobSpec"]),
        ORDER: render.as_json(sending.order.dump()),
        "create.sh": "\n".join(commands) + "\n",
    }


def _unplanned(planned: dict[str, Any], body: dict[str, Any], *, has_price: bool) -> Iterator[Fault]:
    """Yield a fault if `raw` changes a planned value, or a field that the job needs.

    A price does not count pools that the user has added after ours.
    """
    guarded = {_RETRIES: "budget.on_limit"} if render.at(planned, _RETRIES) else {}  # a budget assumes a single start
    yield from render.changed(planned, body, planned_of("vertex") | guarded, "vertex.raw")
    ours, theirs = (render.at(whole, ("jobSpec", "workerPoolSpecs")) for whole in (planned, body))
    kept = theirs[: len(ours)] if isinstance(theirs, list) else []
    if [_planned_of(pool) for pool in kept] != [_planned_of(pool) for pool in ours]:
        message = "`raw` changes the machines, their number, disks or tasks, and so the plan no longer fits"
        hint = "set resources and image instead; a list in `raw` replaces the whole list"
        yield Fault(message, key="vertex.raw", hint=hint)
    elif has_price and len(theirs) > len(ours):
        message = "`raw` adds machines, which the price and every budget leave out"
        hint = "leave vertex.raw.jobSpec.workerPoolSpecs as they are, and set resources.instances"
        yield Fault(message, key="vertex.raw", hint=hint)
    if any(render.at(body, ("labels", key)) != value for key, value in planned["labels"].items() if key == RUN_LABEL):
        yield Fault(f"`raw` takes away the label {RUN_LABEL}", key="vertex.raw", hint="leave it")


def _planned_of(pool: Any) -> Any:
    if not isinstance(pool, dict):
        return pool
    own = pool.get("containerSpec") or pool.get("pythonPackageSpec")
    own = own if isinstance(own, dict) else {}
    machine = pool.get("machineSpec")
    if isinstance(machine, dict):
        machine = {key: value for key, value in machine.items() if key != "reservationAffinity"}
    runs = [own.get(key) for key in ("command", "args", "pythonModule")]
    return [pool.get("replicaCount"), machine, pool.get("diskSpec"), *runs]


def _impossible(config: JobConfig, choice: MachineChoice) -> Iterator[Fault]:
    """Yield a fault for each setting that a replica on Vertex AI does not support."""
    yield from [*_unreachable(config), *unsupported(config, "Vertex AI")]
    if config.checkpoint.uri and config.checkpoint.mirror:
        hint = "a replica has no shared disk, so the mirror is the place itself: keep one of the two"
        message = "on Vertex AI `checkpoint.uri` and `checkpoint.mirror` are the same thing"
        yield Fault(message, key="checkpoint.mirror", hint=hint)
    if choice.accelerator is not None and not choice.accelerator.startswith("NVIDIA"):
        message = f"torch's DDP and FSDP do not run on {choice.accelerator}"
        hint = f"choose GPUs; known as of {machine_types.AS_OF}: L4 to B200"
        yield Fault(message, key="resources", hint=hint)


def _unreachable(config: JobConfig) -> Iterator[Fault]:
    """Yield a fault for each URI that a replica cannot reach."""
    for key, uri in places(config.checkpoint.uri, config.inputs, config.outputs).items():
        if wrong := addresses.in_bucket(uri, "gs"):
            is_here = not wrong[0] and "://" not in uri and key.startswith("inputs.")
            hint = wrong[1] + (f"; gcloud storage cp -r {uri} gs://BUCKET/x; {GOES_ALONG}" if is_here else "")
            elsewhere = f"Vertex AI reads and writes Cloud Storage, and `{uri}` is elsewhere"
            yield Fault(wrong[0] or elsewhere, key=key, hint=hint)
    mirror = config.checkpoint.mirror
    if mirror is not None and ("://" not in mirror or mirror.startswith("file:")):
        hint = "name a place such as gs://BUCKET/PREFIX, or leave it out: checkpoints go to the bucket anyway"
        yield Fault("a mirror on the replica's own disk would end with it", key="checkpoint.mirror", hint=hint)
    if mirror is not None and not config.task:
        hint = "name the place by checkpoint.uri: what a script writes to CLOUDTRAIN_CHECKPOINT_DIR goes there"
        yield Fault("a mirror is the shared trainer's, and this job runs its own code", "checkpoint.mirror", hint=hint)
