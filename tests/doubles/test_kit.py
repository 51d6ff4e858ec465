"""The shared parts of the stand-ins: which calls a fault hits, and the refusal of misspelt faults and settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from doubles.aws.handle import Aws
from doubles.azure.handle import Azure
from doubles.google.handle import Google
from doubles.kit.faults import Fault, Faults


class OneKind(Fault):
    """A fault of a single kind."""

    KINDS = ("drop",)


@dataclass(frozen=True)
class Call:
    """A call to a stand-in."""

    names: tuple[str, ...] = ("jobs.list",)
    is_from_container: bool = False


def hits(calls: list[Call], operations: tuple[str, ...] = ("jobs.list",), **asked: Any) -> list[bool]:
    """Return for each call whether a fault hits it."""
    faults = Faults(OneKind)
    faults.add({"operations": list(operations), "kind": "drop", **asked})
    return [faults.take(call) is not None for call in calls]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, "xxxxxxx"),
        ({"count": 2}, "xx....."),
        ({"every": 3}, "..x..x."),
        ({"every": 3, "after": 1}, "...x..x"),
        ({"after": 2, "count": 1}, "..x...."),
    ],
)
def test_fault_hits_the_counted_calls(asked: dict[str, int], wanted: str) -> None:
    """A fault lets the first calls through, hits every n-th call, and ends after its count."""
    assert "".join("x" if is_hit else "." for is_hit in hits([Call()] * 7, **asked)) == wanted


def test_fault_names_operations_by_patterns() -> None:
    """The calls of all named operations count together; a call may have several names."""
    calls = [Call(), Call(("blob.get",)), Call(("list", "jobs:list")), Call(("jobs.put",))]
    assert hits(calls, ("jobs.*", "jobs:*")) == [True, False, True, True]
    assert hits(calls, ("jobs.*", "blob.get"), every=3) == [False, False, False, True]


def test_fault_spares_containers_by_default() -> None:
    """Calls from containers are hit only on request."""
    calls = [Call(is_from_container=True), Call()]
    assert hits(calls) == [False, True]
    assert hits(calls, containers=True) == [True, True]


@pytest.mark.parametrize("name", ["aws", "azure", "google"])
def test_misspelt_control_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    """A misspelt fault, field, setting or job is an error: else a test could pass without its fault."""
    double: Aws | Azure | Google = request.getfixturevalue(name)
    wrongs: list[tuple[str, Callable[[], Any]]] = [
        ("a fault has", lambda: double.fault("*", "nonsense")),
        ("a fault has", lambda: double.fault("*", "drop", often=2)),
        ("a fault has", lambda: double.fault("*", "drop", hits=2)),
        ("unknown settings", lambda: double.settings(queue_s=1)),
        ("KeyError", lambda: double.end("nothing")),
    ]
    for message, wrong in wrongs:
        with pytest.raises(ValueError, match=message):
            wrong()


def test_settings_have_choices(azure: Azure) -> None:
    """An unknown choice is refused."""
    with pytest.raises(ValueError, match="is one of"):
        azure.settings(restart_logs="other")
