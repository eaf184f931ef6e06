"""The exception tree.

Every class also derives from the builtin a caller would guess, so that
``except RuntimeError`` or ``except FileNotFoundError`` keeps working. A user's own
exception is never replaced: it keeps its type and gains notes. These types are for
failures of the house. Each can be made of its message alone, as frameworks do that
raise an error again in another process::

    LoaderError
    ├── DatasetError                     .location .attempts
    │   ├── DecodeError(ValueError)       bytes that are not what their name says
    │   ├── ObjectNotFoundError(FileNotFoundError)
    │   ├── ObjectPermissionError(PermissionError)
    │   └── TruncatedReadError(EOFError)  .expected .received
    ├── WorkerError(RuntimeError)          .worker
    │   ├── WorkerStartError              no worker could be started
    │   └── WorkerDiedError               .pid .exitcode .batch
    ├── TransportError
    │   └── BatchTooLargeError(ValueError)  .nbytes .slot_bytes
    ├── BatchTimeoutError(TimeoutError, RuntimeError)   .timeout .batch
    ├── FailureBudgetError(RuntimeError)  .failures .attempted
    ├── LoaderClosedError(RuntimeError)
    └── StateMismatchError(ValueError)    .expected .found
"""

from typing import Any


class LoaderError(Exception):
    """Base of every error that aioloader itself raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with keyword fields and notes kept."""
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[LoaderError], args: tuple[Any, ...]) -> LoaderError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class DatasetError(LoaderError):
    """Say that a read failed for good.

    Attributes:
        location: What was read, such as ``"s3://bucket/key"``; never a credential.
        attempts: How often the read was tried; at least 1.
    """

    def __init__(self, message: str, *, location: str = "", attempts: int = 1) -> None:
        super().__init__(message)
        self.location = location
        self.attempts = attempts


class DecodeError(DatasetError, ValueError):
    """Say that the bytes of a sample are not what their extension says."""


class ObjectNotFoundError(DatasetError, FileNotFoundError):
    """Say that a key or path does not exist in its store."""


class ObjectPermissionError(DatasetError, PermissionError):
    """Say that the store refused access: wrong or missing credentials."""


class TruncatedReadError(DatasetError, EOFError):
    """Say that a body ended before its announced length.

    Attributes:
        expected: Announced size, in bytes, or None if it is not known.
        received: Size that arrived, in bytes, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        location: str = "",
        expected: int | None = None,
        received: int | None = None,
    ) -> None:
        super().__init__(message, location=location)
        self.expected = expected
        self.received = received


class ShardChangedError(DatasetError):
    """Say that a shard is not what it was when a state was saved: it cannot go on."""


class WorkerError(LoaderError, RuntimeError):
    """Say that a worker failed, or that what it raised could not be brought here.

    Attributes:
        worker: Number of the worker, or None if it is not known.
    """

    def __init__(self, message: str, *, worker: int | None = None) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerStartError(WorkerError):
    """Say that workers could not be started: what to ship cannot be pickled, say."""


class WorkerDiedError(WorkerError):
    """Say that a batch has cost workers their lives.

    Attributes:
        pid: Process identifier of the last worker that died of it.
        exitcode: Its exit status; negative for the signal that killed it; None if it
            is not known.
        batch: Number of the batch, or None if the worker had none in hand.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        pid: int | None = None,
        exitcode: int | None = None,
        batch: int | None = None,
    ) -> None:
        super().__init__(message, worker=worker)
        self.pid = pid
        self.exitcode = exitcode
        self.batch = batch


class TransportError(LoaderError):
    """Say that a batch could not cross from one process to another."""


class BatchTooLargeError(TransportError, ValueError):
    """Say that the machine has no memory for a batch.

    Attributes:
        nbytes: Size wanted, in bytes, or None if it is not known.
        slot_bytes: The largest slot that memory allows, in bytes, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        nbytes: int | None = None,
        slot_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes


class BatchTimeoutError(LoaderError, TimeoutError, RuntimeError):
    """Say that a batch did not arrive within ``timeout`` seconds.

    The deadline counts from the moment the consumer began to wait for that batch. The
    batch is still on its way: the next step of the iterator waits for it again.

    Attributes:
        timeout: The deadline, in seconds, or None if it is not known.
        batch: Number of the batch that was awaited, from 0 in each epoch, or None.
    """

    def __init__(
        self, message: str, *, timeout: float | None = None, batch: int | None = None
    ) -> None:
        super().__init__(message)
        self.timeout = timeout
        self.batch = batch


class FailureBudgetError(LoaderError, RuntimeError):
    """Say that more samples failed than ``max_failures`` allows.

    Attributes:
        failures: Samples that failed in this epoch.
        attempted: Samples that were tried in this epoch.
    """

    def __init__(self, message: str, *, failures: int = 0, attempted: int = 0) -> None:
        super().__init__(message)
        self.failures = failures
        self.attempted = attempted


class LoaderClosedError(LoaderError, RuntimeError):
    """Say that the event loop of a loader has ended under its consumer."""


class StateMismatchError(LoaderError, ValueError):
    """Say that a saved state does not belong to what it was loaded into.

    Attributes:
        expected: What the state was saved with.
        found: What it was loaded into.
    """

    def __init__(
        self, message: str, *, expected: Any = None, found: Any = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found
