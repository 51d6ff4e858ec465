"""login.microsoftonline.com, and the identity endpoint of a job's container."""

import time
from typing import Any
from urllib.parse import parse_qsl

from doubles.azure.errors import AzureError
from doubles.azure.names import CLIENT, CLIENT_SECRET, JOB_CLIENT, MSI_SECRET, TENANT
from doubles.azure.tokens import audience_of
from doubles.azure.world import World
from doubles.wire import Answer, Request, json_answer

LOGIN = "https://login.microsoftonline.com"


def open_id(world: World, request: Request, tenant: str) -> Answer:
    """Return the addresses of the tenant's endpoints."""
    base = f"{LOGIN}/{tenant}"
    return json_answer(
        {
            "token_endpoint": f"{base}/oauth2/v2.0/token",
            "token_endpoint_auth_methods_supported": ["client_secret_post", "private_key_jwt", "client_secret_basic"],
            "jwks_uri": f"{base}/discovery/v2.0/keys",
            "response_modes_supported": ["query", "fragment", "form_post"],
            "subject_types_supported": ["pairwise"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "response_types_supported": ["code", "id_token", "code id_token", "id_token token"],
            "scopes_supported": ["openid", "profile", "email", "offline_access"],
            "issuer": f"{base}/v2.0",
            "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
            "device_authorization_endpoint": f"{base}/oauth2/v2.0/devicecode",
            "tenant_region_scope": "NA",
            "cloud_instance_name": "microsoftonline.com",
        }
    )


def keys(world: World, request: Request, tenant: str) -> Answer:
    """Return no keys: tokens are opaque to clients."""
    return json_answer({"keys": []})


def discover_instance(world: World, request: Request) -> Answer:
    """Return the names of the public cloud."""
    hosts: dict[str, Any] = {"preferred_network": "login.microsoftonline.com", "preferred_cache": "login.windows.net"}
    hosts |= {"aliases": ["login.microsoftonline.com", "login.windows.net", "login.microsoft.com", "sts.windows.net"]}
    endpoint = f"{LOGIN}/{TENANT}/v2.0/.well-known/openid-configuration"
    return json_answer({"tenant_discovery_endpoint": endpoint, "api-version": "1.1", "metadata": [hosts]})


def give_token(world: World, request: Request, tenant: str) -> Answer:
    """Answer the client-credentials grant of the tests' only client."""
    told = dict(parse_qsl(request.body.decode(errors="replace")))
    if tenant.lower() != TENANT:
        message = f"AADSTS90002: Tenant '{tenant}' not found. Check to make sure you have the correct tenant ID."
        raise AzureError(400, "invalid_request", message)
    if told.get("client_id") != CLIENT:
        message = f"AADSTS700016: Application with identifier '{told.get('client_id')}' was not found in the directory."
        raise AzureError(400, "unauthorized_client", message)
    if told.get("client_secret") != CLIENT_SECRET:
        message = (
            f"AADSTS7000215: Invalid client secret provided. Ensure the secret being sent is right: app '{CLIENT}'."
        )
        raise AzureError(401, "invalid_client", message)
    if told.get("grant_type") != "client_credentials":
        raise AzureError(400, "unsupported_grant_type", "AADSTS70003: The app requested an unsupported grant type.")
    lasts_s = world.settings.token_s
    token = world.tokens.issue(CLIENT, audience_of(told.get("scope", "")), lasts_s)
    seconds = int(lasts_s)
    return json_answer(
        {"token_type": "Bearer", "expires_in": seconds, "ext_expires_in": seconds, "access_token": token}
    )


def give_token_to_job(world: World, request: Request) -> Answer:
    """Answer MSI_ENDPOINT (api-version 2017-09-01, header `secret`) and IDENTITY_ENDPOINT (X-IDENTITY-HEADER)."""
    secret = request.headers.get("secret") or request.headers.get("x-identity-header")
    if secret != MSI_SECRET:
        raise AzureError(401, "unauthorized", "The secret of the identity endpoint is missing or wrong.")
    resource = request.query.get("resource") or request.query.get("scope")
    if not resource:
        raise AzureError(400, "bad_request", "The query has no `resource`.")
    lasts_s = world.settings.token_s
    audience = audience_of(resource)
    token = world.tokens.issue(JOB_CLIENT, audience, lasts_s)
    expires = str(int(time.time() + lasts_s))
    told = {"access_token": token, "expires_on": expires, "resource": audience, "token_type": "Bearer"}
    return json_answer({**told, "client_id": JOB_CLIENT})
