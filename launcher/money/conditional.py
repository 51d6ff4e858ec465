"""Conditional objects: an object in a shared store, read whole and written by compare and swap; for shared ledgers.

A store is a module with `open_cell(uri)`, chosen by the scheme of the address and imported on first use.
"""

from __future__ import annotations

import importlib
import re
from typing import Protocol, cast

from cloudtrain.launcher.backend_table import BUILT_IN, traits
from cloudtrain.launcher.errors import UsageError
from cloudtrain.launcher.job import LEDGER_PATTERN

__all__ = ["ABSENT", "ConditionalObject", "located", "open_cell"]

ABSENT = ""  # the version of a missing object
DEFAULT_NAME = "ledger.json"

_FILE = {"file": "cloudtrain.launcher.money.conditional_file"}


class ConditionalObject(Protocol):
    """The object. Every call raises UnreachableError, CredentialError or ConfigError."""

    uri: str

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version; None and ABSENT if the object is missing."""

    def write(self, data: bytes, version: str) -> bool:
        """Replace the object if it still has `version`; return False at a different version, without a change.

        UnreachableError does not tell whether the write happened.
        """


def located(text: str) -> str:
    """Return the object's full address; in a folder or bucket, the file DEFAULT_NAME. Raises UsageError."""
    if not re.fullmatch(LEDGER_PATTERN, text):
        hint = "s3://BUCKET/NAME, gs://BUCKET/NAME, https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME, or a path"
        raise UsageError("invalid address of a ledger", hint=hint)
    uri = text.rstrip("/")
    if "://" not in uri:
        from pathlib import Path

        uri = f"file://{Path(uri).expanduser()}"
    return uri if uri.endswith(".json") else f"{uri}/{DEFAULT_NAME}"


def open_cell(uri: str) -> ConditionalObject:
    """Return the object at an address that `located` has returned; sends no request."""
    scheme = uri.partition("://")[0]
    stores = (_FILE, *(traits(name).ledgers for name in BUILT_IN))
    store = importlib.import_module(next(each[scheme] for each in stores if scheme in each))
    return cast("ConditionalObject", store.open_cell(uri))
