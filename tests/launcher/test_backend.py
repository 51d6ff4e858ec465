"""Loading a backend by name: built-in, plug-in, unknown."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend_table import GROUP
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.store.registry import Registry
from doubles.signatures import MakeProject

PROTOCOL = [name for name in vars(backends.Backend) if not name.startswith("_")]

# A backend as a foreign package defines it; `send` raises the error that the environment names.
PLUGIN = """\
import json, os
from cloudtrain.launcher import errors
from cloudtrain.launcher.backend import Backend, Capacity, Request

class Vendor(Backend):
    def capacity(self, config): return Capacity(0, 1.5, "a test's price of today")
    def request(self, plan, config, job_id, attempt, bundle_sha256):
        return Request(f"{job_id}-{attempt}", {"job": job_id}, json.dumps({"job": job_id}))
    def check(self, request): return []
    def send(self, request, shipment):
        raise getattr(errors, os.environ["ERROR"])("the vendor said no", hint="ask again")
    def find(self, request, home): return None
    def doctor(self, config): return []
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for PYTHONPATH with a package that declares the backends `vendor` and, in vain, `local`."""
    site = tmp_path / "site"
    (site / "vendor-1.0.dist-info").mkdir(parents=True)
    (site / "vendor-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    points = f"[{GROUP}]\nvendor = vendor_backend:Vendor\nlocal = vendor_backend:Vendor\n"
    (site / "vendor-1.0.dist-info" / "entry_points.txt").write_text(points)
    (site / "vendor_backend.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.parametrize("name", backends.BUILT_IN)
def test_built_in_backend_has_the_complete_protocol(name: str) -> None:
    """The class that the table names has every method of the protocol, and a process makes one object of the class."""
    backend = backends.load(name)
    assert [method for method in PROTOCOL if not callable(getattr(backend, method, None))] == []
    assert backends.load(name) is backend


@pytest.mark.parametrize("method", PROTOCOL)
@pytest.mark.parametrize("name", backends.BUILT_IN)
def test_built_in_backend_matches_the_protocol_parameters(name: str, method: str) -> None:
    """Names and defaults must be equal, because the type checker does not see that `load` returns the class."""
    of_self, *wanted = inspect.signature(getattr(backends.Backend, method)).parameters.values()
    found = inspect.signature(getattr(backends.load(name), method)).parameters.values()
    assert of_self.name == "self"
    assert [str(parameter) for parameter in found] == [str(parameter) for parameter in wanted]


def test_plugin_joins_the_built_in_backends(plugin: Path) -> None:
    """A foreign package's backend is imported on first use, `local` stays ours, and an unknown name gets all."""
    assert type(backends.load("local")).__module__ == "cloudtrain.backends.local.backend"
    assert backends.names() == [*backends.BUILT_IN, "vendor"]
    assert backends.load("vendor").check(Any) == []  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown backend `elsewhere`") as caught:
        backends.load("elsewhere")
    assert all(name in str(caught.value) for name in backends.names())


@pytest.mark.parametrize(("error", "code"), [("CredentialError", 4), ("CapacityError", 5), ("BudgetError", 6)])
def test_refused_submit_exits_with_the_code_of_the_refusal(
    cli: Any, project: MakeProject, plugin: Path, error: str, code: int
) -> None:
    """The refusal leaves no job behind."""
    env = {"PYTHONPATH": str(plugin), "ERROR": error}
    result = cli("submit", "-d", "-y", "--backend", "vendor", cwd=project(), env=env)
    assert (result.code, result.stderr.count("error: the vendor said no")) == (code, 1), result.stderr
    assert f"hint: {'wait in line: --queue; ' * (code == 5)}ask again" in result.stderr
    assert Registry().jobs() == []


def test_unanswered_submit_stays_an_intent(cli: Any, project: MakeProject, plugin: Path) -> None:
    """A lost answer decides nothing: exit code 7, and the next command asks the vendor for the job's name."""
    env = {"PYTHONPATH": str(plugin), "ERROR": "UnreachableError"}
    assert cli("submit", "-d", "-y", "--backend", "vendor", cwd=project(), env=env).code == 7
    assert Registry().find("last").attempt.phase == "intent"
    [job] = cli("list", "--json", env=env).json["jobs"]
    assert (job["state"], "nothing runs" in job["detail"]) == ("failed", True)


def test_submit_that_costs_money_needs_a_confirmation(cli: Any, project: MakeProject, plugin: Path) -> None:
    """Without a terminal the submit is a usage error that names -y, and no row is journalled."""
    env = {"PYTHONPATH": str(plugin), "ERROR": "CapacityError"}
    result = cli("submit", "-d", "--backend", "vendor", cwd=project("limits: {max_duration: 2h}\n"), env=env)
    assert (result.code, "3.00 USD" in result.stderr, "add -y" in result.stderr) == (2, True, True)
    assert Registry().jobs() == []
