"""ignite's engine, torchmetrics, torchdata's states, timm's and YOLO's loaders."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torchmetrics
from ignite.engine import DeterministicEngine, Engine, Events
from ignite.engine.deterministic import ReproducibleBatchSampler, update_dataloader

from compat.kit import KINDS, WORKERS, Cases, Kit, dataset, plain, seed

cases = Cases()


@cases.add(*KINDS)
def ignite(kit: Kit, workers: int, kind: str) -> Any:
    """Two epochs of an engine; it counts iterations and finds lengths."""
    seen: list[Any] = []

    def step(engine: Any, batch: Any) -> float:
        seen.append([engine.state.epoch, engine.state.iteration, plain(batch)])
        return float(batch.mean())

    engine = Engine(step)
    shuffle = kind == "map" or None
    loader = kit.loader(dataset(kind), 4, shuffle=shuffle, num_workers=workers)
    state = engine.run(loader, max_epochs=2)
    return [seen, state.epoch_length, state.iteration]


@cases.add(*WORKERS)
def ignite_rebuilds(kit: Kit, workers: int) -> Any:
    """``update_dataloader`` calls the class with the public attributes."""
    loader = kit.loader(dataset("map"), 4, num_workers=workers)
    again = update_dataloader(loader, ReproducibleBatchSampler(loader.batch_sampler))
    kit.check_engine(again)
    return [plain(batch) for batch in again]


@cases.add(*[{**w, "at": at} for w in WORKERS for at in (2, 8)])
def ignite_resumes(kit: Kit, workers: int, at: int) -> Any:
    """A deterministic engine goes on in mid-epoch with the batches that would come."""

    def run(state: Any = None) -> Any:
        seen: list[Any] = []
        saved: list[Any] = []
        engine = DeterministicEngine(lambda _, batch: seen.append(plain(batch)))
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=at),
            lambda one: saved.append(copy.deepcopy(one.state_dict())),
        )
        loader = kit.loader(dataset("map"), 4, shuffle=True, num_workers=workers)
        if state is not None:
            engine.load_state_dict(state)
        seed()
        engine.run(loader, max_epochs=3, epoch_length=6)
        return seen, saved

    whole, (state,) = run()
    rest, _ = run(state)
    return [whole, rest, rest == whole[at:]]


@cases.add(*KINDS)
def metrics(kit: Kit, workers: int, kind: str) -> Any:
    """Updated by the batch, computed at the end of each epoch."""
    found = []
    mean, top = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
    loader = kit.loader(dataset(kind), 4, num_workers=workers, drop_last=True)
    for _ in range(2):
        for batch in loader:
            mean.update(batch)
            top.update(batch)
        found.append([mean.compute().item(), top.compute().item()])
        mean.reset()
    return found


@cases.add(*[{**one, "step": step} for one in KINDS for step in (0, 2, 5)])
def torchdata_states(kit: Kit, workers: int, kind: str, step: int) -> Any:
    """The rest of an epoch, after a state that was saved in the middle of it."""

    def loader() -> Any:
        seed()
        return kit.loader(dataset(kind), 4, num_workers=workers, stateful=True)

    first = loader()
    iterator = iter(first)
    head = [plain(next(iterator)) for _ in range(step)]
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    return [head, [plain(batch) for batch in second], [plain(b) for b in second]]


class Repeat:
    """A batch sampler without an end."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def yolo_like(cls: Any) -> Any:
    class InfiniteDataLoader(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def __del__(self) -> None:
            for worker in getattr(self.iterator, "_workers", ()):
                if worker.is_alive():
                    worker.terminate()
            if hasattr(self.iterator, "_shutdown_workers"):
                self.iterator._shutdown_workers()

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    return InfiniteDataLoader


def timm_like(cls: Any) -> Any:
    class MultiEpochsDataLoader(cls):  # type: ignore[misc]
        batch_sampler: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = Repeat(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochsDataLoader


@cases.add(*[{**w, "like": like} for w in WORKERS for like in ("yolo", "timm")])
def sub_classes(kit: Kit, workers: int, like: str) -> Any:
    """Three epochs over one iterator; YOLO's starts another in between."""
    make = yolo_like if like == "yolo" else timm_like
    generator = torch.Generator().manual_seed(6)
    loader = make(kit.cls)(
        kit.data(dataset("map")),
        4,
        shuffle=True,
        num_workers=workers,
        generator=generator,
        **kit.options(),
    )
    found = [[plain(batch) for batch in loader] for _ in range(2)]
    if like == "yolo":
        loader.reset()
    return [found, [plain(batch) for batch in loader], len(loader)]
