"""How workers start: forked from this process or by the fork server, or spawned."""

from typing import TYPE_CHECKING

from aioloader._transport.slots import Locker
from aioloader._workers.kept import Servers, Tally
from aioloader._workers.process.pool import ProcessPool
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, ship

if TYPE_CHECKING:
    from aioloader._workers.process.pool import Launcher


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
        method: Its name in ``multiprocessing``.
        servers: The loader's supervisors of the fork server.
        locker: Page-locks the memory that workers write batches to, or None.
        tally: Counts the deaths of workers.

    Raises:
        WorkerStartError: If ``spec`` cannot be pickled or no worker can be started.
    """

    def launch(ends: list[int]) -> "Launcher":
        if method == "fork":
            from aioloader._workers.process.fork_launcher import ForkLauncher

            return ForkLauncher(spec, ends)
        surroundings, file = Surroundings(), ship(spec)
        if method == "spawn":
            from aioloader._workers.process.spawn import SpawnLauncher

            return SpawnLauncher(surroundings, file, ends)
        from aioloader._workers.process.server_launcher import ServerLauncher

        return ServerLauncher(servers, surroundings, file, ends)

    return ProcessPool(spec, launch, locker, tally)
