"""CreateCustomJob's refusals. The messages begin as the service's; the messages about single rules are invented."""

import re
from collections.abc import Iterator
from typing import Any

from google.cloud.aiplatform_v1 import types

from doubles.google.errors import invalid
from doubles.google.jobs import STRATEGIES

NO_ACCELERATOR = types.AcceleratorType.ACCELERATOR_TYPE_UNSPECIFIED
FLEX_MAX_S = 7 * 86400  # docs "Schedule training jobs based on resource availability"
MAX_ENV, MAX_LABELS, MAX_POOLS = 100, 64, 4
_LABEL_KEY = re.compile(r"[^\W\dA-Z_][\w-]{0,62}")
_LABEL_VALUE = re.compile(r"[\w-]{0,63}")
_NETWORK = re.compile(r"projects/[^/]+/global/networks/[^/]+")

Fault = tuple[str, str]  # field, message


def check(job: Any, pools: dict[str, Any]) -> None:
    """Raise GoogleError with all faults of a new CustomJob; `pools` are the persistent resources."""
    found = [*_names(job), *_pools(job), *_scheduling(job), *_spec(job, pools)]
    if not found:
        return
    told = "".join(f"{number}.Field: {field}; Message: {text}\t" for number, (field, text) in enumerate(found, 1))
    violations = [{"field": field, "description": text} for field, text in found]
    details = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
    raise invalid(f"List of found errors:\t{told}", [details])


def _names(job: Any) -> Iterator[Fault]:
    if not 1 <= len(job.display_name) <= 128:
        yield "custom_job.display_name", "The display name must have 1 to 128 characters."
    if len(job.labels) > MAX_LABELS:
        yield "custom_job.labels", f"There may be at most {MAX_LABELS} labels."
    for key, value in job.labels.items():
        if not _LABEL_KEY.fullmatch(key):
            yield "custom_job.labels", f'The label key "{key}" is invalid.'
        if not _LABEL_VALUE.fullmatch(value) or value != value.lower():
            yield "custom_job.labels", f'The value "{value}" of label "{key}" is invalid.'


def _pools(job: Any) -> Iterator[Fault]:
    specs = job.job_spec.worker_pool_specs
    if not 1 <= len(specs) <= MAX_POOLS:
        yield "job_spec.worker_pool_specs", f"There must be 1 to {MAX_POOLS} worker pools."
    for number, pool in enumerate(specs):
        at = f"job_spec.worker_pool_specs[{number}]"
        if number and not pool.ByteSize():  # a placeholder
            continue
        if number == 0 and pool.replica_count != 1:
            yield f"{at}.replica_count", "The replica count of the first worker pool must be 1."
        elif pool.replica_count < 1:
            yield f"{at}.replica_count", "The replica count must be positive."
        yield from _machine(pool, at, bool(job.job_spec.persistent_resource_id))
        yield from _task(pool, at)


def _machine(pool: Any, at: str, is_persistent: bool) -> Iterator[Fault]:
    machine, disk = pool.machine_spec, pool.disk_spec
    if not machine.machine_type and not is_persistent:
        yield f"{at}.machine_spec.machine_type", "Machine type is required."
    if machine.accelerator_type not in {one.value for one in types.AcceleratorType}:
        yield f"{at}.machine_spec.accelerator_type", "Accelerator type is unknown."
    elif (machine.accelerator_type != NO_ACCELERATOR) != (machine.accelerator_count > 0):
        yield f"{at}.machine_spec.accelerator_count", "Accelerator type and count must be set together."
    if disk.boot_disk_size_gb and not 100 <= disk.boot_disk_size_gb <= 64000:
        yield f"{at}.disk_spec.boot_disk_size_gb", "Boot disk size must be 100 to 64000 GB."


def _task(pool: Any, at: str) -> Iterator[Fault]:
    kind = pool.WhichOneof("task")
    if kind is None:
        yield at, "One of container_spec and python_package_spec is required."
        return
    task = getattr(pool, kind)
    if kind == "container_spec" and not task.image_uri:
        yield f"{at}.container_spec.image_uri", "Image URI is required."
    if kind == "python_package_spec":
        for name in ("executor_image_uri", "python_module"):
            if not getattr(task, name):
                yield f"{at}.python_package_spec.{name}", "The field is required."
        if not task.package_uris or any(not uri.startswith("gs://") for uri in task.package_uris):
            yield f"{at}.python_package_spec.package_uris", "Package URIs must begin with gs://."
    names = [one.name for one in task.env]
    if len(names) > MAX_ENV:
        yield f"{at}.{kind}.env", f"There may be at most {MAX_ENV} environment variables."
    if len(set(names)) < len(names) or "" in names:
        yield f"{at}.{kind}.env", "Names of environment variables must be unique and not empty."


def _scheduling(job: Any) -> Iterator[Fault]:
    scheduling, specs = job.job_spec.scheduling, job.job_spec.worker_pool_specs
    if scheduling.strategy not in {one.value for one in STRATEGIES}:
        yield "job_spec.scheduling.strategy", "Strategy is unknown."
    if scheduling.HasField("timeout") and scheduling.timeout.ToNanoseconds() <= 0:
        yield "job_spec.scheduling.timeout", "Timeout must be positive."
    if scheduling.strategy != STRATEGIES.FLEX_START:
        return
    if scheduling.timeout.seconds > FLEX_MAX_S:
        yield "job_spec.scheduling.timeout", "Timeout of FLEX_START jobs must be at most 7 days."
    if len({spec.machine_spec.SerializeToString(deterministic=True) for spec in specs if spec.ByteSize()}) > 1:
        yield "job_spec.worker_pool_specs", "FLEX_START requires one machine configuration for all worker pools."
    if any(spec.machine_spec.HasField("reservation_affinity") for spec in specs):
        yield "job_spec.worker_pool_specs", "FLEX_START does not support reservations."


def _spec(job: Any, pools: dict[str, Any]) -> Iterator[Fault]:
    spec = job.job_spec
    if spec.network and not _NETWORK.fullmatch(spec.network):
        yield "job_spec.network", "The network must have the form projects/{project}/global/networks/{network}."
    if spec.network and spec.HasField("psc_interface_config"):
        yield "job_spec.psc_interface_config", "It cannot be set together with network."
    if spec.tensorboard and not spec.service_account:
        yield "job_spec.service_account", "A service account is required with a tensorboard."
    uri = spec.base_output_directory.output_uri_prefix
    if spec.HasField("base_output_directory") and not uri.startswith("gs://"):
        yield "job_spec.base_output_directory.output_uri_prefix", "The URI must begin with gs://."
    if spec.persistent_resource_id and spec.persistent_resource_id not in pools:
        yield "job_spec.persistent_resource_id", f"There is no PersistentResource {spec.persistent_resource_id}."
