"""Share the loader's memory with workers that are not forked from it.

Workers map the files of memory-mapped arrays again. Tensors in shared memory and shared
objects of ``multiprocessing`` stay shared, by descriptor or name. All else is copied.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from multiprocessing import context, heap, reduction
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import reduce_typed_storage

from aioloader._transport.codec import Reducers
from aioloader._workers.reducers import REDUCERS, is_shared

# In a worker and its supervisor: the descriptors that the loader has sent.
received: list[int] = []
_STORAGE: Any = torch.UntypedStorage
# Modules whose reducers are left out, because the pickler has better ones.
_GENERAL = {"multiprocessing.reduction", "torch.multiprocessing.reductions"}


class ReceivedDescriptor(NamedTuple):
    """A pickled reference to one of the descriptors that the loader sends."""

    number: int  # index in ``received``

    def detach(self) -> int:
        """Return a duplicate of the descriptor, which the caller owns."""
        return os.dup(received[self.number])


class _Child:
    """A substitute for ``multiprocessing``'s child process, to collect descriptors."""

    DupFd = ReceivedDescriptor

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1


@contextlib.contextmanager
def pickling_for_child() -> Iterator[list[int]]:
    """Yield a list of the descriptors pickled in the block; the caller closes them."""
    child, before = _Child(), context.get_spawning_popen()
    context.set_spawning_popen(child)  # type: ignore[arg-type]
    try:
        yield child.descriptors
    except BaseException:
        for descriptor in child.descriptors:
            os.close(descriptor)
        raise
    finally:
        context.set_spawning_popen(before)


def sharing_reducers() -> Reducers:
    """Return the reducers for shared memory and those that users registered."""
    known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001  (there is no public way)
    registered = {
        kind: reduce
        for kind, reduce in known.items()
        if getattr(reduce, "__module__", None) not in _GENERAL
    }
    return {**registered, **_SHARING}


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if is_shared(tensor):
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return REDUCERS[torch.Tensor](tensor)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if not storage.nbytes() or storage.device.type != "cpu" or not is_shared(storage):
        return REDUCERS[torch.UntypedStorage](storage)
    if storage.filename is not None:
        return torch.UntypedStorage.from_file, (
            storage.filename,
            True,
            storage.nbytes(),
        )
    if get_sharing_strategy() == "file_system":  # type: ignore[no-untyped-call]
        shared = storage._share_filename_cpu_()
        return _STORAGE._new_shared_filename_cpu, shared  # noqa: SLF001
    descriptor, size = storage._share_fd_cpu_()
    if descriptor < 0:  # the storage maps a file privately
        return REDUCERS[torch.UntypedStorage](storage)
    return _map_storage, (reduction.DupFd(descriptor), size)


def _map_storage(received: ReceivedDescriptor, size: int) -> Any:
    descriptor = received.detach()
    try:
        return _STORAGE._new_shared_fd_cpu(descriptor, size)  # noqa: SLF001  (as torch's reductions do)
    finally:
        os.close(descriptor)


def _reduce_arena(arena: Any) -> Any:
    """Reduce the memory in which ``multiprocessing`` shares values and arrays."""
    return _map_arena, (arena.size, reduction.DupFd(arena.fd))


def _map_arena(size: int, received: ReceivedDescriptor) -> Any:
    descriptor = received.detach()
    arena = heap.Arena(size, descriptor)
    Finalize(arena, os.close, (descriptor,))
    return arena


def _reduce_memmap(array: np.memmap[Any, Any]) -> Any:
    """Reduce a memory-mapped array to its file and offset, or else to its values."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    is_mapped = isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    is_there = is_mapped and root.filename and Path(root.filename).exists()
    if not is_there or not is_whole or root.mode == "c":
        return array.__reduce_ex__(5)
    offset = root.offset + array.ctypes.data - root.ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r" if root.mode == "r" else "r+"
    return _map_again, (root.filename, array.dtype, mode, offset, array.shape, order)


def _map_again(
    filename: Any,
    dtype: Any,
    mode: Any,
    offset: int,
    shape: tuple[int, ...],
    order: Any,
) -> Any:
    if not np.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(filename, dtype, mode, offset, shape, order)


_SHARING: Reducers = {
    torch.Tensor: _reduce_tensor,
    torch.storage.TypedStorage: reduce_typed_storage,
    torch.UntypedStorage: _reduce_storage,
    **({heap.Arena: _reduce_arena} if hasattr(reduction, "DupFd") else {}),
    np.memmap: _reduce_memmap,
}
