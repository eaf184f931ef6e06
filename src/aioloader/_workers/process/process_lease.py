"""Worker processes as one iteration sees them: who is stuck, and what is to be read."""

from collections.abc import Sequence

from aioloader._pipeline.batch_task import BatchTask
from aioloader._workers.lease import Lease
from aioloader._workers.process.fork_launcher import advice_on_forks
from aioloader._workers.process.messages import STAGES
from aioloader._workers.process.pool import ProcessPool
from aioloader._workers.process.stacks import stack_of


class ProcessLease(Lease[ProcessPool]):
    """Worker processes, as one iteration sees them."""

    @property
    def pump(self) -> "ProcessLease":
        """What the consumer tasks while it waits."""
        return self

    def wait_up(self) -> None:
        """Wait until a worker process runs, which takes seconds where one is spawned.

        Raises:
            WorkerStartError: If none does within a minute.
        """
        if self._pool is not None:
            self._pool.wait_up()

    def descriptors(self) -> Sequence[int]:
        """Return what becomes readable when ``collect`` has something to do."""
        return () if self._pool is None else self._pool.descriptors()

    def collect(self) -> None:
        """Deliver what workers have sent."""
        if self._pool is not None:
            self._pool.collect()

    def explain(self, task: BatchTask) -> str:
        """Say which worker has ``task``, since when, and where it is stuck."""
        holders = self._pool.holders(task) if self._pool is not None else []
        if not holders:
            return "waits for a worker process that is free"
        parts = []
        for number, pid, held in holders:
            parts.append(
                f"has been in stage {STAGES[held.stage]!r} of worker {number} (pid "
                f"{pid}) for {held.seconds:.2f} s"
            )
            if pid is not None and self._pool is not None:
                parts.append(stack_of(pid, self._pool.stack))
        if self._pool is not None and self._pool.is_forked:
            parts += advice_on_forks()
        return "\n".join(parts)

    def restart(self, task: BatchTask) -> bool:
        """Kill the worker that has ``task`` in hand; it is replaced, and made again."""
        holders = self._pool.holders(task) if self._pool is not None else []
        for number, _, _ in holders:
            assert self._pool is not None
            self._pool.kill(number)
        return bool(holders)
