"""One object in a place that many machines reach, read whole and written on condition: what a team's ledger lies in.

A store is a module with `open_cell(uri)`, found by the place's scheme and imported on first use.
"""

from __future__ import annotations

import importlib
import re
from typing import Protocol, cast

from cloudtrain.launcher.errors import UsageError

__all__ = ["ABSENT", "LEDGER_PATTERN", "Cell", "located", "open_cell"]

ABSENT = ""  # the version of what is not there
DEFAULT_NAME = "ledger.json"

_STORES = {
    "s3": "cloudtrain.backends.sagemaker.cell",
    "gs": "cloudtrain.backends.vertex.cell",
    "https": "cloudtrain.backends.azureml.cell",
    "file": "cloudtrain.launcher.money.filecell",
}
# JavaScript's dialect too: an editor checks with it. A query or a fragment would be a secret or a mistake.
LEDGER_PATTERN = (
    r"(s3|gs)://[A-Za-z0-9._-]{3,222}(/[^?#\s]*)?"
    r"|https://[a-z0-9-]+\.blob\.[a-z0-9.-]+/[a-z0-9$][a-z0-9-]{2,62}(/[^?#\s]*)?"
    r"|(file://)?/[^?#\n]+|~/[^?#\n]+"
)


class Cell(Protocol):
    """The object. Every call raises UnreachableError, CredentialError or ConfigError."""

    uri: str

    def read(self) -> tuple[bytes | None, str]:
        """Return what is there and its version; None and ABSENT where there is nothing."""

    def write(self, data: bytes, version: str) -> bool:
        """Put it there in place of that version; return False where it is another by now, and leave that.

        UnreachableError leaves open whether it was written.
        """


def located(text: str) -> str:
    """Return the object's whole address: a folder's or bucket's is the file of the usual name in it.

    Raises UsageError.
    """
    if not re.fullmatch(LEDGER_PATTERN, text):
        hint = "s3://BUCKET/NAME, gs://BUCKET/NAME, https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME, or a path"
        raise UsageError("that is no place for a ledger", hint=hint)
    uri = text.rstrip("/")
    if "://" not in uri:
        from pathlib import Path

        uri = f"file://{Path(uri).expanduser()}"
    return uri if uri.endswith(".json") else f"{uri}/{DEFAULT_NAME}"


def open_cell(uri: str) -> Cell:
    """Return the object at an address that `located` has given; asks nobody yet."""
    store = importlib.import_module(_STORES[uri.partition("://")[0]])
    return cast("Cell", store.open_cell(uri))
