"""Exceptions from a worker: the same type and text, or the text at least."""

import pickle

from aioloader._workers.remote_tasks import RemoteError


def raised(error: BaseException) -> BaseException:
    """Return ``error`` with a traceback and a note, as a worker catches it."""
    error.add_note("where it was")
    try:
        raise error
    except type(error) as caught:
        return caught


def crossed(error: BaseException) -> BaseException:
    """Return ``error`` as the loader raises it."""
    remote = RemoteError.of(raised(error), 3)
    copy: RemoteError = pickle.loads(pickle.dumps(remote))
    return copy.raisable()


def test_endless_tracebacks_are_cut() -> None:
    """The end, which says what it was, is kept."""
    found = crossed(ValueError("x" * 100_000 + "end"))
    assert len(found.__notes__[-1]) < 25_000
    assert "end" in found.__notes__[-1]


def test_the_same_error_raised_twice_has_its_notes_once() -> None:
    """Nothing piles up."""
    remote = RemoteError.of(raised(ValueError("x")), 0)
    assert remote.raisable().__notes__ == remote.raisable().__notes__
