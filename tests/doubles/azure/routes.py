"""Every route of the JSON services, with the operation's name for faults and the journal."""

from collections.abc import Callable

from doubles.azure import arm, blobs, jobroutes, login, prices, vault
from doubles.kit.routing import Route
from doubles.wire import Answer

_ROOT = "/subscriptions/(?P<subscription>[^/]+)"
_OURS = "providers/Microsoft.MachineLearningServices"
_WORKSPACE = f"{_ROOT}/resourceGroups/(?P<group>[^/]+)/{_OURS}/workspaces/(?P<workspace>[^/]+)"
_VERSION = "(?P<name>[^/]+)/versions/(?P<version>[^/]+)"

_ARM = [
    Route("GET", _WORKSPACE, "workspace.get", arm.get_workspace),
    Route("GET", f"{_WORKSPACE}/computes", "computes.list", arm.list_computes),
    Route("GET", f"{_WORKSPACE}/computes/(?P<name>[^/]+)", "computes.get", arm.get_compute),
    Route("GET", f"{_WORKSPACE}/datastores/(?P<name>[^/]+)", "datastores.get", arm.get_datastore),
    Route("POST", f"{_WORKSPACE}/datastores/(?P<name>[^/]+)/listSecrets", "datastores.secrets", arm.list_secrets),
    Route("GET", f"{_WORKSPACE}/(?P<kind>data|models)/(?P<name>[^/]+)", "assets.latest", arm.get_asset),
    Route("GET", f"{_WORKSPACE}/(?P<kind>data|models)/{_VERSION}", "assets.get", arm.get_asset),
    Route("GET", f"{_WORKSPACE}/codes/(?P<name>[^/]+)/versions", "codes.list", arm.list_codes),
    Route("GET", f"{_WORKSPACE}/codes/{_VERSION}", "codes.get", arm.get_code),
    Route("PUT", f"{_WORKSPACE}/codes/{_VERSION}", "codes.put", arm.put_code),
    Route("POST", f"{_WORKSPACE}/codes/{_VERSION}/startPendingUpload", "codes.upload", arm.start_upload),
    Route("PUT", f"{_WORKSPACE}/environments/{_VERSION}", "environments.put", arm.put_environment),
    Route("GET", f"{_WORKSPACE}/jobs", "jobs.list", jobroutes.list_all),
    Route("GET", f"{_WORKSPACE}/jobs/(?P<name>[^/]+)", "jobs.get", jobroutes.get),
    Route("PUT", f"{_WORKSPACE}/jobs/(?P<name>[^/]+)", "jobs.put", jobroutes.put),
    Route("POST", f"{_WORKSPACE}/jobs/(?P<name>[^/]+)/cancel", "jobs.cancel", jobroutes.cancel),
]

ROUTES: dict[str, list[Route]] = {
    "login": [
        Route("GET", "/common/discovery/instance", "instance", login.discover_instance),
        Route("GET", "/(?P<tenant>[^/]+)(?:/v2.0)?/.well-known/openid-configuration", "openid", login.open_id),
        Route("GET", "/(?P<tenant>[^/]+)/discovery/v2.0/keys", "keys", login.keys),
        Route("POST", "/(?P<tenant>[^/]+)/oauth2/v2.0/token", "token", login.give_token),
    ],
    "arm": _ARM,
    "data": [Route("GET", f"/history/v1.0{_WORKSPACE}/runs/(?P<run>[^/]+)/details", "run.details", jobroutes.details)],
    "vault": [
        Route("PUT", "/secrets/(?P<name>[^/]+)", "vault.put", vault.put),
        Route("GET", "/secrets/(?P<name>[^/]+)(?:/(?P<version>[^/]*))?", "vault.get", vault.get),
        Route("DELETE", "/secrets/(?P<name>[^/]+)", "vault.delete", vault.delete),
    ],
    "prices": [Route("GET", "/api/retail/prices", "prices", prices.get)],
}

BLOBS: dict[str, Callable[..., Answer]] = {
    "blob.list": blobs.list_blobs,
    "blob.get": blobs.get,
    "blob.head": blobs.head,
    "blob.put": blobs.put,
    "blob.put_block": blobs.stage,
    "blob.put_blocklist": blobs.commit,
    "blob.metadata": blobs.set_metadata,
    "blob.delete": blobs.delete,
}
