"""A model folder on disk: its checksums, its verification, its signature. Needs no torch.

SHA256SUMS has the form of `sha256sum`: the command `sha256sum -c SHA256SUMS` checks the files too.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import foreign
from ..atomic_json import sync

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
CHECK, CONFIG, CARD, CODE = "check.json", "config.json", "README.md", "code"
WEIGHTS, INDEX, PT2, ONNX = "model.safetensors", "model.safetensors.index.json", "model.pt2", "model.onnx"
WEIGHT_FILES = (INDEX, WEIGHTS, "model.pt")  # of a folder of plain weights, the first that exists
OWN = "cloudtrain"  # where config.json is of the layout of Hugging Face's transformers, the key with our content
FORMAT = 1
NAMESPACE = "cloudtrain-model"  # of signatures: a signature for another purpose is not valid for a model

_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_SIGN_S = 120.0  # a key on a device may wait for a touch


class ModelFolderError(Exception):
    """The folder is no model folder, or a file in it differs from the checksums; the message names the file."""


@dataclass(frozen=True)
class ModelFolder:
    """A verified folder."""

    path: Path
    digest: str
    """The sha256 of SHA256SUMS, which identifies the model."""
    files: dict[str, str]
    """The sha256 by name."""
    config: dict[str, Any]
    """Our content of config.json."""
    check: dict[str, Any]
    """The content of check.json."""

    @property
    def is_checked(self) -> bool:
        """Whether the exported files gave the results of the checkpoint's model, in a process of their own."""
        return self.check.get("passed") is True


def verify(path: Path, *, checked: bool = False) -> ModelFolder:
    """Return the folder after reading every byte. Raises ModelFolderError for a missing, changed or additional file.

    `checked`: refuse a folder whose check has failed or was left out too.
    """
    files, digest = read_sums(path)
    for name in sorted(_present(path) | set(files)):
        if name not in files:
            raise ModelFolderError(f"{path} has the file {name}, which {SUMS} does not list")
        sha256 = file_sha256(path / name)
        if sha256 != files[name]:
            raise ModelFolderError(f"{path / name} is damaged: its sha256 is {sha256[:12]}, not {files[name][:12]}")
    folder = ModelFolder(path, digest, files, read_config(path), _object(path / CHECK))
    if folder.config.get("format") != FORMAT:
        raise ModelFolderError(f"{path} has format {folder.config.get('format')!r}; this cloudtrain reads {FORMAT}")
    if checked and not folder.is_checked:
        why = "its check failed" if folder.check.get("passed") is False else "the export was not checked"
        raise ModelFolderError(f"{path} is not proven to be the trained model: {why}")
    return folder


def read_config(path: Path) -> dict[str, Any]:
    """Return our content of the folder's config.json. Raises ModelFolderError, OSError."""
    whole = _object(path / CONFIG)
    own = whole.get(OWN, whole)
    return own if isinstance(own, dict) else whole


def write_sums(path: Path, known: Mapping[str, str]) -> None:
    """Write the checksums of all files of the folder, durably. `known`: sha256 by name.

    Raises OSError, ModelFolderError for a name that a line cannot hold.
    """
    names = sorted(_present(path))
    if wrong := [name for name in names if not name.isprintable()]:
        raise ModelFolderError(f"the file name {wrong[0]!a} cannot be listed in {SUMS}")
    lines = [f"{known[name] if name in known else file_sha256(path / name)}  {name}\n" for name in names]
    (path / SUMS).write_text("".join(lines), encoding="utf-8")
    for folder in {path / name for name in [*names, SUMS]} | {(path / name).parent for name in names}:
        sync(folder)


def sign(path: Path, key: Path) -> None:
    """Sign the folder's checksums with an ssh key, by ssh-keygen. Raises ModelFolderError."""
    (path / SIGNATURE).unlink(missing_ok=True)
    command = ["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(path / SUMS)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SIGN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelFolderError(f"the model cannot be signed: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ModelFolderError(f"the model cannot be signed with {key}: {lines[-1] if lines else done.returncode}")


def read_sums(path: Path) -> tuple[dict[str, str], str]:
    """Return the sha256 by name of the folder's files, and the sha256 of the list itself. Reads no other file.

    Raises ModelFolderError for a damaged list, and for a name that leads out of the folder.
    """
    try:
        if not stat.S_ISREG((path / SUMS).lstat().st_mode):
            raise ModelFolderError(f"{path / SUMS} is no regular file")
        data = foreign.read(path / SUMS, foreign.JSON_BYTES)
        text = data.decode()
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is no model folder: it has no {SUMS}") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path / SUMS} cannot be read: {error}") from error
    lines = [_LINE.fullmatch(line) for line in text.split("\n")[:-1]]
    files = {line[2]: line[1] for line in lines if line}
    if not text.endswith("\n") or len(files) != len(lines) or not {CONFIG, CHECK} <= set(files):
        raise ModelFolderError(f"{path / SUMS} is damaged: it is no list of all files of a model")
    if wrong := [name for name in files if not (foreign.is_inside(name) and name.isprintable())]:
        raise ModelFolderError(f"{path / SUMS} names a file outside the folder: {wrong[0]!r}")
    return files, hashlib.sha256(data).hexdigest()


def _present(path: Path) -> set[str]:
    """Return the names of the files below the folder that the checksums cover."""
    entries = (entry for entry in path.rglob("*") if entry.is_symlink() or not entry.is_dir())
    return {entry.relative_to(path).as_posix() for entry in entries} - {SUMS, SIGNATURE}


def file_sha256(path: Path) -> str:
    """Return the hash of a regular file. Raises ModelFolderError."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ModelFolderError(f"{path} is no regular file")
        return foreign.sha256_of(path)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing") from None
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(foreign.read(path, foreign.JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not readable: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds no object")
    return content
