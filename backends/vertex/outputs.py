"""The download of a job's output folder: only whole files, and no file outside the folder."""

from __future__ import annotations

import errno
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from cloudtrain.backends.vertex import api, files
from cloudtrain.backends.vertex.api import GoogleError, VertexAccess
from cloudtrain.launcher.errors import CloudtrainError, ConfigError
from cloudtrain.launcher.text.terminal import say

__all__ = ["download"]

WORKERS = 4
PIECE_BYTES = 1 << 20
BREAKS = 4  # breaks in a row, without a new byte, after which a download fails
_PART = ".part"
# A bucket may hold an object `a` and an object `a/b`, and longer names than a file system allows.
_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EILSEQ)


def download(access: VertexAccess, uri: str, folder: Path) -> list[Path]:
    """Copy all objects below the URI to the folder, WORKERS at a time; return the files.

    Raises CloudtrainError if no output exists yet, ConfigError if the folder cannot be written, or GoogleError.
    """
    prefix = api.split_uri(uri.rstrip("/") + "/")[1]
    bucket = api.split_uri(uri)[0]
    left_out: list[str] = []

    def one(name: str) -> Path | None:
        target = folder / name.removeprefix(prefix)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return target if _copy(access, f"gs://{bucket}/{name}", target) else None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            left_out.append(f"{name}, which cannot be a file here: {error.strerror}")
            return None

    names = [name for name in files.names(access, uri.rstrip("/") + "/") if _is_inside(name.removeprefix(prefix))]
    try:
        if names:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(WORKERS) as pool:
            found = [path for path in pool.map(one, names) if path is not None]
    except OSError as error:
        raise ConfigError(f"cannot write there: {error.strerror}", where=str(folder)) from error
    for words in left_out:
        say(f"left out: {words}")
    if not found:
        raise CloudtrainError("there is no output", where=uri, hint="the job has not written any output yet")
    return found


def _is_inside(name: str) -> bool:
    """Return whether the name is a file below the folder: not above the folder, and no folder object of the console."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _copy(access: VertexAccess, uri: str, path: Path) -> bool:
    """Copy the object; return False if the object is gone: a running job may remove its own files."""
    partial = path.with_name(f".{secrets.token_hex(8)}{_PART}")  # a name that no object has
    try:
        with partial.open("wb") as file:
            is_there = _whole(access, uri, file)
        if is_there:
            partial.replace(path)
        return is_there
    finally:
        partial.unlink(missing_ok=True)


def _whole(access: VertexAccess, uri: str, file: BinaryIO) -> bool:
    """Write the object into the file, and resume after a break; return False if the object is gone."""
    generation, breaks = "", 0
    while True:
        begin = file.tell()
        asked = {"generation": generation} if begin else {}
        try:
            generation, is_whole = _piece(access, uri, file, asked)
        except GoogleError as error:
            if error.status != 404 or not begin:
                if error.status == 404:
                    return False
                raise
            is_whole, generation = False, ""  # the object was replaced: begin again
        if is_whole:
            return True
        if not generation:
            file.seek(0)
            file.truncate()
        breaks = 0 if file.tell() > begin else breaks + 1
        if breaks >= BREAKS:
            raise GoogleError(0, "", f"{uri} breaks off after {file.tell()} bytes, again and again")


def _piece(access: VertexAccess, uri: str, file: BinaryIO, asked: dict[str, str]) -> tuple[str, bool]:
    """Return the object's generation ("": no resume is possible), and whether the copy is whole. Raises GoogleError."""
    from requests.exceptions import RequestException

    begin = file.tell()
    headers = {"Range": f"bytes={begin}-"} if begin else {}
    params = {"alt": "media", **asked}
    answer = api.call(access, "GET", api.object_url(access, uri), params=params, headers=headers, stream=True)
    received = answer.headers
    if begin and answer.status_code != 206:  # the server sends the whole object, with or without a range in the request
        file.seek(begin := 0)
        file.truncate()
    try:
        for piece in answer.iter_content(PIECE_BYTES):
            file.write(piece)
    except RequestException:
        # For a compressed object, offsets in the file differ from offsets in the transfer.
        return "" if received.get("Content-Encoding") else str(received.get("x-goog-generation", "")), False
    finally:
        answer.close()
    length = None if received.get("Content-Encoding") else received.get("Content-Length")
    return str(received.get("x-goog-generation", "")), length is None or file.tell() - begin == int(length)
