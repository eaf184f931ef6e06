"""The exception tree."""

import inspect
import pickle

import pytest

from aioloader import errors

EXAMPLES = [
    errors.LoaderError("m"),
    errors.DatasetError("m", location="s3://b/k", attempts=3),
    errors.DecodeError("m", location="s3://b/k"),
    errors.ObjectNotFoundError("m", location="s3://b/k"),
    errors.ObjectPermissionError("m", location="s3://b/k"),
    errors.ShardChangedError("m", location="s3://b/k"),
    errors.TruncatedReadError("m", location="s3://b/k", expected=9, received=4),
    errors.BatchTimeoutError("m", timeout=1.5, batch=7),
    errors.FailureBudgetError("m", failures=3, attempted=10),
    errors.LoaderClosedError("m"),
    errors.WorkerError("m", worker=1),
    errors.WorkerStartError("m"),
    errors.WorkerDiedError("m", worker=1, pid=4711, exitcode=-9, batch=3),
    errors.TransportError("m"),
    errors.BatchTooLargeError("m", nbytes=9, slot_bytes=4),
    errors.StateMismatchError("m", expected=3, found=4),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: errors.LoaderError) -> None:
    """Pickling keeps type, message, fields and notes; frameworks copy only the text."""
    error.add_note("where")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "m"
    assert vars(copy) == vars(error)
    again = type(error)(str(error))
    fields = vars(error).keys() - {"__notes__"}
    assert (str(again), set(vars(again))) == ("m", fields)


def test_every_error_class_has_an_example() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    tree = {value for value in classes if issubclass(value, errors.LoaderError)}
    assert tree <= {type(error) for error in EXAMPLES}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.DecodeError, ValueError),
        (errors.ObjectNotFoundError, FileNotFoundError),
        (errors.ObjectPermissionError, PermissionError),
        (errors.TruncatedReadError, EOFError),
        (errors.BatchTimeoutError, TimeoutError),
        (errors.BatchTimeoutError, RuntimeError),
        (errors.FailureBudgetError, RuntimeError),
        (errors.LoaderClosedError, RuntimeError),
        (errors.WorkerDiedError, RuntimeError),
        (errors.BatchTooLargeError, ValueError),
        (errors.StateMismatchError, ValueError),
    ],
)
def test_errors_are_caught_as_builtin_errors(error: type, builtin: type) -> None:
    assert issubclass(error, builtin)
