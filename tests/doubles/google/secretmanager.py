"""secretmanager.googleapis.com: secrets and their versions, after secretmanager.v1.json; no IAM policies."""

import base64
import binascii
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from doubles.google.errors import GoogleError, invalid
from doubles.google.names import NUMBER, PROJECT, rfc3339
from doubles.kit.routing import Route
from doubles.wire import Answer, BadJson, Request, json_answer

MAX_BYTES = 64 * 1024  # SecretPayload.data, discovery document
MAX_LABELS = 64
_FIELDS = {"labels", "replication", "ttl"}
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")

JSON = dict[str, Any]


@dataclass
class Version:
    """A version of a secret."""

    data: bytes
    created: float


@dataclass
class Secret:
    """A secret; versions count from 1."""

    name: str
    created: float
    told: JSON
    expires: float | None
    versions: list[Version] = field(default_factory=list)


class Secrets:
    """The project's secrets. Names in answers always have the project's number."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._secrets: dict[str, Secret] = {}

    def clear(self) -> None:
        """Forget all secrets."""
        with self._lock:
            self._secrets.clear()

    def value(self, name: str) -> str | None:
        """Return the last version's data, or None."""
        found = self._secrets.get(name)
        return found.versions[-1].data.decode(errors="replace") if found is not None and found.versions else None

    def values(self) -> dict[str, str | None]:
        """Return every secret's value."""
        return {name: self.value(name) for name in self._living()}

    def set(self, name: str, value: str) -> None:
        """Write a secret."""
        with self._lock:
            made = Secret(name, self._clock(), {"replication": {"automatic": {}}}, None)
            found = self._secrets.setdefault(name, made)
            found.versions.append(Version(value.encode(), self._clock()))

    def create(self, name: str, body: JSON) -> JSON:
        """Make a secret without a version."""
        unknown = set(body) - _FIELDS
        if unknown:
            message = f"Invalid JSON payload received. Unknown name \"{min(unknown)}\" at 'secret': Cannot find field."
            raise invalid(message)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,255}", name):
            raise invalid(f"The provided Secret ID [{name}] does not match the expected format.")
        replication = body.get("replication")
        if not isinstance(replication, dict) or set(replication) not in ({"automatic"}, {"userManaged"}):
            raise invalid("Secret.replication must be provided.")
        _check_labels(body.get("labels", {}))
        expires = self._expires(body)
        with self._lock:
            if name in self._living():
                raise GoogleError("ALREADY_EXISTS", f"Secret [projects/{NUMBER}/secrets/{name}] already exists.")
            kept: JSON = {key: body[key] for key in ("labels", "replication") if key in body}
            self._secrets[name] = Secret(name, self._clock(), kept, expires)
            return _secret(self._secrets[name])

    def delete(self, name: str) -> JSON:
        """Remove a secret with all its versions permanently."""
        with self._lock:
            self._found(name)
            del self._secrets[name]
        return {}

    def add(self, name: str, body: JSON) -> JSON:
        """Add a version."""
        payload = body.get("payload")
        if set(body) != {"payload"} or not isinstance(payload, dict) or "data" not in payload:
            raise invalid("Secret Payload cannot be empty.")
        try:
            data = base64.b64decode(payload["data"].replace("-", "+").replace("_", "/"), validate=True)
        except binascii.Error:
            raise invalid("Invalid value at 'payload.data' (TYPE_BYTES), Base64 decoding failed.") from None
        if not 0 < len(data) <= MAX_BYTES:
            raise invalid("The secret payload is empty or exceeds the 64KiB limit.")
        checksum = payload.get("dataCrc32c")
        if checksum is not None and int(checksum) != google_crc32c.value(data):
            raise invalid("SecretVersion checksum verification failed.")
        with self._lock:
            secret = self._found(name)
            secret.versions.append(Version(data, self._clock()))
            told = _version(secret, len(secret.versions))
        return {**told, **({"clientSpecifiedPayloadChecksum": True} if checksum is not None else {})}

    def access(self, name: str, version: str) -> JSON:
        """Return a version's data."""
        secret, number = self._found_version(name, version)
        found = secret.versions[number - 1]
        payload = {"data": base64.b64encode(found.data).decode(), "dataCrc32c": str(google_crc32c.value(found.data))}
        return {"name": _version_name(name, number), "payload": payload}

    def _living(self) -> dict[str, Secret]:
        """Return the secrets that have not expired, and forget the expired secrets."""
        with self._lock:
            now = self._clock()
            for name in [name for name, one in self._secrets.items() if one.expires is not None and one.expires <= now]:
                del self._secrets[name]
            return self._secrets

    def _found(self, name: str) -> Secret:
        found = self._living().get(name)
        if found is None:
            raise GoogleError("NOT_FOUND", f"Secret [projects/{NUMBER}/secrets/{name}] not found or has no versions.")
        return found

    def _found_version(self, name: str, version: str) -> tuple[Secret, int]:
        secret = self._found(name)
        number = len(secret.versions) if version == "latest" else int(version) if version.isdigit() else 0
        if not 0 < number <= len(secret.versions):
            message = f"Secret Version [projects/{NUMBER}/secrets/{name}/versions/{version}] not found."
            if version == "latest":
                message = f"Secret [projects/{NUMBER}/secrets/{name}] not found or has no versions."
            raise GoogleError("NOT_FOUND", message)
        return secret, number

    def _expires(self, body: JSON) -> float | None:
        if "ttl" not in body:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)s", str(body["ttl"]))
        if found is None or float(found[1]) <= 0:
            raise invalid("Invalid value at 'secret' for ttl")
        return self._clock() + float(found[1])


def _check_labels(labels: JSON) -> None:
    for key, value in labels.items():
        if not _LABEL.fullmatch(key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            raise invalid(f"The label [{key}: {value}] does not match the expected format.")
    if len(labels) > MAX_LABELS:
        raise invalid(f"A secret has at most {MAX_LABELS} labels.")


def _secret(secret: Secret) -> JSON:
    told = {"name": f"projects/{NUMBER}/secrets/{secret.name}", "createTime": rfc3339(secret.created), **secret.told}
    return {**told, "etag": '"16214e"', **({"expireTime": rfc3339(secret.expires)} if secret.expires else {})}


def _version_name(secret: str, number: int) -> str:
    return f"projects/{NUMBER}/secrets/{secret}/versions/{number}"


def _version(secret: Secret, number: int) -> JSON:
    version = secret.versions[number - 1]
    told = {"name": _version_name(secret.name, number), "createTime": rfc3339(version.created), "state": "ENABLED"}
    return {**told, "replicationStatus": {"automatic": {}}, "etag": '"16214f"'}


def _answer(request: Request, project: str, act: Callable[[JSON], JSON]) -> Answer:
    if project not in (PROJECT, NUMBER):
        message = f"Permission denied on resource project {project} (or it may not exist)."
        raise GoogleError("PERMISSION_DENIED", message)
    try:
        body = request.json()
    except BadJson as error:
        raise invalid(f"Invalid JSON payload received. {error}") from None
    return json_answer(act(body))


def _create(world: Any, request: Request, project: str) -> Answer:
    name = request.query.get("secretId", "")
    return _answer(request, project, lambda body: world.secrets.create(name, body))


def _delete(world: Any, request: Request, project: str, secret: str) -> Answer:
    return _answer(request, project, lambda body: world.secrets.delete(secret))


def _add(world: Any, request: Request, project: str, secret: str) -> Answer:
    return _answer(request, project, lambda body: world.secrets.add(secret, body))


def _access(world: Any, request: Request, project: str, secret: str, version: str) -> Answer:
    return _answer(request, project, lambda body: world.secrets.access(secret, version))


_ALL = "/v1/projects/(?P<project>[^/]+)/secrets"
_ONE = f"{_ALL}/(?P<secret>[^/:]+)"
_VERSION = f"{_ONE}/versions/(?P<version>[^/:]+)"

ROUTES = [
    Route("POST", _ALL, "secrets.create", _create),
    Route("DELETE", _ONE, "secrets.delete", _delete),
    Route("POST", f"{_ONE}:addVersion", "secrets.add", _add),
    Route("GET", f"{_VERSION}:access", "secrets.access", _access),
]
