"""Conditional objects: an object in a shared store, read whole and written by compare and swap; for shared ledgers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from cloudtrain.entrypoints.stores import LEDGER_PATTERN, STORES, forms

from ..errors import ConfigError, CredentialError, UnreachableError, UsageError
from ..store import agent_limit

if TYPE_CHECKING:
    from cloudtrain.entrypoints.stores.store import Store

DEFAULT_NAME = "ledger.json"
ATTEMPTS = 4  # of a request: a person waits for the answer; a training's store waits longer


class ConditionalObject:
    """The object at an address that `located` has returned; opening sends no request.

    Every call raises UnreachableError, CredentialError or ConfigError.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._folder, _, name = uri.rpartition("/")
        self._name = unquote(name) if uri.startswith("https:") else name
        self._store: Store | None = None

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version; None and ABSENT if the object is missing."""
        with self._asking("read") as store:
            return store.read(self._name)

    def write(self, data: bytes, version: str) -> bool:
        """Replace the object if it still has `version`; return False at a different version, without a change.

        UnreachableError does not tell whether the write happened.
        """
        with self._asking("write") as store:
            return store.put_if(data, self._name, version)

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[Store]:
        from cloudtrain.entrypoints.stores.store import StoreError, open_store  # few commands use a shared ledger

        doing = f"cannot {doing} the ledger {self.uri}"
        try:
            if self._store is None:
                self._store = open_store(self._folder, ATTEMPTS)
            yield self._store
        except PermissionError as error:
            scheme = self.uri.partition("://")[0]
            raise CredentialError(f"{doing}: {error.strerror or error}", hint=STORES[scheme].access) from error
        except FileNotFoundError as error:
            folder = self._folder.removeprefix("file://")
            hint = f"mkdir -p {folder}; if the disk is shared, check that the disk is mounted"
            raise UnreachableError(f"there is no folder {folder} for the ledger", hint=hint) from error
        except (StoreError, IsADirectoryError, NotADirectoryError) as error:
            if isinstance(error, StoreError) and error.is_passing:
                raise UnreachableError(f"{doing}: {error}") from error
            package = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
            hint = f"pip install {package.replace('.', '-')}, on this machine" if package else ""
            raise ConfigError(f"{doing}: {error.strerror or error}", hint=hint) from error
        except OSError as error:
            raise UnreachableError(f"{doing}: {error.strerror or error}") from error


def located(text: str) -> str:
    """Return the object's full address; in a folder or bucket, the file DEFAULT_NAME. Raises UsageError."""
    if not re.fullmatch(LEDGER_PATTERN, text):
        hint = f"{', '.join(forms('NAME'))}, or a path"
        raise UsageError("invalid address of a ledger", hint=hint)
    uri = text.rstrip("/")
    if "://" not in uri:
        uri = f"file://{Path(uri).expanduser()}"
    uri = uri if uri.endswith(".json") else f"{uri}/{DEFAULT_NAME}"
    if agent_limit.is_place(uri):
        raise UsageError("this ledger is for the owner's limit alone", hint="cloudtrain budget set agent 50USD --month")
    return uri
