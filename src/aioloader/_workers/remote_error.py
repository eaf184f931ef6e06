"""The user's exceptions, sent from a worker to the loader with the remote traceback.

They keep their type. An exception that does not survive pickling is rebuilt without its
constructor and without attributes that cannot be pickled; only if its class cannot, it
becomes a ``WorkerError`` with the remote text.
"""

import traceback
from dataclasses import dataclass
from typing import Any

from aioloader._order.raising import STOPS, raisable
from aioloader._transport.codec import decode, encode
from aioloader._workers.reducers import REDUCERS
from aioloader.errors import WorkerError

_MOST_TEXT = 20_000


@dataclass(frozen=True)
class RemoteError:
    """An exception in transit.

    Attributes:
        pickled: The exception, header and buffers; None if it cannot be pickled.
        name: Name of its type.
        text: Its traceback in the worker.
        notes: Its notes, which some classes lose in pickling.
        worker: Number of the worker.
        stop: The type of the cause, if it is one that ``raisable`` replaces.
    """

    pickled: tuple[bytes, list[bytearray]] | None
    name: str
    text: str
    notes: list[str]
    worker: int
    stop: type[BaseException] | None = None

    @classmethod
    def of(cls, error: BaseException, worker: int) -> "RemoteError":
        """Return ``error`` in a form that can be sent."""
        error = raisable(error, "user code")
        stop = next((one for one in STOPS if isinstance(error.__cause__, one)), None)
        text = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
        notes = list(getattr(error, "__notes__", ()))
        return cls(_pickled(error), type(error).__name__, text, notes, worker, stop)

    def raisable(self) -> BaseException:
        """Return the exception, with notes on where it was raised."""
        caught = f"Caught {self.name} in DataLoader worker process {self.worker}."
        text = f"{caught}\nOriginal {self.text}"
        try:
            error = decode(*self.pickled) if self.pickled is not None else None
        except Exception:  # of the user's class
            error = None
        if not isinstance(error, BaseException):
            error = WorkerError(text, worker=self.worker)
            notes = self.notes
        else:
            notes = [*self.notes, text]
        if self.stop is not None:
            error.__cause__ = self.stop()
        for note in notes:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        return error


def _pickled(error: BaseException) -> tuple[bytes, list[bytearray]] | None:
    """Return a pickle that was checked to restore the same type."""
    for form in (error, _Bare(error), _Bare(error, is_text=True)):
        try:
            header, buffers = encode(form, REDUCERS)
            raws = [bytearray(buffer.raw()) for buffer in buffers]
            back = decode(header, raws)
        except Exception:  # noqa: S112  (of the user's class; the next form keeps less)
            continue
        if type(back).__name__ == type(error).__name__:
            return header, raws
    return None


class _Bare:
    """Pickle an exception as type, args and attributes: no constructor is called.

    Args:
        error: The exception.
        is_text: Whether to keep only its text, if args or attributes cannot be pickled.
    """

    def __init__(self, error: BaseException, *, is_text: bool = False) -> None:
        self._error = error
        self._is_text = is_text

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        if self._is_text:
            return _rebuild, (type(error), (str(error),), {})
        return _rebuild, (type(error), error.args, error.__dict__)


def _rebuild(
    cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
