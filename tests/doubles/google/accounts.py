"""The sources of tokens: the OAuth endpoint, and the replicas' metadata server."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from doubles.google.names import SERVICE_ACCOUNT
from doubles.google.tokens import REFRESH_TOKEN
from doubles.kit.routing import Route
from doubles.wire import Answer, Request, json_answer

if TYPE_CHECKING:
    from doubles.google.world import World

METADATA = "/computeMetadata/v1"
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
JWT_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
USER = "user@example.com"
_FLAVOR = {"Metadata-Flavor": "Google"}


def _give_token(world: World, request: Request) -> Answer:
    """Return a token for a signed assertion or a refresh token."""
    form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
    if form.get("grant_type") == JWT_GRANT:
        try:
            email = world.tokens.verified(form.get("assertion", ""))["iss"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return _refused(str(error))
    elif form.get("grant_type") == "refresh_token":
        if world.settings.refresh_revoked or form.get("refresh_token") != REFRESH_TOKEN:
            return _refused("Token has been expired or revoked.")
        email = USER
    else:
        return _refused("Unsupported grant type", "unsupported_grant_type")
    return json_answer(_token(world, email))


def _token(world: World, email: str) -> dict[str, object]:
    lasts_s = world.settings.token_s
    told = {"access_token": world.tokens.issue(email, lasts_s), "expires_in": int(lasts_s), "token_type": "Bearer"}
    return {**told, "scope": " ".join(SCOPES)} if email == USER else told


def _refused(description: str, error: str = "invalid_grant") -> Answer:
    return json_answer({"error": error, "error_description": description}, 400)


def metadata(world: World, request: Request) -> Answer:
    """Answer a request to the metadata server."""
    if request.headers.get("metadata-flavor") != "Google":
        return Answer(403, body=b"Missing required header: Metadata-Flavor")
    account = f"{METADATA}/instance/service-accounts/default"
    if request.path == f"{account}/token":
        return json_answer(_token(world, SERVICE_ACCOUNT), headers=_FLAVOR)
    if request.path == f"{account}/email":
        return Answer(200, {**_FLAVOR, "Content-Type": "application/text"}, SERVICE_ACCOUNT.encode())
    return Answer(404, dict(_FLAVOR), b"Not Found")


def _tell_locations(world: World, request: Request, **groups: str) -> Answer:
    """Allow the account in all locations; google-auth asks for these before its first call."""
    return json_answer({"locations": [], "encodedLocations": "0x0"})


ROUTES = [Route("POST", "/token", "token", _give_token)]
LOCATIONS = [Route("GET", "/v1/projects/-/serviceAccounts/[^/]+/allowedLocations", "locations", _tell_locations)]
