"""Waiting for the end of an iteration, bounded, by whoever closes it."""

from aioloader._observe.warnings import warn
from aioloader._pipeline.cpu import beside
from aioloader._pipeline.host import GRACE, Host
from aioloader._pipeline.hosted import Hosted


def wait_released(host: Host, hosted: Hosted) -> None:
    """Wait until ``hosted`` has ended, and ``host`` if it was the last; bounded.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    if host.is_here():
        return
    if not hosted.ended.wait(GRACE) or (host.is_left() and not host.closed.wait(GRACE)):
        _warn_stuck()
    elif host.is_left():
        host.join()
    if not hosted.join():
        _warn_stuck()
    _raise_exit_errors(host, hosted)


async def wait_released_async(host: Host, hosted: Hosted) -> None:
    """Wait as ``wait_released`` does, without blocking the loop.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    if host.is_foreign():
        return
    is_gone = await hosted.ended.wait_async(GRACE)
    if not is_gone or (host.is_left() and not await host.closed.wait_async(GRACE)):
        _warn_stuck()
    if not await beside(hosted.join):
        _warn_stuck()
    _raise_exit_errors(host, hosted)


def _warn_stuck() -> None:
    warn(
        f"a DataLoader was closed, but code of its dataset or of its functions has not "
        f"returned for {GRACE:g} seconds; its thread is left behind",
        ResourceWarning,
    )


def _raise_exit_errors(host: Host, hosted: Hosted) -> None:
    """Raise what came up while closing, once."""
    for holder in (hosted, host):
        error, holder.exit_error = holder.exit_error, None
        if error is not None:
            raise error
