"""The time limit in each request: every platform reads the limit, and the limit costs at most the budget."""

import base64
import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import config as configs
from cloudtrain.launcher.backend import Capacity, Request
from cloudtrain.launcher.config.schema import Budget, JobConfig
from cloudtrain.launcher.errors import BudgetError
from cloudtrain.launcher.plan import Plan
from cloudtrain.launcher.planning import plan_text
from cloudtrain.launcher.planning import planner as plans

TEXT = """
name: x
script: train.py
resources: {accelerators: "A100:8"}
budget: {limit: 5000 USD}
local: {price_per_hour: 2 USD}
ssh: {hosts: [a, b, c, d, e, f, g, h], price_per_hour: 30 USD}
slurm: {price_per_hour: 30 USD, cpus_per_node: 8}
sagemaker: {region: us-east-1, role: "arn:aws:iam::111122223333:role/train", keep_alive: 10m}
azureml: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: ml, workspace: research, region: eastus,
  compute: c, idle: 5m}
vertex: {project: my-project, location: us-central1, staging_bucket: gs://b-uc}
"""
NAMES = list(backends.BUILT_IN)
# The place where the platform reads the limit, or our own process in the job.
READ: dict[str, Callable[[dict[str, Any]], int]] = {
    "local": lambda body: int(body["max_duration_s"]),
    "ssh": lambda body: int(body["max_duration_s"]),
    "slurm": lambda body: int(next(o for o in body["sbatch"] if o.startswith("--time=")).partition("=")[2]) * 60,
    "sagemaker": lambda body: int(body["StoppingCondition"]["MaxRuntimeInSeconds"]),
    "azureml": lambda body: int(body["limits"]["timeout"]),
    "vertex": lambda body: int(body["jobSpec"]["scheduling"]["timeout"].removesuffix("s")),
}


def told(name: str, request: Request) -> dict[str, Any]:
    """Return the spec of the job's own processes."""
    if name in ("local", "ssh"):
        return request.body
    if name == "slurm":
        return request.body["order"]
    if name == "azureml":
        return json.loads(base64.b64decode(request.body["environment_variables"]["CLOUDTRAIN_ORDER"]))
    return request.sending["order"]


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., JobConfig]:
    """Return a function that loads the config for a backend."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(TEXT)

    def load(name: str, *settings: str) -> JobConfig:
        typed = ["resources.accelerators=null"] if name == "local" else []
        return configs.load(tmp_path / "cloudtrain.yaml", backend=name, overrides=[*typed, *settings], environ={})

    return load


def rendered(config: JobConfig, spent_micro: int = 0) -> tuple[Plan, Capacity, Request]:
    """Return the plan and the request of a config."""
    backend = backends.load(config.backend)
    capacity = backend.capacity(config)
    plan = plans.make(config, capacity, spent_micro)
    return plan, capacity, backend.request(plan, config, "x-abcde", 1, "f" * 64)


def worst_usd(limit_s: int, config: JobConfig, capacity: Capacity) -> Fraction:
    """Return the worst cost of a run to the rendered limit, calculated only from the facts."""
    terms, hourly = capacity.terms, Fraction(str(capacity.hourly_usd))
    seconds = max(terms.minimum_bill_s, -(-(limit_s + terms.tail_s) // terms.unit_s) * terms.unit_s)
    return (
        Fraction(seconds * config.resources.instances * terms.starts, 3600)
        * hourly
        * Fraction(str(capacity.uncertainty))
    )


def test_five_hundred_requests_carry_the_limit(config_of: Callable[..., JobConfig]) -> None:
    """Random instances, budgets and earlier attempts: the limit in the request costs at most the remaining money."""
    draw, refused = random.Random(8), 0
    loaded = {name: config_of(name) for name in NAMES}
    for number in range(500):
        config = loaded[NAMES[number % len(NAMES)]]
        limit = round(10 ** draw.uniform(6.5, 10.5))
        spent = round(limit * draw.choice([0, 0.1, 0.5]))
        budget = Budget.model_construct(**{**dict(config.budget or ()), "limit": limit})
        resources = config.resources.model_copy(update={"instances": draw.randint(1, 8)})
        config = config.model_copy(update={"budget": budget, "resources": resources})
        try:
            plan, capacity, request = rendered(config, spent)
        except BudgetError as error:
            refused += 1
            enough = Budget.model_construct(**{**dict(budget), "limit": error.enough_micro})
            rendered(config.model_copy(update={"budget": enough}), spent)
            continue
        limit_s = READ[config.backend](request.body)
        assert capacity.terms.least_s <= limit_s == plan.cap_s
        assert worst_usd(limit_s, config, capacity) * 10**6 + spent <= limit
        own = told(config.backend, request)
        assert own["deadline_s"] < own["max_duration_s"] <= limit_s
        assert own["limit_reason"] == plan.cap_reason
    assert 20 < refused < 250


@pytest.mark.parametrize("name", NAMES)
def test_action_at_the_limit_is_the_same_everywhere(name: str, config_of: Callable[..., JobConfig]) -> None:
    """checkpoint-and-stop has a deadline before the end, stop has no earlier one, alert has no money limit."""
    limit = {"local": "10 USD", "ssh": "60 USD"}.get(name, "150 USD")
    found = {}
    for what in ("checkpoint-and-stop", "stop", "alert"):
        config = config_of(name, f"budget.on_limit={what}", f"budget.limit={limit}", "resources.instances=2")
        plan, _, request = rendered(config)
        own = told(name, request)
        has_time = own["deadline_s"] < own["max_duration_s"]
        found[what] = (READ[name](request.body) == plan.cap_s < 86_400, own["limit_reason"], has_time)
    saves, stops = (True, "budget", True), (True, "budget", False)
    assert found == {"checkpoint-and-stop": saves, "stop": stops, "alert": (False, "time_limit", True)}


@pytest.mark.parametrize("name", ["local", "ssh"])
@pytest.mark.parametrize("price", ["null", "0"])
@pytest.mark.parametrize("on_limit", ["checkpoint-and-stop", "stop", "alert"])
def test_budget_does_not_apply_to_own_machines_without_a_price(
    name: str, price: str, on_limit: str, config_of: Callable[..., JobConfig]
) -> None:
    """Only the time limit counts, the plan equals the plan without a budget, and one line reports the fact."""
    settings = (f"{name}.price_per_hour={price}", "limits.max_duration=2h")
    plan, _, request = rendered(config_of(name, *settings, f"budget.on_limit={on_limit}"))
    plain = rendered(config_of(name, *settings, "budget=null"))
    assert replace(plan, unpriced_budget_micro=None) == plain[0]
    assert told(name, request) == told(name, plain[2])
    assert (plan.cap_s, plan.cap_reason, plan.worst_case_micro, plan.budget_micro) == (7200, "time_limit", 0, None)
    assert any("the budget does not apply on" in line for line in plan_text.lines(plan))


def test_vertex_retries_nothing_under_a_budget(config_of: Callable[..., JobConfig]) -> None:
    """Also with a shorter time limit: whether Vertex's timeout spans restarts is not documented."""
    guarded, _, request = rendered(config_of("vertex", "limits.max_duration=1h"))
    assert (guarded.cap_reason, guarded.terms.starts) == ("time_limit", 1)
    assert request.body["jobSpec"]["scheduling"]["disableRetries"] is True
    with pytest.raises(configs.ConfigError, match=r"changes jobSpec\.scheduling\.disableRetries"):
        rendered(config_of("vertex", "vertex.raw={jobSpec: {scheduling: {disableRetries: false}}}"))
    free, _, request = rendered(config_of("vertex", "limits.max_duration=1h", "budget=null"))
    assert free.terms.starts == 4
    assert "disableRetries" not in request.body["jobSpec"]["scheduling"]


def test_spot_machines_may_wait_beyond_the_limit_but_not_run(config_of: Callable[..., JobConfig]) -> None:
    """MaxWait adds the time of waiting, which is not billed, to the run."""
    _, _, request = rendered(config_of("sagemaker", "resources.spot=true", "budget.limit=150 USD"))
    stopping = request.body["StoppingCondition"]
    assert stopping["MaxWaitTimeInSeconds"] == stopping["MaxRuntimeInSeconds"] + 86_400
