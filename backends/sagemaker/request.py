"""The CreateTrainingJob request, and the sending plan beside it.

The container runs our own boot from a channel `code` (the bundle, shared by all jobs with the same code) and reads the
job's spec from a channel `job`: SageMaker limits arguments to 256 characters and variables to 512, but not files. The
two older modes run the image's own toolkit instead, which reads its settings from hyperparameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.contract import ParameterSecrets, Places
from cloudtrain.launcher.backend import Request
from cloudtrain.launcher.errors import ConfigError, Fault, refuse, require_all
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.planning import images, render
from cloudtrain.launcher.planning.job_spec import container_order, job_spec
from cloudtrain.launcher.planning.request_rules import listed, notes_of, planned_of
from cloudtrain.launcher.text import addresses
from cloudtrain.launcher.text.units import format_duration

from ..cloud import GOES_ALONG, unsupported, with_places
from . import request_images
from .machine import ACCELERATED, DISK_GB, S3Location, block_of, choices, choose, disk_usd, place_of, unknown_region
from .records import SageMakerSending

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig
    from cloudtrain.launcher.metering.rate import Machine
    from cloudtrain.launcher.plan import Plan, Runtime

MAX_DAYS_S = 28 * 86_400  # SageMaker's limit of a job's run, and of a spot job's run with its wait
PENDING_S = range(1800, MAX_DAYS_S + 1)  # MaxPendingTimeInSeconds, by botocore 1.44
WAIT_S = 86_400  # for spot machines, if the config sets none
CODE, JOB = "code", "job"  # our channels: no input may have these names
BUNDLE, SPEC = "bundle.tar.gz", "spec.json"  # the files in the channels
GRACE_S = 110  # from SageMaker's signal to its kill: 120 s
JOIN_TIMEOUT_S = 900  # for the slowest instance's download of image and data

_RULES = ("DebugRuleConfigurations", "ProfilerRuleConfigurations")

# 224 characters of the 256 allowed. An image needs only a shell, tar and python3.
ENTRYPOINT = (
    "mkdir -p /opt/cloudtrain && tar -xzf /opt/ml/input/data/code/bundle.tar.gz -C /opt/cloudtrain "
    "&& exec env PYTHONPATH=/opt/cloudtrain/runtime python3 -m cloudtrain.entrypoints.container "
    "/opt/ml input/data/job/spec.json"
)

# The toolkit's program, from the bundle: it refuses an image without SMDDP, else runs the script.
GUARD = "runtime/cloudtrain/entrypoints/container/smddp.py"

# Names for SageMaker's own charts, and the fields of our event lines with the numbers (entrypoints/events.py).
_NUMBER = r"(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
_EVENT_FIELDS = {
    "loss": ("step", "loss"),
    "lr": ("step", "lr"),
    "samples_per_s": ("step", "samples_per_s"),
    "tokens_per_s": ("step", "tokens_per_s"),
    "mfu": ("step", "mfu"),
    "eval:loss": ("eval", "loss"),
}


def require(config: JobConfig) -> None:
    """Raise ConfigError with all that the config lacks for a request."""
    require_all(lambda: place_of(config), lambda: choose(config), lambda: refuse(_unreachable(config)))


def build(plan: Plan, config: JobConfig, job_id: str, attempt: int, bundle_sha256: str) -> Request:
    """Return the request. Raises ConfigError if the config lacks a setting that the request needs."""
    block, place, is_spot = block_of(config), place_of(config), config.resources.spot
    config = with_places(config, place.root)
    refuse(_unreachable(config))
    name, machine, machines = platform_name(job_id, attempt), choose(config), choices(config)
    home = f"{place.root}/jobs/{job_id}"
    image = config.image or _default_image(place.region, machine.count, machines)
    # With a trailing slash: SageMaker takes all objects whose names begin with the URI, as attempt-10 with attempt-1.
    code_uri, job_uri = f"{place.root}/code/{bundle_sha256}/", f"{home}/attempt-{attempt}/"
    toolkit = {} if block.distribution == "torchrun" else _toolkit(config, place, name, machine.instance_type, code_uri)
    # AWS's bill can be split by job and by project.
    project = [("cloudtrain:project", config.project.name)] if config.project is not None else []
    job = {
        "name": name,
        "role": place.role,
        "image": image,
        "entrypoint": [] if toolkit else ["/bin/sh", "-c", ENTRYPOINT],
        "hyperparameters": toolkit,
        # Without the toolkit the variables are in the spec, which has no limit of length.
        "environment": {**config.env, "CLOUDTRAIN_SCRIPT": f"code/{config.script}"} if toolkit else {},
        # The toolkit reads neither channel, but no job must start without its order.
        "channels": _channels(config, [(JOB, job_uri)] if toolkit else [(CODE, code_uri), (JOB, job_uri)]),
        "output_uri": _output(config) or f"{home}/output",
        "checkpoint_uri": f"{(config.checkpoint.uri or f'{home}/checkpoints').rstrip('/')}/",
        "tensorboard_uri": f"{home}/tensorboard" if config.task and config.training.tensorboard else None,
        "instance_types": [each.instance_type for each in machines],
        "disk_gb": config.resources.disk_gb or DISK_GB,
        "metrics": _metrics(config),
        "max_wait_s": min(plan.cap_s + (config.limits.max_wait or WAIT_S), MAX_DAYS_S) if is_spot else None,
        "max_pending_s": _max_pending_s(config, machine.instance_type),
        "retries": config.retry.max_attempts - 1 or None,
        "tags": [*config.tags.items(), ("cloudtrain:job", job_id), ("cloudtrain:attempt", str(attempt)), *project],
    }
    body = render.render_json("sagemaker/request.json", job=job, plan=plan, block=block, spot=is_spot)
    planned = body
    body, changes = render.overlaid(body, block.raw)
    refuse(_unplanned(planned, body, has_price=plan.price_micro is not None))
    spec, checkpoint_uri = job_spec(plan, config, job_id, attempt), body["CheckpointConfig"]["S3Uri"].rstrip("/")
    own = _own_order(config, place, name, checkpoint_uri, gathers=config.task is None and plan.instances > 1)
    order = container_order(plan, config, spec, bundle_sha256, **own)
    sending = SageMakerSending(
        region=place.region,
        profile=block.profile,
        endpoints=dict(block.endpoints),
        default_of=place.role.split(":")[4] if block.bucket is None else None,  # the account
        code_uri=code_uri,
        job_uri=job_uri,
        owner_uri=f"{home}/owner",
        order=order,
        hourly_usd=_hourly_usd(plan, config, machines),
    )
    text = render.as_json(body)
    files = {"create-training-job.json": text, SPEC: render.as_json(order.dump())}
    runtime = _runtime(config, image, body)
    # The wait of a job in line may be shorter than SageMaker's shortest.
    carries_wait = is_spot or job["max_pending_s"] == config.limits.max_wait
    carried = {"retry", "resources.disk_gb", "resources.spot", *(["limits.max_wait"] if carries_wait else [])}
    notes = (*changes, *_notes(config))
    return Request(name, body, text, files, sending.dump(), notes, frozenset(carried), runtime=runtime)


def _default_image(region: str, gpus: int, machines: tuple[Machine, ...]) -> str:
    """Return AWS's image for the machines. Raises ConfigError if it does not run on one of them."""
    unserved = [each.accelerator for each in machines if each.accelerator in request_images.UNSERVED]
    if unserved:
        ours = f"the default image (PyTorch {request_images.TORCH}, CUDA 13, x86)"
        message = f"{ours} does not run on {unserved[0]}"
        raise ConfigError(message, key="resources", hint="set `image` to one that does, or take other machines")
    return request_images.default_image(region, gpus)


def _max_pending_s(config: JobConfig, instance_type: str) -> int | None:
    """Return the seconds for which on-demand machines may be awaited; None if SageMaker gives the wait no limit.

    With `queue.wait` the config's wait, which begins in line, may be shorter than SageMaker's shortest.
    """
    wait_s = config.limits.max_wait
    if wait_s is None or config.resources.spot or not ACCELERATED.match(instance_type):
        return None
    wait_s = max(wait_s, PENDING_S[0]) if config.queue.wait else wait_s
    if wait_s not in PENDING_S:
        hint = f"write {format_duration(PENDING_S[0])} to {format_duration(PENDING_S[-1])}, or leave `max_wait` out"
        message = f"SageMaker cannot wait {format_duration(wait_s)} for machines"
        raise ConfigError(message, key="limits.max_wait", hint=hint)
    return wait_s


def _hourly_usd(plan: Plan, config: JobConfig, machines: tuple[Machine, ...]) -> dict[str, float] | None:
    """Return the price of an instance of each type of a list, with its disk: SageMaker bills the type that it takes."""
    size_gb = config.resources.disk_gb or DISK_GB
    if len(machines) == 1 or plan.price_micro is None or block_of(config).price_per_hour is not None:
        return None
    return {each.instance_type: (each.hourly_usd or 0.0) + disk_usd(each.instance_type, size_gb) for each in machines}


def _runtime(config: JobConfig, planned: str, body: Mapping[str, Any]) -> Runtime | None:
    """Return what the request's image holds, which `raw` may have set; None for a value that is no name."""
    pulled = render.at(body, ("AlgorithmSpecification", "TrainingImage"))
    if not isinstance(pulled, str):
        return None
    is_planned = pulled == planned
    whose = f"AWS's, as of {request_images.IMAGES_AS_OF}" if is_planned and config.image is None else "yours"
    found = images.of(pulled, whose, "image" if is_planned else "sagemaker.raw")
    is_ours = block_of(config).distribution == "torchrun"  # with the toolkit, the Python may be older
    return found if is_ours else replace(found, python=None)


def _notes(config: JobConfig) -> Iterator[str]:
    yield from notes_of(unknown_region(config))
    if len(names := [each.instance_type for each in choices(config)]) > 1:
        yield f"SageMaker takes the first type with machines, and bills that type: {', '.join(names)}"
    if config.resources.spot:
        wait_s = config.limits.max_wait or WAIT_S
        yield f"spot machines: the job may wait for them up to {format_duration(wait_s)}, and start again on others"
    if config.retry.max_attempts > 1 and "error" in config.retry.on:
        yield "SageMaker starts again after faults of its machines, not after errors of the code: retry.on `error`"


def _own_order(config: JobConfig, place: S3Location, name: str, checkpoints: str, *, gathers: bool) -> dict[str, Any]:
    """Return SageMaker's fields of the container order; paths begin at /opt/ml."""
    secrets = ParameterSecrets(place.region, f"/cloudtrain/{name}", tuple(config.secrets))
    reaches_s3 = not block_of(config).network_isolation  # an isolated container cannot reach S3
    return {
        "gathers": gathers,
        "secrets": secrets if config.secrets else None,
        "grace_s": GRACE_S,
        "join_timeout_s": JOIN_TIMEOUT_S,
        "environments_in": f"{place.root}/environments" if reaches_s3 and config.requirements else None,
        "places": Places(
            own="cloudtrain",
            bundle=f"input/data/{CODE}/{BUNDLE}",
            checkpoints="checkpoints",
            output="model",
            failure="output/failure",
            inputs={key: _input_path(config, key) for key in config.inputs},
            copied_to=checkpoints if reaches_s3 else None,
        ),
    }


def _unplanned(planned: dict[str, Any], body: dict[str, Any], *, has_price: bool) -> Iterator[Fault]:
    """Yield a fault if `raw` changes a planned value, or a field that the job needs.

    Debug and profiler rules with machines of their own run beside the job, and no price counts the machines.
    """
    yield from render.changed(planned, body, planned_of("sagemaker"), "sagemaker.raw")
    for name in _RULES if has_price else ():
        if any(isinstance(rule, dict) and rule.get("InstanceType") for rule in listed(body, name)):
            message = f"`raw` has {name} run on machines of their own, which the price and every budget leave out"
            yield Fault(message, key="sagemaker.raw", hint=f"leave InstanceType out of {name}")
    channels = body.get("InputDataConfig")
    ours = [channel for channel in planned["InputDataConfig"] if channel["ChannelName"] in (CODE, JOB)]
    if not isinstance(channels, list) or any(channel not in channels for channel in ours):
        message = "`raw` takes away the channels `code` or `job`, by which the job gets its code and its order"
        yield Fault(message, key="sagemaker.raw", hint="repeat them, or use `inputs`")
    for part, name in (("CheckpointConfig", "S3Uri"), ("OutputDataConfig", "S3OutputPath")):
        if not isinstance(render.at(body, (part, name)), str):
            hint = "leave it as it is, or name another place"
            yield Fault(f"`raw` takes away {part}.{name}", key="sagemaker.raw", hint=hint)


def _toolkit(config: JobConfig, place: S3Location, name: str, instance_type: str, code_uri: str) -> dict[str, str]:
    """Return the hyperparameters by which the image's toolkit runs a script under SMDDP.

    `pytorchddp` and `smdistributed` mean the same: SDK v2 rewrote the first as the second.
    """
    distribution = block_of(config).distribution
    image = config.image
    instead = "write `distribution: torchrun`"
    if config.secrets:
        raise ConfigError("the image's toolkit has no place for secrets", key="secrets", hint=instead)
    for key in [name for name in ("requirements", "setup") if getattr(config, name)]:
        message = f"the image's toolkit starts the script by itself, and does not support `{key}`"
        raise ConfigError(message, key=key, hint=instead)
    if config.script is None:
        message = f"`distribution: {distribution}` runs a `script`, by the image's own toolkit"
        raise ConfigError(message, key="sagemaker.distribution", hint=instead)
    if image is None or not request_images.has_smddp(image, instance_type):
        where = f"{image or 'the images of today'} for {instance_type}"
        message = f"`distribution: {distribution}` needs SageMaker's SMDDP library, which is not in {where}"
        ended = "SMDDP ended with PyTorch 2.4.1 images, on ml.p4d.24xlarge and ml.p4de.24xlarge"
        raise ConfigError(message, key="sagemaker.distribution", hint=f"{instead} (NCCL over EFA); {ended}")
    orders: dict[str, Any] = {
        "sagemaker_program": GUARD,
        "sagemaker_submit_directory": f"{code_uri}bundle.tar.gz",
        "sagemaker_container_log_level": 20,
        "sagemaker_job_name": name,
        "sagemaker_region": place.region,
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        "sagemaker_instance_type": instance_type,
    }
    return {key: json.dumps(value) for key, value in {**_as_hyperparameters(config), **orders}.items()}


def _as_hyperparameters(config: JobConfig) -> dict[str, Any]:
    """Return `--name value` pairs as a mapping, the only form that the toolkit can pass on."""
    pairs: dict[str, Any] = {}
    arguments = list(config.args)
    while arguments:
        name, *rest = arguments
        plain = name.removeprefix("--")
        is_odd = not plain or "=" in plain or plain in pairs or plain.startswith("sagemaker_")
        if is_odd or not name.startswith("--") or not rest or rest[0].startswith("--"):
            passes = "the image's toolkit passes `--key value` pairs only, each name once"
            message = f"{passes}, and `{name}` is not such a pair"
            raise ConfigError(message, key="args", hint="write `distribution: torchrun`, which takes any")
        pairs[plain] = rest[0]
        arguments = rest[1:]
    return pairs


def _metrics(config: JobConfig) -> list[dict[str, str]]:
    own = {metric.name: metric.regex for metric in block_of(config).metrics}
    ours = {name: f'::ct \\{{"e":"{event}".*"{field}":{_NUMBER}' for name, (event, field) in _EVENT_FIELDS.items()}
    return [{"Name": name, "Regex": regex} for name, regex in {**(ours if config.task else {}), **own}.items()]


def _input_path(config: JobConfig, name: str) -> str:
    """Return the channel's folder; for a single file, the file in the folder. A pipe has neither."""
    uri, folder = config.inputs[name], f"input/data/{name}"
    is_file = addresses.is_file(uri) and block_of(config).input_mode != "Pipe"
    return f"{folder}/{uri.rpartition('/')[2]}" if is_file else folder


def _channels(config: JobConfig, ours: list[tuple[str, str]]) -> list[dict[str, str]]:
    mode = block_of(config).input_mode
    own = [{"name": name, "uri": uri, "mode": "File"} for name, uri in ours]
    return own + [{"name": name, "uri": addresses.explicit(uri), "mode": mode} for name, uri in config.inputs.items()]


def _unreachable(config: JobConfig) -> Iterator[Fault]:
    """Yield a fault for each place that a container on SageMaker cannot reach."""
    mirror = config.checkpoint.mirror
    if mirror is not None and not mirror.startswith("s3://"):
        hint = "name a place in S3, or leave it out: SageMaker copies the checkpoints to checkpoint.uri by itself"
        yield Fault("a mirror on SageMaker would end with the container", key="checkpoint.mirror", hint=hint)
    if block_of(config).network_isolation:
        for key in [name for name, is_set in (("secrets", config.secrets), ("checkpoint.mirror", mirror)) if is_set]:
            message = "without a network the container cannot fetch secrets" if key == "secrets" else "no way to S3"
            hint = "leave out sagemaker.network_isolation, or this"
            yield Fault(f"{message}: network_isolation is on", key=key, hint=hint)
    yield from unsupported(config, "SageMaker", outputs_of="SageMaker")
    for name, uri in config.inputs.items():
        if not addresses.is_beside(uri) and (wrong := addresses.in_bucket(uri, "s3")):
            elsewhere = f"SageMaker reads inputs from S3, and `{uri}` is elsewhere"
            hint = wrong[1] if wrong[0] or "://" in uri else f"aws s3 sync {uri} s3://BUCKET/{name}; {GOES_ALONG}"
            yield Fault(wrong[0] or elsewhere, key=f"inputs.{name}", hint=hint)
        if name in (CODE, JOB):
            hint = "call it otherwise"
            yield Fault(f"the channel `{name}` is cloudtrain's own", key=f"inputs.{name}", hint=hint)
    for key, place in (("checkpoint.uri", config.checkpoint.uri), ("outputs", _output(config))):
        if place is not None and (wrong := addresses.in_bucket(place, "s3")):
            yield Fault(wrong[0] or f"SageMaker writes to S3, and `{place}` is elsewhere", key=key, hint=wrong[1])


def _output(config: JobConfig) -> str | None:
    """Return the URI for the output folder's archive: SageMaker has one place for all outputs."""
    return next(iter(config.outputs.values()), None)
