"""How workers start: forked from this process or by the fork server, or spawned."""

import multiprocessing
from typing import Any

from aioloader._transport.slots import Locker
from aioloader._workers.lease import Servers, Tally
from aioloader._workers.process.fork_launcher import ForkLauncher
from aioloader._workers.process.pool import Launcher, ProcessPool
from aioloader._workers.process.server_launcher import ServerLauncher
from aioloader._workers.process.spawn import SpawnLauncher
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, ship


def start_method(context: Any, *, is_plain: bool) -> str:
    """Return the start method of workers, as named by ``multiprocessing``.

    Args:
        context: The user's context, or None.
        is_plain: Whether all user code is plain. Event loops and their clients do not
            survive a fork, so only an explicit context forks them.
    """
    if context is not None:
        return str(context.get_start_method())
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:  # not set yet; get_start_method() would set it
        method = multiprocessing.get_all_start_methods()[0]
    return "forkserver" if method == "fork" and not is_plain else method


def start_pool(
    spec: WorkerSpec,
    method: str,
    servers: Servers,
    locker: Locker | None,
    tally: Tally,
) -> ProcessPool:
    """Start the workers in the background.

    Args:
        spec: What they do.
        method: The result of ``start_method``.
        servers: The loader's supervisors of the fork server.
        locker: Page-locks the memory that workers write batches to, or None.
        tally: Counts the deaths of workers.

    Raises:
        WorkerStartError: If ``spec`` cannot be pickled or no worker can be started.
    """

    def launch(ends: list[int]) -> Launcher:
        if method == "fork":
            return ForkLauncher(spec, ends)
        surroundings, file = Surroundings(), ship(spec)
        if method == "spawn":
            return SpawnLauncher(surroundings, file, ends)
        return ServerLauncher(servers, surroundings, file, ends)

    return ProcessPool(spec, launch, locker, tally)
