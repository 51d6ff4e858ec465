"""The candidates of a job, prepared: order, requests, what is held, refused ranks, and the table of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import BudgetError, ConfigError, Fault
from cloudtrain.launcher.jobs import failover
from cloudtrain.launcher.jobs.reserve import amount_of
from cloudtrain.launcher.planning.candidates import candidates
from cloudtrain.launcher.planning.prepare import Prepared, prepare, require_a_plan
from cloudtrain.launcher.store.registry import Registry

SCRIPT = "script: train.py\n"
TASK = "task: task.py\ntraining: {global_batch_size: 64}\n"
FILE = """name: digits
backend: sagemaker
resources: {instance_type: ml.g5.12xlarge, instances: 2}
sagemaker: {region: eu-west-1, role: "arn:aws:iam::111122223333:role/train"}
limits: {max_duration: 2h}
"""
WEST, DEAR, CHEAP, SPOT, SMALL = (
    "{sagemaker.region: us-west-2}",
    "{resources.instance_type: ml.g5.24xlarge}",
    "{resources.instance_type: ml.g4dn.12xlarge}",
    "{resources.spot: true}",
    "{resources.instance_type: ml.g5.8xlarge}",
)


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    """Return a function that prepares a job with these entries, as a dry run does."""
    (tmp_path / "train.py").write_text("import torch.distributed\n")
    (tmp_path / "task.py").write_text("def model(params): ...\ndef dataset(p, s): ...\ndef loss(model, batch): ...\n")

    def make(*tried: str, run: str = SCRIPT, more: str = "") -> Prepared:
        file = tmp_path / "cloudtrain.yaml"
        file.write_text(f"{FILE}{run}{more}capacity: {{try: [{', '.join(tried)}], order: given}}\n")
        return prepare(configs.load(file), file, tmp_path, dry=True)

    return make


def faults(prepared: Any, *tried: str, **more: str) -> list[Fault]:
    """Return the faults of a job with these entries."""
    with pytest.raises(ConfigError) as caught:
        prepared(*tried, **more)
    return list(caught.value.faults)


def test_capacity_renders_each_candidate_with_one_archive(prepared: Any) -> None:
    """Each request is the one that the file with the entry's values would send, but for the candidates."""
    found = prepared("{}", WEST, SPOT).candidates
    assert [each.candidate for each in found] == [0, 1, 2]
    assert len({each.bundle.sha256 for each in found}) == 1
    assert [each.request.sending["region"] for each in found] == ["eu-west-1", "us-west-2", "eu-west-1"]
    assert [each.request.body.get("EnableManagedSpotTraining", False) for each in found] == [False, False, True]


def test_capacity_without_candidates_stays_as_before(tmp_path: Path, prepared: Any) -> None:
    """A job without the section has no candidates, and its own worst case is held."""
    prepared("{}")
    config = configs.load(tmp_path / "cloudtrain.yaml", overrides=["capacity=null"])
    alone = prepare(config, tmp_path / "cloudtrain.yaml", tmp_path, dry=True)
    assert alone.candidates == ()
    assert (alone.plan.hold_micro, amount_of(alone.plan)) == (None, alone.plan.worst_case_micro)


def test_capacity_holds_the_dearest_worst_case_and_a_late_start(prepared: Any) -> None:
    """The hold is the largest worst case, not the sum, and 5 minutes of boot with the time after the end."""
    first = prepared(CHEAP, SPOT, "{resources.instance_type: ml.g5.24xlarge, sagemaker.region: us-west-2}")
    worst = [each.plan.worst_case_micro for each in first.candidates]
    rates = [each.plan.rate.scaled for each in first.candidates]
    late_micro = -(-max(rates) * 600 // (3600 * 10**6))
    assert {each.plan.hold_micro for each in first.candidates} == {max(worst) + late_micro}
    assert amount_of(first.plan) == max(worst) + late_micro


def test_capacity_fits_the_budget_with_the_late_start(prepared: Any) -> None:
    """The money for a late start is left out of each candidate's time limit."""
    first = prepared("{}", WEST, more="budget: {limit: 20 USD}\n")
    assert first.plan.cap_reason == "budget"
    assert 19_000_000 < first.plan.hold_micro <= 20_000_000
    with pytest.raises(BudgetError, match=r"capacity\.try\[0\]: .* are kept for a late start"):
        prepared("{}", WEST, more="budget: {limit: 5 USD}\n")


def test_capacity_joins_neighbours_that_differ_by_type(prepared: Any) -> None:
    """Unlike types on demand in one place become one request; spot, another place or other ranks end the list."""
    found = prepared("{}", DEAR, WEST, SPOT, CHEAP, run=TASK).candidates
    assert [each.candidate for each in found] == [0, 2, 3, 4]
    listed = found[0].request.body["ResourceConfig"]
    assert [each["InstanceType"] for each in listed["InstancePreferences"]] == ["ml.g5.12xlarge", "ml.g5.24xlarge"]
    assert [each.request.body["ResourceConfig"].get("InstanceType") for each in found[1:]] == [
        *("ml.g5.12xlarge", "ml.g5.12xlarge"),
        "ml.g4dn.12xlarge",
    ]
    assert [each.plan.lists_machines for each in found] == [True, False, False, False]
    assert len(prepared("{}", SMALL, run=TASK).candidates) == 2


def test_capacity_leaves_a_written_list_of_types_alone(prepared: Any) -> None:
    """A list of types in an entry is one request, as the next entry's machine is, even if the list has that type."""
    listed = "{resources.instance_type: 'ml.g5.12xlarge,ml.g5.24xlarge'}"
    machines = ["ml.g5.12xlarge", "ml.g5.12xlarge, ml.g5.24xlarge"]
    assert [each.plan.machine for each in prepared("{}", listed).candidates] == machines
    assert [each.plan.machine for each in prepared(listed, "{}").candidates] == machines[::-1]


def test_capacity_orders_by_price(tmp_path: Path, prepared: Any) -> None:
    """The lowest worst case comes first, though a budget gives all the same; a candidate has its entry's number."""
    prepared(DEAR, WEST, "{resources.instance_type: ml.g4dn.12xlarge, resources.spot: true}")
    file = tmp_path / "cloudtrain.yaml"
    config = configs.load(file, overrides=["capacity.order=price", "budget.limit=15 USD"])
    first = prepare(config, file, tmp_path, dry=True)
    machines = [each.plan.machine for each in first.candidates]
    assert machines == ["ml.g4dn.12xlarge", "ml.g5.12xlarge", "ml.g5.24xlarge"]
    assert [each.candidate for each in first.candidates] == [2, 1, 0]
    assert [each.resources.instance_type for each in candidates(first.config)] == machines[::-1]


def test_capacity_fault_names_the_entry_of_the_file_in_any_order(tmp_path: Path, prepared: Any) -> None:
    """With the order by price a fault of the last check stands at the entry that the file has."""
    prepared(DEAR, WEST)
    file = tmp_path / "cloudtrain.yaml"
    file.write_text(file.read_text().replace(WEST, '{sagemaker.region: us-west-2, image: "x/y:1"}'))
    with pytest.raises(ConfigError) as caught:
        prepare(configs.load(file, overrides=["capacity.order=price"]), file, tmp_path, dry=True)
    assert {fault.key for fault in caught.value.faults} == {"capacity.try[1].image"}


def test_capacity_refuses_another_number_of_ranks_of_a_script(prepared: Any) -> None:
    """A script's batch would change; a task's fixed global batch is split anew."""
    [fault] = faults(prepared, "{}", SMALL)
    assert fault.key == "capacity.try[1]"
    assert fault.message == "2 ranks in place of the first candidate's 8 change the batch of a script"
    assert fault.hint.startswith("take 2 machines with 4 GPUs")
    batches = [each.plan.batch for each in prepared("{}", SMALL, run=TASK).candidates]
    assert [(each.global_size, each.data_ranks(ranks)) for each, ranks in zip(batches, (8, 2), strict=True)] == [
        (64, 8),
        (64, 2),
    ]


def test_capacity_keeps_the_trials_of_a_sweep(prepared: Any) -> None:
    """A sweep may move to machines with as many trials at once, and to no others."""
    sweep = "sweep: {algorithm: random, trials: 4, space: {training.optimizer.lr: [0.1, 0.2]}}\n"
    run = TASK.replace("64", "64, max_steps: 10")
    assert len(prepared("{}", WEST, run=run, more=sweep).candidates) == 2
    [fault] = faults(prepared, "{}", SMALL, run=run, more=sweep)
    assert fault.message.endswith("change the trials at once")
    assert fault.hint == "take 2 machines with 4 GPUs"  # the job is a task


def test_capacity_reports_the_faults_of_all_candidates_at_once(tmp_path: Path, prepared: Any) -> None:
    """A fault of one candidate stands at its entry, a fault of all once at its own key; validate finds the same."""
    entries = "{}", "{sagemaker.region: US}", "{resources.instance_type: ml.nope}"
    found = faults(prepared, *entries, more="inputs: {train: gs://bucket/x}\n")
    file = tmp_path / "cloudtrain.yaml"
    keys = {fault.key for fault in found}
    assert keys == {"capacity.try[1].sagemaker.region", "capacity.try[2].resources.instance_type", "inputs.train"}
    with pytest.raises(ConfigError) as caught:
        require_a_plan(configs.load(file), file)
    assert {fault.key for fault in caught.value.faults} == keys
    placed = configs.placed(caught.value, file).faults
    assert {fault.place.line for fault in placed if fault.place} == {7, 8}


def test_capacity_stands_side_by_side_in_the_plan(cli: Any, tmp_path: Path, prepared: Any) -> None:
    """The plan names place, machine, price, ranks, batch, worst case, and who moves on; as JSON too."""
    prepared("{}", DEAR, WEST, SPOT, run=TASK)
    plan = cli("plan", "--no-code", cwd=tmp_path)
    rows = [line for line in plan.stdout.splitlines() if line[:1].isdigit() and "sagemaker" in line]
    assert [row.split()[:3] for row in rows] == [
        ["0", "sagemaker", "eu-west-1"],
        ["2", "sagemaker", "us-west-2"],
        ["3", "sagemaker", "eu-west-1"],
    ]
    assert "64 = 8 x 1 x 8" in rows[0]
    assert "the service moves from one machine type to the next within candidate 0" in plan.stdout
    assert "from one candidate to the next moves a command of cloudtrain" in plan.stdout
    assert "held once for all" in plan.stdout
    shown = cli("plan", "--no-code", "--json", cwd=tmp_path).json
    assert [each["spot"] for each in shown["candidates"]] == [False, False, True]
    dry = cli("submit", "--dry-run", "--json", "-o", "out", cwd=tmp_path).json
    assert [each["request"]["TrainingJobName"] for each in dry["candidates"]] == ["digits-00000-1"] * 3
    assert (tmp_path / "out/candidate-2/create-training-job.json").exists()


SSH = "{backend: ssh, resources.instance_type: null, 'ssh.python': /usr/bin/python3, ssh.hosts: [%s]}"
SLURM = "{backend: slurm, resources.instance_type: null, slurm.python: /usr/bin/python3, slurm.login: %s}"


def test_capacity_place_of_other_or_fewer_machines_is_another_place(registry: Registry, prepared: Any) -> None:
    """A refusal for 2 machines blocks no candidate with 1, and busy hosts block no other hosts or clusters."""
    entries = ("{}", "{resources.instances: 1}", SSH % "a, b", SSH % "c, d", SLURM % "x", SLURM % "y")
    _, course, _ = failover.begin(registry, prepared(*entries, run=TASK))
    assert len({tuple(place[1:]) for place in course["places"]}) == len(entries)
