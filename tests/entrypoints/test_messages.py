"""The messages between the launcher and the nodes: their JSON form, and what an older or newer version may send."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cloudtrain.entrypoints import contract
from cloudtrain.entrypoints.contract import (
    AgentSpec,
    AgentState,
    CheckpointSettings,
    ContainerOrder,
    ContractError,
    ExitCodes,
    ExitReport,
    FetchedInput,
    JobSpec,
    KeyVaultSecrets,
    NodeStatus,
    NoticeChannel,
    NoticeSettings,
    ParameterSecrets,
    Places,
    RunSpec,
    SecretManagerSecrets,
    SecretSource,
    SetupSpec,
    SyncedFolder,
)

JOB = JobSpec(
    job="digits-x2345",
    nodes=2,
    node_counts=(1, 2),
    run=RunSpec("script", "train.py", ("--lr", "1"), keep=("out",), progress={"step": "s"}, on_stop="save"),
    checkpoint=CheckpointSettings(mirror="gs://b/x", all_damaged="start-over"),
    setup=SetupSpec("requirements.txt", ("true",)),
    notices=NoticeSettings((NoticeChannel("w", "webhook", "HOOK", on=("failed",)),), "vertex", 5, (50, 90)),
)
ORDER = ContainerOrder(
    job=JOB,
    environment={"A": "é"},
    deadline_s=50,
    max_duration_s=60,
    limit_reason="budget",
    grace_s=5,
    join_timeout_s=9,
    places=Places(own="own", bundle="b", checkpoints="c", output="o", inputs={"train": "in"}),
    bundle_sha256="0" * 64,
    exit_codes=ExitCodes(1, 143, ("lost",)),
    fetched={"train": FetchedInput("gs://b/train")},
    carried=(SyncedFolder("c", "gs://b/c", back=True),),
)
AGENT = AgentSpec(
    job=JOB,
    node=1,
    address="10.0.0.2",
    root="/r",
    bundle="/b",
    sha256="0",
    python="python3",
    max_duration_s=60,
    deadline_s=50,
    limit_reason="budget",
    grace_s=5,
    workdir="/w",
    head=("10.0.0.1", 20_000),
    mounts=(("/data", True),),
)
STATUS = NodeStatus(AgentState(7, "stamp", gone_s={"1": 2.0}), ExitReport("failed", "error", {"rank": 0}), asked="now")


def sent(message: contract.Message) -> Any:
    """Return the message's JSON as another machine reads it."""
    return json.loads(json.dumps(message.dump()))


@pytest.mark.parametrize("message", [JOB, ORDER, AGENT, STATUS], ids=lambda each: type(each).__name__)
def test_message_survives_json(message: contract.Message) -> None:
    """Every field comes back with its value, nested messages too; only the pairs of `mounts` become lists."""
    found = type(message).load(sent(message))
    if isinstance(found, AgentSpec):
        found = replace(found, mounts=tuple((path, is_read_only) for path, is_read_only in found.mounts))
    assert found == message


@pytest.mark.parametrize(
    "source",
    [
        ParameterSecrets("r", "/p", ("A",)),
        KeyVaultSecrets(("A",), "user", "https://v"),
        SecretManagerSecrets(("A",), "s"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_secret_source_is_known_by_its_keys(source: SecretSource) -> None:
    """An order names the secrets of one of three stores."""
    assert ContainerOrder.load(sent(replace(ORDER, secrets=source))).secrets == source


def test_order_holds_the_job_spec_beside_its_own_keys() -> None:
    """The order's JSON is one flat object: the job spec's keys and the order's own."""
    data = sent(ORDER)
    assert (data["job"], data["run"]["target"], data["places"]["own"]) == ("digits-x2345", "train.py", "own")
    assert "token" not in data


def test_unknown_keys_and_nulls_are_accepted() -> None:
    """A newer launcher may send more keys; null stands for the default."""
    assert JobSpec.load({"job": "a", "max_restarts": None, "new": 1}) == JobSpec(job="a")


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (AgentState, {"stamp": "s"}, "AgentState lacks `pid`"),
        (AgentSpec, {}, "AgentSpec lacks `node`"),
        (JobSpec, [], "JobSpec: an object is expected, not list"),
        (JobSpec, {"run": 5}, "RunSpec: an object is expected, not int"),
        (ExitReport, {"state": "failed", "version": 2}, "ExitReport has version 2; this cloudtrain reads 1"),
    ],
)
def test_unreadable_message_is_named(kind: type[contract.Message], data: Any, words: str) -> None:
    """The error names the message and the fault."""
    with pytest.raises(ContractError, match=words):
        kind.load(data)
