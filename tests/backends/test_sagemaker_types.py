"""A list of machine types on SageMaker: one request, the first type with machines, the price of that type."""

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.sagemaker.machine import disk_usd
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.prices import catalog
from cloudtrain.launcher.store import ledger
from cloudtrain.launcher.store.registry import Registry
from doubles.aws.handle import ROLE, Aws

TYPES = ("ml.g5.24xlarge", "ml.g4dn.12xlarge", "ml.g5.12xlarge")
CONFIG = f"""\
name: j
backend: sagemaker
script: train.py
resources: {{instances: 2, instance_type: "{",".join(TYPES)}"}}
limits: {{max_duration: 1h}}
budget: {{limit: 200 USD}}
sagemaker: {{role: "{ROLE}", bucket: cloudtrain-tests, region: us-east-1}}
"""


def hourly_usd(name: str, factor: float = 1.0) -> float:
    """Return the price of an instance with its disk."""
    machine = catalog.by_type("sagemaker", name, "us-east-1")
    assert machine is not None
    assert machine.hourly_usd is not None
    return (machine.hourly_usd + disk_usd(name, 100)) * factor


@pytest.fixture
def folder(account: Aws, tmp_path: Path) -> Path:
    """Return the folder of a project whose jobs run until the test ends them."""
    account.settings(execute=False)
    (tmp_path / "train.py").write_text("import torch.distributed\n")
    (tmp_path / "cloudtrain.yaml").write_text(CONFIG)
    return tmp_path


def test_list_becomes_preferences_capped_by_the_dearest_type(render: Any) -> None:
    """MaxRuntime x the dearest type's highest price x count stays within the budget, with the time after the end."""
    body = render(CONFIG, "budget.limit=10 USD").body
    resources, runtime_s = body["ResourceConfig"], body["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert resources["InstancePreferences"] == [{"InstanceType": name} for name in TYPES]
    assert resources["InstanceCount"] == 2
    assert "InstanceType" not in resources
    machines = [catalog.by_type("sagemaker", name, "us-east-1") for name in TYPES]
    worst = max(hourly_usd(name) for name in TYPES) * max(each.uncertainty_of() for each in machines if each)
    assert 9.9 < 2 * worst * (runtime_s + 300) / 3600 <= 10


@pytest.mark.parametrize(
    "setting",
    [
        "resources.spot=true",
        "sagemaker.keep_alive=10m",
        "resources.instance_type=ml.g5.12xlarge,ml.g5.12xlarge",
        "resources.instance_type=ml.g5.12xlarge,ml.g5.xlarge",
        "resources.instance_type=ml.g5.xlarge,ml.g5.2xlarge,ml.g5.4xlarge,ml.g5.8xlarge,ml.g5.16xlarge,ml.g6.xlarge",
    ],
)
def test_list_that_sagemaker_does_not_take_is_refused(render: Any, setting: str) -> None:
    """No spot, no warm machines, at most 5 unlike types, and the same number of ranks with each."""
    with pytest.raises(ConfigError, match="SageMaker takes a list of 1 to 5 types") as caught:
        render(CONFIG, setting)
    assert caught.value.faults[0].key == "resources.instance_type"


def test_meter_takes_the_price_of_the_selected_type(cli: Any, account: Aws, folder: Path) -> None:
    """The first type has no machines: the second is selected, and its seconds are billed at its own price."""
    account.capacity("no_stock", machine=TYPES[0])
    assert cli("submit", "-d", "-y", "--name", "j", cwd=folder).code == 0
    account.wait("j-1", "Training")
    assert account.describe("j-1")["ResourceConfig"]["SelectedInstanceType"] == TYPES[1]
    assert cli("status", "j", "--json").json["state"] == "running"
    account.end("j-1")
    billed_s = account.wait("j-1")["BillableTimeInSeconds"]
    [leg] = cli("cost", "j", "--json").json["legs"]
    assert leg["price_usd_per_hour"] == pytest.approx(hourly_usd(TYPES[1]), abs=1e-6)
    assert leg["billed_usd"] == pytest.approx(2 * hourly_usd(TYPES[1]) * billed_s / 3600, abs=1e-5)


def test_short_quota_of_one_type_refuses_the_list(cli: Any, account: Aws, folder: Path) -> None:
    """AWS counts the quota of each listed type before it looks for machines."""
    account.capacity("no_quota", machine=TYPES[2])
    refused = cli("submit", "-d", "-y", "--name", "j", cwd=folder)
    assert refused.code == 5
    assert f"{TYPES[2]} for training job usage" in refused.stderr


def test_backend_says_how_many_types_fit(render: Any, tmp_path: Path) -> None:
    """A plain job on demand lists 5 types, a spot job one."""
    from cloudtrain.launcher import config as configs

    render(CONFIG)
    backend = backends.load("sagemaker")
    assert isinstance(backend, backends.ListsTypes)
    spot = configs.load(tmp_path / "cloudtrain.yaml", overrides=["resources.spot=true"])
    assert (backend.types_at_once(configs.load(tmp_path / "cloudtrain.yaml")), backend.types_at_once(spot)) == (5, 1)


def test_submit_with_candidates_sends_the_first_and_holds_for_all(cli: Any, account: Aws, folder: Path) -> None:
    """The first request has the types of two entries; the hold covers the dear candidate that was not sent."""
    config = CONFIG.replace(",".join(TYPES), TYPES[1])
    entries = f"{{}}, {{resources.instance_type: {TYPES[2]}}}, {{resources.instances: 3, sagemaker.region: us-west-2}}"
    tried = f"distributed: {{nproc_per_node: 2}}\ncapacity: {{try: [{entries}]}}\n"
    (folder / "cloudtrain.yaml").write_text(config + tried)
    refused = cli("submit", "-d", "-y", "--name", "j", cwd=folder)
    assert refused.code == 3
    assert "6 ranks in place of the first candidate's 4 change the batch of a script" in refused.stderr
    (folder / "cloudtrain.yaml").write_text(config + tried.replace("resources.instances: 3", "resources.disk_gb: 900"))
    sent = cli("submit", "-d", "-y", "--name", "j", cwd=folder)
    assert sent.code == 0, sent.stderr
    asked = account.describe("j-1")["ResourceConfig"]["InstancePreferences"]
    assert [each["InstanceType"] for each in asked] == [TYPES[1], TYPES[2]]
    registry = Registry(cli.home)
    plan = registry.find("j").attempt.plan
    held = ledger.reservation(registry.database, "j", 1)
    assert held is not None
    assert plan.hold_micro is not None
    assert plan.worst_case_micro is not None
    assert held["amount_micro"] == plan.hold_micro > plan.worst_case_micro
