"""`doctor azureml`: obstacles to a job are found before the job, and reported with a remedy."""

from pathlib import Path
from typing import Any

import pytest

from doubles.azure.handle import Azure
from doubles.azure.names import GROUP, REGION, SUBSCRIPTION, WORKSPACE

CONFIG = f"""\
name: j
backend: azureml
script: loop.py
resources: {{instances: 2, instance_type: Standard_NC6s_v3}}
secrets: [TOKEN]
azureml:
  {{subscription: {SUBSCRIPTION}, resource_group: {GROUP}, workspace: {WORKSPACE}, region: {REGION}, identity: managed}}
"""

pytestmark = pytest.mark.usefixtures("azure_account")


def verdicts(cli: Any, folder: Path, *settings: str, env: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Return each check's verdict and words."""
    text = CONFIG
    for old, new in (setting.split("->") for setting in settings):
        assert old in text
        text = text.replace(old, new)
    (folder / "cloudtrain.yaml").write_text(text)
    done = cli("doctor", "azureml", "--json", cwd=folder, env=env)
    assert "Traceback" not in done.stderr
    return {one["name"]: (one["verdict"], f"{one['found']} {one['cure']}") for one in done.json["azureml"]}


def test_valid_setup_passes_all_checks(cli: Any, folder: Path) -> None:
    """Every requirement of a job is checked; the price table is compared with Azure's own list."""
    found = verdicts(cli, folder)
    checks = {name: verdict for name, (verdict, _) in found.items() if name != "price"}
    assert checks == dict.fromkeys(("credentials", "workspace", "datastore", "key vault"), "ok")
    assert "by Azure Retail Prices" in found["price"][1]
    assert "read from the vendor's list, 0 days old" in cli("plan", cwd=folder).stdout


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        (f"workspace: {WORKSPACE}->workspace: nowhere", "workspace", "there is no nowhere"),
        (f"subscription: {SUBSCRIPTION}, ->", "workspace", "no Azure subscription"),
        ("identity: managed->identity: managed, compute: nowhere", "compute", "there is no compute `nowhere`"),
        ("identity: managed->identity: managed, compute: cpu-cluster", "compute", "not Standard_NC6s_v3"),
        ("identity: managed->identity: managed, compute: shouting", "compute", "write Standard_NC24ads_A100_v4, or"),
        ("identity: managed->identity: managed, datastore: nowhere", "datastore", "there is no datastore `nowhere`"),
        ("region: eastus->region: moonbase", "price", "Azure lists no Standard_NC6s_v3 in moonbase"),
        ("region: eastus->region: moonbase", "workspace", "is in eastus, not in moonbase"),
        (
            "secrets: [TOKEN]->inputs: {x: azureml:labels:3}",
            "input x",
            "type uri_file, and the request says uri_folder",
        ),
        ("identity: managed->identity: managed, compute: small", "compute", "grows to 1 machines, and the job needs 2"),
    ],
)
def test_faults_are_named(cli: Any, folder: Path, azure: Azure, setting: str, name: str, words: str) -> None:
    """Each fault has a remedy."""
    azure.compute("small", vmSize="STANDARD_NC6S_V3", maxNodeCount=1)
    azure.compute("shouting", vmSize="STANDARD_NC24ADS_A100_V4", maxNodeCount=4)
    verdict, said = verdicts(cli, folder, setting)[name]
    assert (verdict in ("fail", "warn"), words in said) == (True, True), said


def test_vault_without_write_access_is_found(cli: Any, folder: Path, azure: Azure) -> None:
    """The check writes to the vault, as the address alone proves nothing, and leaves no entry."""
    azure.settings(vault_access=False)
    verdict, said = verdicts(cli, folder)["key vault"]
    assert (verdict, "Key Vault Secrets Officer" in said) == ("fail", True)


def test_without_credentials_the_skipped_checks_and_the_faults_of_the_config_are_named(cli: Any, folder: Path) -> None:
    """A missing machine type and a missing subscription show without Azure."""
    changes = (f"subscription: {SUBSCRIPTION}, ->", ", instance_type: Standard_NC6s_v3->")
    found = verdicts(cli, folder, *changes, env={"AZURE_CLIENT_SECRET": ""})
    assert list(found) == ["credentials", "config", "not checked without credentials"]
    assert found["not checked without credentials"][1].split(", ")[:2] == ["workspace", "compute"]
    assert (found["credentials"][0], "az login" in found["credentials"][1]) == ("fail", True)
