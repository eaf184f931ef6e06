"""The exception classes of aioloader.

Where a builtin exception fits, a class also derives from it, so that ``except
RuntimeError`` or ``except FileNotFoundError`` keeps working. A user's own exception is
never replaced: it keeps its type and gets notes. Each class can be created from a
message alone, because frameworks do so to raise an error again in another process::

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

# Follows the package's name in pip commands, until a package index has a release.
UNRELEASED = " @ git+https://github.com/aioloader/aioloader"


@dataclass(eq=False, repr=False)
class LoaderError(Exception):
    """Base class of aioloader's own exception classes."""

    message: InitVar[str] = ""

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message, the keyword fields and the notes."""
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(cls: type[LoaderError], args: tuple[Any, ...]) -> LoaderError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetError(LoaderError):
    """Data is missing or damaged, or could not be read or written.

    Attributes:
        location: Address of the data, such as ``"s3://bucket/key"``; no credentials.
        attempts: How often the request was tried; at least 1.
    """

    location: str = ""
    attempts: int = 1


class DecodeError(DatasetError, ValueError):
    """The bytes of a sample do not match their extension."""


class ObjectNotFoundError(DatasetError, FileNotFoundError):
    """An object, file or row does not exist."""


class ObjectPermissionError(DatasetError, PermissionError):
    """Access was denied, for example because credentials are wrong or missing."""


@dataclass(eq=False, repr=False, kw_only=True)
class TruncatedReadError(DatasetError, EOFError):
    """Data ended before its expected length.

    Attributes:
        expected: Expected size, in bytes; None if unknown.
        received: Size of the data that arrived, in bytes; None if unknown.
    """

    expected: int | None = None
    received: int | None = None


class ShardChangedError(DatasetError):
    """A shard or source has changed since a state was saved, or an index was made."""


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerError(LoaderError, RuntimeError):
    """A worker failed, or its error could not be sent to the loader.

    Attributes:
        worker: Number of the worker; None if unknown.
    """

    worker: int | None = None


class WorkerStartError(WorkerError):
    """Workers could not be started, for example because of a pickling error."""


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerDiedError(WorkerError):
    """Workers died unexpectedly.

    Attributes:
        pid: Process identifier of the last worker that died; None if unknown.
        exitcode: Exit status of that process, or the negated number of the signal that
            killed the process; None if unknown.
        batch: Number of the batch that the worker was making; None if there was none.
    """

    pid: int | None = None
    exitcode: int | None = None
    batch: int | None = None


class TransportError(LoaderError):
    """A batch could not be sent from one process to another."""


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTooLargeError(TransportError, ValueError):
    """A batch needs more shared memory than is available.

    Attributes:
        nbytes: Size of the batch, in bytes; None if unknown.
        slot_bytes: The available memory, in bytes; None if unknown.
    """

    nbytes: int | None = None
    slot_bytes: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class BatchTimeoutError(LoaderError, TimeoutError, RuntimeError):
    """A batch, or a report from a rank, did not arrive within ``timeout`` seconds.

    The time counts from when the consumer starts to wait for that batch. The batch
    stays in flight: the iterator's next step waits for it again.

    Attributes:
        timeout: The timeout, in seconds; None if unknown.
        batch: Number of the awaited batch, from 0 in each epoch; None if unknown.
    """

    timeout: float | None = None
    batch: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class FailureBudgetError(LoaderError, RuntimeError):
    """More samples failed than ``Skip.at_most`` allows.

    Attributes:
        failures: Number of samples that failed in this epoch.
        attempted: Number of samples that were tried in this epoch.
    """

    failures: int = 0
    attempted: int = 0


class LoaderClosedError(LoaderError, RuntimeError):
    """The loader, its iterator or its event loop has ended and cannot be used."""


@dataclass(eq=False, repr=False, kw_only=True)
class StateMismatchError(LoaderError, ValueError):
    """A saved state or an existing file does not fit the object that continues it.

    Attributes:
        expected: The value in the state or file.
        found: The corresponding value of the object that loads or continues it.
    """

    expected: Any = None
    found: Any = None
