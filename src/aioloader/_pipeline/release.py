"""Waiting for the end of an iteration, bounded, by whoever closes it."""

from aioloader._pipeline.cpu import beside
from aioloader._pipeline.guests import Guest
from aioloader._pipeline.home import GRACE, Home
from aioloader._warnings import warn


def wait_released(home: Home, guest: Guest) -> None:
    """Wait until ``guest`` has ended, and ``home`` if it was the last; bounded.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    if home.is_here():
        return
    if not guest.ended.wait(GRACE) or (home.is_left() and not home.closed.wait(GRACE)):
        _warn_stuck()
    elif home.is_left():
        home.join()
    if not guest.join():
        _warn_stuck()
    _raise_exit_errors(home, guest)


async def wait_released_async(home: Home, guest: Guest) -> None:
    """Wait as ``wait_released`` does, without blocking the loop.

    Raises:
        BaseException: What the dataset or its iterator raised when it was closed.
    """
    if home.is_foreign():
        return
    is_gone = await guest.ended.wait_async(GRACE)
    if not is_gone or (home.is_left() and not await home.closed.wait_async(GRACE)):
        _warn_stuck()
    if not await beside(guest.join):
        _warn_stuck()
    _raise_exit_errors(home, guest)


def _warn_stuck() -> None:
    warn(
        f"a DataLoader was closed, but code of its dataset or of its functions has not "
        f"returned for {GRACE:g} seconds; its thread is left behind",
        ResourceWarning,
    )


def _raise_exit_errors(home: Home, guest: Guest) -> None:
    """Raise what came up while closing, once."""
    for holder in (guest, home):
        error, holder.exit_error = holder.exit_error, None
        if error is not None:
            raise error
