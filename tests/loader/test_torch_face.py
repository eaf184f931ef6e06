"""A loader is torch's for frameworks that inspect it, rebuild it, or subclass it."""

import inspect
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data._utils import collate as torch_rules
from torch.utils.data.dataloader import (
    _DatasetKind,
    _InfiniteConstantSampler,
    _SingleProcessDataLoaderIter,
)

from aioloader import (
    DataLoader,
    Retry,
    ShuffledIndices,
    default_collate,
    default_convert,
)
from samples import AsyncMap


class Numbers(IterableDataset[int]):
    """Ten numbers, in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


class AsyncNumbers:
    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(10):
            yield number


class AsyncBoth:
    """A stream that can also be indexed."""

    async def __aiter__(self) -> AsyncIterator[int]:
        yield 1

    def __getitem__(self, index: int) -> int:
        return index


def tenfold(sample: Any) -> Any:
    return 10 * sample


def public(loader: object) -> dict[str, Any]:
    return {k: v for k, v in vars(loader).items() if not k.startswith("_")}


def batches(loader: Iterable[Any]) -> list[Any]:
    return [batch.tolist() for batch in loader]


CASES: list[dict[str, Any]] = [
    {"dataset": range(10)},
    {"dataset": range(10), "batch_size": None},
    {"dataset": range(10), "batch_size": 3, "shuffle": True, "drop_last": True},
    {"dataset": range(10), "batch_sampler": [[1, 2], [3]]},
    {"dataset": range(10), "sampler": [4, 5, 6], "batch_size": 2},
    {"dataset": Numbers(), "batch_size": 4},
    {"dataset": Numbers(), "batch_size": None},
    {"dataset": range(10), "num_workers": 1, "persistent_workers": True},
]


@pytest.mark.parametrize("arguments", CASES)
def test_attributes_are_those_of_torchs_loader(arguments: dict[str, Any]) -> None:
    """Public attributes, private names and properties."""
    ours: Any = DataLoader(**arguments)
    theirs: Any = torch.utils.data.DataLoader(**arguments)
    assert isinstance(ours, torch.utils.data.DataLoader)
    # here the default depends on the dataset; torch's context is a property
    own = {"prefetch_factor", "_DataLoader__multiprocessing_context"}
    for name in set(vars(theirs)) - own:
        value, expected = getattr(ours, name), vars(theirs)[name]
        assert type(value) is type(expected), name
        if isinstance(value, (int, float, str)):
            assert value == expected, name
    assert ours._auto_collation == theirs._auto_collation
    assert type(ours._index_sampler) is type(theirs._index_sampler)
    assert ours.multiprocessing_context is theirs.multiprocessing_context is None
    assert ours._iterator is theirs._iterator is None
    batched = ours.batch_size is not None or "batch_sampler" in arguments
    assert ours.collate_fn is (default_collate if batched else default_convert)


@pytest.mark.parametrize("size", [None, 2])
def test_patched_collate_functions_are_called(size: Any, monkeypatch: Any) -> None:
    """Libraries replace torch's defaults in their module."""
    for name in ("default_collate", "default_convert"):
        monkeypatch.setattr(torch_rules, name, lambda data, name=name: (name, data))
    assert list(DataLoader([1], size)) == list(TorchLoader([1], size))  # type: ignore[arg-type]


def test_public_attributes_are_arguments() -> None:
    """Frameworks rebuild a loader from them, even with unknown arguments."""
    loader = DataLoader(
        range(10),
        4,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
        transform=tenfold,
        concurrency=3,
        retry=Retry(),
        rng="sample",
        rank=1,
        world_size=2,
        tail="drop",
    )
    given = public(loader)
    names = set(inspect.signature(DataLoader).parameters)
    assert names - set(given) == {"shuffle"}
    assert set(given) <= names
    del given["batch_sampler"]
    again = type(loader)(**given)
    assert {k for k, v in public(again).items() if given.get(k, v) is not v} == set()


def test_async_iterables_count_as_iterable_datasets() -> None:
    """Frameworks would add samplers to other datasets."""
    loader = DataLoader[Any](AsyncNumbers(), batch_size=4)
    assert isinstance(loader.dataset, IterableDataset)
    assert loader._dataset_kind == _DatasetKind.Iterable
    assert type(loader.sampler) is _InfiniteConstantSampler
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_indexable_stream_is_no_iterable_dataset() -> None:
    """Torch's own loader indexes it, and must still do so."""
    both = AsyncBoth()
    DataLoader(both)
    assert not isinstance(both, IterableDataset)


class Passing(DataLoader[Any]):
    """Passes all arguments on, as most subclasses do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Adding(DataLoader[Any]):
    """Has an additional argument."""

    def __init__(self, dataset: Any, *args: Any, extra: int = 3, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.extra = extra


class Further(Adding):
    """Derives from a subclass with an additional argument."""

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)


class Mixin:
    """Knows nothing of loaders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Mixed(Mixin, DataLoader[Any]):
    """Its ``__init__`` is that of the mixin."""


def test_signatures_of_sub_classes_are_explicit() -> None:
    """With ``**kwargs``, frameworks would keep only torch's arguments."""
    names = list(inspect.signature(DataLoader.__init__).parameters)
    for cls in (Passing, Mixed):
        loader = cls(range(4), transform=tenfold)
        assert list(inspect.signature(cls.__init__).parameters) == names
        assert list(inspect.signature(loader.__init__).parameters) == names[1:]  # type: ignore[misc]
    assert "transform" not in inspect.signature(Mixin.__init__).parameters
    for sub in (Adding, Further):
        parameters = list(inspect.signature(sub.__init__).parameters)
        assert set(parameters) == {*names, "extra"}
        assert parameters[:2] == ["self", "dataset"]
        assert sub(range(4), transform=tenfold).transform is tenfold


class Repeat:
    """An endless batch sampler, for trainers that iterate once."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def repeating(base: Any, *, guarded: bool) -> Any:
    """Return a class that iterates once, over an endless batch sampler."""

    class Infinite(base):  # type: ignore[misc]
        batch_sampler: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            repeat = Repeat(self.batch_sampler)
            if guarded:  # as YOLO's does
                object.__setattr__(self, "batch_sampler", repeat)
            else:  # as timm's, which switches torch's guard off
                self._DataLoader__initialized = False
                self.batch_sampler = repeat
                self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Infinite


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_endless_samplers_work_as_in_torch(guarded: bool, num_workers: int) -> None:
    """Three epochs over one iterator give torch's batches."""

    def epochs(base: Any) -> list[Any]:
        loader = repeating(base, guarded=guarded)(
            list(range(10)),
            4,
            shuffle=True,
            generator=torch.Generator().manual_seed(4),
            num_workers=num_workers,
        )
        all_epochs = [batches(loader) for _ in range(3)]
        if num_workers:
            loader.iterator._shutdown_workers()
        return all_epochs

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "names",
    [
        {
            "_auto_collation": lambda _self: False,
            "_index_sampler": lambda self: self.batch_sampler,
        },
        {"_index_sampler": lambda _self: [[3, 1], [0]]},
    ],
    ids=["a read per batch", "other batches"],
)
def test_a_sub_class_may_choose_the_order(names: Any, num_workers: int) -> None:
    """By torch's private names, which also decide whether samples are collated."""
    members = {name: property(get) for name, get in names.items()}
    with pytest.raises(TypeError, match="do not follow the epochs of ShuffledIndices"):
        type("Sub", (DataLoader,), members)(range(4), sampler=ShuffledIndices(4, 0))

    if len(members) == 1:
        loader = type("Sub", (DataLoader,), members)(iter("abcd"))
        with pytest.raises(TypeError, match="nothing samples an iterable dataset"):
            list(loader)

    def loaded(base: Any) -> tuple[int, list[Any]]:
        torch.manual_seed(3)
        dataset, cls = TensorDataset(torch.arange(6.0)), type("Sub", (base,), members)
        loader = cls(dataset, 3, shuffle=True, num_workers=num_workers)
        return len(loader), [[part.tolist() for part in batch] for batch in loader]

    assert loaded(DataLoader) == loaded(TorchLoader)


class Counted(DataLoader[Any]):
    """Makes its own iterator."""

    def _get_iterator(self) -> Any:
        return enumerate(super()._get_iterator())


def test_a_sub_class_may_make_its_own_iterator() -> None:
    """``iter`` calls ``_get_iterator``, as in torch; ``async for`` cannot."""
    loader = Counted(range(4), batch_size=2)
    steps: list[Any] = list(loader)
    assert [(n, batch.tolist()) for n, batch in steps] == [(0, [0, 1]), (1, [2, 3])]
    with pytest.raises(TypeError, match="Counted overrides _get_iterator"):
        aiter(loader)


class Negated(DataLoader[Any]):
    """Changes the batches of a plain loop."""

    def __iter__(self) -> Any:
        return (-batch for batch in super().__iter__())


class NegatedForTasks(Negated):
    """Changes those of ``async for``, too."""

    async def __aiter__(self) -> Any:
        async for batch in super().__aiter__():
            yield -batch


async def test_async_for_does_not_bypass_a_sub_class() -> None:
    """A subclass that changes ``for`` must define ``async for``."""
    with pytest.raises(TypeError, match="Negated overrides __iter__"):
        aiter(Negated(range(2), 2))
    both = NegatedForTasks(range(2), 2)
    expected = [[0, -1]]
    assert batches(both) == expected
    assert [batch.tolist() async for batch in both] == expected


def test_torchs_own_iterator_reads_a_loader() -> None:
    """The loader has all private names that it reads."""
    loader: Any = DataLoader(Numbers(), batch_size=4)
    loaded = batches(_SingleProcessDataLoaderIter(loader))
    assert loaded == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def ranges_of(profile: Any) -> list[str]:
    names = [event.name for event in profile.events()]
    return [name for name in names if name.startswith("enumerate(DataLoader)#")]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_profilers_see_the_steps_of_a_loop(options: dict[str, Any]) -> None:
    """There is a range for each, and for the end, as with torch's loader."""

    def ranges(cls: Any) -> list[str]:
        loader = cls(range(4), 2, **options)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            list(loader)
        return ranges_of(profile)

    assert ranges(DataLoader) == ["enumerate(DataLoader)#BatchIterator.__next__"] * 3
    assert len(ranges(torch.utils.data.DataLoader)) == 3


async def test_profilers_see_no_steps_of_async_for() -> None:
    """Other tasks run during a step: their work would count as data loading."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        assert [batch.tolist() async for batch in DataLoader(range(2), 2)] == [[0, 1]]
    assert ranges_of(profile) == []


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_batches_are_counted_under_torchs_name(options: dict[str, Any]) -> None:
    """SpeechBrain's checkpoints read ``_num_yielded``, even after the end."""

    def counts(cls: Any) -> list[int]:
        iterator = iter(cls(range(5), 2, **options))
        numbers = [iterator._num_yielded]
        numbers += [iterator._num_yielded for _ in iterator]
        return [*numbers, iterator._num_yielded]

    assert counts(DataLoader) == counts(torch.utils.data.DataLoader) == [0, 1, 2, 3, 3]


def test_samplers_are_guarded_as_in_torch() -> None:
    """Samplers and ranks cannot be replaced by accident."""
    loader = DataLoader[Any](range(10), batch_size=5)
    names = "batch_size batch_sampler sampler drop_last dataset persistent_workers"
    for name in [*names.split(), "rank", "world_size", "tail"]:
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(loader, name, None)
    object.__setattr__(loader, "batch_sampler", [[3, 2], [1]])
    assert batches(loader) == [[3, 2], [1]]
    assert len(loader) == 2


def test_a_reported_length_is_kept() -> None:
    """Torch's iterators read it by a private name."""
    loader = DataLoader[Any](Numbers(), batch_size=4)
    assert loader._IterableDataset_len_called is None
    assert len(loader) == 3
    assert loader._IterableDataset_len_called == 10


def test_iterators_have_torchs_private_names() -> None:
    """The seed, and the method that shuts workers down."""
    torch.manual_seed(5)
    theirs: Any = iter(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
    torch.manual_seed(5)
    ours = iter(DataLoader[Any](range(4)))
    assert ours._base_seed == theirs._base_seed
    ours._shutdown_workers()
    assert list(ours) == []


def test_a_temporary_iterator_gives_a_batch() -> None:
    for workers in (0, 1):
        loader = DataLoader[Any](range(4), 2, num_workers=workers)
        assert iter(loader).__next__().tolist() == [0, 1]


def test_persistent_workers_are_renewed_as_in_torch() -> None:
    """By shutting down ``_iterator``, which exists between epochs."""
    dataset = [0] * 4
    loader = DataLoader[Any](dataset, 4, num_workers=1, persistent_workers=True)
    assert [batch.tolist() for batch in loader] == [[0] * 4]
    dataset[:] = [1] * 4
    assert loader._iterator is not None
    loader._iterator._shutdown_workers()
    loader._iterator = None
    assert [batch.tolist() for batch in loader] == [[1] * 4]
    loader.close()
    assert loader._iterator is None


def test_setting_the_iterator_to_none_ends_its_workers() -> None:
    """Lightning's teardown sets it to None."""
    loader = DataLoader[Any](range(4), num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    iterator = iter(loader)
    assert next(iterator).tolist() == [0]
    assert loader._iterator is iterator
    loader._iterator = None
    assert not loader._live.has_kept()
    with pytest.raises(AttributeError, match="only be set to None"):
        loader._iterator = iterator


@pytest.mark.parametrize(
    ("loader", "lost"),
    [
        (DataLoader[Any](range(10), transform=tenfold), "transform="),
        (DataLoader[Any](range(10), rng="sample"), "rng="),
        (DataLoader[Any](range(10), rank=0, world_size=2), "rank=, world_size="),
        (DataLoader[Any](AsyncMap(10)), "an async dataset"),
        (DataLoader[Any](AsyncNumbers()), "an async dataset"),
    ],
    ids=["transform", "rng", "ranks", "async map", "async stream"],
)
def test_accelerate_may_not_lose_our_options(loader: Any, lost: str) -> None:
    """accelerate would make a loader of torch's class."""
    with pytest.raises(ValueError, match=f"without .*{lost}.*aioloader.accelerate"):
        _ = loader._is_accelerate_prepared


def test_accelerate_warns_if_only_speed_is_lost() -> None:
    """Torch's loader would deliver the same batches."""
    loader = DataLoader[Any](range(10), 4, concurrency=3)
    with pytest.warns(UserWarning, match=r"batches are the same.*accelerate\.prepare"):
        assert loader._is_accelerate_prepared is False


def test_accelerate_may_not_lose_a_loaded_state() -> None:
    """Torch's loader would start from the beginning."""
    loader = DataLoader[Any](range(10), 4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="without a loaded state"):
        _ = loader._is_accelerate_prepared


def test_a_program_may_replace_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate is still refused, and a subclass gets all arguments."""
    monkeypatch.setattr(torch.utils.data, "DataLoader", Passing)
    with pytest.raises(ValueError, match="without transform="):
        _ = DataLoader[Any](range(10), transform=tenfold)._is_accelerate_prepared

    class Other(DataLoader[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)

    assert "batch_sampler" in inspect.signature(Other).parameters


def before(cls: Any) -> Any:
    """Return a loader that keeps its own ``transform``, and applies it to batches.

    As torch_geometric's ``NodeLoader`` does.
    """

    class NodeLoader(cls):  # type: ignore[misc]
        def __init__(self, size: int, transform: Any = None, **kwargs: Any) -> None:
            self.transform = transform
            super().__init__(range(size), collate_fn=self.collate, **kwargs)

        def collate(self, samples: list[int]) -> Any:
            batch = torch.tensor(samples)
            return batch if self.transform is None else self.transform(batch)

    return NodeLoader(4, transform=tenfold, batch_size=2)


def after(cls: Any) -> Any:
    """Return a loader that sets its attributes after ``super().__init__``."""

    class Loader(cls):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(range(4), batch_size=2)
            self.transform = tenfold
            self.device = "cpu"
            self.rank, self.world_size = 1, 2
            self.retry = self.loop = self.fetch = self.rng = "mine"

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield self.transform(batch).to(self.device) + self.rank

    return Loader()


def properties(cls: Any) -> Any:
    """Return a loader with properties, a method, and an attribute of its class."""

    class Loader(cls):  # type: ignore[misc]
        tail = "a tail"

        @property
        def device(self) -> str:
            return self._device

        @property
        def world_size(self) -> int:
            return 2

        def transform(self, batch: Any) -> Any:
            return 10 * batch

        def __init__(self) -> None:
            super().__init__(range(4), batch_size=2)
            self._device = "cpu"

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield self.transform(batch).to(self.device) + self.world_size

    return Loader()


@pytest.mark.parametrize("make", [before, after, properties])
def test_subclasses_keep_their_own_attributes(make: Any) -> None:
    """Attributes with names of our arguments do what they do in torch's loader."""

    def batches(cls: Any) -> list[Any]:
        loader = make(cls)
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert batches(DataLoader) == batches(TorchLoader)


class Plain(DataLoader[Any]):
    """A subclass that adds nothing."""


class Mapped(DataLoader[Any]):
    """A subclass that passes ``transform`` on, and keeps it."""

    def __init__(self, dataset: Any, transform: Any, **kwargs: Any) -> None:
        super().__init__(dataset, transform=transform, **kwargs)
        self.transform = transform


def test_a_subclass_uses_its_constructor_arguments() -> None:
    """They are attributes, too: frameworks rebuild loaders from these."""
    options: Any = {"transform": tenfold, "concurrency": 3, "prefetch_factor": "auto"}
    plain = Plain(range(4), batch_size=2, **options)
    assert vars(plain)["concurrency"] == 3
    again = pickle.loads(pickle.dumps(plain))
    for loader in (plain, again, Mapped(range(4), tenfold, batch_size=2)):
        assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


def test_attributes_of_a_loader_may_change() -> None:
    """They apply from the next iteration on, as in torch."""
    loader: DataLoader[Any] = DataLoader(range(4), batch_size=2)
    loader.transform = tenfold
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]
