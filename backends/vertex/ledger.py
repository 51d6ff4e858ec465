"""An object in Cloud Storage with conditional writes, where a team keeps its ledger (launcher/money/conditional.py).

Cloud Storage compares the object's generation with ifGenerationMatch before a write; 0 means that the object is absent
(Cloud Storage documentation, "Request preconditions"). The standard library suffices: a ledger needs no SDK.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from urllib.parse import quote, urlencode

from cloudtrain.entrypoints.stores import google_access
from cloudtrain.entrypoints.stores.google_http import HttpResponse, Lost, Service, ServiceError, Untrusted
from cloudtrain.entrypoints.stores.google_storage import endpoint, split
from cloudtrain.launcher.errors import ConfigError, CredentialError, UnreachableError

__all__ = ["GcsCell", "open_cell"]

TRIES, PAUSE_S = 4, 0.5  # a person waits for this call; the training's store retries for longer
_ROLE = "who uses it needs the role Storage Object User (roles/storage.objectUser) on the bucket"


def open_cell(uri: str) -> GcsCell:
    """Return the object at `gs://BUCKET/NAME`, opened with the application's default credentials."""
    return GcsCell(uri)


class GcsCell:
    """The object, with the generation as version. See cells.Cell."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        bucket, self._key = split(uri)
        identity = None if google_access.anonymous() else google_access.of_environment()
        self._service = Service(endpoint(), identity)
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"

    def read(self) -> tuple[bytes | None, str]:
        """Return the content and its version."""
        with self._asking("read"):
            try:
                found = self._ask("GET", f"{self._objects}/{quote(self._key, safe='')}?alt=media")
            except ServiceError as error:
                if error.status != 404 or not error.message.lower().startswith("no such object"):  # else no bucket
                    raise
                return None, ""
            return found.body, found.headers["x-goog-generation"]

    def write(self, data: bytes, version: str) -> bool:
        """Replace that version of the object by the data; return False if the version has changed."""
        query = {"uploadType": "media", "name": self._key, "ifGenerationMatch": version or "0", "fields": "generation"}
        headers = {"Content-Type": "application/json"}
        with self._asking("write"):
            answer = self._ask("POST", f"/upload{self._objects}?{urlencode(query)}", headers, data, also=(412,))
            return answer.status != 412

    def _ask(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        also: tuple[int, ...] = (),
    ) -> HttpResponse:
        """Return the whole answer. If a lost write had succeeded, the retry is refused with 412."""
        for number in range(1, TRIES + 1):
            try:
                with self._service.once(method, target, headers, body, also=also) as reply:
                    return HttpResponse(reply.status, reply.headers, reply.read())
            except (ServiceError, Lost) as error:
                if number == TRIES or (
                    isinstance(error, ServiceError) and not (error.is_passing or error.status == 401)
                ):
                    raise
            time.sleep(PAUSE_S * 2 ** (number - 1))
        raise AssertionError("the last try returns or raises")

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        what = f"cannot {doing} the ledger {self.uri}"
        try:
            yield
        except ServiceError as error:
            if error.status == 404:
                hint = "make the bucket, or name another place"
                raise ConfigError(f"{what}: there is no such bucket ({error})", hint=hint) from error
            if error.status in (401, 403) and not error.is_passing:
                raise CredentialError(f"{what}: not allowed ({error})", hint=_ROLE) from error
            raise UnreachableError(f"{what}: Google gave an unexpected answer ({error})") from error
        except Lost as error:
            raise UnreachableError(f"{what}: Google does not answer ({error})") from error
        except Untrusted as error:
            raise ConfigError(f"{what}: the server's certificate is not trusted ({error})") from error
        except PermissionError as error:
            raise CredentialError(f"{what}: {error}") from error
        except OSError as error:
            raise UnreachableError(f"{what}: {error}") from error
