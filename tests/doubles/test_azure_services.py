"""Azure's stand-in beside jobs and blobs: sign-in, ARM's refusals, the vault, prices."""

import urllib.parse
from typing import Any

import pytest

from doubles.azure.client import job_body
from doubles.azure.handle import Azure
from doubles.azure.names import VAULT

SECRET = f"https://{VAULT}.vault.azure.net/secrets/s?api-version=7.4"
AUDIENCE = "https://vault.azure.net"


def test_token_of_wrong_audience_is_refused(azure: Azure) -> None:
    """ARM refuses a token of a wrong audience, and a call without a token."""
    refused = azure.call("GET", "/computes", audience="https://storage.azure.com")
    assert (refused.status, refused.json["error"]["code"]) == (401, "InvalidAuthenticationTokenAudience")
    assert azure.call("GET", "/computes", audience=None).status == 401


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"compute": "none"}, 404, "Unknown compute target 'none'"),
        ({"nodes": 9}, 400, "maximum of compute 'cpu-cluster' is 8"),
        ({"queueSettings": {"jobTier": "Spot"}}, 400, "serverless"),
        ({"command": "run ${{inputs.nope}}"}, 400, "inputs.nope"),
        ({"distribution": {"distributionType": "Torch"}}, 400, "invalid"),
        ({"limits": {"jobLimitsType": "Command", "timeout": "1h"}}, 400, "invalid"),
        ({"resources": {"shmSize": "16 GiB"}}, 400, "invalid"),
    ],
)
def test_invalid_job_body_is_refused(azure: Azure, changes: dict[str, Any], status: int, words: str) -> None:
    """Bodies are refused by the schema, and by rules that only the service checks."""
    command, told = changes.get("command", "true"), {key: value for key, value in changes.items() if key != "command"}
    refused = azure.client.submit("job", job_body(command, **told), {"empty.txt": ""})
    assert (refused.status, words in refused.json["error"]["message"]) == (status, True), refused
    assert azure.jobs() == []


def test_secret_is_written_read_and_removed(azure: Azure) -> None:
    """A token for vaults is needed to write, read and remove a secret; a removed secret keeps its name."""
    assert azure.call("GET", SECRET, audience=AUDIENCE).json["error"]["code"] == "SecretNotFound"
    assert azure.call("PUT", SECRET, {"value": "v"}, audience=AUDIENCE).status == 200
    assert azure.call("GET", SECRET, audience=AUDIENCE).json["value"] == "v" == azure.secret("s")
    assert azure.call("DELETE", SECRET, audience=AUDIENCE).status == 200
    assert azure.call("DELETE", SECRET, audience=AUDIENCE).status == 404
    assert azure.secret("s") is None
    taken = azure.call("PUT", SECRET, {"value": "w"}, audience=AUDIENCE)
    assert (taken.status, taken.json["error"]["code"]) == (409, "Conflict")
    refused = azure.call("GET", SECRET)
    assert (refused.status, "vault.azure.net" in refused.headers["www-authenticate"]) == (401, True)


def test_price_list_has_the_traps_of_the_real_list(azure: Azure) -> None:
    """The list has Windows, Spot and Low Priority beside the relevant price, case-sensitive values, and pages."""
    size = "Standard_NC24ads_A100_v4"
    found = prices(azure, f"armSkuName eq '{size}' and armRegionName eq 'eastus' and priceType eq 'Consumption'")
    assert len(found) == 6
    linux = [item for item in found if "Windows" not in item["productName"]]
    assert {item["meterName"].partition("v4")[2].strip() for item in linux} == {"", "Spot", "Low Priority"}
    assert prices(azure, f"armSkuName eq '{size.lower()}'") == []
    azure.settings(price_page_size=4)
    assert (
        prices(azure, f"armSkuName eq '{size}' and armRegionName eq 'eastus' and priceType eq 'Consumption'") == found
    )
    assert len(azure.journal("prices")) == 4


def prices(azure: Azure, text: str) -> list[dict[str, Any]]:
    """Return all items of a filter, page after page."""
    query = urllib.parse.urlencode({"api-version": "2023-01-01-preview", "$filter": text})
    url, found = f"https://prices.azure.com/api/retail/prices?{query}", []
    while url:
        page = azure.call("GET", url, audience=None).json
        assert page["Count"] == len(page["Items"])
        found += page["Items"]
        url = page["NextPageLink"]
    return found
