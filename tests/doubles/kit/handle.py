"""The base of a stand-in's handle: start the process, let unmodified clients find the stand-in, control it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import doubles.process

if TYPE_CHECKING:
    import pytest

LOOK_S = 0.05  # between two looks at a job
# Calls of a handle go to loopback, also on a machine with a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Handle:
    """A running stand-in."""

    NAME: ClassVar[str]  # of the package that the process runs
    ENDS: ClassVar[tuple[str, ...]]  # the statuses of a job that has ended
    url: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, state: Path | None = None) -> Self:
        """Start the process, which dies with the calling thread; return when the stand-in answers."""
        process, told = doubles.process.start(cls.NAME, state)
        return cls(process=process, **json.loads(told))

    def stop(self) -> None:
        """End the process and all its containers."""
        doubles.process.stop(self.process)

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables by which unmodified clients find the stand-in, and sign in."""
        raise NotImplementedError

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let clients in the test process find the stand-in. gRPC reads the certificates once in a process."""
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)

    def settings(self, **values: Any) -> None:
        """Change settings: see the cloud's settings.py."""
        self.control("settings", values)

    def fault(self, operations: str | Sequence[str], kind: str, **details: Any) -> None:
        """Inject a fault: see the cloud's faults.py; operations have the journal's names, or are patterns."""
        names = [operations] if isinstance(operations, str) else list(operations)
        self.control("faults", {"operations": names, "kind": kind, **details})

    def change(self, operations: str | Sequence[str], path: str, how: str, value: Any = None, **details: Any) -> None:
        """Change what the platform accepts (`at="request"`) or answers: see kit/differences.py."""
        names = [operations] if isinstance(operations, str) else list(operations)
        self.control("changes", {"operations": names, "path": path, "how": how, "value": value, **details})

    def capacity(self, has: str, **place: Any) -> None:
        """Say what a place has, by region, machine (names or patterns), spot, count and lost: see kit/capacity.py."""
        self.control("capacity", {"has": has, **place})

    def clear_capacity(self) -> None:
        """Give every place machines again; jobs that were created stay as they are."""
        self.control("capacity", method="DELETE")

    def begin_late(self, name: str) -> None:
        """Start the containers of a job that has ended without machines; what the platform tells stays the same."""
        self.control("late", {"name": name})

    def wait_late(self, count: int = 1, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait until so many late jobs have ended; return the status and the history of each."""
        return self.until(
            lambda: self.control("late", method="GET"),
            lambda found: len(found) >= count and all(one["status"] in self.ENDS for one in found),
            lambda found: f"{count} late jobs have not ended: {found}",
            timeout_s,
        )

    def most_live(self) -> int:
        """Return the largest number of jobs that were created and not ended at the same time."""
        return int(self.control("most_live", method="GET"))

    def clear_faults(self) -> None:
        """Remove all faults, and end the calls that hang."""
        self.control("faults", method="DELETE")

    def journal(self, operation: str | None = None) -> list[dict[str, Any]]:
        """Return the calls until now in order, including containers' calls; `operation` selects one operation.

        Each has service, operation, outcome ("ok", a code or a fault's kind), time, is_from_container. AWS adds params,
        region, access_key; Azure and Google add host, method, path, query, range, body (of JSON requests without
        secrets), received and sent (bytes of the bodies), and status; Google adds protocol ("rest" or "grpc").
        """
        calls: list[dict[str, Any]] = self.control("journal", method="GET")
        return [call for call in calls if operation in (None, call["operation"])]

    def clear_journal(self) -> None:
        """Forget the calls until now."""
        self.control("journal", method="DELETE")

    def unserved(self) -> list[str]:
        """Return host and path of the requests that the stand-in cannot serve."""
        return [f"{call['host']}{call['path']}" for call in self.journal("unserved")]

    def reset(self) -> None:
        """Kill all containers and forget all state."""
        self.control("reset", {})

    def control(self, path: str, told: Mapping[str, Any] | None = None, method: str = "POST") -> Any:
        """Call the control endpoint. Raises ValueError if the endpoint refuses."""
        data = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(f"{self.url}/_control/{path}", data, method=method)
        try:
            with _OPENER.open(request, timeout=60) as answer:
                return json.loads(answer.read())["result"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.loads(error.read())["message"]) from None

    def secret(self, name: str) -> str | None:
        """Return a secret's value, or None."""
        return self.control("secrets", method="GET").get(name)

    def job(self, name: str) -> dict[str, Any]:
        """Return all fields of a job."""
        raise NotImplementedError

    def log(self, name: str, part: str = "") -> str:
        """Return the job's log, or a part of the log, up to now."""
        raise NotImplementedError

    def wait_log(self, name: str, text: str, *part: str, count: int = 1, timeout_s: float = 60.0) -> str:
        """Wait until the log, or the part of the log, contains the text `count` times; return the log."""
        return self.until(
            lambda: self.log(name, *part),
            lambda found: found.count(text) >= count,
            lambda found: f"{text!r} is not in the log of {name}: {found[-2000:]}",
            timeout_s,
        )

    @staticmethod
    def until(
        look: Callable[[], Seen], holds: Callable[[Seen], bool], told: Callable[[Seen], str], timeout_s: float
    ) -> Seen:
        """Look again until the condition holds; return what was seen. `told` describes a failure."""
        end = time.monotonic() + timeout_s
        while not holds(seen := look()):
            assert time.monotonic() < end, told(seen)
            time.sleep(LOOK_S)
        return seen


def proxied(url: str, ca: str, direct: str = "127.0.0.1,localhost") -> dict[str, str]:
    """Return the variables by which clients call all hosts but `direct` by the proxy, and trust the certificate."""
    return {
        **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), url),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
        **dict.fromkeys(("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"), ca),
    }
