"""Which of these tests are left to ``make fuzz``."""

import pytest

_ON_ONE_LOOP = ("test_raised_stops", "test_without_collector", "test_policies")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark repeated combinations as fuzz: uvloop with processes, or in some files."""
    for item in items:
        path = item.path.as_posix()
        is_repeated = "processes" in item.name or item.path.stem in _ON_ONE_LOOP
        if "tests/core/" in path and "uvloop" in item.name and is_repeated:
            item.add_marker(pytest.mark.fuzz)
