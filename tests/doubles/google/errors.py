"""Errors of operations: Google's canonical codes, in both protocols."""

from collections.abc import Mapping, Sequence
from typing import Any

from doubles.wire import Answer, json_answer

# Canonical code (google/rpc/code.proto) -> its number, and its HTTP status in the same file.
CODES: dict[str, tuple[int, int]] = {
    "OK": (0, 200),
    "CANCELLED": (1, 499),
    "UNKNOWN": (2, 500),
    "INVALID_ARGUMENT": (3, 400),
    "DEADLINE_EXCEEDED": (4, 504),
    "NOT_FOUND": (5, 404),
    "ALREADY_EXISTS": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 400),
    "ABORTED": (10, 409),
    "OUT_OF_RANGE": (11, 400),
    "UNIMPLEMENTED": (12, 501),
    "INTERNAL": (13, 500),
    "UNAVAILABLE": (14, 503),
    "DATA_LOSS": (15, 500),
    "UNAUTHENTICATED": (16, 401),
}
_BY_STATUS = {400: "INVALID_ARGUMENT", 409: "ABORTED", 412: "FAILED_PRECONDITION", 500: "INTERNAL", 502: "UNAVAILABLE"}
_STORAGE_REASONS = {
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    429: "rateLimitExceeded",
}


class GoogleError(Exception):
    """An error of an operation; the protocol decides its format."""

    def __init__(
        self,
        code: str,
        message: str,
        details: Sequence[Mapping[str, Any]] = (),
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.details = code, message, [dict(one) for one in details]
        self.number, own = CODES[code]
        self.status, self.headers = status or own, dict(headers or {})


def invalid(message: str, details: Sequence[Mapping[str, Any]] = ()) -> GoogleError:
    """Return the error of a request that is not valid."""
    return GoogleError("INVALID_ARGUMENT", message, details)


def code_of(status: int) -> str:
    """Return the canonical code of an HTTP status."""
    if status < 300:
        return "OK"
    found = next((code for code, (_, one) in CODES.items() if one == status), "UNKNOWN")
    return _BY_STATUS.get(status, found)


def error_answer(error: GoogleError, service: str = "") -> Answer:
    """Return the error in the service's JSON: storage has a special format."""
    told: dict[str, Any] = {"code": error.status, "message": error.message}
    if service == "storage":
        reason = _STORAGE_REASONS.get(error.status, "backendError")
        told["errors"] = [{"message": error.message, "domain": "global", "reason": reason}]
    else:
        told["status"] = error.code
        if error.details:
            told["details"] = error.details
    return json_answer({"error": told}, error.status, error.headers)
