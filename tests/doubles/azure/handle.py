"""The stand-in from a test's side: start it, let unmodified clients find it, control it."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubles.azure.client import Client, job_body
from doubles.azure.names import CLIENT, CLIENT_SECRET, CONTAINER, TENANT
from doubles.client import Reply
from doubles.kit import handle

ENDS = ("Completed", "Failed", "Canceled")


@dataclass(frozen=True)
class Azure(handle.Handle):
    """A running stand-in; `url` is the proxy's."""

    NAME = "azure"
    ENDS = ENDS
    ca: str  # file with the certificate that clients must trust

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables by which any client finds the stand-in under Azure's host names, and signs in."""
        return {
            **handle.proxied(self.url, self.ca),
            "AZURE_TENANT_ID": TENANT,
            "AZURE_CLIENT_ID": CLIENT,
            "AZURE_CLIENT_SECRET": CLIENT_SECRET,
            "AZURE_CONFIG_DIR": str(Path(self.ca).parent / "no-azure-cli"),
            "AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential",
        }

    @property
    def client(self) -> Client:
        """Return a client for calls by hand, as the signed-in user."""
        return Client(self.url, self.ca)

    def call(self, method: str, url: str, body: Any = None, **details: Any) -> Reply:
        """Return the answer of any status; a `url` as /jobs/NAME is below the workspace: see client.Client."""
        return self.client.call(method, url, body, **details)

    def submit(
        self, name: str, command: str, files: Mapping[str, str | bytes] | None = None, nodes: int = 1, **details: Any
    ) -> str:
        """Create a job by hand, without any SDK; return the job's name. `details` are the arguments of client.job_body.

        The files are the job's code, and the command runs in their folder. The names of properties are ARM's.
        """
        done = self.client.submit(name, job_body(command, nodes, **details), files or {"empty.txt": ""})
        assert done.status == 201, done
        return name

    def compute(self, name: str, **properties: Any) -> None:
        """Make or change a cluster: vmSize, vmPriority ("Dedicated" or "LowPriority"), maxNodeCount, minNodeCount.

        Also nodeIdleTimeBeforeScaleDown ("PT120S"), provisioningState, computeType, location.
        """
        self.control("computes", {"name": name, "properties": properties})

    def blob(self, name: str, container: str = CONTAINER) -> bytes | None:
        """Return a blob's content, or None."""
        data = self.control("read", {"name": name, "container": container})
        return None if data is None else base64.b64decode(data)

    def blobs(self, prefix: str = "", container: str = CONTAINER) -> list[str]:
        """Return the names of a container's blobs, by default of workspaceblobstore's container."""
        return self.control("blobs", {"prefix": prefix, "container": container})

    def put_blob(self, name: str, data: bytes | str, container: str = CONTAINER) -> None:
        """Write a blob."""
        raw = data.encode() if isinstance(data, str) else data
        self.control("blob", {"name": name, "container": container, "data": base64.b64encode(raw).decode()})

    def jobs(self) -> list[str]:
        """Return the names of all jobs, in the order of their creation."""
        return self.control("jobs", method="GET")

    def job(self, name: str) -> dict[str, Any]:
        """Return a job: name, status, history [[status, time]], body, tags, error, attempts, folder, pids, ..."""
        return self.control(f"jobs/{name}", method="GET")

    def log(self, name: str, part: str = "user_logs/std_log.txt") -> str:
        """Return a log file up to now, or "" if missing."""
        return (self.blob(f"ExperimentRun/dcid.{name}/{part}", "azureml") or b"").decode(errors="replace")

    def preempt(self, name: str, how: str = "restart") -> None:
        """Take the job's nodes away; the job restarts ("restart") or ends in Failed with PreemptionError ("fail")."""
        self.control(f"jobs/{name}/preempt", {"how": how})

    def begin(self, name: str, status: str = "Running") -> None:
        """Set the status of a job that is not executed (settings(execute=False))."""
        self.control(f"jobs/{name}/begin", {"status": status})

    def write_log(self, name: str, file: str, data: bytes | str) -> None:
        """Append to a log file of the job, for example user_logs/std_log_process_00.txt."""
        raw = data.encode() if isinstance(data, str) else data
        self.control(f"jobs/{name}/write_log", {"file": file, "data": base64.b64encode(raw).decode()})

    def write_logs(self, name: str, node: int, *lines: str) -> None:
        """Append lines to the log file of a node's (only) process; the file's name depends on the number of nodes."""
        self.control(f"jobs/{name}/write_lines", {"node": node, "lines": list(lines)})

    def end(self, name: str, status: str = "Completed", error: dict[str, Any] | None = None) -> None:
        """End a job, executed or not; `error` as in {"code": "UserError", "message": "..."}."""
        self.control(f"jobs/{name}/end", {"status": status, "error": error})
        self.wait(name)

    def wait(self, name: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one of the statuses (default: any end); return job(name)."""
        wanted = statuses or ENDS
        return self.until(
            lambda: self.job(name),
            lambda told: told["status"] in wanted,
            lambda told: f"{name} is {told['status']}, not one of {wanted}",
            timeout_s,
        )
