"""The messages between the launcher and the nodes: their JSON form, and what an older or newer version may send."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from cloudtrain.entrypoints.records import Record

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
    """Every field comes back with its value, nested messages too."""
    assert type(message).load(sent(message)) == message


@pytest.mark.parametrize(
    "source",
    [ParameterSecrets("r", "/p", ("A",)), KeyVaultSecrets(("A",), "u", "https://v"), SecretManagerSecrets(("A",), "s")],
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
        (JobSpec, [], "JobSpec expects an object, not list"),
        (JobSpec, {"run": 5}, "RunSpec expects an object, not int"),
        (ExitReport, {"state": "failed", "version": 2}, "ExitReport has version 2; this cloudtrain reads 1"),
    ],
)
def test_unreadable_message_is_named(kind: type[contract.Message], data: Any, words: str) -> None:
    """The error names the message and the fault."""
    with pytest.raises(ContractError, match=words):
        kind.load(data)


def test_misspelt_field_in_a_class_argument_is_refused() -> None:
    """A name in `optional` or `names` that is no field would change the form of the message in silence."""
    with pytest.raises(TypeError, match="Misspelt has no field kepe"):
        type("Misspelt", (contract.Message,), {"__annotations__": {"keep": int}}, optional="kepe")


@dataclass(frozen=True)
class Parts(Record, checks=True, optional="kind"):
    """A record with a field of each form."""

    count: int
    seconds: float = 0.0
    pair: tuple[str, int] | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    named: Mapping[str, SetupSpec] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    kind: Literal["a", "b"] = "a"
    more: Any = None


def test_record_survives_json() -> None:
    """Tuples, nested records and null come back as they were."""
    one = Parts(1)
    all_of_them = Parts(2, 0.5, ("a", 1), ((1, 2), ()), {"x": SetupSpec("r.txt", ("true",))}, ["n"], "b", {"y": [1]})
    for record in (one, all_of_them):
        assert Parts.load(json.loads(json.dumps(record.dump()))) == record
    assert "kind" not in one.dump()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": "1"}, "Parts has '1' as `count`"),
        ({"count": None}, "Parts lacks `count`"),
        ({"pair": ["a"]}, "Parts has 1 values in `pair`"),
        ({"rows": [[1], ["x"]]}, "Parts has 'x' as `rows`"),
        ({"named": {"x": 1}}, "SetupSpec expects an object, not int: 1"),
        ({"names": {}}, "Parts has {} as `names`"),
        ({"kind": "c"}, "Parts has 'c' as `kind`"),
    ],
)
def test_checked_record_refuses_another_type(change: dict[str, Any], words: str) -> None:
    """The error names the record, the key and the value."""
    with pytest.raises(ValueError, match=re.escape(words)):
        Parts.load({"count": 1, **change})
