"""Hugging Face datasets: map-style and streaming, formats, shuffles, states."""

import importlib
from typing import Any

from aioloader.datasets import from_iterable
from compat.kit import WORKERS, Cases, Kit, plain

cases = Cases()
# By name: there is a folder of tests that is called so too.
datasets: Any = importlib.import_module("datasets")
nodes: Any = importlib.import_module("datasets.distributed")
datasets.disable_progress_bars()


def table(n: int = 23) -> Any:
    names = [f"name {index}" for index in range(n)]
    return datasets.Dataset.from_dict({"x": list(range(n)), "name": names})


def loaded(kit: Kit, data: Any, *args: Any, **options: Any) -> Any:
    """Return a loader; datasets shift their values themselves in both."""
    return kit.cls(data, *args, **options)


def add_one(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] + 1}


@cases.add(*[{**w, "form": form} for w in WORKERS for form in ("torch", "numpy", None)])
def map_style(kit: Kit, workers: int, form: str | None) -> Any:
    """Two epochs over one dataset, which is there afterwards."""
    data = table().map(add_one).with_format(form)
    loader = loaded(kit, data, 4, shuffle=True, num_workers=workers)
    found = [[plain(batch) for batch in loader] for _ in range(2)]
    return [found, plain(data[3]), len(loader)]


@cases.add(*WORKERS)
def with_a_transform(kit: Kit, workers: int) -> Any:
    """Ours after the dataset's own: the engine shows."""
    data = table().with_format("torch")
    return [plain(batch) for batch in kit.loader(data, 4, True, num_workers=workers)]


@cases.add(*[{**w, "shuffle": s} for w in WORKERS for s in (False, True)])
def streaming(kit: Kit, workers: int, shuffle: bool) -> Any:
    """Shards are dealt to workers; ``set_epoch`` counts."""
    data = table().to_iterable_dataset(num_shards=3).map(add_one)
    if shuffle:
        data = data.shuffle(seed=3, buffer_size=5)
    data = data.with_format("torch")
    loader = loaded(kit, data, 4, num_workers=workers)
    found = []
    for epoch in range(2):
        data.set_epoch(epoch)
        found.append([plain(batch) for batch in loader])
    return found


@cases.add(*WORKERS)
def streaming_with_a_transform(kit: Kit, workers: int) -> Any:
    """The engine shows."""
    data = table().to_iterable_dataset(num_shards=3).with_format("torch")
    return [plain(batch) for batch in kit.loader(data, 4, num_workers=workers)]


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (1, 3)])
def streaming_resumed(kit: Kit, workers: int, step: int) -> Any:
    """The dataset's own state is the loader's."""

    def loader() -> Any:
        data = table().to_iterable_dataset(num_shards=2).with_format("torch")
        return kit.loader(data, 4, num_workers=workers, stateful=True)

    first = loader()
    iterator = iter(first)
    head = [plain(next(iterator)) for _ in range(step)]
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    return [head, [plain(batch) for batch in second]]


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (0, 1, 4, 6)])
def streaming_after_a_resumed_epoch(kit: Kit, workers: int, step: int) -> Any:
    """Later epochs are whole; with torchdata they are as short as the resumed one."""

    def loader() -> Any:
        data = table().to_iterable_dataset(num_shards=2).with_format("torch")
        kept = {"persistent_workers": True} if workers else {}
        return kit.loader(data, 4, num_workers=workers, **kept)

    if not kit.is_ours:
        whole = [plain(batch) for batch in loader()]
        return [whole[step:], whole, whole]
    first = loader()
    iterator = iter(first)
    for _ in range(step):
        next(iterator)
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    found = [[plain(batch) for batch in second] for _ in range(3)]
    first.close()
    second.close()
    return found


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (1, 4)])
def streaming_in_a_later_epoch(kit: Kit, workers: int, step: int) -> Any:
    """A resumed script need not set the epoch: it is that of the state."""

    def loader(epoch: int) -> Any:
        data = table().to_iterable_dataset(num_shards=2)
        if not workers:  # a state of shuffled shards cannot be loaded in workers
            data = data.shuffle(3, buffer_size=1)
        data.set_epoch(epoch)
        return kit.loader(data, 4, num_workers=workers)

    if not kit.is_ours:
        return [plain(batch) for batch in loader(3)][step:]
    first, second = loader(3), loader(0)
    iterator = iter(first)
    for _ in range(step):
        next(iterator)
    second.load_state_dict(first.state_dict())
    del iterator
    return [plain(batch) for batch in second]


@cases.add(*WORKERS)
def streaming_through_our_stream(kit: Kit, workers: int) -> Any:
    """A node reads its shards; its shuffle buffer is the same in a resumed run."""

    def loader(rank: int) -> Any:
        data = table().to_iterable_dataset(num_shards=4).shuffle(3, buffer_size=5)
        split = nodes.split_dataset_by_node(data, rank, 2)
        return kit.loader(from_iterable(split).epoch_length(8), 2, num_workers=workers)

    if not kit.is_ours:
        return None
    seen = set()
    for rank in range(2):
        whole = loader(rank)
        epochs = [[plain(batch)["x"] for batch in whole] for _ in range(3)]
        first, second = loader(rank), loader(rank)
        assert [plain(batch)["x"] for batch in first] == epochs[0]
        iterator = iter(first)
        head = [plain(next(iterator))["x"] for _ in range(2)]
        second.load_state_dict(first.state_dict())
        del iterator
        rest = [[plain(batch)["x"] for batch in second] for _ in range(2)]
        assert [head + rest[0], rest[1]] == epochs[1:]
        seen |= {x for epoch in epochs for batch in epoch for x in batch}
    assert seen == {1000 + x for x in range(23)}
    return None
