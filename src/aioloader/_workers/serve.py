"""The program of the template process: import torch once, fork when asked.

One nursery is forked ahead, so that an order does not have to wait for a fork.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence

from aioloader._transport.channel import Channel
from aioloader._workers import nursery
from aioloader._workers.seeds import seed_worker
from aioloader._workers.template import READY

# Seconds without an order after which the next nursery is forked ahead: not while the
# workers of the latest one need the processor.
_QUIET_SECONDS = 0.2


def serve(descriptor: int) -> None:
    """Be the template: have a nursery for each order, until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the nurseries
    _read_nothing()
    if nursery.number_of_threads() > 1:
        sys.stderr.write("aioloader: an import has started threads in the template\n")
        os._exit(1)
    seed_worker(0, 0)  # its first call takes 2 ms longer than the next
    gc.collect()
    gc.freeze()
    os.set_inheritable(descriptor, False)  # noqa: FBT003  (its only argument)
    with contextlib.suppress(EOFError, OSError):
        _Template(Channel.adopt(descriptor)).serve()
    os._exit(0)


class _Template:
    """Orders in, nurseries out.

    Args:
        channel: Where orders come from.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._spare: Channel | None = None

    def serve(self) -> None:
        """Follow orders.

        Raises:
            EOFError: If the loader's process is gone.
        """
        self._spare = self._fork()
        self._channel.send(READY)
        while True:
            if self._spare is None and not self._channel.wait(_QUIET_SECONDS):
                self._spare = self._fork()
            received = self._channel.receive()
            assert received is not None
            order, descriptors = received
            self._hand_over(order, descriptors)
            for copy in descriptors:
                os.close(copy)

    def _hand_over(self, order: bytes, descriptors: Sequence[int]) -> None:
        spare, self._spare = self._spare or self._fork(descriptors), None
        try:
            spare.send(order, descriptors)
        except OSError:  # somebody has killed it
            spare.close()
            spare = self._fork(descriptors)
            spare.send(order, descriptors)
        spare.close()

    def _fork(self, passing: Sequence[int] = ()) -> Channel:
        """Fork a nursery, and return where it waits for its order.

        Args:
            passing: Descriptors that it must not inherit: it will be sent them, and a
                second copy would hide its end from the loader.
        """
        ours, theirs = Channel.pair()
        if os.fork() == 0:
            for copy in passing:
                os.close(copy)
            ours.close()
            self._channel.close()
            try:
                received = theirs.receive()
            except EOFError:  # the template is gone
                os._exit(0)
            theirs.close()
            assert received is not None
            nursery.run(*received)
        theirs.close()
        return ours


def _read_nothing() -> None:
    """Keep the terminal for the loader's process."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
