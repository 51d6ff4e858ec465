"""The order of the tests for several workers: long tests first, so that no worker is left alone with one at the end."""

import itertools
from pathlib import Path

import pytest

SLOWEST = Path(__file__).with_name("slowest.txt")  # lines `SECONDS PATH::TEST` of the longest case, as measured
SLOW_S = 2.0  # for a slow test without a line
TOGETHER = {"entrypoints", "test_azureml_check.py"}  # folders and files whose slow tests share runs: a single worker


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
