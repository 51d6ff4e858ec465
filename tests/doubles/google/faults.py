"""Faults of calls, set by a test."""

from dataclasses import dataclass

from doubles.google.errors import CODES, GoogleError, code_of
from doubles.kit import faults

BREAKS = ("drop", "lost", "late", "hang", "slow", "cut")
STATUSES = ("400", "401", "403", "404", "409", "412", "429", "500", "502", "503", "504")
_MESSAGES = {
    "RESOURCE_EXHAUSTED": "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service.",
    "UNAVAILABLE": "The service is currently unavailable.",
    "DEADLINE_EXCEEDED": "Deadline expired before operation could complete.",
    "INTERNAL": "Internal error encountered.",
    "UNAUTHENTICATED": "Request had invalid authentication credentials. Expected OAuth 2 access token.",
    "PERMISSION_DENIED": "The caller does not have permission",
}


@dataclass
class Fault(faults.Fault):
    """A fault. A code ("503", "UNAVAILABLE") is answered and nothing executed, in both protocols.

    `drop` breaks the connection off, nothing executed; `lost` executes first; `late` breaks the connection off and
    executes `delay_s` later; `hang` never answers, until faults are cleared or the client has gone; `slow` answers
    after `delay_s`; `cut` breaks off in the middle of the answer's body (REST alone).
    """

    KINDS = (*BREAKS, *list(CODES)[1:], *STATUSES)

    def error(self) -> GoogleError | None:
        """Return the error to answer in place of executing, or None."""
        if self.kind in BREAKS:
            return None
        status = int(self.kind) if self.kind.isdigit() else None
        code = self.kind if status is None else code_of(status)
        return GoogleError(code, self.message or _MESSAGES.get(code, code), status=status)
