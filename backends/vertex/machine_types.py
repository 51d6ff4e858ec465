"""Vertex's machine types for training, and the accelerators that each type takes: Google's own table, as of AS_OF.

Copied by hand from the page "Configure compute resources" (docs.cloud.google.com, gemini-enterprise-agent-platform/
machine-learning/training/configure-compute: the list of machine types and the table of valid numbers of GPUs). The
source was a stored copy of the page without a date and without the table's empty cells; AS_OF is the day of the
copying. Only _OTHER_CPUS, families of Compute Engine that the page leaves out, is from memory. No API lists these
pairs; a machine type that the table lacks may be new.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cloudtrain.launcher.prices.catalog import plain

AS_OF = "2026-11-22"

# Accelerator-optimized machines: the built-in accelerator and its count; they take no further accelerators.
FIXED: dict[str, tuple[str, int]] = {
    **{f"a2-highgpu-{count}g": ("NVIDIA_TESLA_A100", count) for count in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{count}g": ("NVIDIA_A100_80GB", count) for count in (1, 2, 4, 8)},
    **{f"a3-highgpu-{count}g": ("NVIDIA_H100_80GB", count) for count in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{size}": ("NVIDIA_L4", 1) for size in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{size}": ("NVIDIA_L4", count) for size, count in ((24, 2), (48, 4), (96, 8))},
    **{f"g4-standard-{48 * count}": ("NVIDIA_RTX_PRO_6000", count) for count in (1, 2, 4, 8)},
}

# N1 machines by vCPUs: accelerators that may be attached, and the legal counts. A larger machine needs more GPUs.
_T4, _P4, _P100, _V100 = "NVIDIA_TESLA_T4", "NVIDIA_TESLA_P4", "NVIDIA_TESLA_P100", "NVIDIA_TESLA_V100"
_TO_4 = {_T4: (1, 2, 4), _P4: (1, 2, 4), _P100: (1, 2, 4)}
_CHOICES: dict[int, dict[str, tuple[int, ...]]] = {
    **{size: {**_TO_4, _V100: (1, 2, 4, 8)} for size in (2, 4, 8)},
    16: {**_TO_4, _V100: (2, 4, 8)},
    32: {_T4: (2, 4), _P4: (2, 4), _P100: (2, 4), _V100: (4, 8)},
    64: {_T4: (4,), _P4: (4,), _V100: (8,)},
    96: {_T4: (4,), _P4: (4,), _V100: (8,)},
}
# Four P100s serve at most 64 vCPUs and 208 GB; of the large machines only this type stays within the limit.
_P100_AT_MOST = "n1-highcpu-64"
_N1 = {
    "n1-highcpu": (16, 32, 64, 96),
    "n1-standard": (4, 8, 16, 32, 64, 96),
    "n1-highmem": (2, 4, 8, 16, 32, 64, 96),
}
# The page warns that a host of this size may lose the log of a GPU's job.
_TOO_SMALL = "n1-highmem-2"

_CPUS = {
    **_N1,
    "e2-standard": (4, 8, 16, 32),
    "e2-highmem": (2, 4, 8, 16),
    "e2-highcpu": (16, 32),
    "n4-standard": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highcpu": (2, 4, 8, 16, 32, 48, 64, 80),
    "n2-standard": (4, 8, 16, 32, 48, 64, 80),
    "n2-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n2-highcpu": (16, 32, 48, 64, 80),
    "c2-standard": (4, 8, 16, 30, 60),
    "m1-ultramem": (40, 80, 160),
    "m1-megamem": (96,),
}
_CPU_TYPES = {f"{family}-{size}": (size, family) for family, sizes in _CPUS.items() for size in sizes}
KNOWN = (*FIXED, *_CPU_TYPES)
_OTHER_CPUS = {"n2d", "n4a", "n4d", "c2d", "c3", "c3d", "c4", "c4a", "c4d", "t2a", "t2d", "m2", "m3", "m4", "h3", "x4"}
TPU_FAMILIES = ("cloud-tpu", "ct", "tpu")  # on which cloudtrain's code does not run

# Config names, in small letters and digits only, and the API's names; without a machine type the first name is meant.
_NAMES = {
    "a100": ("NVIDIA_TESLA_A100", "NVIDIA_A100_80GB"),
    "a10040gb": ("NVIDIA_TESLA_A100",),
    "a10080gb": ("NVIDIA_A100_80GB",),
    "h100": ("NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB"),
    "h10080gb": ("NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB"),
    "h100mega": ("NVIDIA_H100_MEGA_80GB",),
    "h100mega80gb": ("NVIDIA_H100_MEGA_80GB",),
    "h200": ("NVIDIA_H200_141GB",),
    "h200141gb": ("NVIDIA_H200_141GB",),
    "b200": ("NVIDIA_B200",),
    "gb200": ("NVIDIA_GB200",),
    "l4": ("NVIDIA_L4",),
    "t4": (_T4,),
    "v100": (_V100,),
    "p100": (_P100,),
    "p4": (_P4,),
    "rtxpro6000": ("NVIDIA_RTX_PRO_6000",),
}


def choices(machine_type: str) -> Mapping[str, tuple[int, ...]]:
    """Return the accelerators that may be attached, with the legal counts; empty for all but N1 machines."""
    size, family = _CPU_TYPES.get(machine_type, (0, ""))
    found = _CHOICES[size] if family in _N1 else {}
    return MappingProxyType({**found, _P100: (4,)} if machine_type == _P100_AT_MOST else found)


def hosts_for(accelerator_type: str, count: int) -> list[str]:
    """Return the machines that have or take this number of the accelerator, the smallest machine first."""
    built_in = [name for name, found in FIXED.items() if found == (accelerator_type, count)]
    order = list(_N1)  # by memory for each vCPU
    hosts = sorted((size, order.index(family), name) for name, (size, family) in _CPU_TYPES.items() if family in _N1)
    fitting = (name for *_, name in hosts if count in choices(name).get(accelerator_type, ()))
    return built_in + [name for name in fitting if name != _TOO_SMALL]


def is_cpu(machine_type: str) -> bool:
    """Return whether the machine has no built-in accelerator; includes CPU families that the table lacks."""
    return machine_type in _CPU_TYPES or machine_type.split("-", maxsplit=1)[0] in {
        *_OTHER_CPUS,
        *(family.split("-")[0] for family in _CPUS),
    }


def enum_of(name: str, machine_type: str | None = None) -> str | None:
    """Return the API's name for an accelerator of the config (`A100-80GB`, `RTX-PRO-6000`), or for Google's own name.

    Two accelerators are called A100, and two H100: the machine type decides. None if the accelerator is unknown, or if
    the machine does not take the accelerator.
    """
    exact = name.upper().replace("-", "_")  # of the API; gcloud writes `nvidia-tesla-a100`
    words = (exact,) if any(exact in found for found in _NAMES.values()) else _NAMES.get(plain(name), ())
    if machine_type is None or not (machine_type in KNOWN or is_cpu(machine_type)):
        return words[0] if words else None
    built_in = FIXED.get(machine_type)
    possible = [built_in[0]] if built_in else list(choices(machine_type))
    return next((word for word in words if word in possible), None)
