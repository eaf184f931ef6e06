"""A small Ray cluster on this machine, for the tests of a module."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from aioloader.testing import Resources
from faulty import parent_of

# Its workers have the niceness of the processes that run other tests.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster with four logical CPUs; return the module ``ray``."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        ray = pytest.importorskip("ray")
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Any) -> Iterator[None]:
    """Fail a test that leaves an actor, or anything that is not Ray's.

    It replaces the fixture of all tests, for Ray's threads, sockets and processes
    come and go while a cluster is up.
    """
    before = _ours()
    yield
    for _ in range(4):
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("aioloader"):
            thread.join(10)
    assert _ours() - before == set()
    assert _actors(cluster) == []


def _ours() -> set[str]:
    """Return this process's threads, files and children that are not Ray's."""
    now = Resources.now()
    mine = [pid for pid in now.children if _is_own(pid)]
    return {
        *(t.name for t in now.threads if t.name.startswith("aioloader")),
        *(target for _, target in now.descriptors if "aioloader" in target),
        *(target for _, target in now.descriptors if target.startswith("pipe:")),
        *map(str, mine),
    }


def _is_own(pid: int) -> bool:
    """Return whether this process started another; Ray's workers come and go."""
    try:
        return parent_of(pid) == os.getpid()
    except FileNotFoundError:
        return False


def _actors(ray: Any) -> list[Any]:
    """Return the actors that are not dead."""
    table = ray._private.state.actors()
    return [actor for actor in table.values() if actor["State"] != "DEAD"]


def begun(loader: Any) -> int:
    """Return how many of the actors that a loader keeps have started."""
    kept = loader._live.pools._kept
    seats = kept[0]._seats if kept else ()
    return sum(seat.begun is not None for seat in seats)


def wait_for(fifo: Path) -> None:
    """Block until another process opens the other end of a FIFO."""
    with fifo.open("rb"):
        pass
