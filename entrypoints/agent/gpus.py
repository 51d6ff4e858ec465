"""The NVIDIA GPUs of this machine and the processes on the GPUs, as reported by `nvidia-smi`."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .. import processes
from . import gpulocks

TYPE_CHECKING = False  # as in typing, but the import of typing costs each call of a host 4 ms; so does subprocess
if TYPE_CHECKING:
    import subprocess
    from typing import Any

PATIENCE_S = 4.0  # without persistence mode the driver restarts each GPU; a GPU that hangs never answers

_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version", "mig.mode.current")
_OLD = _FIELDS[:-1]  # drivers before 450 do not know MIG
_BROKEN = re.compile("ERR!|is lost|Unknown Error")  # [N/A] and [Not Supported] only mean a missing feature
_APPS = "pid,gpu_uuid,process_name,used_memory"
_NONE = "No devices were found"
_MIG = re.compile(r"MIG (\S+)\s+Device\s+\d+:\s+\(UUID: (MIG-[^)]+)\)")
_ELSEWHERE = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/opt/bin")


def found(devices: Path = Path("/dev"), bus: Path = Path("/sys/bus/pci/devices")) -> dict[str, Any]:
    """Return `gpus`, one mapping each, and `fault`: None, or `kind` and `text` of the fault that prevents their use.

    A GPU: `index`, `uuid`, `name`, `memory_mb` (MiB; None if not reported), `driver`, `mig` (whether the GPU is divided
    into slices), `slices` (their UUIDs), `fault` (an error that the GPU reports in place of a value). Kinds of fault:
    `no-tool` and `no-driver` if the machine nevertheless has a GPU, `mismatch`, `driver`, `lost`, `silent`,
    `unreadable`.
    """
    command = _tool()
    if command is None:
        return {"gpus": [], "fault": _without_tool(devices, bus)}
    import subprocess

    try:
        done = _run(command, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
        if "not a valid field" in done.stdout:
            done = _run(command, f"--query-gpu={','.join(_OLD)}", "--format=csv,noheader,nounits")
    except subprocess.TimeoutExpired:
        return {"gpus": [], "fault": _fault("silent", f"{command} did not answer within {PATIENCE_S:.0f} s")}
    except OSError as error:
        return {"gpus": [], "fault": _fault("no-tool", f"{command} does not start: {error.strerror}")}
    gpus, others = _gpus(done.stdout)
    if any(gpu["mig"] for gpu in gpus):
        _add_slices(command, gpus)
    text = " ".join(" ".join([*others, done.stderr]).split())
    if _NONE in text or (not gpus and not text and done.returncode == 0):
        return {"gpus": [], "fault": None}
    return {"gpus": gpus, "fault": _fault(_kind(text), text) if text or done.returncode else None}


def in_use() -> list[dict[str, Any]]:
    """Return the processes that compute on the GPUs: `pid`, `gpu` (UUID), `name`, `memory_mb`, `owner`, `job`.

    `owner` is None if the process is not visible from here, for example in a container. `job` is a job of ours, if the
    process's environment is readable and names the job. Raises OSError, subprocess.TimeoutExpired.
    """
    command = _tool()
    if command is None:
        return []
    lines = _run(command, f"--query-compute-apps={_APPS}", "--format=csv,noheader,nounits").stdout.splitlines()
    return [process for line in lines if (process := _process(line)) is not None]


def query(*fields: str) -> list[list[str]]:
    """Return the values of the fields for each GPU; empty without nvidia-smi. Raises as `in_use`."""
    command = _tool()
    text = _run(command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits").stdout if command else ""
    rows = [[value.strip() for value in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _tool() -> str | None:
    """Return the path of nvidia-smi; also searches outside PATH, which is short in a login without a terminal."""
    places = (Path(folder, "nvidia-smi") for folder in (*os.get_exec_path(), *_ELSEWHERE))
    return next((str(path) for path in places if path.is_file() and os.access(path, os.X_OK)), None)


def _run(command: str, *args: str) -> subprocess.CompletedProcess[str]:
    return processes.completed([command, *args], PATIENCE_S, env={**os.environ, "LC_ALL": "C"})


def _without_tool(devices: Path, bus: Path) -> dict[str, Any] | None:
    if (devices / "nvidia0").exists():
        return _fault("no-tool", f"{devices / 'nvidia0'} is there, nvidia-smi is not")
    for device in bus.glob("*"):
        with contextlib.suppress(OSError):
            # Class 03 is a display: a network card by NVIDIA is no GPU.
            is_display = (device / "class").read_text().startswith("0x03")
            if is_display and (device / "vendor").read_text().strip() == "0x10de":
                return _fault("no-driver", f"there is an NVIDIA GPU at {device.name}, and no driver")
    return None


def _gpus(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the GPUs, and the lines without a GPU: nvidia-smi prints its errors to standard output."""
    gpus, others = [], []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) not in (len(_FIELDS), len(_OLD)) or not values[0].isdigit():
            others += [line] if line.strip() else []
            continue
        fields = dict(zip(_FIELDS, values, strict=False))
        broken = next((f"{key} is {value}" for key, value in fields.items() if _BROKEN.search(value)), None)
        memory = fields["memory.total"]
        gpus.append(
            {
                "index": int(fields["index"]),
                "uuid": fields["uuid"],
                "name": fields["name"],
                "memory_mb": int(memory) if memory.isdigit() else None,
                "driver": fields["driver_version"],
                "mig": fields.get("mig.mode.current") == "Enabled",
                "slices": [],
                "fault": broken,
            }
        )
    return gpus, others


def _add_slices(command: str, gpus: list[dict[str, Any]]) -> None:
    """Add the UUIDs of MIG devices to their GPUs; only the listing (-L) has the UUIDs."""
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        gpu: dict[str, Any] | None = None
        for line in _run(command, "-L").stdout.splitlines():
            if line.startswith("GPU "):
                gpu = next((known for known in gpus if known["uuid"] in line), None)
            elif gpu is not None and (match := _MIG.search(line)):
                gpu["slices"].append(match[2])


def _kind(text: str) -> str:
    if "version mismatch" in text:
        return "mismatch"
    if "is lost" in text or "Unable to determine the device handle" in text:
        return "lost"
    return "driver" if "driver" in text or "NVML" in text else "unreadable"


def _fault(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "text": text[:500] or "nvidia-smi failed without a message"}


def _process(line: str) -> dict[str, Any] | None:
    """Return the process in a line; the name of a process may contain commas."""
    values = [value.strip() for value in line.split(",")]
    if len(values) < 4 or not values[0].isdigit():
        return None
    pid, used = int(values[0]), values[-1]
    return {
        "pid": pid,
        "gpu": values[1],
        "name": ", ".join(values[2:-1]),
        "memory_mb": int(used) if used.isdigit() else None,
        "owner": _owner(pid),
        "job": _job(pid),
    }


def _owner(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return gpulocks.login(Path(f"/proc/{pid}").stat().st_uid)
    return None


def _job(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"CLOUDTRAIN_JOB="):
                return variable.partition(b"=")[2].decode(errors="replace")
    return None
