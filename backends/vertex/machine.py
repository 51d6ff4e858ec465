"""The Google machine that a config requests, and where: type, accelerators, project, region, bucket."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cloudtrain.launcher.errors import ConfigError, Fault, refuse
from cloudtrain.launcher.metering.rate import Machine
from cloudtrain.launcher.planning import request_rules
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.text import addresses

from ..cloud import misnamed
from . import machine_types

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import JobConfig

    from .block import Vertex

Kind = Literal["standard", "spot", "flex_start", "reservation"]  # how machines are provisioned, which sets their price

SERVICES = ("aiplatform", "logging", "storage", "secretmanager", "cloudbilling")

REGIONS_AS_OF = "2026"
DISK_GB = 100  # Vertex AI's own default, and its minimum
_HYPERDISK = re.compile(r"a3-ultragpu|a4|g4|c4|n4|h4|x4")

_TYPE = re.compile(r"[a-z][a-z0-9]*-[a-z0-9]+(-[a-z0-9]+)*")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+")
_LOCATION = re.compile(r"[a-z]+-[a-z]+\d+")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*")
_BUCKET = addresses.NAMES["gs"]


@dataclass(frozen=True)
class MachineChoice:
    """A machine type with its accelerators. `accelerator`: Google's name for the kind, None for a CPU machine."""

    machine_type: str
    accelerator: str | None
    count: int
    machine: Machine  # the price table's entry, or an entry without prices

    @property
    def label(self) -> str:
        """The machine's name in a plan: the type, and the attached accelerators."""
        return label_of(self.machine_type, self.accelerator, self.count)


@dataclass(frozen=True)
class VertexLocation:
    """Where jobs are kept: `root` is cloudtrain's folder in the bucket, without a trailing slash."""

    project: str
    location: str
    root: str


def block_of(config: JobConfig | None) -> Vertex:
    """Return the config's `vertex` block, or a block of defaults."""
    from .block import Vertex  # a poll of a job's state needs no config

    return Vertex() if config is None else config.block(Vertex)


def kind_of(config: JobConfig) -> Kind:
    """Return how the machines are provisioned. Raises ConfigError if the config asks for two ways."""
    block = block_of(config)
    ways: dict[str, Kind] = {}
    if config.resources.spot:
        ways["resources.spot"] = "spot"
    if block.scheduling == "flex_start":
        ways["vertex.scheduling"] = "flex_start"
    if block.reservation is not None:
        ways["vertex.reservation"] = "reservation"
    if len(ways) > 1:
        message = f"machines are had in one way, not by {' and '.join(ways)}"
        raise ConfigError(message, key=next(iter(ways)), hint="keep one of them")
    return next(iter(ways.values()), "standard")


def choose(config: JobConfig) -> MachineChoice:
    """Return the machine that the config requests. Raises ConfigError if the config names none, or an unknown one."""
    resources, block = config.resources, block_of(config)
    location, host = region_of(block), block.machine_type and block.machine_type.lower()
    if resources.accelerators is not None:
        return _by_accelerators(resources.accelerators, host, location)
    if resources.instance_type is not None and host not in (None, resources.instance_type.lower()):
        message = f"`instance_type` says {resources.instance_type}, `machine_type` {block.machine_type}"
        raise ConfigError(message, key="vertex.machine_type", hint="keep one of them")
    if resources.instance_type is not None:
        return named(resources.instance_type, "resources.instance_type", location)
    if block.machine_type is not None:
        return named(block.machine_type, "vertex.machine_type", location)
    hint = "write `accelerators: A100:8`, or `instance_type: a2-highgpu-8g`"
    raise ConfigError("Vertex AI needs to know which machines", key="resources", hint=hint)


def disk_of(config: JobConfig, choice: MachineChoice) -> tuple[str, int]:
    """Return type and size in GB of each machine's boot disk."""
    usual = "hyperdisk-balanced" if _HYPERDISK.match(choice.machine_type) else "pd-ssd"
    return block_of(config).boot_disk_type or usual, max(config.resources.disk_gb or DISK_GB, DISK_GB)


def _by_accelerators(wanted: str, host: str | None, location: str | None) -> MachineChoice:
    name, _, number = wanted.partition(":")
    key, count = "resources.accelerators", int(number or 1)
    kind = machine_types.enum_of(name, host) or machine_types.enum_of(name)
    if kind is None:
        there = "there are A100, A100-80GB, H100, H200, B200, L4, RTX-PRO-6000, and on N1 machines T4, V100, P100, P4"
        hint = " ".join(filter(None, [catalog.unknown(wanted).partition("; ")[2], there]))
        raise ConfigError(f"Vertex AI has no accelerator `{name}`", key=key, hint=hint)
    if host is not None:
        return _with(host, kind, count, location)
    known = catalog.by_accelerators("vertex", wanted, location)
    exact = [machine for machine in known if machine_types.FIXED.get(machine.instance_type) == (kind, count)]
    if exact:
        return _of(exact[0])
    hosts = machine_types.hosts_for(kind, count)
    if not hosts:
        message = f"no machine of Google's has {count} x {name}"
        existing = ", ".join(f"{name}:{each}" for each in range(1, 17) if machine_types.hosts_for(kind, each))
        raise ConfigError(message, key=key, hint=f"existing: {existing}; or name `instance_type`")
    return _with(hosts[0], kind, count, location)


def _with(machine_type: str, kind: str, count: int, location: str | None) -> MachineChoice:
    """Return the machine with built-in or attached accelerators; attached ones are part of the label and the price."""
    fixed, key = machine_types.FIXED.get(machine_type), "vertex.machine_type"
    if fixed == (kind, count) or machine_type not in machine_types.KNOWN:
        return named(machine_type, key, location)
    if fixed is not None:
        message = f"{machine_type} has {fixed[1]} x {fixed[0]}, not {count} x {kind}"
        raise ConfigError(message, key=key, hint="leave it out, or ask for what it has")
    legal = machine_types.choices(machine_type).get(kind, ())
    if count not in legal:
        counts = ", ".join(map(str, legal))
        message = f"{machine_type} takes {counts} x {kind}, not {count}" if legal else f"{machine_type} takes no {kind}"
        hosts = ", ".join(machine_types.hosts_for(kind, count)[:3])
        raise ConfigError(message, key=key, hint=f"{count} go with {hosts}" if hosts else "leave it out")
    label = label_of(machine_type, kind, count)  # the attached accelerators are a part of the price
    machine = Machine(label, kind, count, catalog.rates("vertex", label, location))
    return MachineChoice(machine_type, kind, count, machine)


def named(machine_type: str, key: str, location: str | None) -> MachineChoice:
    """Return the machine type of this name, in any case, which `key` sets. Raises ConfigError for a wrong name."""
    written, machine_type = machine_type, machine_type.lower()
    if not _TYPE.fullmatch(machine_type) or not catalog.unknown(written):
        examples = "a2-highgpu-8g, g2-standard-48 or n1-standard-16"
        raise misnamed(written, "a Google machine type", machine_types.KNOWN, examples, key)
    if machine_type.startswith(machine_types.TPU_FAMILIES):
        message = f"{machine_type} has TPUs, which cloudtrain does not support"
        raise ConfigError(message, key=key, hint="take GPUs, as a2-highgpu-8g")
    if machine_type not in machine_types.KNOWN:
        message = f"what accelerators `{machine_type}` has is not in our table of {machine_types.AS_OF}"
        close = request_rules.meant(machine_type, machine_types.KNOWN).removeprefix("; ")
        other = close or "take a type of A2, A3, A4, G2, G4, N1, N2, N4, C2 or E2;"
        raise ConfigError(message, key=key, hint=f"{other} a newer cloudtrain may know more types")
    name, count = machine_types.FIXED.get(machine_type) or ("CPU", 0)
    known = catalog.by_type("vertex", machine_type, location)
    return _of(known or Machine(machine_type, name, count, catalog.rates("vertex", machine_type, location)))


def _of(machine: Machine) -> MachineChoice:
    kind, count = machine_types.FIXED.get(machine.instance_type) or (None, 0)
    return MachineChoice(machine.instance_type, kind, count, machine)


def place_of(config: JobConfig, environ: Mapping[str, str] = os.environ) -> VertexLocation:
    """Return where the job is kept. Raises ConfigError with all missing settings."""
    block = block_of(config)
    project, location = project_of(block, environ), region_of(block, environ)
    bucket = (block.staging_bucket or "").removeprefix("gs://").strip("/") or None
    faults = []
    make = f"; gcloud storage buckets create gs://my-bucket --location {location or 'europe-west4'} makes one"
    for key, value, pattern, example, missing, wrong, more in (
        ("project", project, _PROJECT, "my-project", "no Google Cloud project", "not a project ID", ""),
        ("location", location, _LOCATION, "europe-west4", "no region for it", "not a region", ""),
        ("staging_bucket", bucket, _BUCKET, "gs://my-bucket", "no bucket for its files", "not a bucket name", make),
    ):
        if value is None:
            faults.append(Fault(missing, key=f"vertex.{key}", hint=f"write `{key}: {example}`{more}"))
        elif not pattern.fullmatch(value):
            hint = _meant(key, value, pattern, example)
            faults.append(Fault(f"`{value}` is {wrong}", key=f"vertex.{key}", hint=hint))
    if not _PREFIX.fullmatch(block.prefix):
        message = f"`{block.prefix}` is not a safe folder name"
        faults.append(Fault(message, key="vertex.prefix", hint="letters, digits and . _ - / as in teams/vision"))
    faults += _endpoint_faults(block.endpoints)
    refuse(faults)
    return VertexLocation(str(project), str(location), f"gs://{bucket}/{block.prefix.strip('/')}".rstrip("/"))


def _meant(key: str, value: str, pattern: re.Pattern[str], example: str) -> str:
    """Return how to fix the value: a zone or a spelling like AWS's as the region, or a folder after the bucket."""
    folder = value.partition("/")[2]
    if key == "staging_bucket" and ("://" in value or value.startswith("arn:")):
        near = addresses.meant(value)
        hint = f"did you mean `{near}`?" if near.startswith("gs://") else f"as in {example}"
        return f"a bucket of Cloud Storage, {hint}"
    if key == "staging_bucket" and folder:
        return f"only the bucket; the folder as `prefix: {folder}`"
    plain = value.lower()
    plain = plain[:-2] if re.search(r"\d-[a-z]$", plain) else plain
    plain = re.sub(r"-(\d+)$", r"\1", plain) if key == "location" else plain
    if plain != value and pattern.fullmatch(plain):
        return f"did you mean `{plain}`?"
    return f"{addresses.RULES['gs']}, as in {example}" if key == "staging_bucket" else f"as in {example}"


def _endpoint_faults(endpoints: Mapping[str, str]) -> Iterator[Fault]:
    for service, url in endpoints.items():
        if service not in SERVICES:
            message = f"`{service}` is not a service with a configurable endpoint"
            yield Fault(message, key="vertex.endpoints", hint=f"choose from {', '.join(SERVICES)}")
        elif not re.match(r"https://[^/]|http://(127\.0\.0\.1|localhost)([:/]|$)", url):
            message = f"`{url}` would receive your token without encryption"
            yield Fault(message, key="vertex.endpoints", hint="as in https://storage-x.p.googleapis.com")


def label_of(machine_type: str, accelerator: str | None, count: int) -> str:
    """Return the machine's name in a plan and in price lists: the type, and the attached accelerators."""
    is_attached = accelerator is not None and machine_types.FIXED.get(machine_type) is None
    return f"{machine_type} + {count} x {accelerator}" if is_attached else machine_type


def unknown_region(config: JobConfig) -> Fault | None:
    """Return a warning if the config's location is not known."""
    return request_rules.unknown_region("vertex", "location", region_of(block_of(config)), REGIONS_AS_OF)


def region_of(block: Vertex, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the region, in the order of Google's own tools: the config's, the environment's, then gcloud's."""
    chosen = block.location or environ.get("GOOGLE_CLOUD_LOCATION") or environ.get("CLOUDSDK_AI_REGION")
    return chosen or _of_gcloud("ai", "region", environ) or _of_gcloud("compute", "region", environ)


def project_of(block: Vertex, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the project, in the same order."""
    chosen = block.project or environ.get("GOOGLE_CLOUD_PROJECT") or environ.get("CLOUDSDK_CORE_PROJECT")
    return chosen or _of_gcloud("core", "project", environ)


def _of_gcloud(section: str, key: str, environ: Mapping[str, str]) -> str | None:
    """Return a property of gcloud's active configuration, or None if no configuration can be read."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        folder = Path(environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
        active, mark = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME"), folder / "active_config"
        if active is None:
            active = mark.read_text(encoding="utf-8").strip() if mark.exists() else "default"
        parser.read(folder / "configurations" / f"config_{active}", encoding="utf-8")
    except (OSError, configparser.Error, ValueError, RuntimeError):
        return None
    return parser.get(section, key, fallback=None)
