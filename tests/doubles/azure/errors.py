"""Errors of operations."""

from collections.abc import Mapping


class AzureError(Exception):
    """An error as the answer of an operation; the service decides its format."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})
