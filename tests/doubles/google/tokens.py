"""Bearer tokens: tokens issued by the stand-in, and JSON Web Tokens signed by clients with their account's key."""

import base64
import hashlib
import hmac
import itertools
import json
import os
import re
import threading
import time
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from doubles.google.errors import GoogleError
from doubles.google.names import PROJECT, SERVICE_ACCOUNT

TOKEN_URI = "https://oauth2.googleapis.com/token"
KEY_BITS = 1024  # half of Google's: every client verifies its key; verification takes 80 ms at 2048
KEY_ID = "5ca1ab1e" * 5
REFRESH_TOKEN = "1//refresh-token"
CLIENT = {"client_id": "cloudtrain-tests.apps.googleusercontent.com", "client_secret": "client-secret"}
PREFIX = "ya29."


class Tokens:
    """Issues and verifies tokens, and can expire all tokens seen until now."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)
        self._serials = itertools.count(1)
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
        self._lock = threading.Lock()
        self._seen: set[str] = set()  # self-signed tokens
        self._expired: set[str] = set()
        self.last, self._expired_to = 0, 0

    def key_file(self) -> dict[str, str]:
        """Return the service account's key file."""
        form = serialization.PrivateFormat.PKCS8
        pem = self._key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        return {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": KEY_ID,
            "private_key": pem.decode(),
            "client_email": SERVICE_ACCOUNT,
            "client_id": "100000000000000000001",
            "auth_uri": "https://accounts.google.com/o/oauth2/auth",
            "token_uri": TOKEN_URI,
            "universe_domain": "googleapis.com",
        }

    def user_file(self) -> dict[str, str]:
        """Return a user's application default credentials, in the format of gcloud's login."""
        return {"type": "authorized_user", **CLIENT, "refresh_token": REFRESH_TOKEN, "quota_project_id": PROJECT}

    def issue(self, email: str, lasts_s: float) -> str:
        """Return a token, opaque to clients."""
        with self._lock:
            self.last = next(self._serials)
            told = {"email": email, "exp": time.time() + lasts_s, "serial": self.last}
        text = base64.urlsafe_b64encode(json.dumps(told).encode()).decode().rstrip("=")
        return f"{PREFIX}{text}.{self._signature(text)}"

    def expire(self) -> None:
        """Expire all tokens that were issued or used until now."""
        with self._lock:
            self._expired_to = self.last
            self._expired |= self._seen
        # A token that a client signs within the same second equals the last token.
        time.sleep(1.01 - time.time() % 1.0)

    def check(self, authorization: str, service: str) -> str:
        """Return the account of the token. Raises GoogleError unless the token is valid."""
        kind, _, token = authorization.partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token:
            raise GoogleError(
                "UNAUTHENTICATED",
                "Request is missing required authentication credential. Expected OAuth 2 access token, login cookie or "
                "other valid authentication credential.",
                headers={"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/"'},
            )
        return self._check_own(token) if token.startswith(PREFIX) else self._check_signed(token, service)

    def verified(self, token: str) -> dict[str, Any]:
        """Return the claims of a token signed with the account's key. Raises ValueError unless the token is valid."""
        text, _, signature = token.rpartition(".")
        try:
            raw = _unpacked(signature)
            self._key.public_key().verify(raw, text.encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            raise ValueError("Invalid JWT Signature.") from None
        claims: dict[str, Any] = json.loads(_unpacked(text.split(".")[1]))
        if claims["exp"] <= time.time() or claims["iat"] > time.time() + 300:
            raise ValueError("Invalid JWT: Token must be a short-lived token (60 minutes).")
        if claims.get("iss") != SERVICE_ACCOUNT:
            raise ValueError("Invalid grant: account not found")
        return claims

    def _check_own(self, token: str) -> str:
        text, _, signature = token.removeprefix(PREFIX).rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode()):
            raise _invalid()
        told = json.loads(_unpacked(text))
        if told["exp"] <= time.time() or told["serial"] <= self._expired_to:
            raise _invalid()
        return str(told["email"])

    def _check_signed(self, token: str, service: str) -> str:
        try:
            claims = self.verified(token)
        except (ValueError, KeyError, IndexError, TypeError):
            raise _invalid() from None
        is_ours = re.fullmatch(rf"https://([a-z0-9-]+-)?{service}\.googleapis\.com/?", claims.get("aud", ""))
        with self._lock:
            self._seen.add(token)
            if token in self._expired or not ("scope" in claims or is_ours):
                raise _invalid()
        return str(claims["iss"])

    def _signature(self, text: str) -> str:
        digest = hmac.new(self._secret, text.encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _unpacked(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _invalid() -> GoogleError:
    info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "ACCESS_TOKEN_EXPIRED"}
    info |= {"domain": "googleapis.com"}
    return GoogleError(
        "UNAUTHENTICATED",
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
        "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project.",
        [info],
        headers={"WWW-Authenticate": 'Bearer realm="https://accounts.google.com/", error="invalid_token"'},
    )
