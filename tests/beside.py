"""Run what would block the test's loop in a thread of its own."""

from functools import partial

from aioloader._base.cpu_threads import NEW_THREAD
from aioloader._base.outlast import in_thread

# Returns what a function returns, while the loop goes on.
beside = partial(in_thread, executor=NEW_THREAD)
