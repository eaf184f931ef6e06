"""The meaning of Ray's errors for a loader, and the errors raised for them."""

from typing import Any, Literal

from aioloader._pipeline.batch_task import shorten
from aioloader._workers.ray.dispatcher import Seat, Ticket
from aioloader.errors import WorkerDiedError

# By name: in the order of Ray's own tree.
_DEATHS = ("RayActorError", "NodeDiedError", "OutOfMemoryError", "WorkerCrashedError")
_LOSSES = ("ObjectLostError",)


def meaning_of(error: BaseException | None) -> Literal["death", "loss", "other"]:
    """Classify one of Ray's errors: an actor died, a result was lost, or another."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names.intersection(_DEATHS):
        return "death"
    return "loss" if names.intersection(_LOSSES) else "other"


def died_with(ticket: Ticket, seat: Seat, error: BaseException) -> WorkerDiedError:
    """Return the error for a batch that is not retried."""
    task = ticket.task
    message = (
        f"DataLoader worker {_who(seat)} exited unexpectedly with batch {task.number} "
        f"in hand, sample indices {shorten(task.indices)}; it is not the first worker "
        f"that this batch has cost. Ray says: {error}"
    )
    pid = seat.begun.pid if seat.begun else None
    return _with_cause(
        WorkerDiedError(message, worker=seat.number, pid=pid, batch=task.number), error
    )


def died_too_early(seat: Seat, error: BaseException) -> WorkerDiedError:
    """Return the error for actors that die before they are ready."""
    message = (
        f"DataLoader worker {seat.number} died as a Ray actor before it started, and "
        "so did those before it. Is aioloader installed on every node? Ray says: "
        f"{error}"
    )
    return _with_cause(WorkerDiedError(message, worker=seat.number), error)


def waits_for_actor(ray: Any, seats: list[Seat], options: dict[str, Any]) -> str:
    """Return text that explains why no actor has a batch."""
    ready = sum(seat.begun is not None for seat in seats)
    if ready == len(seats):
        return f"waits for one of {ready} Ray actors to be free"
    free, total = ray.available_resources(), ray.cluster_resources()
    needs = {
        "CPU": options.get("num_cpus", 0),
        "GPU": options.get("num_gpus", 0),
        "memory": options.get("memory", 0),
        **options.get("resources", {}),
    }
    each = ", ".join(
        f"{amount:g} {name} ({free.get(name, 0):g} of {total.get(name, 0):g} free)"
        for name, amount in needs.items()
        if amount
    )
    return (
        f"waits for a Ray actor: {ready} of {len(seats)} are placed, the others wait "
        f"for room in the cluster; each needs {each}"
    )


def _who(seat: Seat) -> str:
    begun = seat.begun
    return f"(pid(s) {begun.pid} on {begun.host})" if begun else str(seat.number)


def _with_cause(error: WorkerDiedError, cause: BaseException) -> WorkerDiedError:
    error.__cause__ = cause.with_traceback(None)
    return error
