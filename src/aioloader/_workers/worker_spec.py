"""The functions, dataset and settings that a loader sends to its workers once.

They are pickled by value, so that lambdas, local classes and notebooks work. Worker
processes that are not forked from the loader's process share a memory file that holds
the pickle. Each maps the file privately, so that no process sees another's writes.
"""

import contextlib
import functools
import logging
import mmap
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, graph_settings
from torch.utils.data._utils import collate as torch_rules

from aioloader._collate.collate import changed_rules
from aioloader._pipeline.batch_maker import BatchMaker, Recipe
from aioloader._transport.codec import (
    ONLY_TO_WORKERS,
    Buffers,
    Reducers,
    decode,
    encode_by_value,
)
from aioloader._transport.segments import unnamed_file, write_at
from aioloader._workers.info import WorkerInfo, be_worker_process, call_init
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.rng import Rng, seed_worker, states
from aioloader._workers.sharing import pickling_for_child, sharing_reducers
from aioloader.errors import WorkerStartError

# A big buffer starts on a new page; small ones share pages.
_ALIGN, _ALIGN_SMALL, _BIG = 4096, 64, 1 << 16
_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120  (a part of other texts)


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerSpec(Recipe):
    """The functions, dataset and settings that all workers of a loader get."""

    num_workers: int
    base_seed: int  # the iteration's seed; a worker adds its number to it
    rng: Rng
    window: int  # batches that a worker with an event loop makes at once
    in_flight: int  # batches in flight, over all workers
    worker_init_fn: Any = None
    lifespan: Any = None
    # By worker: the state that its copy of a stateful map-style dataset resumes.
    datasets: dict[int, Any] = field(default_factory=dict)
    # Collate rules that the user registered: the script does not run in workers.
    default_collate_fn_map: dict[Any, Any] = field(default_factory=changed_rules)

    @property
    def is_addressed(self) -> bool:
        """Whether each request is for one particular worker, not for any free worker.

        True for replicas of a stream, for stateful map-style datasets (a copy's state
        depends on the samples it has read), with ``rng="worker"`` and with a
        ``worker_init_fn``. Batches then go to workers round-robin, as in torch.
        """
        is_own = self.rng == "worker" or self.worker_init_fn is not None
        return is_own or self.is_stream() or self.keeps_state

    def begin(self, worker: int) -> None:
        """Make this process worker number ``worker``, and seed its generators."""
        torch_rules.default_collate_fn_map.update(self.default_collate_fn_map)
        seed = seed_worker(self.base_seed, worker)
        be_worker_process(WorkerInfo(worker, self.num_workers, seed, self.dataset))

    def initialise(self, worker: int, maker: BatchMaker) -> None:
        """Call the user's ``worker_init_fn``, and shard a data pipe, as torch does.

        If the function seeds the global generators, batches do not seed them again.
        """
        before = states() if self.worker_init_fn is not None else None
        call_init(self.worker_init_fn, worker)
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            graph_settings.apply_sharding(self.dataset, self.num_workers, worker)
        has_seeded = before is not None and states() != before
        if has_seeded or self.rng == "worker":
            maker.leave_generators()

    def pickled(self, reducers: Reducers = REDUCERS) -> tuple[bytes, Buffers]:
        """Return the pickled spec: its header, and its buffers, which are not copied.

        Raises:
            WorkerStartError: If pickling fails; the text names the attribute and a fix.
        """
        try:
            send_by_value_what_cannot_be_imported()
            return encode_by_value(self, reducers)
        except Exception as error:  # user objects may raise anything
            from aioloader._workers.pickling_errors import explain

            raise WorkerStartError(explain(self, error, reducers)) from error


# OpenBLAS and OpenMP would start threads at import, and threads do not survive a fork.
QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def new_python(call: str) -> tuple[str, list[str], dict[str, str]]:
    """Return the executable, arguments and environment of a Python that runs ``call``.

    ``call`` is code such as ``"fork_server.serve(3)"``; the user's script does not run.
    """
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  (as multiprocessing does)
    path = [os.fspath(entry) for entry in sys.path if isinstance(entry, str)]
    code = (
        "import os, sys\n"
        "try: os.getcwd()\n"
        # In a directory that was deleted, torch's libraries cannot be loaded.
        "except FileNotFoundError: os.chdir('/')\n"
        f"sys.path[:] = {path!r}\n"
        f"from aioloader._workers.process import {call.partition('.')[0]}\n"
        f"{call}"
    )
    return executable, [executable, *flags, "-c", code], {**os.environ, **QUIET}


def _logging_levels() -> dict[str, int]:
    """Return the loggers' levels by name; the root logger's name is empty."""
    root = logging.getLogger()
    levels = {
        name: logger.level
        for name, logger in list(root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"": root.level, **levels}


def _directory(getcwd: Callable[[], str] = os.getcwd) -> str:
    """Return the working directory; if it was deleted, a ``/proc`` link to it."""
    try:
        return getcwd()
    except FileNotFoundError:
        return f"/proc/{os.getpid()}/cwd"


@dataclass(eq=False, repr=False)
class Surroundings:
    """Settings of the user's process, for workers that are not forked from it."""

    directory: str = field(default_factory=_directory)
    path: list[str] = field(
        default_factory=lambda: [part for part in sys.path if isinstance(part, str)]
    )
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    affinity: set[int] = field(
        default_factory=lambda: getattr(os, "sched_getaffinity", lambda _: set())(0)
    )
    filters: list[bytes] = field(  # of warnings; since 3.14 a context may have its own
        default_factory=lambda: _each(
            pickle.dumps, getattr(warnings, "_get_filters", lambda: warnings.filters)()
        )
    )
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    numpy_errors: Any = field(default_factory=np.geterr)
    levels: dict[str, int] = field(default_factory=_logging_levels)
    secret: bytes = field(
        default_factory=lambda: bytes(multiprocessing.current_process().authkey)
    )

    def enter(self) -> None:
        """Apply the settings to this process, before it imports any user code.

        ``QUIET`` then keeps libraries from starting threads when they are imported.
        """
        self.enter_environment()
        os.environ.update(QUIET)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        os.chdir(self.directory)
        with contextlib.suppress(OSError):  # the processors went offline
            if self.affinity:
                os.sched_setaffinity(0, self.affinity)
        filters = _each(decode, self.filters)
        warnings.filters[:] = filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001  (clears caches)
        torch.set_default_dtype(self.dtype)
        np.seterr(**self.numpy_errors)
        for name, level in self.levels.items():
            logging.getLogger(name or None).setLevel(level)
        multiprocessing.current_process().authkey = self.secret

    def enter_environment(self) -> None:
        """Replace this process's environment with that of the user's process."""
        os.environ.clear()
        os.environ.update(self.environment)


def _each(convert: Callable[[Any], Any], objects: Iterable[Any]) -> list[Any]:
    """Convert objects; leave out those whose conversion raises."""
    converted = []
    for part in objects:
        with contextlib.suppress(Exception):
            converted.append(convert(part))
    return converted


def send_by_value_what_cannot_be_imported() -> None:
    """Make cloudpickle pickle modules by value if workers cannot import them by name.

    Such modules are often loaded from a path: tests, configurations, plugins. Importing
    the name of such a module might even find another file on ``sys.path``.
    """
    import cloudpickle

    can_import = _importer(tuple(sys.path), _directory())
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and getattr(module, "__name__", None) == name:
            spec = getattr(module, "__spec__", None)
            file = getattr(module, "__file__", None) if spec is None else spec.origin
            if not can_import(name, file, type(module) is ModuleType):
                cloudpickle.register_pickle_by_value(module)


@functools.lru_cache(1)
def _importer(path: object, directory: object) -> Callable[..., bool]:  # noqa: ARG001
    """Return ``_can_import`` with a cache, which is renewed if an argument changes."""
    return functools.cache(_can_import)


def _can_import(name: str, file: str | None, is_plain: bool) -> bool:  # noqa: FBT001
    """Tell whether a process with this ``sys.path`` imports the same module by name."""
    if name in {"__main__", "__mp_main__"}:  # the latter is a spawned process's main
        return name == "__main__"
    parent, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", ())
    starts = tuple(f"{folder}/{last}{end}" for folder in folders for end in "./")
    if file is not None and file.startswith(starts):
        return True  # a shortcut for thousands of modules
    try:
        spec = _spec_of(name)
    except Exception:  # of a third-party finder
        return True
    if spec is None:
        return bool(parent)  # a package may create its submodules in code
    if file is None:  # created in code, without a file
        return not (is_plain and spec.has_location)
    is_of_python = name in sys.stdlib_module_names and file.startswith(_LIBRARY)
    return (
        file == "frozen"
        or is_of_python  # imported before ``sys.path`` was complete
        or file == spec.origin
        or _is_same_file(file, spec.origin)
    )


def _is_same_file(
    first: str, second: str | None, stat: Callable[[str], os.stat_result] = os.stat
) -> bool:
    """Tell whether two paths lead to the same file, perhaps through a link."""
    try:
        return second is not None and os.path.samestat(stat(first), stat(second))
    except OSError:
        return False


def _spec_of(name: str) -> Any:
    """Find a module's spec as an import would, but without importing its parents."""
    path, parent = None, name.rpartition(".")[0]
    if parent:
        above = _spec_of(parent)
        path = above and above.submodule_search_locations
        if path is None:
            return None
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def ship(spec: WorkerSpec) -> list[int]:
    """Write ``spec`` to a memory file; return descriptors, which the caller owns.

    The first descriptor is the file's. The others belong to shared memory that the spec
    refers to. Each buffer is copied once, into the file.
    """
    with pickling_for_child() as shared:
        file = _written(*spec.pickled({**sharing_reducers(), **ONLY_TO_WORKERS}))
    return [file, *shared]


def _written(header: bytes, buffers: Buffers) -> int:
    """Write a pickle to a new memory file; return the file's descriptor."""
    parts = [memoryview(header), *(buffer.raw() for buffer in buffers)]
    sizes = np.array([len(parts), *(part.nbytes for part in parts)], "<q").tobytes()
    file, offset, small = unnamed_file(), 0, bytearray()
    try:
        for part in (memoryview(sizes), *parts):
            small += bytes(_gap(offset + len(small), part.nbytes))
            is_big = part.nbytes >= _BIG
            if not is_big:  # there may be millions of small buffers
                small += part
            if is_big or len(small) >= _BIG:
                offset, small = _write(file, memoryview(small), offset), bytearray()
            if is_big:
                offset = _write(file, part, offset)
        _write(file, memoryview(small), offset)
    except BaseException:
        os.close(file)
        raise
    return file


def receive(file: int) -> WorkerSpec:
    """Return the spec in ``file``; its buffers are privately mapped and writable.

    Raises:
        WorkerStartError: If the spec names something that cannot be imported here.
    """
    memory = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
    count = int(np.frombuffer(memory, "<q", 1)[0])
    offset, parts = (count + 1) * 8, []
    for nbytes in np.frombuffer(memory, "<q", count, 8).tolist():
        offset += _gap(offset, nbytes)
        parts.append(memory[offset : offset + nbytes])
        offset += nbytes
    try:
        spec: WorkerSpec = decode(parts[0], parts[1:])
    except (AttributeError, ImportError) as error:
        raise WorkerStartError(
            f"what the workers need cannot be unpickled there: {error}; define it in a "
            "module that your script imports (the script does not run in these "
            "workers), or let workers inherit it with multiprocessing_context='fork'"
        ) from error
    return spec


def _write(file: int, data: memoryview, offset: int) -> int:
    """Write all of ``data``, at most 1 GiB per call; return the offset of its end."""
    while len(data):
        written: int = write_at(file, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written
    return offset


def _gap(offset: int, nbytes: int) -> int:
    """Return how many bytes to skip before a buffer; a big one starts on a new page."""
    return -offset % (_ALIGN if nbytes >= _BIG else _ALIGN_SMALL)
