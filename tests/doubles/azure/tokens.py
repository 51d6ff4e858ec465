"""Bearer tokens: opaque to clients, with audience, client and expiry that the services verify."""

import base64
import hashlib
import hmac
import itertools
import json
import os
import time
from typing import Any

from doubles.azure.errors import AzureError
from doubles.azure.names import TENANT

# Service -> accepted audiences.
AUDIENCES = {
    "arm": ("https://management.azure.com", "https://management.core.windows.net"),
    "data": ("https://management.azure.com", "https://management.core.windows.net", "https://ml.azure.com"),
    "blob": ("https://storage.azure.com",),
    "vault": ("https://vault.azure.net",),
}


def audience_of(scope: str) -> str:
    """Return the audience of a scope or a resource."""
    return scope.split()[0].removesuffix("/.default").rstrip("/")


class Tokens:
    """Issues and verifies tokens; each token has a serial number, which tells its age."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._serials = itertools.count(1)
        self.last = 0  # serial number of the last issued token

    def issue(self, client: str, audience: str, lasts_s: float) -> str:
        """Return a token in the format of a JSON Web Token."""
        now = time.time()
        self.last = next(self._serials)
        claims: dict[str, Any] = {"aud": audience, "iss": f"https://sts.windows.net/{TENANT}/", "tid": TENANT}
        claims |= {"appid": client, "oid": client, "iat": int(now), "exp": now + lasts_s, "uti": str(self.last)}
        text = f"{_packed({'typ': 'JWT', 'alg': 'HS256'})}.{_packed(claims)}"
        return f"{text}.{self._signature(text)}"

    def claims(self, authorization: str, service: str) -> dict[str, Any]:
        """Return the claims of the header's token. Raises AzureError unless the token is valid for the service."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or not token:
            raise AzureError(
                401, "AuthenticationFailed", "Authentication failed. The 'Authorization' header is missing."
            )
        text, _, signature = token.strip().rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode()):
            raise AzureError(401, "InvalidAuthenticationToken", "The access token is invalid.")
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text.split(".")[1] + "=="))
        if claims["exp"] <= time.time():
            message = "The access token expiry UTC time is earlier than current UTC time."
            raise AzureError(401, "ExpiredAuthenticationToken", message)
        if claims["aud"].rstrip("/") not in AUDIENCES[service]:
            message = (
                "The access token has been obtained for wrong audience or resource "
                f"'{claims['aud']}'. It should exactly match with one of the allowed audiences "
                f"{','.join(repr(one) for one in AUDIENCES[service])}."
            )
            raise AzureError(401, "InvalidAuthenticationTokenAudience", message)
        return claims

    def serial(self, authorization: str) -> int:
        """Return the token's serial number; 0 for a foreign token."""
        try:
            payload = authorization.split(" ", 1)[1].split(".")[1]
            return int(json.loads(base64.urlsafe_b64decode(payload + "=="))["uti"])
        except (IndexError, ValueError, KeyError):
            return 0

    def _signature(self, text: str) -> str:
        digest = hmac.new(self._secret, text.encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _packed(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
