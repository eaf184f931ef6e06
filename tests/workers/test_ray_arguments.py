"""Arguments of ``RayWorkers``, and clusters that a loader starts."""

import os
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, RayWorkers
from aioloader.errors import UNRELEASED
from python_process import python
from samples import AsyncStream
from workers.ray_cluster import ENVIRONMENT
from working import Numbers

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("ray")


def make(dataset: Any, actors: int = 1, **options: Any) -> Any:
    return DataLoader(dataset, workers=RayWorkers(actors), **options)


def test_the_number_of_actors_is_given_once() -> None:
    """Or twice the same."""
    assert make(Numbers(), actors=3).num_workers == 3
    assert make(Numbers(), actors=3, num_workers=3).num_workers == 3
    with pytest.raises(ValueError, match="leave num_workers out"):
        make(Numbers(), actors=3, num_workers=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RayWorkers(0)
    with pytest.raises(ValueError, match="must not be negative"):
        RayWorkers(1, resources={"CPU": -1})


def test_arguments_that_actors_cannot_have_raise() -> None:
    with pytest.raises(ValueError, match="the loader reads an iterable once"):
        make(AsyncStream(), fetch="workers")
    with pytest.raises(ValueError, match="only be used with workers='process'"):
        make(Numbers(), multiprocessing_context="fork")
    with pytest.raises(ValueError, match="Ray Client"):
        RayWorkers(1, address="ray://localhost:10001")


def test_resources_become_options_of_the_actors() -> None:
    """By the names of ``ray.cluster_resources()``."""
    workers = RayWorkers(2, resources={"CPU": 2, "memory": 1 << 20, "loader": 0.5})
    options = workers.options()
    assert (options["num_cpus"], options["memory"]) == (2, 1 << 20)
    assert options["resources"] == {"loader": 0.5}
    assert "CPU': 2" in repr(workers)


def ran(*command: str) -> Any:
    """Run Python in a process of its own."""
    return python(*command, env={**os.environ, **ENVIRONMENT})


@pytest.mark.slow
def test_a_missing_ray_is_named_with_its_extra() -> None:
    """Importing the package does not need Ray."""
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "import aioloader\n"
        "try: aioloader.RayWorkers(1)\n"
        "except ImportError as error: print(error)\n"
    )
    wanted = f'RayWorkers needs Ray: pip install "aioloader[ray]{UNRELEASED}"\n'
    assert ran("-c", script).stdout == wanted


@pytest.mark.slow
def test_an_address_without_a_cluster_is_an_error() -> None:
    """At once, where Ray tries for minutes."""
    script = (
        "import os, aioloader\n"
        "def attempt(address):\n"
        "    try: list(aioloader.DataLoader(range(3), workers=address))\n"
        "    except (OSError, ValueError) as error: print(error)\n"
        "if __name__ == '__main__':\n"
        "    attempt(aioloader.RayWorkers(1, address='127.0.0.1:1'))\n"
        "    os.environ['RAY_ADDRESS'] = 'ray://127.0.0.1:1'\n"
        "    attempt(aioloader.RayWorkers(1))\n"
    )
    lines = ran("-c", script).stdout.splitlines()
    assert lines[0].startswith("no Ray cluster at '127.0.0.1:1'")
    assert lines[1].startswith("RAY_ADDRESS='ray://127.0.0.1:1' is a Ray Client")


@pytest.mark.slow
@pytest.mark.fuzz
def test_the_example_runs_without_a_main_guard() -> None:
    """Its cluster ends with it."""
    done = ran(str(EXAMPLES / "ray_workers.py"))
    lines = done.stdout.splitlines()
    assert lines[-1] == "the same images: True", done.stderr
    assert lines[0].startswith("epoch 0: 1797 images by worker ")
    assert lines[1] == "epoch 0: 1797 images by this process"


SCRIPT = """
import gc, threading
import ray
from aioloader import DataLoader, RayWorkers

first = DataLoader(range(9), workers=RayWorkers(1, resources={"loader": 1}))
second = DataLoader(range(9), workers=RayWorkers(1), persistent_workers=True)
assert not ray.is_initialized()
assert len(list(first)) == len(list(second)) == 9
del first
gc.collect()
assert ray.is_initialized() and len(list(second)) == 9
del second
while ours := [t for t in threading.enumerate() if "aioloader" in t.name]:
    gc.collect()
    ours[0].join(1)
assert not ray.is_initialized()

left = iter(DataLoader(range(99), workers=RayWorkers(1)))
print(next(left))
"""


@pytest.mark.slow
@pytest.mark.fuzz
def test_a_started_cluster_ends_with_its_last_loader() -> None:
    """A later loader starts another; exiting during an iteration is silent."""
    done = ran("-c", SCRIPT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor([0])\n", "")
