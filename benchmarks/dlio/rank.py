"""One rank of DLIO: its own ``main``, on a machine with fewer cores than ranks.

DLIO imports TensorFlow for a profiler that no workload here uses; an empty module saves
300 MB of packages and the seconds that their import takes. MPICH spins at a barrier:
ranks stand for accelerators, and must not take their workers' cores while they wait.
"""

import sys
import time
import types

sys.modules["tensorflow"] = types.ModuleType("tensorflow")

from dlio_benchmark.main import main  # noqa: E402
from dlio_benchmark.utils.utility import DLIOMPI  # noqa: E402


class SleepingRanks:
    """An MPI communicator whose ranks sleep at a barrier."""

    def __init__(self, ranks: object) -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> object:
        return getattr(self._ranks, name)

    def barrier(self) -> None:
        """Wait for the other ranks, polling every 0.1 ms."""
        request = self._ranks.Ibarrier()
        while not request.Test():
            time.sleep(1e-4)


if __name__ == "__main__":
    mpi = DLIOMPI.get_instance()
    mpi.initialize()
    mpi.mpi_world = SleepingRanks(mpi.mpi_world)
    main()
