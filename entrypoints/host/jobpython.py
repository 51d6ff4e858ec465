"""The interpreter of a job, and its torch: examined without importing torch, which takes seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

PATIENCE_S = 4.0

# Runs in the job's interpreter, which may be old. torch's version.py has the CUDA build as text, and the folders beside
# torch have the other versions: importlib.metadata takes 60 ms to import.
_LOOK = """
import json, os, re, sys
told = {"version": ".".join(map(str, sys.version_info[:3])), "executable": sys.executable}
told.update(torch=None, cuda=None, nccl=None)
try:
    import importlib.util
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        beside = {}
        for name in os.listdir(os.path.dirname(os.path.dirname(spec.origin))):
            found = re.match(r"(torch|nvidia_nccl_cu\\d+)-(.+)\\.dist-info$", name)
            if found:
                beside[found.group(1)] = found.group(2)
        def version(name):
            if name in beside:
                return beside[name]
            from importlib import metadata
            try:
                return metadata.version(name.replace("_", "-"))
            except metadata.PackageNotFoundError:
                return None
        told["torch"] = version("torch")
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            text = file.read()
        build = re.search(r"^__version__ *= *['\\"](.+)['\\"]", text, re.M)
        told["torch"] = build.group(1) if build else told["torch"]
        cuda = re.search(r"^cuda *(?::[^=]+)?= *['\\"](.+)['\\"]", text, re.M)
        told["cuda"] = cuda.group(1) if cuda else None
        for name in ("nvidia_nccl_cu13", "nvidia_nccl_cu12", "nvidia_nccl_cu11"):
            if told["cuda"] and not told["nccl"]:
                told["nccl"] = version(name)
except Exception as error:
    told["fault"] = repr(error)
print("\\n" + json.dumps(told))
"""


def look(python: str, umask: int | None = None, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """Return `version` and `executable`, and torch's `torch`, `cuda`, `nccl`, None if absent or unknown.

    If the interpreter does not start, return only `error`. conda's torch includes NCCL, but the version stays unknown.
    """
    wanted = Path(python).expanduser() if python.startswith("~") else Path(python)
    command = shutil.which(wanted)
    if command is None:
        why = "may not be run" if wanted.exists() else "is not there"
        return {"error": f"{python} {why}"}
    try:
        done = subprocess.run(
            [command, "-c", _LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=patience_s,
            cwd="/",  # modules in the current folder are not modules that the job would import
            umask=-1 if umask is None else umask,
            check=False,
        )
    except OSError as error:
        return {"error": f"{python} does not start: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not answer within {patience_s:.0f} s"}
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = (done.stderr.strip() or done.stdout.strip() or f"it ended with code {done.returncode}").splitlines()
        return {"error": f"{python} is no Python: {words[-1][:200]}"}
    return answer if isinstance(answer, dict) else {"error": f"{python} is no Python"}
