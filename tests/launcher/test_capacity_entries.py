"""The section `capacity`: its keys, its faults with their places, and the candidates of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError, Fault
from cloudtrain.launcher.planning.candidates import candidates
from cloudtrain.launcher.planning.prepare import refused

FILE = """name: digits
backend: sagemaker
script: train.py
resources: {instance_type: ml.g5.12xlarge, instances: 2}
sagemaker: {region: eu-west-1, role: "arn:aws:iam::111122223333:role/train"}
inputs: {train: {sagemaker: "s3://b/train/", vertex: "gs://b/train/"}}
limits: {max_duration: 2h}
capacity:
  try:
"""
ENTRIES = """  - {}
  - {sagemaker.region: us-west-2, sagemaker.bucket: my-west, env.RUN: 1.10}
  - {resources.instance_type: null, resources.accelerators: A10G:8}
  - {resources.spot: true, limits.max_duration: 3h}
  - {backend: vertex, vertex.project: my-project}
"""


def load(tmp_path: Path, entries: str) -> configs.JobConfig:
    """Return the config of a file with the entries."""
    (tmp_path / "train.py").write_text("print(1)\n")
    file = tmp_path / "cloudtrain.yaml"
    file.write_text(FILE + entries)
    return configs.load(file)


def faults(tmp_path: Path, entries: str) -> list[Fault]:
    """Return the faults of a file with the entries."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, entries)
    return list(caught.value.faults)


def test_capacity_entry_overrides_its_keys_and_nothing_else(tmp_path: Path) -> None:
    """Each candidate is the file under its entry, as `--set` would give it, with the backend's own places."""
    found = candidates(load(tmp_path, ENTRIES))
    assert [each.resources.instance_type for each in found] == ["ml.g5.12xlarge"] * 2 + [None] + ["ml.g5.12xlarge"] * 2
    assert [each.limits.max_duration for each in found] == [7200, 7200, 7200, 10800, 7200]
    assert [each.resources.spot for each in found] == [False, False, False, True, False]
    assert [each.env.get("RUN") for each in found] == [None, "1.10", None, None, None]
    assert [each.inputs["train"] for each in found] == ["s3://b/train/"] * 4 + ["gs://b/train/"]
    assert [each.backend for each in found] == ["sagemaker"] * 4 + ["vertex"]
    assert found[2].resources.accelerators == "A10G:8"
    assert found[0].model_copy(update={"capacity": None}) == load_alone(tmp_path)


def load_alone(tmp_path: Path) -> configs.JobConfig:
    """Return the file's config without candidates."""
    return configs.load(tmp_path / "cloudtrain.yaml", overrides=["capacity=null"])


def test_capacity_candidates_of_each_stored_candidate_are_the_same(tmp_path: Path) -> None:
    """An entry names the same candidate from the stored config of any candidate: nothing of an earlier one stays."""
    found = candidates(load(tmp_path, ENTRIES))
    for each in found:
        assert candidates(configs.stored(each.model_dump(mode="json"))) == found


def test_capacity_without_the_section_is_the_config_itself(tmp_path: Path) -> None:
    """A config without `capacity` has one candidate."""
    load(tmp_path, ENTRIES)
    config = load_alone(tmp_path)
    assert candidates(config) == (config,)


def test_capacity_fault_names_the_entry_and_its_key(tmp_path: Path) -> None:
    """A wrong value, an unknown key and a broken rule are reported at once, each at its entry's key."""
    entries = "  - {sagemaker.regio: us-west-2}\n  - {resources.spot: maybe}\n  - {resources.accelerators: A10G:8}\n"
    found = faults(tmp_path, entries)
    assert [(fault.key, fault.place and fault.place.line) for fault in found] == [
        ("capacity.try[0].sagemaker.regio", 10),
        ("capacity.try[1].resources.spot", 11),
        ("capacity.try[2]", 12),
    ]
    assert found[0].hint == "did you mean `region`?"
    assert found[2].hint.endswith("`resources.instance_type: null` in the entry takes the file's away")


@pytest.mark.parametrize("key", ["name", "training.max_steps", "code.dir", "budget.limit", "capacity.wait"])
def test_capacity_entry_changes_no_key_of_what_is_trained(tmp_path: Path, key: str) -> None:
    """A candidate trains the same job, from the same code, for the same money."""
    fault = faults(tmp_path, f"  - {{{key}: 1}}\n")[0]
    assert fault.message == f"`{key}` cannot differ between candidates"
    assert fault.key == f"capacity.try[0].{key}"


@pytest.mark.parametrize("key", ["any_of", "ordered"])
def test_capacity_is_named_for_the_key_of_a_similar_tool(tmp_path: Path, key: str) -> None:
    """SkyPilot's lists of candidates lead to `capacity.try`."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "  - {}\n" + f"tags: {{}}\n{key}: []\n")
    assert caught.value.faults[0].hint == "it is `capacity.try` here"


def test_capacity_entry_names_keys_and_no_section(tmp_path: Path) -> None:
    """A whole section would replace the file's other keys of it."""
    fault = faults(tmp_path, "  - {resources: {spot: true}}\n")[0]
    assert (fault.message, fault.key) == ("`resources` is a section", "capacity.try[0].resources")


@pytest.mark.parametrize("entry", ["{secrets: {A: env:B}}", "{secrets.A: env:B}", "{1: 3m}"])
def test_capacity_key_of_a_wrong_form_is_a_fault_alone(tmp_path: Path, entry: str) -> None:
    """The checks of the backend and the code folder, which follow, ask no candidate with the wrong key."""
    (tmp_path / "train.py").write_text("print(1)\n")
    file = tmp_path / "cloudtrain.yaml"
    file.write_text(f"{FILE}  - {{}}\n  - {entry}\n  - {{sagemaker.region: us-west-2, sagemaker.role: null}}\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(file, further=refused)
    messages = {fault.key: fault.message for fault in caught.value.faults}
    (wrong,) = (message for key, message in messages.items() if key.startswith("capacity.try[1]"))
    assert wrong.endswith("cannot differ between candidates")
    assert messages["capacity.try[2].sagemaker.role"] == "no execution role for the job"


@pytest.mark.parametrize("entry", ["{}", "{sagemaker.region: eu-west-1}", "{slurm.partition: gpu}"])
def test_capacity_names_no_candidate_twice(tmp_path: Path, entry: str) -> None:
    """A place without machines is not asked again in the same round; a block of another backend changes nothing."""
    (fault,) = faults(tmp_path, f"  - {{}}\n  - {{resources.spot: true}}\n  - {entry}\n")
    assert (fault.message, fault.key) == ("the same candidate as capacity.try[0]", "capacity.try[2]")


@pytest.mark.parametrize("key", ["capacity.wait", "capacity.limits.until", "limits.max_wait"])
def test_capacity_wait_of_no_time_is_refused(tmp_path: Path, key: str) -> None:
    """A wait of 0 s would end each try before the platform's answer."""
    load(tmp_path, "  - {}\n")
    with pytest.raises(ConfigError, match="expected more than 0"):
        configs.load(tmp_path / "cloudtrain.yaml", overrides=[f"{key}=0"])


def test_capacity_without_an_entry_shows_the_form(tmp_path: Path) -> None:
    """The hint has an example of the list."""
    load(tmp_path, "  - {}\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(tmp_path / "cloudtrain.yaml", overrides=["capacity.try=[]"])
    (fault,) = caught.value.faults
    assert fault.message.endswith("found an empty list")
    assert fault.hint.startswith("as in `try: [{}, ")
