"""Named objects in a store, by one protocol: a folder, S3, Azure blob storage, or Cloud Storage."""

from __future__ import annotations

import contextlib
import importlib
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from . import STORES

_T = TypeVar("_T")
ABSENT = ""  # the version of a missing object


class StoreError(OSError):
    """The address is wrong, or the store refuses a request; the message names the cure.

    `is_passing`: a later try may succeed.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class Store(Protocol):
    """A flat store of named objects below one address. Thread-safe.

    Every object is stored completely or not at all, and its checksum is compared in both directions. A large object
    goes in parts; a failed part is sent again, not the whole object. Every call raises PermissionError without a right
    or credentials, ConnectionError if the store does not answer, StoreError for other refusals.
    """

    def put(self, source: Path | bytes, name: str) -> object:
        """Store the file, or the bytes, under a name such as `step-00000120/manifest.json`."""

    def get(self, name: str, path: Path) -> object:
        """Copy the object to the path. Raises FileNotFoundError."""

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Return a small object's content and its version; None and ABSENT if the object is missing."""

    def head(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of the object, all bytes of a smaller object. Raises FileNotFoundError."""

    def put_if(self, data: bytes, name: str, version: str) -> bool:
        """Replace the object if it still has `version`; return False at a different version, without a change.

        A request whose answer was lost is sent again: False does not prove that the data was not stored.
        """

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names that begin with `prefix`."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of each object whose name begins with `prefix`."""

    def delete(self, name: str) -> None:
        """Delete the object, if present."""


def open_store(uri: str, attempts: int | None = None) -> Store:
    """Return the store at the uri; sends no request. `attempts` overrides the store's number of tries of a request.

    Raises StoreError for an unknown scheme, a bad address, or a missing package.
    """
    scheme = urlsplit(uri).scheme
    kind = STORES.get(scheme or "file")
    if kind is None:
        known = ", ".join(f"{name}://" for name in STORES if name != "file")
        raise StoreError(f"{uri!r}: this version knows no {scheme}:// store, only folders and {known}")
    open_at: Callable[[str, int | None], Store] = importlib.import_module(f"{__package__}.{kind.module}").open_at
    return open_at(uri, attempts)


def in_bucket(uri: str) -> tuple[str, str]:
    """Return the bucket, and the name below the bucket, of an address such as s3://BUCKET/NAME. Raises StoreError."""
    # Not by urlsplit: a `#` or a `?` would end the name.
    bucket, _, name = uri.partition("://")[2].partition("/")
    kind = STORES.get(uri.partition(":")[0].lower())
    if kind is None or not re.fullmatch(kind.bucket, bucket):
        form = "s3://BUCKET" if kind is None else kind.form
        raise StoreError(f"{uri!r} names no bucket; write it as in {form}/PREFIX")
    return bucket, name


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename the file to `path` at the end, remove the file on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short: `path` may have the longest name of a disk
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def in_threads(work: Callable[[_T], None], items: Iterable[_T], count: int) -> None:
    """Call `work` with each item, in `count` threads; after an exception, start no further call, and re-raise.

    Unlike a pool's threads, these threads do not delay the end of the process.
    """
    all_items = list(items)
    todo = iter(all_items)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def run() -> None:
        while not failures:
            with lock:
                item = next(todo, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=run, name="store part", daemon=True) for _ in range(min(count, len(all_items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
