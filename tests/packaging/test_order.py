"""The order of the tests for several workers."""

import runpy
from pathlib import Path

import pytest

import order


def test_parts_are_equal_and_begin_with_the_slow_tests(request: pytest.FixtureRequest) -> None:
    """No test is lost; each worker's part begins with its share of the slow tests."""
    items = request.session.items
    parts = order.in_shares(items, 1)
    assert sorted(item.nodeid for item in parts) == sorted(item.nodeid for item in items)
    is_slow = [item.get_closest_marker("slow") is not None for item in parts]
    assert is_slow == sorted(is_slow, reverse=True)


def test_changed_files_choose_their_soak_tests() -> None:
    """A test file chooses itself, a backend's file the backend's cases; the nearest tests come first."""
    chosen = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "soak_of_changes.py"))["chosen"]
    tests = [
        "tests/backends/test_contract.py::test_budget[ssh]",
        "tests/backends/test_contract.py::test_budget[vertex]",
        "tests/backends/test_vertex_jobs.py::test_loss",
        "tests/docs/test_tutorials.py::test_page[vertex]",
        "tests/entrypoints/test_tensor.py::test_split[2]",
    ]
    assert chosen(["tests/entrypoints/test_tensor.py", "backends/vertex/jobs.py"], tests) == [tests[4], *tests[1:4]]
    assert chosen(["docs/tutorials/vertex.md"], tests) == [tests[3]]
    assert chosen(["entrypoints/trainer/tensor_slices.py", "README.md"], tests) == [tests[4]]


def test_every_recorded_test_exists() -> None:
    """A test that is gone or has another name leaves its line in slowest.txt or samples.txt behind."""
    root = order.SLOWEST.parents[1]
    names = [line.split()[1] for line in order.SLOWEST.read_text().splitlines()]
    names += [f"tests/{test}" for test in order.samples()]
    defined = [(name, f"\ndef {name.partition('::')[2]}(") for name in names]
    assert [name for name, text in defined if text not in (root / name.partition("::")[0]).read_text()] == []


def test_faults_of_the_list_fit_the_code() -> None:
    """The text of each fault occurs once in its file, and its tests exist: else `tools/faults.py` finds fewer."""
    root = order.SLOWEST.parents[1]
    faults = runpy.run_path(str(root / "tools" / "faults.py"))["FAULTS"]
    assert [fault.capability for fault in faults if (root / fault.file).read_text().count(fault.old) != 1] == []
    named = [test.split("[")[0].split("::") for fault in faults for test in fault.tests.split()]
    assert [name for path, name in named if f"def {name}(" not in (root / "tests" / path).read_text()] == []
