"""The exception tree.

Every class also derives from the builtin a caller would guess, so that
``except RuntimeError`` or ``except FileNotFoundError`` keeps working. A user's own
exception is never replaced: it keeps its type and gets notes. These types are for
aioloader's own failures. Each can be made from its message alone: frameworks do so to
raise an error again in another process::

    LoaderError
    ├── DatasetError                     .location .attempts
    │   ├── DecodeError(ValueError)       bytes that do not match their extension
    │   ├── ObjectNotFoundError(FileNotFoundError)
    │   ├── ObjectPermissionError(PermissionError)
    │   ├── ShardChangedError             a shard differs from the state or the index
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

from dataclasses import InitVar, dataclass
from typing import Any

# Where pip gets the package, after its name: no index has it until there is a release.
UNRELEASED = " @ git+https://github.com/aioloader/aioloader"


@dataclass(eq=False, repr=False)
class LoaderError(Exception):
    """Base of every error that aioloader itself raises."""

    message: InitVar[str] = ""

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with keyword fields and notes kept."""
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[LoaderError], args: tuple[Any, ...]) -> LoaderError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetError(LoaderError):
    """A read failed, after its retries.

    Attributes:
        location: The object, such as ``"s3://bucket/key"``; never a credential.
        attempts: How often the read was tried; at least 1.
    """

    location: str = ""
    attempts: int = 1


class DecodeError(DatasetError, ValueError):
    """The bytes of a sample do not match their extension."""


class ObjectNotFoundError(DatasetError, FileNotFoundError):
    """A key or path does not exist in its store."""


class ObjectPermissionError(DatasetError, PermissionError):
    """The store refused access: wrong or missing credentials."""


@dataclass(eq=False, repr=False, kw_only=True)
class TruncatedReadError(DatasetError, EOFError):
    """A body ended before its announced length.

    Attributes:
        expected: Announced size, in bytes, or None if it is not known.
        received: Size that arrived, in bytes, or None.
    """

    expected: int | None = None
    received: int | None = None


class ShardChangedError(DatasetError):
    """A shard has changed since a state was saved, or since it was indexed."""


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerError(LoaderError, RuntimeError):
    """A worker failed, or its error could not be sent to the loader.

    Attributes:
        worker: Number of the worker, or None if it is not known.
    """

    worker: int | None = None


class WorkerStartError(WorkerError):
    """Workers could not be started, for example because of a pickling error."""


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerDiedError(WorkerError):
    """Workers died unexpectedly.

    Attributes:
        pid: Process identifier of the last worker that died.
        exitcode: Its exit status; negative for the signal that killed it; None if it
            is not known.
        batch: Number of its batch, or None if it had none.
    """

    pid: int | None = None
    exitcode: int | None = None
    batch: int | None = None


class TransportError(LoaderError):
    """A batch could not be sent from one process to another."""


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTooLargeError(TransportError, ValueError):
    """The machine has no memory for a batch.

    Attributes:
        nbytes: Size wanted, in bytes, or None if it is not known.
        slot_bytes: The largest slot that memory allows, in bytes, or None.
    """

    nbytes: int | None = None
    slot_bytes: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTimeoutError(LoaderError, TimeoutError, RuntimeError):
    """A batch did not arrive within ``timeout`` seconds.

    The time counts from when the consumer started to wait for that batch. The batch is
    still in flight: the next step of the iterator waits for it again.

    Attributes:
        timeout: The timeout, in seconds, or None if it is not known.
        batch: Number of the awaited batch, from 0 in each epoch, or None.
    """

    timeout: float | None = None
    batch: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class FailureBudgetError(LoaderError, RuntimeError):
    """More samples failed than ``Skip.at_most`` allows.

    Attributes:
        failures: Samples that failed in this epoch.
        attempted: Samples that were tried in this epoch.
    """

    failures: int = 0
    attempted: int = 0


class LoaderClosedError(LoaderError, RuntimeError):
    """The loader, its iterator or its event loop was closed while in use."""


@dataclass(eq=False, repr=False, kw_only=True)
class StateMismatchError(LoaderError, ValueError):
    """A saved state does not fit the object that loads it.

    Attributes:
        expected: The value in the state.
        found: The value of the object that loads it.
    """

    expected: Any = None
    found: Any = None
