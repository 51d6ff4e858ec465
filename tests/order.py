"""The order of the tests for several workers, and which cases are left to the soak.

Long tests come first, so that no worker is left alone with one at the end.
"""

import functools
import itertools
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SLOWEST = Path(__file__).with_name("slowest.txt")  # lines `SECONDS PATH::TEST` of the longest case, as measured
SAMPLES = Path(__file__).with_name("samples.txt")
SLOW_S = 2.0  # for a slow test without a line
TOGETHER = {"entrypoints", "test_azureml_check.py"}  # folders and files whose slow tests share runs: a single worker


@functools.cache
def samples() -> dict[str, list[str]]:
    """Return the lines of samples.txt: tests below tests/, and patterns of the cases that `make test` runs."""
    return {test: cases for test, *cases in map(str.split, SAMPLES.read_text().splitlines())}


def is_further(nodeid: str) -> bool:
    """Return whether the test is a case of samples.txt that is left to the soak."""
    test, _, case = nodeid.removeprefix("tests/").partition("[")
    cases = samples().get(test)
    return cases is not None and not any(fnmatchcase(case.removesuffix("]"), pattern) for pattern in cases)


def in_shares(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in equal parts, as pytest-xdist will cut the list: a part for each worker, slow tests first.

    Idle workers then take tests from the ends of the parts (`--dist worksteal`). The slow tests of a file stay together
    if they share runs of the trainer or of an SDK.
    """
    known = {name: float(cost_s) for cost_s, name in map(str.split, SLOWEST.read_text().splitlines())}
    slow = [item for item in items if item.get_closest_marker("slow")]
    costs = {item: known.get(item.nodeid.partition("[")[0], SLOW_S) for item in slow}
    units: dict[str, list[pytest.Item]] = {}
    for item in slow:
        is_shared = TOGETHER & {item.path.parent.name, item.path.name}
        units.setdefault(str(item.path) if is_shared else item.nodeid, []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for unit in sorted(units.values(), key=lambda unit: -sum(costs[item] for item in unit)):
        min(shares, key=lambda share: sum(costs[item] for item in share)).extend(unit)
    quick = iter([item for item in items if item not in costs])
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares, 1):
        room = len(items) * number // workers - len(ordered) - len(share)
        ordered += [*share, *itertools.islice(quick, max(0, room))]
    return [*ordered, *quick]
