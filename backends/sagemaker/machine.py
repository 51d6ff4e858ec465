"""The SageMaker machine that a config requests, and where: type, price, region, account and bucket."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher.errors import ConfigError, Fault, refuse
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text import addresses

from ..cloud import machine_of_type, machine_with, misnamed

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

    from .block import SageMaker

DISK_GB = 100  # if the config sets none
MOST_TYPES = 5  # of ResourceConfig.InstancePreferences; botocore 1.44
# Of a volume, for a GB and a month: 0.14 to 0.154 by region; the worst case uses the higher figure. Source: the cost
# sheet of a public tool for SageMaker, read in 2026-10. AWS's month has 30 days.
DISK_USD_PER_GB_MONTH, MONTH_H = 0.154, 720
# Types with NVMe disks of their own. Source: botocore's text on VolumeKmsKeyId, and EC2's list of instance stores.
ACCELERATED = re.compile(r"ml\.(gr?\d|p\d|trn|inf)")
LOCAL_DISK = re.compile(r"ml\.(g4dn|g5|g6e?|gr6|g7e|p3dn|p4de?|p5(e|en)?|p6[a-z0-9-]*|trn\w+|[a-z]+\d[a-z]*d[a-z]*)\.")

_CPU_FAMILY = re.compile(r"ml\.[cmrt]\d")
_TRAINIUM = re.compile(r"ml\.(trn|inf)\d")
_NEURON = re.compile(r"(?i)trainium|inferentia")
_REGION = re.compile(r"[a-z]{2,6}(-[a-z]+)+-\d+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/.+")


@dataclass(frozen=True)
class S3Location:
    """Where a job is kept. `root` is the S3 folder with all files of cloudtrain, without a trailing slash."""

    region: str
    role: str
    bucket: str
    root: str


def block_of(config: JobConfig | None) -> SageMaker:
    """Return the config's `sagemaker` block, or a block of defaults."""
    from .block import SageMaker  # a poll of a job's state needs no config

    return SageMaker() if config is None else config.block(SageMaker)


def choose(config: JobConfig) -> Machine:
    """Return the requested machine type, of a list the dearest type. Raises ConfigError as `choices` does."""
    size_gb = config.resources.disk_gb or DISK_GB

    def usd(each: Machine) -> float:
        return inf if each.hourly_usd is None else each.hourly_usd + disk_usd(each.instance_type, size_gb)

    return max(choices(config), key=usd)


def choices(config: JobConfig) -> tuple[Machine, ...]:
    """Return the machine types that the config requests, of which SageMaker takes the first with machines.

    Raises ConfigError if the config names none, a wrong one, or types that cannot stand in one list.
    """
    resources, region = config.resources, region_of(block_of(config))
    if resources.instance_type is not None:
        nproc, names = config.distributed.nproc_per_node, resources.instance_type.split(",")
        machines = tuple(named(name.strip(), region, nproc) for name in names)
        refuse(_no_list(config, machines) if len(machines) > 1 else ())
        return machines
    if resources.accelerators is None:
        hint = "write `accelerators: A100:8` or `instance_type: ml.m5.xlarge`"
        raise ConfigError("SageMaker needs to know which machines", key="resources", hint=hint)
    if _NEURON.match(resources.accelerators):
        raise ConfigError([_no_neuron(resources.accelerators, "resources.accelerators")])
    return (machine_with("sagemaker", "SageMaker", resources.accelerators, region),)


def types_at_once(config: JobConfig) -> int:
    """Return how many types ResourceConfig.InstancePreferences may list for the config; 1 for no list.

    The list is for machines on demand (botocore 1.44). Whether it goes with warm machines is not documented, and a
    training plan is for one type.
    """
    block = block_of(config)
    is_plain = block.distribution == "torchrun" and not (block.training_plan or block.keep_alive)
    return MOST_TYPES if is_plain and not config.resources.spot else 1


def _no_list(config: JobConfig, machines: tuple[Machine, ...]) -> Iterator[Fault]:
    names, counts = {each.instance_type for each in machines}, {each.count for each in machines}
    if len(machines) > types_at_once(config) or len(names) < len(machines) or len(counts) > 1:
        message = f"SageMaker takes a list of 1 to {MOST_TYPES} types, with as many GPUs in each, on demand"
        hint = "with torchrun, no `training_plan` and no `keep_alive`; other machines go under `capacity.try`"
        yield Fault(message, "resources.instance_type", hint=hint)


def disk_usd(instance_type: str, size_gb: int) -> float:
    """Return the hourly price of the volume that SageMaker gives each instance, 0 for a type with local disks."""
    return 0.0 if LOCAL_DISK.match(instance_type) else size_gb * DISK_USD_PER_GB_MONTH / MONTH_H


def named(instance_type: str, region: str | None, nproc: int | str, *, key: str = "resources.instance_type") -> Machine:
    """Return the machine type of this name; `key` sets the name. Raises ConfigError for a wrong name.

    AWS writes small letters; EC2's name means SageMaker's, with `ml.` in front.
    """
    name = f"ml.{instance_type.lower().removeprefix('ml.')}"
    if _TRAINIUM.match(name):
        raise ConfigError([_no_neuron(name, key)])
    if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", name):
        known = catalog.types("sagemaker")
        raise misnamed(instance_type, "a SageMaker instance type", known, "ml.g5.12xlarge or ml.m5.xlarge", key)
    return machine_of_type("sagemaker", name, region, nproc, is_cpu=bool(_CPU_FAMILY.match(name)))


def _no_neuron(wanted: str, key: str) -> Fault:
    message = f"`{wanted}` means Trainium or Inferentia chips, which torch's DDP and FSDP do not run on"
    return Fault(message, key=key, hint="choose a type with GPUs, as ml.g6.12xlarge")


def place_of(config: JobConfig) -> S3Location:
    """Return where the job is kept. Raises ConfigError with all missing settings."""
    block = block_of(config)
    region, faults = region_of(block), []
    if region is None:
        hint = "write `region: eu-west-1`, or export AWS_REGION"
        faults.append(Fault("no AWS region", key="sagemaker.region", hint=hint))
    elif not _REGION.fullmatch(region):
        near = _REGION.match(region.lower())  # with the letter of a zone, or in capitals
        hint = f"did you mean `{near[0]}`?" if near else "as in eu-west-1"
        faults.append(Fault(f"`{region}` is not a region", key="sagemaker.region", hint=hint))
    account = account_of(block.role or "")
    if block.role is None:
        hint = "the ARN of a role that SageMaker may take on: see docs/tutorials/sagemaker.md"
        faults.append(Fault("no execution role for the job", key="sagemaker.role", hint=hint))
    elif account is None:
        hint = "as in arn:aws:iam::111122223333:role/train"
        faults.append(Fault(f"`{block.role}` is not the ARN of a role", key="sagemaker.role", hint=hint))
    if faults or region is None or account is None:
        raise ConfigError(faults)
    bucket = (block.bucket or f"sagemaker-{region}-{account}").removeprefix("s3://").strip("/")
    if wrong := addresses.bucket_fault(bucket.partition("/")[0], "s3"):
        raise ConfigError(wrong[0], key="sagemaker.bucket", hint=wrong[1])
    return S3Location(region, str(block.role), bucket, f"s3://{bucket}/{block.prefix.strip('/')}".rstrip("/"))


def account_of(role: str) -> str | None:
    """Return the number of the account in the ARN of a role; None for any other text."""
    found = _ROLE.fullmatch(role)
    return None if found is None else found[1]


def unknown_region(config: JobConfig) -> Fault | None:
    """Return a warning if the config's region is not known."""
    from .request_images import IMAGES_AS_OF

    return request_rules.unknown_region("sagemaker", "region", region_of(block_of(config)), IMAGES_AS_OF)


def region_of(block: SageMaker, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the region, in the order of AWS's own tools: the config's, the environment's, then the profile's.

    AWS writes small letters.
    """
    if region := block.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        return region.lower()
    profile = block.profile or environ.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser(strict=False)
    file = environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    try:
        parser.read(Path(file).expanduser(), encoding="utf-8")
    except (OSError, configparser.Error, ValueError, RuntimeError) as error:
        message = f"the AWS config cannot be read: {error}"
        raise ConfigError(message, where=file, hint="or set sagemaker.region") from error
    return parser.get("default" if profile == "default" else f"profile {profile}", "region", fallback=None)
