"""Hugging Face datasets: map-style and streaming, formats, shuffles, states."""

import importlib
from typing import Any

from compat.kit import WORKERS, Cases, Kit, plain

cases = Cases()
# By name: there is a folder of tests that is called so too.
datasets: Any = importlib.import_module("datasets")
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
