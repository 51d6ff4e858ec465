"""A model in MLflow's registry, by its REST interface: three calls, and no package of MLflow's.

Source: MLflow's REST API 2.0 (registered-models/create, model-versions/search, model-versions/create). A search and a
mark in the store keep two processes from making two versions.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from cloudtrain.entrypoints.stores.store import StoreError, open_store

from ..backend.models import MANIFEST, CheckedModel, VendorCall
from ..errors import CloudtrainError, ConfigError, CredentialError, UnreachableError, UsageError
from ..text.remote import one_line
from .exclusive import alone

SERVER = "MLFLOW_TRACKING_URI"
ANSWER_S = 60.0
_API = "/api/2.0/mlflow"


class MlflowRegistry:
    """A model's place in the registry. `store`: the folder of a store for the files."""

    def __init__(self, model: CheckedModel, store: str | None, environ: Mapping[str, str] = os.environ) -> None:
        server = environ.get(SERVER, "").rstrip("/")
        if urlsplit(server).scheme not in ("http", "https"):
            raise ConfigError("no MLflow server", where=SERVER, hint=f"export {SERVER}=https://mlflow.example.com")
        if store is None:
            raise UsageError("MLflow stores no files of its own", hint="--store s3://BUCKET/FOLDER, gs:// or https://")
        self._model, self._server, self._headers = model, server, _headers(environ)
        self.uri = model.place(store.rstrip("/"))
        tags = [{"key": key, "value": value} for key, value in model.tags().items()]
        version = {"name": model.name, "source": self.uri, "description": model.about, "tags": tags}
        search = {"filter": f"name='{model.name}'"}
        self.calls = (
            VendorCall(f"GET {_API}/model-versions/search", search),
            VendorCall(f"POST {_API}/registered-models/create", {"name": model.name}),
            VendorCall(f"POST {_API}/model-versions/create", version),
        )

    def find(self) -> str | None:
        """Return the version with the digest in its tags."""
        token = ""
        while True:
            found = self._call(f"{self.calls[0].name}?filter={quote(self.calls[0].body['filter'])}&page_token={token}")
            versions = found.get("model_versions", [])
            if not isinstance(versions, list) or not all(isinstance(each, dict) for each in versions):
                raise UnreachableError(f"MLflow at {self._server} gave an unexpected answer: no list of versions")
            for each in versions:
                tags = {tag.get("key"): tag.get("value") for tag in each.get("tags", ())}
                if tags.get("cloudtrain.sha256") == self._model.digest:
                    return f"{self._model.name}/{each['version']}"
            token = quote(found.get("next_page_token") or "")
            if not token:
                return None

    def upload(self) -> None:
        """Upload the files, the checksums last."""
        with _answers():
            store = open_store(self.uri)
            with contextlib.suppress(FileNotFoundError):  # a folder that does not exist yet
                if store.read(MANIFEST)[0] == (self._model.path / MANIFEST).read_bytes():
                    return
            for name in [*self._model.uploads, MANIFEST]:
                store.put(self._model.path / name, name)

    def create(self) -> str:
        """Make the name unless it exists, then the version."""
        _, name, version = self.calls
        with _answers(), alone(open_store, self.uri):
            if (known := self.find()) is not None:
                return known
            self._call(name.name, name.body, but="RESOURCE_ALREADY_EXISTS")
            made = self._call(version.name, version.body).get("model_version")
            if not isinstance(made, dict) or "version" not in made:
                raise UnreachableError(f"MLflow at {self._server} gave an unexpected answer: no version")
            return f"{self._model.name}/{made['version']}"

    def _call(self, call: str, body: Mapping[str, Any] | None = None, but: str = "") -> dict[str, Any]:
        """Return the answer; {} for a refusal with the code `but`. Raises the errors of `CloudtrainError`."""
        method, _, path = call.partition(" ")
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._server + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return _refusal(error.code, error.read(), but)
        except (OSError, ValueError) as error:
            words = one_line(str(getattr(error, "reason", error)))
            raise UnreachableError(f"MLflow at {self._server} gave no answer: {words}") from error
        return found if isinstance(found, dict) else {}


def _refusal(status: int, text: bytes, but: str) -> dict[str, Any]:
    """Return {} if the refusal has the code `but`; else raise the error."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        found = loaded if isinstance(loaded := json.loads(text), dict) else {}
    if but and found.get("error_code") == but:
        return {}
    words = one_line(str(found.get("message") or f"HTTP {status}"))
    if status in (401, 403):
        hint = "export MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise CredentialError(f"MLflow refuses these credentials: {words}", hint=hint)
    if status == 429 or status >= 500:
        raise UnreachableError(f"MLflow gave an unexpected answer: {words}")
    raise ConfigError(f"MLflow refuses the model: {words}")


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the header with the credentials, by the variables of MLflow's own client."""
    if token := environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    """Raise a store's errors as cloudtrain's."""
    try:
        yield
    except CloudtrainError:
        raise
    except PermissionError as error:
        raise CredentialError(f"cannot upload the model: {error}") from error
    except ConnectionError as error:
        raise UnreachableError(f"cannot upload the model: {error}") from error
    except (StoreError, OSError) as error:
        raise ConfigError(f"cannot upload the model: {error}") from error
