"""The task's code in a process of this machine, before a send: for a plan's memory and a parent's weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import atomic_json

from ..errors import CloudtrainError
from ..planning.prepare import Prepared
from ..store import home
from ..text import addresses
from ..text.terminal import say

TOLD, MOST_TOLD = "told.json", 500  # in the home folder: the folders whose code has run here
LIMIT_S = 30.0  # a model of 80 layers on 64 ranks takes 10 to 28 s on two busy cores, a model of 6 layers 3 s
# This machine's variables that the code gets: places and languages, no key and no token.
_PLAIN = re.compile(
    "PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TEMP|TMP|(LD|DYLD|DYLD_FALLBACK)_LIBRARY_PATH|LD_PRELOAD"
    "|VIRTUAL_ENV|CONDA_PREFIX|PYTHON(PATH|HOME|USERBASE|NOUSERSITE)|GUIX_PYTHONPATH|KMP_DUPLICATE_LIB_OK"
    "|MKL_THREADING_LAYER|XDG_[A-Z]+_HOME|(HF|TORCH|NLTK|TRANSFORMERS|HF_[A-Z]+|HUGGINGFACE_HUB)_(HOME|CACHE|DATA)"
    "|(TORCH_EXTENSIONS|TORCHINDUCTOR_CACHE|TRITON_CACHE|NUMBA_CACHE)_DIR|MPLCONFIGDIR|CUDA_(HOME|PATH)|JAVA_HOME"
    "|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
)


def tell_once(folder: Path, how: str) -> None:
    """Say at the first use of a folder that its code runs on this machine; at each use if none can be kept."""
    told = None
    with contextlib.suppress(CloudtrainError, RuntimeError):
        told = atomic_json.read_json(home.where() / TOLD)
    known = told if isinstance(told, list) else []
    if str(folder) not in known:
        say(f"this runs code of {folder} on this machine, {how}")
        with contextlib.suppress(CloudtrainError, OSError):
            atomic_json.write_json(home.home() / TOLD, [*known, str(folder)][-MOST_TOLD:], 0o600)


def run(prepared: Prepared, module: str, ask: dict[str, Any], word: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the lines of a module of entrypoints/trainer, or a line with the reason; and whether time ran out."""
    config, base = prepared.config, prepared.config_file.parent.resolve()
    tell_once((base / config.code.dir).resolve(), "without its keys; `plan --no-code` runs none")
    paths = ((name, addresses.path_of(uri).removeprefix("file://")) for name, uri in config.inputs.items())
    inputs = {f"CLOUDTRAIN_INPUT_{name.upper()}": path for name, path in paths}
    environment = {
        **{name: value for name, value in os.environ.items() if _PLAIN.fullmatch(name)},
        **config.env,
        **{name: str(base / uri) for name, uri in inputs.items() if "://" not in uri},
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",  # the code folder stays as it is
        "HF_HUB_OFFLINE": "1",  # a plan downloads nothing
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as scratch:
        spec = Path(scratch) / "spec.json"
        spec.write_text(json.dumps(ask))
        words = [sys.executable, "-m", f"cloudtrain.entrypoints.trainer.{module}", str(spec), word]
        child = subprocess.Popen(
            words,
            cwd=base / config.code.dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        why, is_cut = "the task ended the process", False
        try:
            out, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            why, is_cut = f"the task took longer than {LIMIT_S:.0f} s", True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # data loaders too
        out = out if child.returncode is not None else child.communicate()[0]
    lines = [json.loads(text) for text in out.splitlines() if text.startswith("{") and text.endswith("}")]
    return lines or [{"why": why}], is_cut
