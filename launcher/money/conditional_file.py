"""A shared ledger as a file on a shared disk: written as a whole, under a lock file in the same folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError

__all__ = ["FileCell", "open_cell"]

LOCK_S = 20.0  # how long a writer waits for the lock; a holder needs the lock for a single small write


def open_cell(uri: str) -> FileCell:
    """Return the file at `file:///PATH`."""
    return FileCell(uri)


class FileCell:
    """The file; its version is the SHA-256 hash of the content. See cells.Cell."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._path = Path(uri.removeprefix("file://"))

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version."""
        with self._disk():
            try:
                data = self._path.read_bytes()
            except FileNotFoundError:
                if not self._path.parent.is_dir():  # a disk that is not mounted is not an empty ledger
                    raise
                return None, ""
            return data, hashlib.sha256(data).hexdigest()

    def write(self, data: bytes, version: str) -> bool:
        """Replace `version` of the file by `data`, completely or not at all; return False at a different version."""
        with self._disk(), self._lock():
            if self.read()[1] != version:
                return False
            partial = self._path.with_name(f"{self._path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
            try:
                with partial.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(self._path)
            finally:
                partial.unlink(missing_ok=True)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            return True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock; the kernel releases the lock when the process ends, also after a crash."""
        end = time.monotonic() + LOCK_S
        # flock over NFS needs a file opened for writing. Mode 0o666, since another user's umask must not lock us out.
        file = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise UnreachableError(f"the ledger's lock is held for long: {self._path}.lock") from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            hint = "all users of the ledger need write access to the folder"
            raise CredentialError(f"the ledger {self._path} cannot be used: {error.strerror}", hint=hint) from error
        except FileNotFoundError as error:
            hint = f"mkdir -p {self._path.parent}; if the disk is shared, check that the disk is mounted"
            raise UnreachableError(f"there is no folder {self._path.parent} for the ledger", hint=hint) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            raise ConfigError(f"the ledger {self._path} cannot be used: {error.strerror}") from error
        except OSError as error:
            raise UnreachableError(f"the ledger {self._path} cannot be used: {error.strerror or error}") from error
