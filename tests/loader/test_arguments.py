"""Every wrong argument raises in the constructor, in the kind torch documents."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from aioloader import (
    DataLoader,
    ShuffledIndices,
    Skip,
)
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream

DATA = list(range(6))


async def _decide(failure: Any) -> Any:
    """Decide too late."""


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (DATA, {"num_workers": -1}, ValueError, "num_workers option should be non-neg"),
    (DATA, {"num_workers": 1.5}, TypeError, "num_workers must be an integer"),
    (DATA, {"timeout": -1}, ValueError, "timeout option should be non-negative"),
    (DATA, {"timeout": float("nan")}, ValueError, "timeout option should be"),
    (DATA, {"timeout": "1"}, TypeError, "timeout option should be a number"),
    (DATA, {"prefetch_factor": 0}, ValueError, "prefetch_factor option should be"),
    (DATA, {"prefetch_factor": -2}, ValueError, "prefetch_factor option should be"),
    (DATA, {"persistent_workers": True}, ValueError, "needs num_workers > 0"),
    (DATA, {"multiprocessing_context": "spawn"}, ValueError, "can only be used with"),
    (
        DATA,
        {"multiprocessing_context": "no", "num_workers": 1},
        ValueError,
        "should specify a valid start method",
    ),
    (
        DATA,
        {"multiprocessing_context": 3, "num_workers": 1},
        TypeError,
        "should be a valid context object",
    ),
    (DATA, {"batch_size": 0}, ValueError, "batch_size should be a positive integer"),
    (DATA, {"batch_size": -1}, ValueError, "batch_size should be a positive integer"),
    (DATA, {"batch_size": 1.5}, ValueError, "batch_size should be a positive integer"),
    (DATA, {"drop_last": 1}, ValueError, "drop_last should be a boolean"),
    (DATA, {"batch_size": None, "drop_last": True}, ValueError, "disables auto-batch"),
    (DATA, {"sampler": [1], "shuffle": True}, ValueError, "mutually exclusive with sh"),
    (DATA, {"batch_sampler": [[1]], "batch_size": 2}, ValueError, "mutually exclusive"),
    (DATA, {"batch_sampler": [[1]], "shuffle": True}, ValueError, "mutually exclusive"),
    (DATA, {"batch_sampler": [[1]], "sampler": [1]}, ValueError, "mutually exclusive"),
    (DATA, {"batch_sampler": [[1]], "drop_last": True}, ValueError, "mutually exclus"),
    ([], {"shuffle": True}, ValueError, "num_samples should be a positive integer"),
    (SyncStream(), {"shuffle": True}, ValueError, "expected unspecified shuffle"),
    (SyncStream(), {"sampler": [1]}, ValueError, "expected unspecified sampler"),
    (SyncStream(), {"batch_sampler": [[1]]}, ValueError, "unspecified batch_sampler"),
    (SyncStream(), {"batch_size": 0}, ValueError, "batch_size should be a positive"),
    (AsyncStream(), {"shuffle": True}, ValueError, "expected unspecified shuffle"),
    (AsyncStream(), {"sampler": [1]}, ValueError, "expected unspecified sampler"),
    (DATA, {"collate_fn": 3}, TypeError, "collate_fn must be callable"),
    (DATA, {"transform": "x"}, TypeError, "transform must be callable"),
    (DATA, {"worker_init_fn": 1}, TypeError, "worker_init_fn must be callable"),
    (DATA, {"concurrency": 0}, ValueError, "concurrency must be at least 1, got 0"),
    (DATA, {"concurrency": 2.5}, TypeError, "concurrency must be an integer"),
    (DATA, {"loop": "mine"}, ValueError, "loop must be 'thread' or 'caller'"),
    (DATA, {"on_error": "ignore"}, ValueError, "on_error must be"),
    (DATA, {"retry": 3}, TypeError, "retry must be an aioloader.Retry"),
    (DATA, {"on_error": _decide}, TypeError, "on_error must be a plain function"),
    (DATA, {"on_error": Skip(instead=_decide)}, TypeError, "must be a plain function"),
    (DATA, {"workers": "fork"}, TypeError, "workers must be 'process', 'thread', a"),
    (DATA, {"workers": None}, TypeError, "workers must be 'process', 'thread', a"),
    (DATA, {"fetch": "here"}, ValueError, "fetch must be 'auto' or 'loader' or"),
    (DATA, {"rng": "epoch"}, ValueError, "rng must be None or 'batch'"),
    (DATA, {"rng": 3}, ValueError, "rng must be None or 'batch'"),
    (DATA, {"on_timeout": "skip"}, ValueError, "on_timeout must be 'raise' or 'rest"),
    (7, {}, TypeError, "dataset must have __getitem__"),
    (
        DATA,
        {"max_failures": 10},
        TypeError,
        r"^max_failures=10 is now on_error=Skip\(at_most=10\)$",
    ),
    (
        DATA,
        {"device": "cuda", "prefetch_device": 2},
        TypeError,
        r"^prefetch_device=2 is now device=Device\(\.\.\., ahead=2\)$",
    ),
    (DATA, {"device_keys": ["a"]}, TypeError, r"Device\(\.\.\., keys=\['a'\]\)$"),
    (
        DATA,
        {"device_transform": len},
        TypeError,
        r"Device\(\.\.\., transform=<",
    ),
    (DATA, {"batchsize": 2}, TypeError, "unexpected keyword argument 'batchsize'"),
]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    WRONG,
    ids=[f"{number} {' '.join(case[1])}" for number, case in enumerate(WRONG)],
)
def test_wrong_arguments(
    dataset: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Kind and words, before anything runs."""
    with pytest.raises(error, match=words):
        DataLoader(dataset, **options)


def test_a_context_may_be_set_later() -> None:
    """By name or as an object; checked as in the constructor, in torch's words."""
    ours: Any = DataLoader(DATA, 3, num_workers=1)
    theirs: Any = torch.utils.data.DataLoader(DATA, 3, num_workers=1)  # type: ignore[arg-type]
    for value in ("spawn", multiprocessing.get_context("fork"), None, "forkserver"):
        for loader in (ours, theirs):
            loader.multiprocessing_context = value
        assert ours.multiprocessing_context is theirs.multiprocessing_context
    assert [batch.tolist() for batch in ours] == [[0, 1, 2], [3, 4, 5]]
    for wrong in ("no", 3):
        with pytest.raises((ValueError, TypeError)) as expected:
            theirs.multiprocessing_context = wrong
        with pytest.raises(expected.type) as caught:
            ours.multiprocessing_context = wrong
        assert str(caught.value) == str(expected.value)
    with pytest.raises(ValueError, match="can only be used with multi-process"):
        DataLoader(DATA).multiprocessing_context = "fork"
    with pytest.raises(ValueError, match="only be used with workers='process'"):
        DataLoader(
            DATA, num_workers=1, workers="thread"
        ).multiprocessing_context = "fork"


def test_length() -> None:
    """Batches of an epoch, by the sampler or by the stream's own length."""
    assert len(DataLoader(DATA, 4)) == 2
    assert len(DataLoader(DATA, 4, drop_last=True)) == 1
    assert len(DataLoader(DATA, batch_sampler=[[1], [2], [3]])) == 3
    assert len(DataLoader(DATA, batch_size=None)) == 6
    assert len(iter(DataLoader(DATA, 4))) == 2
    assert len(DataLoader(AsyncMap(7), 2)) == 4
    for stream in (SyncStream(), AsyncStream(), (i for i in DATA)):
        with pytest.raises(TypeError, match="has no len"):
            len(DataLoader(stream))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_without_an_accelerator_warns() -> None:
    """As torch: when iterated, and then goes on unpinned."""
    loader = DataLoader(SyncMap(2), pin_memory=True, pin_memory_device="cuda")
    with pytest.warns(UserWarning, match="pin_memory") as caught:
        assert len(list(loader)) == 2
    assert {str(warning.message).split()[0] for warning in caught} == {
        "pin_memory_device",
        "'pin_memory'",
    }


def test_options_of_workers_that_exclude_each_other() -> None:
    """Executors, threads and contexts; an object is taken as a name is."""
    with ThreadPoolExecutor(1) as executor:
        for workers in ("thread", executor):
            with pytest.raises(ValueError, match="only be used with workers='process'"):
                DataLoader(
                    DATA, num_workers=1, workers=workers, multiprocessing_context="fork"
                )
        with pytest.raises(ValueError, match="needs num_workers > 0: how many"):
            DataLoader(DATA, workers=executor)
    context = multiprocessing.get_context("spawn")
    for given in ("spawn", context):
        loader: Any = DataLoader(DATA, num_workers=1, multiprocessing_context=given)
        assert loader.multiprocessing_context is context
    assert [batch.tolist() for batch in DataLoader(DATA, 6, workers="thread")] == [DATA]


def test_repr_shows_the_state() -> None:
    """Dataset, sizes, epoch."""
    loader = DataLoader(SyncMap(), batch_size=4)
    list(loader)
    assert repr(loader) == (
        "DataLoader(SyncMap, batch_size=4, num_workers=0, epoch=1, open=0)"
    )


def test_a_loader_is_copied_and_pickled_without_what_is_live() -> None:
    """As torch's: the copy iterates on its own."""
    loader = DataLoader(SyncMap(8), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [index.tolist() for _, index in twin] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ValueError, match="should not be set"):
            twin.batch_size = 3
    assert len(list(iterator)) == 1


def test_iterators_that_are_dropped_unused_are_no_epochs() -> None:
    """Frameworks call ``iter`` more often than they iterate."""
    loader = DataLoader(list(range(20)), 20, sampler=ShuffledIndices(20, seed=3))
    iter(loader)
    first = next(iter(loader)).tolist()
    assert first == list(ShuffledIndices(20, seed=3))
    assert loader.stats().epoch == 0


def test_endless_timeouts() -> None:
    """Numbers beyond what the system can wait for mean no limit."""
    for timeout in (1e30, float("inf")):
        assert len(list(DataLoader(SyncMap(4), timeout=timeout))) == 4
