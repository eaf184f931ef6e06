"""Hugging Face datasets: map-style and streaming, formats, shuffles, states."""

import importlib
from typing import Any

from aioloader.datasets import from_iterable
from compat.kit import WORKERS, Cases, Kit, batches, plain, resumed, stopped

cases = Cases()
# By name, because a folder of tests has the same name.
datasets: Any = importlib.import_module("datasets")
nodes: Any = importlib.import_module("datasets.distributed")
datasets.disable_progress_bars()


def table(n: int = 23) -> Any:
    names = [f"name {index}" for index in range(n)]
    return datasets.Dataset.from_dict({"x": list(range(n)), "name": names})


def add_one(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "x": row["x"] + 1}


@cases.add(*[{**w, "form": form} for w in WORKERS for form in ("torch", "numpy", None)])
def map_style(kit: Kit, workers: int, form: str | None) -> Any:
    """Two epochs over a dataset, which is unchanged afterwards."""
    data = table().map(add_one).with_format(form)
    loader = kit.cls(data, 4, shuffle=True, num_workers=workers)
    epochs = [batches(loader) for _ in range(2)]
    return [epochs, plain(data[3]), len(loader)]


@cases.add(*WORKERS)
def with_a_transform(kit: Kit, workers: int) -> Any:
    """The loader's transform, after the dataset's own."""
    data = table().with_format("torch")
    return batches(kit.loader(data, 4, True, num_workers=workers))


@cases.add(*[{**w, "shuffle": s} for w in WORKERS for s in (False, True)])
def streaming(kit: Kit, workers: int, shuffle: bool) -> Any:
    """Shards are split among workers; ``set_epoch`` counts."""
    data = table().to_iterable_dataset(num_shards=3).map(add_one)
    if shuffle:
        data = data.shuffle(seed=3, buffer_size=5)
    data = data.with_format("torch")
    loader = kit.cls(data, 4, num_workers=workers)
    epochs = []
    for epoch in range(2):
        data.set_epoch(epoch)
        epochs.append(batches(loader))
    return epochs


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (1, 3)])
def streaming_resumed(kit: Kit, workers: int, step: int) -> Any:
    """The dataset's own state is the loader's; a transform shows the engine."""

    def loader() -> Any:
        data = table().to_iterable_dataset(num_shards=2).with_format("torch")
        return kit.loader(data, 4, num_workers=workers, stateful=True)

    head, state = stopped(loader(), step)
    return [head, resumed(loader(), state)]


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (0, 1, 4, 6)])
def streaming_after_a_resumed_epoch(kit: Kit, workers: int, step: int) -> Any:
    """Later epochs are whole; torchdata's would be as short as the resumed one."""

    def loader() -> Any:
        data = table().to_iterable_dataset(num_shards=2).with_format("torch")
        kept = {"persistent_workers": True} if workers else {}
        return kit.loader(data, 4, num_workers=workers, **kept)

    if not kit.is_ours:
        whole = batches(loader())
        return [whole[step:], whole, whole]
    with loader() as first, loader() as second:
        return resumed(second, stopped(first, step)[1], 3)


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (1, 4)])
def streaming_in_a_later_epoch(kit: Kit, workers: int, step: int) -> Any:
    """A resumed script need not set the epoch, which is in the state."""

    def loader(epoch: int) -> Any:
        data = table().to_iterable_dataset(num_shards=2)
        if not workers:  # a state of shuffled shards cannot be loaded in workers
            data = data.shuffle(3, buffer_size=1)
        data.set_epoch(epoch)
        return kit.loader(data, 4, num_workers=workers)

    if not kit.is_ours:
        return batches(loader(3))[step:]
    return resumed(loader(0), stopped(loader(3), step)[1])[0]


@cases.add(*WORKERS)
def streaming_through_our_stream(kit: Kit, workers: int) -> Any:
    """A node reads its shards; a resumed run has the same shuffle buffer."""

    def loader(rank: int) -> Any:
        data = table().to_iterable_dataset(num_shards=4).shuffle(3, buffer_size=5)
        split = nodes.split_dataset_by_node(data, rank, 2)
        return kit.loader(from_iterable(split).epoch_length(8), 2, num_workers=workers)

    if not kit.is_ours:
        return None
    seen = set()
    for rank in range(2):
        whole, first = loader(rank), loader(rank)
        epochs = [batches(whole) for _ in range(3)]
        assert batches(first) == epochs[0]
        head, state = stopped(first, 2)
        rest, last = resumed(loader(rank), state, 2)
        assert [head + rest, last] == epochs[1:]
        seen |= {x for epoch in epochs for batch in epoch for x in batch["x"]}
    assert seen == {1000 + x for x in range(23)}
    return None
