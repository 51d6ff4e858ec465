"""The order of the tests for several workers."""

from __future__ import annotations

import pytest

import order


def test_parts_are_equal_and_begin_with_the_slow_tests(request: pytest.FixtureRequest) -> None:
    """No test is lost; each worker's part begins with its share of the slow tests."""
    items = request.session.items
    parts = order.in_shares(items, 1)
    assert sorted(item.nodeid for item in parts) == sorted(item.nodeid for item in items)
    is_slow = [item.get_closest_marker("slow") is not None for item in parts]
    assert is_slow == sorted(is_slow, reverse=True)
