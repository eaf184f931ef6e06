"""The limit for worker processes: fork, persistent shared memory, a byte per batch.

No loader: each worker fills its few slots in turn, announces each by one byte through a
pipe, and gets it back the same way. Only the work itself remains.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from layouts import Case, Views

_ALIGNMENT = 4096


def share(layout: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Views:
    """Return tensors over memory that forked children share."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    descriptor = os.memfd_create("slot")
    os.ftruncate(descriptor, starts[-1])
    memory = mmap.mmap(descriptor, starts[-1])
    os.close(descriptor)
    return [
        torch.frombuffer(
            memory, dtype=dtype, count=math.prod(shape), offset=start
        ).reshape(shape)
        for (shape, dtype), start in zip(layout, starts, strict=False)
    ]


class BareWorker:
    """One forked process that fills its slots; ``take`` and ``give`` move a byte."""

    def __init__(self, fill: Callable[[Views], object], slots: Sequence[Views]) -> None:
        filled_out, filled_in = os.pipe()
        free_out, free_in = os.pipe()
        os.write(free_in, bytes(range(len(slots))))
        if not os.fork():
            os.close(free_in)  # or this copy would hide that the consumer is gone
            os.close(filled_out)
            self._serve(fill, slots, free_out, filled_in)
        os.close(filled_in)
        os.close(free_out)
        self._slots = slots
        self._filled, self._free = filled_out, free_in

    @staticmethod
    def _serve(
        fill: Callable[[Views], object], slots: Sequence[Views], free: int, filled: int
    ) -> NoReturn:
        torch.set_num_threads(1)
        with contextlib.suppress(BrokenPipeError):
            while number := os.read(free, 1):
                fill(slots[number[0]])
                os.write(filled, number)
        os._exit(0)

    def take(self) -> tuple[int, Views]:
        """Wait for a filled slot."""
        number = os.read(self._filled, 1)[0]
        return number, self._slots[number]

    def give(self, number: int) -> None:
        """Let the worker fill the slot again."""
        os.write(self._free, bytes([number]))


def bare_batches(
    make_fill: Callable[[int], Callable[[Views], object]],
    case: Case,
    *,
    workers: int = 2,
    slots: int = 3,
) -> Iterator[Views]:
    """Yield the workers' slots in turn; a batch is valid until the next request."""
    crew = []
    for number in range(workers):
        memory = [share(case.layout) for _ in range(slots)]
        crew.append(BareWorker(make_fill(number), memory))
    while True:
        for worker in crew:
            number, views = worker.take()
            yield views
            worker.give(number)


class Collate:
    """The work of a worker at the limit: read samples, collate into the slot."""

    def __init__(self, case: Case, number: int) -> None:
        self._case, self._at = case, number * case.batch
        self._dataset = case.dataset()

    def __call__(self, views: Views) -> None:
        """Fill one slot with the next batch."""
        indices = range(self._at, self._at + self._case.batch)
        self._case.fill([self._dataset[index] for index in indices], views)
        self._at += 2 * self._case.batch


class Copy:
    """The same without collating: a ready batch is copied to the slot."""

    def __init__(self, case: Case, number: int) -> None:
        self._ready = case.empty()
        Collate(case, number)(self._ready)

    def __call__(self, views: Views) -> None:
        """Copy the ready batch."""
        for view, ready in zip(views, self._ready, strict=True):
            view.copy_(ready)
