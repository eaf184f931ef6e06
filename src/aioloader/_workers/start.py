"""How workers come to be: by the template, by ``multiprocessing``, by inheritance."""

import multiprocessing
from typing import Any

from aioloader._transport.locked import Locker
from aioloader._warnings import warn
from aioloader._workers.contexts import ContextLauncher
from aioloader._workers.launch import Launcher, NurseryLauncher
from aioloader._workers.pool import ProcessPool
from aioloader._workers.shipment import (
    OnlyInheritedError,
    Shipment,
    Surroundings,
    ship,
)


def start_pool(
    shipment: Shipment,
    surroundings: Surroundings,
    context: Any,
    locker: Locker | None = None,
) -> ProcessPool:
    """Ship, and start the workers; they come up in the background.

    Args:
        shipment: What they are to do.
        surroundings: Of this process when the iteration began.
        context: A ``multiprocessing`` context that the user asked for, or None.
        locker: Page-locks what they write batches into, or None.

    Raises:
        WorkerStartError: If it cannot be pickled, or no worker can be started.
    """
    if context is None and forks_by_default() and shipment.is_plain():
        context = multiprocessing.get_context("fork")
    is_fork = context is not None and context.get_start_method() == "fork"
    payload: Shipment | int = shipment
    if not is_fork:
        try:
            payload = ship(shipment)
        except OnlyInheritedError as reason:
            warn(
                "the dataset holds what only a forked child can share "
                f"({reason}); its workers are forked from this process, threads, locks "
                "and all; multiprocessing_context='fork' says that this is meant"
            )
            context = multiprocessing.get_context("fork")

    def launch(ends: list[int]) -> Launcher:
        if context is not None:
            return ContextLauncher(context, payload, surroundings, ends)
        assert isinstance(payload, int)
        return NurseryLauncher(surroundings, payload, ends)

    return ProcessPool(shipment, launch, locker)


def forks_by_default() -> bool:
    """Tell whether processes of this interpreter are forked unless told otherwise."""
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:  # nobody has fixed it yet, and neither do we
        method = multiprocessing.get_all_start_methods()[0]
    return method == "fork"
