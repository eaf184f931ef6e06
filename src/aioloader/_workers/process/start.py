"""How workers start: forked from this process, below the fork server, or spawned."""

import multiprocessing
from typing import Any

from aioloader._transport.slots import Locker
from aioloader._workers.process.fork_launcher import ForkLauncher
from aioloader._workers.process.pool import Launcher, ProcessPool, Tally
from aioloader._workers.process.server_launcher import ServerLauncher, Servers
from aioloader._workers.process.spawn import SpawnLauncher
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, ship


def start_method(context: Any, *, is_plain: bool) -> str:
    """Return how workers start, in the words of ``multiprocessing``.

    Args:
        context: The context that the user asked for, or None.
        is_plain: Whether nothing of the user's is async: event loops and their clients
            do not survive a fork, so only an explicit context forks them.
    """
    if context is not None:
        return str(context.get_start_method())
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:  # not fixed yet; to ask otherwise would fix it
        method = multiprocessing.get_all_start_methods()[0]
    return "forkserver" if method == "fork" and not is_plain else method


def start_pool(
    spec: WorkerSpec,
    method: str,
    servers: Servers,
    locker: Locker | None,
    tally: Tally,
) -> ProcessPool:
    """Start the workers; they come up in the background.

    Args:
        spec: What they do.
        method: What ``start_method`` returned.
        servers: The loader's supervisors below the fork server.
        locker: Page-locks what workers write batches into, or None.
        tally: Counts the deaths of workers.

    Raises:
        WorkerStartError: If it cannot be pickled, or no worker can be started.
    """

    def launch(ends: list[int]) -> Launcher:
        if method == "fork":
            return ForkLauncher(spec, ends)
        surroundings, file = Surroundings(), ship(spec)
        if method == "spawn":
            return SpawnLauncher(surroundings, file, ends)
        return ServerLauncher(servers, surroundings, file, ends)

    return ProcessPool(spec, launch, locker, tally)
