"""Faults of calls, set by a test."""

from dataclasses import dataclass, field
from typing import Any

from doubles.aws.wire import AwsError, Call
from doubles.kit import faults


@dataclass
class Fault(faults.Fault):
    """A fault. `throttle`, `500`, `error` and `expired` answer an error and execute nothing.

    `drop` closes the connection without an answer and executes nothing; `lost` executes, then closes the connection.
    `hang` executes nothing, and closes the connection once faults are cleared. `cut` closes the connection in the
    middle of what S3 answers to a read. `empty` makes a page of GetLogEvents empty, with a new token. `slow` answers
    after `delay_s`. `expired` holds for the first caller's access key only: calls with different credentials succeed.
    """

    KINDS = ("throttle", "500", "drop", "lost", "hang", "cut", "expired", "empty", "error", "slow")
    code: str = ""
    status: int = 400
    access_key: str | None = field(default=None, init=False)

    def error(self, call: Call) -> AwsError | None:
        """Return the error to answer in place of executing, or None."""
        s3 = call.protocol == "s3"
        if self.kind == "throttle":
            if s3:
                return AwsError("SlowDown", "Please reduce your request rate.", 503)
            return AwsError("ThrottlingException", "Rate exceeded")
        if self.kind == "500":
            return AwsError("InternalError" if s3 else "InternalFailure", "We encountered an internal error.", 500)
        if self.kind == "expired":
            code = "ExpiredTokenException" if call.protocol == "json" else "ExpiredToken"
            status = 403 if call.protocol == "query" else 400
            return AwsError(code, "The security token included in the request is expired", status)
        return AwsError(self.code, self.message, self.status) if self.kind == "error" else None

    def concerns(self, call: Any) -> bool:
        """Return whether the fault may hit the call."""
        is_spared = self.kind == "expired" and (self.access_key or call.access_key) != call.access_key
        is_spared |= self.kind == "cut" and not call.operation.startswith(("Get", "List"))
        return not is_spared and super().concerns(call)

    def fires(self, call: Any) -> bool:
        """Return whether the fault hits the call, and remember the credentials of the call."""
        is_hit = super().fires(call)
        if is_hit:
            self.access_key = call.access_key
        return is_hit
