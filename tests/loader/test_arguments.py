"""Wrong arguments raise in the constructor; corner cases are as in torch."""

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from aioloader import DataLoader, ShuffledIndices, Skip
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream
from stateful import Counted
from working import Numbers

DATA = list(range(6))
ONE: Any = {"num_workers": 1}
AUTO: Any = {"num_workers": "auto"}


async def _decide(failure: Any) -> Any:
    """Handle failures by a coroutine, which is not allowed."""


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
    (DATA, {**ONE, "multiprocessing_context": "no"}, ValueError, "valid start method"),
    (DATA, {**ONE, "multiprocessing_context": 3}, TypeError, "a valid context object"),
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
    (DATA, {"on_error": Skip}, ValueError, r"on_error must be .*, got <class"),
    (DATA, {"on_error": _decide}, TypeError, "on_error must be a plain function"),
    (DATA, {"on_error": Skip(instead=_decide)}, TypeError, "must be a plain function"),
    (DATA, {"workers": "fork"}, TypeError, "workers must be 'process', 'thread', a"),
    (DATA, {"workers": None}, TypeError, "workers must be 'process', 'thread', a"),
    (DATA, {"fetch": "here"}, ValueError, "fetch must be 'auto' or 'loader' or"),
    (DATA, {"rng": "epoch"}, ValueError, "rng must be None or 'batch'"),
    (DATA, {"on_timeout": "skip"}, ValueError, "on_timeout must be 'raise' or 'rest"),
    (7, {}, TypeError, "dataset must have __getitem__"),
    (DATA, {"max_failures": 10}, TypeError, r"10 is now on_error=Skip\(at_most=10\)$"),
    (DATA, {"prefetch_device": 2}, TypeError, r"2 is now device=Device\(.*ahead=2\)$"),
    (DATA, {"device_keys": ["a"]}, TypeError, r"Device\(\.\.\., keys=\['a'\]\)$"),
    (DATA, {"device_transform": len}, TypeError, r"Device\(\.\.\., transform=<"),
    (DATA, {"batchsize": 2}, TypeError, "'batchsize': did you mean 'batch_size'?"),
    (DATA, {"generator": 0}, TypeError, "generator must be a torch.Generator or"),
    (DATA, {"prefetch_bytes": 0}, ValueError, "prefetch_bytes must be at least 1, got"),
    (DATA, {"prefetch_bytes": -1}, ValueError, "prefetch_bytes must be at least 1, go"),
    (DATA, {"prefetch_bytes": "x"}, TypeError, "must be an integer, got 'x'"),
    *(
        (DATA, {name: "most"}, TypeError, f"{name} must be an integer or 'auto', got")
        for name in ("num_workers", "prefetch_factor", "concurrency")
    ),
    # Samples would depend on the number.
    (DATA, {**AUTO, "rng": "worker"}, ValueError, "random numbers depend on the"),
    (SyncStream(), AUTO, ValueError, "each worker reads a part of an iterable"),
    (AsyncStream(), {**AUTO, "fetch": "workers"}, ValueError, "each worker reads a"),
    (Counted(), AUTO, ValueError, "a stateful dataset has a state in each worker"),
    (DATA, {"rank": 3, "world_size": 3}, ValueError, r"in range\(3\), got 3"),
    (DATA, {"rank": -1, "world_size": 3}, ValueError, r"in range\(3\), got -1"),
    (DATA, {"rank": 1}, ValueError, "go together, got rank=1 and world_size=None"),
    (DATA, {"world_size": 2}, ValueError, "go together, got rank=None"),
    (DATA, {"rank": 0.5, "world_size": 2}, TypeError, "must be an integer or 'auto'"),
    (DATA, {"rank": "auto", "world_size": 2}, ValueError, "excludes world_size"),
    (DATA, {"rank": "env"}, ValueError, "'env' is now rank='auto'"),
    (DATA, {"rank": "me", "world_size": 2}, TypeError, "got 'me' and 2"),
    (DATA, {"tail": "head"}, ValueError, "tail must be .*, got 'head'"),
    (SyncMap, {}, TypeError, "got 'type': pass an instance"),
    (type("Later", (), {"__await__": iter})(), {}, TypeError, "'Later': await it"),
]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    WRONG,
    ids=[f"{number} {' '.join(case[1])}" for number, case in enumerate(WRONG)],
)
def test_wrong_arguments_raise_at_once(
    dataset: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The constructor raises, before anything runs."""
    with pytest.raises(error, match=words):
        DataLoader(dataset, **options)


def test_a_multiprocessing_context_may_be_set_later() -> None:
    """By name or as an object; a wrong one raises torch's error."""
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
        DataLoader(DATA, **ONE, workers="thread").multiprocessing_context = "fork"


def test_len_is_the_number_of_batches() -> None:
    """Loaders of streams without a length have no length."""
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
    """As in torch: when iterated; the batches are not pinned."""
    loader = DataLoader(SyncMap(2), pin_memory=True, pin_memory_device="cuda")
    with pytest.warns(UserWarning, match="pin_memory") as caught:
        assert len(list(loader)) == 2
    assert {str(warning.message).split()[0] for warning in caught} == {
        "pin_memory_device",
        "'pin_memory'",
    }


def test_options_that_exclude_each_other_raise() -> None:
    """Executors, threads and start methods; a context may be an object or a name."""
    with ThreadPoolExecutor(1) as executor:
        for workers in ("thread", executor):
            with pytest.raises(ValueError, match="only be used with workers='process'"):
                DataLoader(DATA, workers=workers, multiprocessing_context="fork", **ONE)
        with pytest.raises(ValueError, match="needs num_workers > 0: how many"):
            DataLoader(DATA, workers=executor)
    context = multiprocessing.get_context("spawn")
    for given in ("spawn", context):
        loader: Any = DataLoader(DATA, num_workers=1, multiprocessing_context=given)
        assert loader.multiprocessing_context is context
    assert [batch.tolist() for batch in DataLoader(DATA, 6, workers="thread")] == [DATA]


def test_repr_shows_the_state() -> None:
    """The dataset, the sizes and the epoch."""
    loader = DataLoader(SyncMap(), batch_size=4)
    list(loader)
    assert repr(loader) == (
        "DataLoader(SyncMap, batch_size=4, num_workers=0, epoch=1, open=0)"
    )


def test_copies_and_pickles_iterate_on_their_own() -> None:
    """As in torch; the original may be in the middle of an epoch."""
    loader = DataLoader(SyncMap(8), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [index.tolist() for _, index in twin] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ValueError, match="should not be set"):
            twin.batch_size = 3
    assert len(list(iterator)) == 1


def test_unused_iterators_do_not_count_as_epochs() -> None:
    """Frameworks call ``iter`` more often than they iterate."""
    loader = DataLoader(list(range(20)), 20, sampler=ShuffledIndices(20, seed=3))
    iter(loader)
    first = next(iter(loader)).tolist()
    assert first == list(ShuffledIndices(20, seed=3))
    assert loader.stats().epoch == 0


def test_huge_timeouts_mean_no_limit() -> None:
    """Timeouts beyond the longest wait of the system."""
    for timeout in (1e30, float("inf")):
        assert len(list(DataLoader(SyncMap(4), timeout=timeout))) == 4


# -- corner cases of torch -------------------------------------------------------------

Loader: Any = DataLoader  # options are tables here
Torch: Any = torch.utils.data.DataLoader


def outcome(cls: Any, options: dict[str, Any]) -> Any:
    """Return what a loader delivers, or the type of its error."""
    try:
        return [batch.tolist() for batch in cls(Numbers(5), **options)]
    except Exception as error:  # noqa: BLE001  (torch's may be any)
        return type(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": np.int64(1)},
        {"num_workers": np.float64(1)},
        {"num_workers": np.int64(-1)},
        {"num_workers": np.bool_(False)},
        {"num_workers": 1, "timeout": np.int64(20)},
        {"num_workers": 1, "timeout": np.float32(20)},
        {"num_workers": 1, "timeout": torch.tensor(20)},
        {"timeout": "20"},
        {"num_workers": 1, "prefetch_factor": np.int64(2)},
        {"batch_size": np.int64(2)},
        {"batch_size": 2, "drop_last": np.bool_(True)},
    ],
    ids=str,
)
def test_numpy_numbers_are_accepted_as_in_torch(options: dict[str, Any]) -> None:
    """Numbers that torch refuses are refused."""
    assert outcome(Loader, options) == outcome(Torch, options)


class Reporting(IterableDataset[int]):
    """Reports two samples, and has six."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __repr__(self) -> str:
        return "Reporting()"


@pytest.mark.usefixtures("fork_is_default")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_more_batches_than_reported_warn_as_in_torch(num_workers: int) -> None:
    """One warning for each batch too many, once ``len`` was called."""
    messages = []
    for cls in (Loader, Torch):
        loader = cls(Reporting(), num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", DeprecationWarning)  # of the fork
            list(loader)
            assert not caught
            len(loader)
            list(loader)
        messages.append([str(warning.message) for warning in caught])
    assert messages[0] == messages[1]
    assert len(messages[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False, None])
def test_data_pipes_are_shuffled_as_in_torch(shuffle: Any, num_workers: int) -> None:
    """Data pipes are seeded and sharded as in torch, too."""
    epochs = []
    for cls in (Loader, Torch):
        torch.manual_seed(3)
        pipe = IterableWrapper(range(12)).shuffle().sharding_filter()
        loader = cls(pipe, 3, shuffle=shuffle, num_workers=num_workers)
        epochs.append([[batch.tolist() for batch in loader] for _ in range(2)])
    assert epochs[0] == epochs[1]


DAY = np.datetime64("2020-01-01")


@pytest.mark.parametrize(
    "sample", [DAY, np.array([DAY, DAY]), DAY - DAY, {"day": np.array(DAY)}], ids=str
)
def test_dates_cannot_be_collated(sample: Any) -> None:
    """Torch has no dtype for dates; our error says how to convert them."""
    with pytest.raises(TypeError):
        next(iter(Torch([sample] * 2, 2)))
    with pytest.raises(TypeError, match=r"can't convert .*astype\('int64'\)"):
        next(iter(Loader([sample] * 2, 2)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", ["transform", "collate_fn"])
def test_lambdas_that_return_coroutines_raise(name: str, num_workers: int) -> None:
    """The lambda looks plain, so nothing would await its coroutine."""

    async def later(value: Any) -> Any:
        return value

    options = {
        name: lambda value: later(value),  # noqa: PLW0108  (it looks plain)
        "num_workers": num_workers,
    }
    with pytest.raises(TypeError, match=f"the {name} is a plain function but returned"):
        next(iter(Loader([1, 2], 2, **options)))


class Seeds(Numbers):
    """Samples are the seed that the worker started with."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


@pytest.mark.filterwarnings("ignore:rng=:UserWarning")
def test_persistent_workers_resume_with_the_saved_seed() -> None:
    """The seed stays for later epochs, as in torchdata."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}

    def make() -> Any:
        return Loader(Seeds(4), 1, rng="worker", **options)

    with make() as loader, make() as resumed:
        iterator = iter(loader)
        seed = next(iterator).item()
        state = loader.state_dict()
        list(iterator)
        assert {batch.item() for batch in resumed} != {seed}
        resumed.load_state_dict(state)
        for _ in range(2):
            assert {batch.item() for batch in resumed} == {seed}


class Uncounted:
    """A batch sampler without a length, as those of graphs."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2])

    def __len__(self) -> int:
        raise ValueError("the number of batches is ambiguous")


def test_iterating_needs_no_length() -> None:
    """Samplers of graphs raise in ``len``; torch iterates them, too."""
    for num_workers in (0, 2):
        loader = DataLoader(
            range(3), batch_sampler=Uncounted(), num_workers=num_workers
        )
        assert [batch.tolist() for batch in loader] == [[0], [1, 2]]
    with pytest.raises(ValueError, match="ambiguous"):
        len(loader)


# -- rows of tensors in memory ---------------------------------------------------------

KINDS: list[Any] = [
    {"prefetch_factor": 2},
    {"num_workers": 2},
    {"num_workers": 2, "workers": "thread"},
]


def counting(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def dataset(rows: int = 10) -> TensorDataset:
    """Return large rows, small rows and empty rows."""
    large = counting((rows, 300, 300), torch.float32)
    return TensorDataset(large, counting((rows,), torch.int16), torch.zeros(rows, 0))


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_gathered_batches_are_torchs(options: dict[str, Any], shuffle: bool) -> None:
    """The same values, types and order."""
    data = dataset()
    torch.manual_seed(5)
    theirs = list(torch.utils.data.DataLoader(data, 4, shuffle=shuffle))
    torch.manual_seed(5)
    ours: Any = list(DataLoader(data, 4, shuffle=shuffle, **options))
    assert len(ours) == len(theirs) == 3
    for batch, expected in zip(ours, theirs, strict=True):
        assert type(batch) is type(expected) is list
        for part, theirs_part in zip(batch, expected, strict=True):
            assert (part.dtype, part.shape) == (theirs_part.dtype, theirs_part.shape)
            assert torch.equal(part, theirs_part)


DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3,), (3, 2)], ids=["vector", "matrix"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:.*(ComplexHalf|quint|qint|QInt|QUInt)")
def test_every_dtype_is_as_in_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """For some of them, torch can only copy single rows."""
    size = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.arange(size, dtype=torch.uint8)
    try:
        data = TensorDataset(octets.view(dtype).view(shape))
        theirs = list(torch.utils.data.DataLoader(data, 2, sampler=[2, 0, 1]))
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")
    in_turn: Any = DataLoader(data, 2)
    assert [len(batch) for (batch,) in in_turn] == [2, 1]
    for factor in (None, 2):
        ours: Any = list(DataLoader(data, 2, sampler=[2, 0, 1], prefetch_factor=factor))
        for (batch,), (expected,) in zip(ours, theirs, strict=True):
            assert batch.dtype is expected.dtype is dtype
            assert torch.equal(batch.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_stacked_as_in_torch() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(2)])
    ((batch,),) = DataLoader(TensorDataset(nested), 2)
    assert batch.tolist() == [[1, 1], [0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
def test_negative_indices_count_from_the_end(options: dict[str, Any]) -> None:
    """Indices beyond either end raise an IndexError that names the batch."""
    data = dataset()
    loader: Any = DataLoader(data, 2, sampler=[-1, 0, -10, 9], **options)
    assert [batch[1].tolist() for batch in loader] == [[9, 0], [0, 9]]
    for wrong in (10, -11):
        with pytest.raises(IndexError) as caught:
            list(DataLoader(data, 2, sampler=[0, wrong], **options))
        assert "batch 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("options", KINDS, ids=["ahead", "processes", "threads"])
def test_on_error_skips_one_row_of_a_batch(options: dict[str, Any]) -> None:
    """The batch is read again sample by sample."""
    loader: Any = DataLoader(
        dataset(), 2, sampler=[0, 10, 2, 3], on_error="skip", **options
    )
    assert [batch[1].tolist() for batch in loader] == [[0], [2, 3]]
    assert loader.stats().failures == 1


def test_a_replaced_getitem_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda data, index: -index)
    batches = [batch.tolist() for batch in DataLoader(dataset(), 5)]
    assert batches == [[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]]
