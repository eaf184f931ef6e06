"""Clusters that a loader starts for itself, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers.ray_cluster import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow
pytest.importorskip("ray")


def ran(*command: str) -> Any:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.fuzz
def test_the_example() -> None:
    """Without a main guard; its cluster ends with it."""
    done = ran(str(EXAMPLES / "ray_workers.py"))
    lines = done.stdout.splitlines()
    assert lines[-1] == "the same images: True", done.stderr
    assert lines[0].startswith("epoch 0: 1797 images by worker ")
    assert lines[1] == "epoch 0: 1797 images by this process"


SCRIPT = """
import gc, threading
import ray
from aioloader import DataLoader, RayWorkers

one = DataLoader(range(9), workers=RayWorkers(1, resources={"loader": 1}))
two = DataLoader(range(9), workers=RayWorkers(1), persistent_workers=True)
assert not ray.is_initialized()
assert len(list(one)) == len(list(two)) == 9
del one
gc.collect()
assert ray.is_initialized() and len(list(two)) == 9
del two
while ours := [one for one in threading.enumerate() if "aioloader" in one.name]:
    gc.collect()
    ours[0].join(1)
assert not ray.is_initialized()

left = iter(DataLoader(range(99), workers=RayWorkers(1)))
print(next(left))
"""


@pytest.mark.fuzz
def test_a_cluster_of_ours_ends_with_its_last_user() -> None:
    """Another one is started when needed; an exit in the middle is a quiet one."""
    done = ran("-c", SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor([0])\n", "")
