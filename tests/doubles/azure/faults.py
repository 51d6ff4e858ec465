"""Faults of calls, set by a test."""

from dataclasses import dataclass, field
from typing import Any

from doubles.azure.errors import AzureError
from doubles.kit import faults


@dataclass(frozen=True)
class Called:
    """The properties of a call that faults depend on."""

    names: tuple[str, ...]  # of the operation
    is_from_container: bool
    token_serial: int | None  # None: no token
    sas_serial: int | None  # None: no signature; 0: a signature of unknown origin


@dataclass
class Fault(faults.Fault):
    """A fault. `throttle`, `500`, `503`, `error` answer an error and execute nothing.

    `drop` closes the connection without an answer and executes nothing; `lost` executes, then closes it; `cut` closes
    it in the middle of the answer's body. `slow` answers after `delay_s`. `expired` answers 401 to tokens issued before
    the fault was set, `sas_expired` 403 to signatures issued before; newer credentials work.
    """

    KINDS = ("throttle", "500", "503", "drop", "lost", "cut", "expired", "sas_expired", "error", "slow")
    code: str = ""
    status: int = 400
    retry_after: str | None = "1"  # the header with throttle and 503; None: no header
    token_serial: int = field(default=0, init=False)
    sas_serial: int = field(default=0, init=False)

    def error(self, service: str) -> AzureError | None:
        """Return the error to answer in place of executing, or None."""
        wait = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        if self.kind == "throttle":
            code = "ServerBusy" if service == "blob" else "TooManyRequests"
            return AzureError(503 if service == "blob" else 429, code, "Too many requests. Retry later.", wait)
        if self.kind == "503":
            return AzureError(503, "ServerBusy", "The server is currently unable to receive requests.", wait)
        if self.kind == "500":
            code = "InternalError" if service == "blob" else "InternalServerError"
            return AzureError(500, code, "The server encountered an internal error. Please retry the request.")
        if self.kind == "expired":
            message = "The access token expiry UTC time is earlier than current UTC time."
            return AzureError(401, "ExpiredAuthenticationToken", message, {"WWW-Authenticate": "Bearer"})
        if self.kind == "sas_expired":
            message = "Server failed to authenticate the request. Signature not valid in the specified time frame."
            return AzureError(403, "AuthenticationFailed", message)
        if self.kind == "error":
            return AzureError(self.status, self.code, self.message, wait if self.status == 429 else {})
        return None

    def concerns(self, call: Any) -> bool:
        """Return whether the fault may hit the call."""
        if self.kind == "expired" and (call.token_serial is None or call.token_serial > self.token_serial):
            return False
        if self.kind == "sas_expired" and (call.sas_serial is None or call.sas_serial > self.sas_serial):
            return False
        return super().concerns(call)
