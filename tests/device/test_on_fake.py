"""The tests on a device, on the fake accelerator: each file in a process of its own.

A process that has begun it has another current accelerator, and torch pins for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from device import fake_accelerator

HERE = Path(__file__).parent
PARTS = [["test_device.py", "test_users.py"], ["test_races.py"]]
IN_CI = bool(os.environ.get("CI"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(fake_accelerator.missing()) and not IN_CI,
        reason=fake_accelerator.missing(),
    ),
]


@pytest.mark.parametrize("names", PARTS, ids=" ".join)
def test_on_fake(names: list[str]) -> None:
    """All pass; what is skipped is about CUDA's own."""
    files = [HERE / name for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "AIOLOADER_TEST_DEVICE": "fake"},
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
