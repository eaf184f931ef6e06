"""Every async test runs on asyncio and on uvloop; no test may block or leak."""

import asyncio
import gc
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import obstore
import pytest
import torch
import uvloop
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings
from obstore.store import MemoryStore

from aioloader import warm_up
from aioloader._order.epoch import UNDER_WAY
from aioloader.testing import Resources

settings.register_profile(
    "aioloader",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# ``make fuzz`` uses it: ten times as many examples, different ones each time.
settings.register_profile(
    "fuzz", settings.get_profile("aioloader"), max_examples=400, derandomize=False
)
settings.load_profile("aioloader")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loop matrix."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("one_loop"):
        del loops["asyncio"]
    return loops


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Start the process-wide runtimes once, so that tests can count threads."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore SIGINT; the tests of Ctrl-C need it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    store = MemoryStore()
    obstore.put(store, "key", b"")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_read(store))
    warm_up()  # the fork server
    multiprocessing.get_all_start_methods()  # 3.14 tries to write a temporary file


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep the objects of earlier tests out of later garbage collections."""
    gc.collect()
    gc.freeze()


async def _read(store: MemoryStore) -> None:
    await obstore.get_async(store, "key")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread, a descriptor or a child process."""
    before = Resources.now()
    yield
    left, _ = UNDER_WAY.get(), UNDER_WAY.set(None)
    assert left is None, "an epoch is under way after the test"
    before.assert_unchanged()


@pytest.fixture(autouse=True)
def nothing_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which the package blocks an event loop."""
    if request.node.get_closest_marker("blocking"):
        yield
        return
    modules = ["aioloader.testing"]
    with blockbuster_ctx("aioloader", excluded_modules=modules) as detector:
        receive = detector.functions["socket.socket.recvmsg"]
        receive.deactivate()
        receive.can_block_predicate = _returns_at_once
        receive.activate()
        # asyncpg looks for the local password file at each connection.
        stat = detector.functions["os.stat"]
        stat.can_block_in("asyncpg/connect_utils.py", "_read_password_file")
        # tqdm's lock, where processes are not forked by default.
        write = detector.functions["os.write"]
        write.can_block_in("multiprocessing/resource_tracker.py", "_write")
        yield


def _returns_at_once(end: socket.socket, *arguments: Any) -> bool:
    """Tell whether a ``recvmsg`` does not wait."""
    flags = arguments[2] if len(arguments) > 2 else 0
    return end.gettimeout() == 0 or bool(flags & socket.MSG_DONTWAIT)


@pytest.fixture
def fork_is_default() -> Iterator[None]:
    """Make fork the default start method, as before Python 3.14."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start each test from the same random state."""
    torch.default_generator.manual_seed(0)  # seeding all devices takes two milliseconds
