"""The tests on a device, with the fake accelerator: each file in its own process.

There the fake one is the current accelerator, and torch pins memory for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from device import fake_accelerator

HERE = Path(__file__).parent
PARTS: list[Any] = [
    ("not fuzz", "test_device.py", "test_users.py"),
    ("not fuzz", "test_races.py"),
    pytest.param(("fuzz", "test_races.py"), marks=pytest.mark.fuzz),
]
IN_CI = bool(os.environ.get("CI"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(fake_accelerator.missing()) and not IN_CI,
        reason=fake_accelerator.missing(),
    ),
]


@pytest.mark.parametrize("part", PARTS, ids=" ".join)
def test_device_tests_pass_on_the_fake_accelerator(part: tuple[str, ...]) -> None:
    """Those that are skipped are about CUDA's own features."""
    which, *names = part
    options = ["-q", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(HERE / name for name in names)],
        env=os.environ | {"AIOLOADER_TEST_DEVICE": "fake", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.fuzz
def test_the_script_for_a_gpu_runs_on_the_fake_one(tmp_path: Path) -> None:
    """To its end; it prints its figures."""
    script, figures = (
        HERE.parents[1] / "tools" / "check_gpu.py",
        tmp_path / "figures.json",
    )
    done = subprocess.run(
        [sys.executable, script, "--dry", "--workers", "2", "--json", figures],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    content = json.loads(figures.read_text())
    assert content["machine"]["device"] == "fake:0"
    assert "5 passed" in content["tests"]["summary"]
    feeds = [row["feed"] for row in content["figures"] if row["megabytes"] == 4]
    assert feeds == ["bare copies", "aioloader", "torch, pin_memory + non_blocking"]
    assert all(row["gb_per_second"] > 0 for row in content["figures"])
    assert "of limit" in done.stdout
