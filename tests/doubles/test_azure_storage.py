"""Blobs of Azure's stand-in: authorization and ranges."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from doubles.azure.handle import Azure
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY, CONTAINER

URL = f"https://{ACCOUNT}.blob.core.windows.net"
# The clients keep connections open, and do not close them at the end of their life.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def signed(name: str) -> str:
    """Return a URL with a signature of the real client."""
    from azure.storage.blob import generate_blob_sas

    soon = datetime.now(timezone.utc) + timedelta(seconds=300)
    query = generate_blob_sas(ACCOUNT, CONTAINER, name, account_key=ACCOUNT_KEY, permission="r", expiry=soon)
    return f"{URL}/{CONTAINER}/{name}?{query}"


def get(azure: Azure, url: str, **headers: str) -> Any:
    """GET without any authorization but the address's."""
    return azure.call(
        "GET", url, audience=None, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )


def test_only_a_token_of_the_storage_audience_reads(azure: Azure) -> None:
    """A token of the storage audience reads; the challenge for a wrong token names the audience."""
    azure.put_blob("a", b"1")
    url, version = f"{URL}/{CONTAINER}/a", {"x-ms-version": "2023-11-03"}
    assert azure.call("GET", url, audience="https://storage.azure.com", headers=version).body == b"1"
    refused = azure.call("GET", url, audience="https://management.azure.com", headers=version)
    assert refused.status == 401
    assert "resource_id=https://storage.azure.com" in refused.headers["www-authenticate"]


def test_ranges_follow_azures_rules(azure: Azure) -> None:
    """Ranges are answered with 206 and Content-Range, or 416 past the end; suffix ranges are refused."""
    azure.put_blob("a", b"0123456789")
    url = signed("a")
    part = get(azure, url, Range="bytes=2-3")
    assert (part.status, part.body, part.headers["content-range"]) == (206, b"23", "bytes 2-3/10")
    assert get(azure, url, x_ms_range="bytes=8-").body == b"89"
    assert get(azure, url, Range="bytes=8-100").headers["content-range"] == "bytes 8-9/10"
    past = get(azure, url, Range="bytes=10-")
    assert (past.status, past.headers["x-ms-error-code"]) == (416, "InvalidRange")
    assert past.headers["content-range"] == "bytes */10"
    assert get(azure, url, Range="bytes=-2").status == 400


def test_unknown_host_is_recorded(azure: Azure) -> None:
    """The proxy answers 502 and the journal has the host."""
    with pytest.raises(OSError, match="502"):
        azure.call("GET", "https://elsewhere.blob.core.windows.net/c/b", audience=None)
    assert azure.unserved() == ["elsewhere.blob.core.windows.net"]
