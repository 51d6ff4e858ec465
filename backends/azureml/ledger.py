"""An Azure blob with conditional writes, where a team keeps its ledger (launcher/money/conditional.py).

Blob storage compares the blob's ETag with If-Match, and its absence with If-None-Match, before a write (Put Blob, and
"Specifying conditional headers for Blob service operations").
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from cloudtrain.backends.azureml import api
from cloudtrain.entrypoints.stores import azure_access
from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError

__all__ = ["BlobCell", "open_cell"]

_HINT_LOGIN = "az login, or export AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN"
_BUSY = (408, 429, 500, 502, 503, 504)
ATTEMPTS = 3  # a person waits for this call; a training's store waits longer


def open_cell(uri: str) -> BlobCell:
    """Return the blob at `https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME`, opened as in a job (azureaccess)."""
    return BlobCell(uri)


class BlobCell:
    """The blob, with the ETag as version. See cells.Cell."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        split = urlsplit(uri)
        container, _, self._name = unquote(split.path).strip("/").partition("/")
        self._place = azure_access.BlobLocation(split.netloc, container, "")

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version."""
        with self._asking("read") as container:
            try:
                found = container.get_blob_client(self._name).download_blob()
                return found.readall(), str(found.properties.etag)
            except Exception as error:
                if str(getattr(error, "error_code", "")) != "BlobNotFound":
                    raise
                return None, ""

    def write(self, data: bytes, version: str) -> bool:
        """Replace that version of the blob by the data; return False if the version has changed."""
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        condition: dict[str, Any] = {"overwrite": False}
        if version:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        with self._asking("write") as container:
            try:
                container.get_blob_client(self._name).upload_blob(data, validate_content="md5", **condition)
            except HttpResponseError as error:
                if error.status_code not in (409, 412) or "Container" in str(getattr(error, "error_code", "")):
                    raise
                return False
            return True

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[Any]:
        for name in ("azure", "msal"):  # the errors of these libraries contain the text of their logs
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            client, who = azure_access.connect(self._place, ATTEMPTS)
        except ImportError as error:
            raise api.not_installed(error) from error
        except PermissionError as error:
            raise CredentialError(f"cannot {doing} the ledger {self.uri}: {error}", hint=_HINT_LOGIN) from error
        try:
            with client:
                yield client
        except Exception as error:
            failure = azure_access.failure(error, self._place, who, "")
            message = f"cannot {doing} the ledger {self.uri}: {failure}".replace(" in checkpoint.mirror", "")
            if isinstance(failure, PermissionError):
                raise CredentialError(message, hint=_HINT_LOGIN) from error
            if isinstance(failure, ConnectionError) or getattr(error, "status_code", None) in _BUSY:
                raise UnreachableError(message) from error
            raise ConfigError(message) from error
