"""Calls to the stand-in without any SDK: with a token of the tests' account, under the real host names."""

import base64
import functools
import json
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles.client import Reply, ask
from doubles.google.names import PROJECT, REGION

VERTEX = f"https://{REGION}-aiplatform.googleapis.com"
LOCATION = f"projects/{PROJECT}/locations/{REGION}"
TOKEN_URI = "https://oauth2.googleapis.com/token"


@dataclass(frozen=True)
class Client:
    """A client behind the proxy."""

    proxy: str
    ca: str
    key_file: str

    def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        is_signed_in: bool = True,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> Reply:
        """Return the answer; a `url` without a host is below the tests' location. Raises OSError without an answer."""
        if url.startswith("/"):
            url = f"{VERTEX}/v1/{LOCATION}{url}"
        told = {**({"Authorization": f"Bearer {self.token()}"} if is_signed_in else {}), **(headers or {})}
        return ask(self.proxy, self.ca, method, url, body, told, timeout_s)

    def token(self) -> str:
        """Return a new token, for an assertion signed with the account's key."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        email, key = _key(self.key_file)
        now = int(time.time())
        claims = {"iss": email, "aud": TOKEN_URI, "iat": now, "exp": now + 3600}
        claims["scope"] = "https://www.googleapis.com/auth/cloud-platform"
        text = f"{_packed({'alg': 'RS256', 'typ': 'JWT'})}.{_packed(claims)}"
        signed = key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        assertion = f"{text}.{base64.urlsafe_b64encode(signed).decode().rstrip('=')}"
        form = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion}
        data = urllib.parse.urlencode(form).encode()
        return self.call("POST", TOKEN_URI, data, is_signed_in=False).json["access_token"]


def job_body(
    name: str,
    *command: str,
    workers: int = 0,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
    scheduling: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """Return a CustomJob's JSON: one replica, and `workers` replicas in a second pool, run the command."""
    container: dict[str, Any] = {"imageUri": "stand-in:1", "command": list(command), "args": list(args)}
    container["env"] = [{"name": key, "value": value} for key, value in (env or {}).items()]
    pool = {"machineSpec": {"machineType": "n1-standard-4"}, "containerSpec": container}
    pools = [{**pool, "replicaCount": str(count)} for count in (1, workers) if count]
    told: dict[str, Any] = {"workerPoolSpecs": pools, **spec}
    if scheduling is not None:
        told["scheduling"] = dict(scheduling)
    return {"displayName": name, "labels": dict(labels or {}), "jobSpec": told}


def _packed(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


@functools.lru_cache(maxsize=8)
def _key(file: str) -> tuple[str, Any]:
    """Return the account of a key file and its key, unvalidated: validation takes longer than all other steps."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    told = json.loads(Path(file).read_text())
    key = load_pem_private_key(told["private_key"].encode(), None, unsafe_skip_rsa_key_validation=True)
    return told["client_email"], key
