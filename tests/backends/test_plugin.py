"""The package of examples/plugin: a backend with a config block, checks, prices and node detection."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints.agent import node
from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning.prepare import require_whole
from doubles.signatures import MakeProject

SETTINGS = "backend: processes\nresources: {instances: 2}\n"


@pytest.fixture
def installed(plugin_package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the folder of the installed package; the command finds the package there."""
    site: str = plugin_package.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", site)
    return site


def test_block_of_a_plugin_is_checked_like_every_key(installed: str, cli: Any, project: MakeProject) -> None:
    """A wrong value and a key of a similar tool are reported with their places and with a hint."""
    folder = project(SETTINGS + "processes: {partition: smal, queue: x}\n")
    told = [
        (fault["key"], fault["line"], fault["hint"]) for fault in cli("validate", "--json", cwd=folder).json["faults"]
    ]
    partition = ("processes.partition", 5, "did you mean `small`?")
    assert told == [partition, ("processes.queue", 5, "it is `processes.partition` here")]


def test_plugins_prices_apply_to_budgets(installed: str, cli: Any, project: MakeProject) -> None:
    """The partition's price is the price of a node, and the block's price beats the partition's price."""
    folder = project(SETTINGS)
    plan = cli("plan", "--json", cwd=folder).json
    dear = cli("plan", "--json", "--set", "processes.price_per_hour=2 USD", cwd=folder).json
    assert (plan["price_micro"], dear["price_micro"]) == (50_000, 2_000_000)
    limited = cli("plan", "--json", "--set", "budget.limit=1 USD", cwd=folder).json
    assert limited["worst_case_micro"] <= 1_000_000 < plan["worst_case_micro"]


def test_plugins_check_refuses_a_request(installed: str, cli: Any, project: MakeProject) -> None:
    """A fault of the plug-in's own check points at the line of the key."""
    folder = project("backend: processes\nresources: {instances: 3}\nprocesses: {partition: small}\n")
    done = cli("submit", "--dry-run", cwd=folder)
    assert done.code == 3
    assert "cloudtrain.yaml:5" in done.stderr
    assert "the partition `small` has 2 nodes, and the job needs 3" in done.stderr
    assert cli("submit", "--dry-run", "--set", "processes.partition=large", cwd=folder).code == 0


def test_keys_of_a_plugin_are_explained(installed: str, cli: Any) -> None:
    """`explain`, the JSON schema and the list of backends have the plug-in."""
    assert "2 small nodes, or 8 large nodes" in cli("explain", "processes.partition").stdout
    assert "processes" in json.loads(cli("schema").stdout)["properties"]
    assert "processes" in cli("backends").stdout


def test_block_of_a_missing_plugin_is_an_unknown_key(cli: Any, project: MakeProject) -> None:
    """Without the package the block and the backend's name are refused."""
    done = cli("validate", cwd=project(SETTINGS + "processes: {partition: small}\n"))
    assert done.code == 3
    assert "unknown key `processes`" in done.stderr


def test_plugin_detects_its_nodes(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's variables identify a node; below an agent the agent's own variables count."""
    monkeypatch.syspath_prepend(installed)
    told = {"CLOUDTRAIN_NODE_DETECTOR": "cloudtrain_processes.detect", "PROCESSES_RANK": "1", "PROCESSES_COUNT": "2"}
    told |= {"PROCESSES_HEAD": "127.0.0.1:7000", "PROCESSES_ADDRESS": "127.0.0.2"}
    found = node.identify(told)
    assert found == node.Node("processes", 1, 2, "127.0.0.1", 7000, "127.0.0.2", "PROCESSES_RANK 1")
    below = {"CLOUDTRAIN_HEAD": "127.0.0.1:7001", "CLOUDTRAIN_NODE_RANK": "1", "CLOUDTRAIN_NUM_NODES": "2"}
    assert node.identify({**told, **below, "CLOUDTRAIN_ADDRESS": "127.0.0.2"}).platform == "agent"


@pytest.mark.parametrize(
    ("method", "ability"), [("doctor", "Backend"), ("saved", "HasCheckpoints"), ("checkpoint_place", "HasCheckpoints")]
)
def test_plugin_with_a_method_missing_is_refused(
    installed: str, method: str, ability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ability in part is refused by name: its commands would otherwise leave the backend out in silence."""
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setattr(backends, "class_of", lambda name: "cloudtrain_processes.backend:ProcessesBackend")
    monkeypatch.delattr(type(backends.load("processes")), method)
    assert backends.load("processes").stop  # a job that runs can be stopped
    with pytest.raises(ConfigError, match=f"the backend `processes` lacks {method} of {ability}"):
        require_whole("processes")
