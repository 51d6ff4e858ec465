"""Calls to the stand-in without any SDK: signed in as the tests' client, under the real host names."""

import hashlib
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from doubles.azure.names import CLIENT, CLIENT_SECRET, TENANT, workspace_id
from doubles.client import Reply, ask

MANAGEMENT = "https://management.azure.com"
API = "2024-01-01-preview"


@dataclass(frozen=True)
class Client:
    """A client behind the proxy."""

    proxy: str
    ca: str

    def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        audience: str | None = MANAGEMENT,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> Reply:
        """Return the answer; a `url` without a host is below the workspace in ARM. Raises OSError without an answer."""
        if url.startswith("/"):
            url = f"{MANAGEMENT}{workspace_id()}{url}{'&' if '?' in url else '?'}api-version={API}"
        told = dict(headers or {})
        if audience is not None:
            told["Authorization"] = f"Bearer {self.token(audience)}"
        return ask(self.proxy, self.ca, method, url, body, told, timeout_s)

    def token(self, audience: str) -> str:
        """Return a new token."""
        form = {"grant_type": "client_credentials", "client_id": CLIENT, "client_secret": CLIENT_SECRET}
        data = urllib.parse.urlencode({**form, "scope": f"{audience}/.default"}).encode()
        url = f"https://login.microsoftonline.com/{TENANT}/oauth2/v2.0/token"
        return self.call("POST", url, data, audience=None).json["access_token"]

    def submit(self, name: str, body: dict[str, Any], files: Mapping[str, str | bytes]) -> Reply:
        """Upload the files as code, register the code and an environment, and PUT the job; return the last answer."""
        digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
        code = f"/codes/{digest[:32]}/versions/1"
        told = self.call("POST", f"{code}/startPendingUpload", {}).json["blobReferenceForConsumption"]
        base, _, signature = told["credential"]["sasUri"].partition("?")
        for file, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            url = f"{base}/code/{urllib.parse.quote(file)}?{signature}"
            done = self.call("PUT", url, data, audience=None, headers={"x-ms-blob-type": "BlockBlob"})
            assert done.status == 201, done
        uri = {"codeUri": f"{told['blobUri']}/code", "properties": {"hash_sha256": digest}}
        assert self.call("PUT", code, {"properties": uri}).status in (200, 201)
        environment = "/environments/stand-in/versions/1"
        assert self.call("PUT", environment, {"properties": {"image": "stand-in:1"}}).status in (200, 201)
        ids = {"codeId": f"{workspace_id()}{code}", "environmentId": f"{workspace_id()}{environment}"}
        return self.call("PUT", f"/jobs/{name}", {"properties": {**ids, **body["properties"]}})


def job_body(command: str, nodes: int = 1, compute: str | None = "cpu-cluster", **properties: Any) -> dict[str, Any]:
    """Return a command job's body for Client.submit; `properties` are ARM's own, such as outputs or limits."""
    told: dict[str, Any] = {
        "jobType": "Command",
        "command": command,
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1},
        "resources": {"instanceCount": nodes},
        **properties,
    }
    if compute is not None:
        told["computeId"] = f"{workspace_id()}/computes/{compute}"
    return {"properties": told}
