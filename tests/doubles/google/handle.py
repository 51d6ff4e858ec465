"""The stand-in from a test's side: start it, let unmodified clients find it, control it."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints import events
from doubles.client import Reply
from doubles.google.client import Client, job_body
from doubles.google.names import BUCKET, PROJECT, REGION
from doubles.kit import handle

ENDS = tuple(f"JOB_STATE_{name}" for name in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"))
CHIEF = "workerpool0-0"


@dataclass(frozen=True)
class Google(handle.Handle):
    """A running stand-in; `url` is the proxy's."""

    NAME = "google"
    ENDS = ENDS
    ca: str  # file with the certificate that clients must trust
    key_file: str  # of the service account
    user_file: str  # a user's credentials, in the format of `gcloud auth application-default login`
    endpoints: dict[str, str]  # service -> http:// address of its own port, without TLS

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables by which any client finds the stand-in under Google's host names, and signs in."""
        folder = Path(self.ca).parent
        return {
            **handle.proxied(self.url, self.ca),
            "grpc_proxy": self.url,
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": self.ca,
            "GOOGLE_APPLICATION_CREDENTIALS": self.key_file,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "CLOUDSDK_CONFIG": str(folder / "no-gcloud"),
            "NO_GCE_CHECK": "true",
        }

    @property
    def client(self) -> Client:
        """Return a client for calls by hand, as the service account."""
        return Client(self.url, self.ca, self.key_file)

    def call(self, method: str, url: str, body: Any = None, **details: Any) -> Reply:
        """Return the answer of any status; a `url` as /customJobs is below the location: see client.Client."""
        return self.client.call(method, url, body, **details)

    def submit(self, name: str, *command: str, workers: int = 0, **details: Any) -> str:
        """Create a job with the display name by hand, without any SDK; return its id. `details`: client.job_body."""
        done = self.call("POST", "/customJobs", job_body(name, *command, workers=workers, **details))
        assert done.status == 200, done
        return str(done.json["name"]).rpartition("/")[2]

    def expire_tokens(self) -> None:
        """Expire all tokens that were issued or used until now."""
        self.control("expire_tokens", {})

    def persistent(self, name: str, **resource: Any) -> None:
        """Make a persistent resource; `resource` has the API's field names, for example resourcePools."""
        self.control("persistent", {"name": name, "resource": resource})

    def secrets(self) -> list[str]:
        """Return the secrets' names."""
        return sorted(self.control("secrets", method="GET"))

    def bucket(self, name: str, location: str = REGION, project: str = PROJECT) -> str:
        """Make a bucket; a bucket of another project answers 403."""
        self.control("bucket", {"name": name, "location": location, "project": project})
        return name

    def object(self, name: str, bucket: str = BUCKET) -> bytes | None:
        """Return an object's content, or None."""
        data = self.control("read", {"name": name, "bucket": bucket})
        return None if data is None else base64.b64decode(data)

    def objects(self, prefix: str = "", bucket: str = BUCKET) -> list[str]:
        """Return the objects' names."""
        return self.control("objects", {"prefix": prefix, "bucket": bucket})

    def put_object(self, name: str, data: bytes | str, bucket: str = BUCKET) -> str:
        """Write an object; return its URI."""
        raw = data.encode() if isinstance(data, str) else data
        self.control("put", {"name": name, "bucket": bucket, "data": base64.b64encode(raw).decode()})
        return f"gs://{bucket}/{name}"

    def remove_object(self, name: str, bucket: str = BUCKET) -> None:
        """Remove an object."""
        self.control("remove", {"name": name, "bucket": bucket})

    def break_next_chunk(self, kept_bytes: int) -> None:
        """Let the next request of a resumable upload keep only `kept_bytes`, in whole 256 KiB, and answer 503."""
        self.control("break_next_chunk", {"kept_bytes": kept_bytes})

    def jobs(self) -> list[dict[str, str]]:
        """Return all jobs in the order of their creation: id, name, display_name, state."""
        return self.control("jobs", method="GET")

    def job(self, name: str) -> dict[str, Any]:
        """Return all fields of a job, given by id, resource name or display name (the newest of several).

        These are id, name, display_name, state, history [[state, time]], body (the CustomJob as created), labels, error
        {code, message}, attempts (starts of the whole job), created, started, ended, and replicas. Each replica has
        name, hostname, address, state (waiting, running, exited), pids (the first is the container's first process),
        folder (of its disk), code, codes, starts, restarts.
        """
        return self.control("jobs/get", {"job": name})

    def replica(self, job: str, name: str = CHIEF) -> dict[str, Any]:
        """Return all fields of a replica: see `job`."""
        return next(one for one in self.job(job)["replicas"] if one["name"] == name)

    def states(self, job: str) -> list[str]:
        """Return the job's states in order, without JOB_STATE_."""
        return [state.removeprefix("JOB_STATE_") for state, _ in self.job(job)["history"]]

    def entries(self, job: str) -> list[dict[str, Any]]:
        """Return the job's log entries in REST's form, including entries that are not yet visible."""
        return self.control("jobs/entries", {"job": job})

    def log(self, name: str, part: str = "") -> str:
        """Return the text of the job's log up to now, of one task (as "workerpool0-0") or of all except "service"."""
        found = []
        for entry in self.entries(name):
            task = entry.get("resource", {}).get("labels", {}).get("task_name")
            if task == part or (not part and task != "service"):
                payload = entry.get("jsonPayload", {})
                text = payload.get("message") if set(payload) <= {"message", "levelname", "severity"} else None
                found.append(entry.get("textPayload") or (text if text is not None else json.dumps(payload)))
        return "".join(f"{line}\n" for line in found)

    def write_log(self, job: str, *lines: str, task: str = CHIEF, **details: Any) -> None:
        """Add lines to the job's log; `details`: stream ("stderr"), severity, at_s."""
        self.control("jobs/write", {"job": job, "task": task, "lines": list(lines), **details})

    def write_ends(self, job: str) -> None:
        """Write the end events of both containers of a job on two instances, as cloudtrain's containers do."""
        for node in range(2):
            fields = {"node": node, "final": True, "life": f"life-{node}", "lines": 0}
            self.write_log(job, events.format_line("end", "it has ended", fields), task=f"workerpool{node}-0")

    def preempt(self, job: str, replica: str = CHIEF) -> None:
        """Take a replica's machine away."""
        self.control("jobs/preempt", {"job": job, "replica": replica})

    def kill(self, job: str, replica: str = CHIEF, signum: int = 9) -> int:
        """Send a signal to the first process of a replica's container; return the process number on this machine."""
        return self.control("jobs/kill", {"job": job, "replica": replica, "signum": signum})

    def begin(self, job: str, state: str = "JOB_STATE_RUNNING") -> None:
        """Set the state of a job that is not executed (settings(execute=False)); return when the job has the state."""
        self.control("jobs/begin", {"job": job, "state": state})
        self.wait(job, state)

    def end(self, job: str, state: str = "JOB_STATE_SUCCEEDED", error: tuple[int, str] | None = None) -> None:
        """End a job, executed or not; return when it has ended. `error` as in (3, "The replica ...")."""
        self.control("jobs/end", {"job": job, "state": state, "error": error})
        self.wait(job)

    def wait(self, job: str, *states: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one of the states (default: any end); return job(job). JOB_STATE_ may be left out."""
        wanted = {state if state.startswith("JOB_") else f"JOB_STATE_{state}" for state in states or ENDS}

        def is_wanted(told: dict[str, Any]) -> bool:
            is_found = told["state"] in wanted
            assert is_found or told["state"] not in ENDS, f"{job}: {told['state']}, {told['error']} {self.log(job)}"
            return is_found

        return self.until(
            lambda: self.job(job),
            is_wanted,
            lambda told: f"{job} is {told['state']}, not one of {wanted}: {self.log(job)[-2000:]}",
            timeout_s,
        )
