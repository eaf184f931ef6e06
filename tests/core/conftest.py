"""Which of these tests are left to ``make fuzz``."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave slow combinations that repeat others: processes beside uvloop."""
    for item in items:
        is_ours = "tests/core/" in item.path.as_posix()
        if is_ours and "processes" in item.name and "uvloop" in item.name:
            item.add_marker(pytest.mark.fuzz)
