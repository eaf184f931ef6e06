"""Requests, answers and errors of batches that are made in another process.

Workers of executors and Ray first get the ``WorkerSpec``, and then requests. Both are
pickled to a header and buffers.
"""

import contextlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from aioloader._base.failures import Failure, FailurePolicy
from aioloader._base.raising import STOPS, raisable
from aioloader._base.records import BatchTimes
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.codec import Buffers, decode, encode, encode_portable
from aioloader._transport.slots import MIN_BYTES, Allocator
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerError

_MAX_TEXT = 20_000
_NOTHING = contextlib.nullcontext()
# A pickle as it is sent: its header and its buffers.
PackedTask: TypeAlias = tuple[bytes, list[Any]]


def maker_of(spec: WorkerSpec, **options: Any) -> BatchMaker:
    """Return a worker's ``BatchMaker``; ``options`` are its other arguments."""
    return BatchMaker(**spec.kwargs(), policy=FailurePolicy(spec.on_error), **options)


def pack_request(pipeline: Pipeline, task: BatchTask) -> tuple[bytes, Buffers]:
    """Pickle the request for a batch, with the samples that the loader has read."""
    fields = task.number, task.indices, task.key, task.sample_keys, task.padding
    epochs = pipeline.maker.epoch, pipeline.maker.dataset_epoch
    values = epochs, *fields, task.samples
    return encode_portable(values, REDUCERS)


def open_request(maker: BatchMaker, request: PackedTask) -> BatchTask:
    """Return the task of a request, and set the maker to the request's epoch.

    If the dataset's ``set_epoch`` raises, the error becomes the task's result.
    """
    epochs, *fields = decode(*copied(request, maker.allocate))
    task = BatchTask(*fields)
    try:
        maker.begin_epoch(*epochs)
    except BaseException as error:  # of user code; handed to the consumer
        task.result = BatchResult(error=error)
    return task


def copied(packed: PackedTask, allocate: Allocator) -> PackedTask:
    """Copy a pickle's buffers to writable memory; ``allocate`` gives large ones."""
    return packed[0], [_copied(buffer, allocate) for buffer in packed[1]]


def _copied(buffer: Any, allocate: Allocator) -> Any:
    raw = memoryview(buffer).cast("B")
    if raw.nbytes < MIN_BYTES:
        return bytearray(raw)
    memory = allocate(raw.nbytes)
    memory[:] = np.frombuffer(raw, np.uint8)
    return memoryview(memory)  # a numpy view would not keep its owner alive


def of_both(task: BatchTask, made: Sequence[float]) -> BatchTimes:
    """Combine a worker's times of a batch with the loader's, if the loader reads."""
    began, read, started, transformed, collated, busy, *spent = made
    if not began:
        began, read, busy = task.began, task.read, task.busy
        started = task.started or started
    return began, read, started, transformed, collated, busy, spent[0], spent[1]


def _moved(made: BatchTimes, seconds: float) -> BatchTimes:
    """Shift a batch's times by ``seconds`` to another clock; unknown times stay 0."""
    began, read, started, transformed, collated = (
        moment and moment + seconds for moment in made[:5]
    )
    return began, read, started, transformed, collated, *made[5:]


def _to_wall() -> float:
    """Return the Unix time at which this process's ``perf_counter`` was 0."""
    return time.time() - time.perf_counter()


def pack_answer(
    maker: BatchMaker, task: BatchTask, result: BatchResult, worker: int
) -> tuple[bytes, Buffers]:
    result.made = _moved(task.made(), _to_wall())
    result.dataset = None  # the loader's copy counts
    try:
        return encode(remote(maker, task, result, worker), REDUCERS)
    except Exception as error:  # of the user's classes
        return encode(refused(maker, task, result, error, worker), REDUCERS)


def remote(
    maker: BatchMaker, task: BatchTask, result: BatchResult, worker: int
) -> BatchResult:
    """Prepare ``result`` for sending: wrap its errors, and add failures and counts."""
    maker.policy.latest.clear()  # the loader keeps them
    result.size, result.attempted = task.size, task.extra
    if result.error is not None:
        result.error = RemoteError.of(result.error, worker)  # type: ignore[assignment]
    result.failures = [
        replace(failure, error=RemoteError.of(failure.error, worker))
        for failure in task.failures
    ]
    result.retries, result.worker = maker.policy.take_retries(), max(0, worker)
    return result


def refused(
    maker: BatchMaker,
    task: BatchTask,
    result: BatchResult,
    error: Exception,
    worker: int,
) -> BatchResult:
    """Return the result to send in place of ``result``, whose pickling failed."""
    error.add_note(f"aioloader: {maker.stage_note('send', task)}")
    problem: Any = RemoteError.of(error, worker)
    refusal = BatchResult(error=problem, state=task.state)
    refusal.attempted, refusal.failures = result.attempted, result.failures
    refusal.retries, refusal.size, refusal.made = result.retries, task.size, result.made
    return refusal


def opened(result: BatchResult, task: BatchTask) -> tuple[BatchResult, list[Failure]]:
    """Undo ``remote`` in the loader; return the result and the batch's failures."""
    task.missing += len(task.indices) - result.size
    if isinstance(result.error, RemoteError):
        result.error = result.error.raisable()
    failures = [replace(f, error=f.error.raisable()) for f in result.failures]
    return result, failures


def unopened(error: Exception, worker: int) -> BatchResult:
    """Return the result to deliver for a batch whose unpickling raised ``error``."""
    text = f"a batch of worker {worker} could not be unpickled here: {error!r}; return "
    text += "values of classes that this process can import"
    problem = WorkerError(text, worker=worker)
    problem.__cause__ = error
    return BatchResult(error=problem)


def deliver(
    pipeline: Pipeline, task: BatchTask, packed: PackedTask, worker: int
) -> None:
    try:
        is_inferring = torch.is_inference_mode_enabled()  # as in `unpack`
        with torch.inference_mode(mode=False) if is_inferring else _NOTHING:
            result = decode(*copied(packed, pipeline.maker.allocate))
    except Exception as error:  # of a user's class
        pipeline.receive(task, unopened(error, worker))
    else:
        task.samples = []
        made = _moved(result.made, -_to_wall())
        # Another machine's clock may be ahead: move the times out of the future.
        early = min(0.0, time.perf_counter() - made[4])
        result.made = of_both(task, _moved(made, early))
        pipeline.receive(task, *opened(result, task))


@dataclass(eq=False, repr=False)
class RemoteError:
    """An exception of user code, sent from a worker to the loader with its traceback.

    The exception keeps its type and, if possible, its text. If it cannot be pickled, it
    is rebuilt without its constructor and without attributes that cannot be pickled. If
    its class cannot be pickled, or its text needs such an attribute, the loader raises
    a ``WorkerError`` with the worker's text.
    """

    # The pickled exception: header and buffers. None: it cannot be pickled.
    pickled: tuple[bytes, list[bytearray]] | None
    name: str
    text: str  # the traceback in the worker
    notes: list[str]  # the notes, which some classes lose in pickling
    worker: int
    stop: type[BaseException] | None = None  # the type of its cause, if in ``STOPS``

    @classmethod
    def of(cls, error: BaseException, worker: int) -> "RemoteError":
        error = raisable(error, "user code")
        stop = next((kind for kind in STOPS if isinstance(error.__cause__, kind)), None)
        text = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
        notes = list(getattr(error, "__notes__", ()))
        return cls(_pickled(error), type(error).__name__, text, notes, worker, stop)

    def raisable(self) -> BaseException:
        """Return the exception to raise, which carries the worker's traceback."""
        caught = f"Caught {self.name} in DataLoader worker process {self.worker}."
        text = f"{caught}\nOriginal {self.text}"
        notes = self.notes
        try:
            error = _restored(*self.pickled) if self.pickled is not None else None
        except Exception:  # of the user's class
            error = None
        if isinstance(error, BaseException):
            notes = [*notes, text]
        else:
            error = WorkerError(text, worker=self.worker)
        if self.stop is not None:
            error.__cause__ = self.stop()
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        return error


def _pickled(error: BaseException) -> tuple[bytes, list[bytearray]] | None:
    """Return a pickle that keeps an error's type and, if possible, text; or None.

    The restored text may differ (it may contain an address), but ``str`` must not fail.
    """
    cls, said, best = type(error), _said(error), None
    attributes = {k: v for k, v in vars(error).items() if _is_picklable(v)}
    for form in (error, (cls, error.args, attributes), (cls, (said,), attributes)):
        try:
            header, buffers = encode(form, REDUCERS)
            raws = [bytearray(buffer.raw()) for buffer in buffers]
            back = _restored(header, raws)
        except Exception:  # noqa: S112  (of the user's class; the next form keeps less)
            continue
        if type(back).__name__ != cls.__name__:
            continue
        if (text := _said(back)) == said:
            return header, raws
        if best is None and text is not None:
            best = header, raws
    return best


def _said(error: BaseException) -> str | None:
    """Return the text of an exception; None if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # of the user's class
        return None


def _is_picklable(value: Any) -> bool:
    try:
        encode(value, REDUCERS)
    except Exception:  # of the user's class
        return False
    return True


def _restored(header: bytes, buffers: list[bytearray]) -> Any:
    form = decode(header, buffers)
    if not isinstance(form, tuple):
        return form
    cls, args, attributes = form
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
