"""ignite's engine, torchmetrics, torchdata's states, pictures."""

import copy
import io
from typing import Any

import numpy as np
import torch
import torchmetrics
from ignite.engine import DeterministicEngine, Engine, Events
from ignite.engine.deterministic import ReproducibleBatchSampler, update_dataloader
from PIL import Image, ImageFile
from skimage import data as skimage_data
from skimage import transform as skimage_transform
from sklearn.datasets import load_sample_images
from torch.utils.data import Dataset

from compat.kit import (
    KINDS,
    WORKERS,
    Cases,
    Kit,
    batches,
    dataset,
    plain,
    resumed,
    seed,
    stopped,
)

cases = Cases()


@cases.add(*KINDS)
def ignite(kit: Kit, workers: int, kind: str) -> Any:
    """Two epochs of an engine, which counts iterations and reads lengths."""
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
    return batches(again)


@cases.add(*[{**w, "stop": stop} for w in WORKERS for stop in (2, 8)])
def ignite_resumes(kit: Kit, workers: int, stop: int) -> Any:
    """A deterministic engine resumes in mid-epoch with the same batches."""

    def run(state: Any = None) -> Any:
        seen: list[Any] = []
        saved: list[Any] = []
        engine = DeterministicEngine(lambda _, batch: seen.append(plain(batch)))
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=stop),
            lambda e: saved.append(copy.deepcopy(e.state_dict())),
        )
        loader = kit.loader(dataset("map"), 4, shuffle=True, num_workers=workers)
        if state is not None:
            engine.load_state_dict(state)
        seed()
        engine.run(loader, max_epochs=3, epoch_length=6)
        return seen, saved

    whole, (state,) = run()
    rest, _ = run(state)
    return [whole, rest, rest == whole[stop:]]


@cases.add(*KINDS)
def metrics(kit: Kit, workers: int, kind: str) -> Any:
    """Updated with each batch, computed at the end of each epoch."""
    computed = []
    mean, top = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
    loader = kit.loader(dataset(kind), 4, num_workers=workers, drop_last=True)
    for _ in range(2):
        for batch in loader:
            mean.update(batch)
            top.update(batch)
        computed.append([mean.compute().item(), top.compute().item()])
        mean.reset()
    return computed


@cases.add(*[{**k, "step": step} for k in KINDS for step in (0, 2, 5)])
def torchdata_states(kit: Kit, workers: int, kind: str, step: int) -> Any:
    """The rest of an epoch, after a state that was saved in the middle of it."""

    def loader() -> Any:
        seed()
        return kit.loader(dataset(kind), 4, num_workers=workers, stateful=True)

    head, state = stopped(loader(), step)
    return [head, resumed(loader(), state, 2)]


class Encoded(Dataset[Any]):
    """JPEG bytes, one of them cut short: only a global of Pillow makes it readable."""

    def __init__(self) -> None:
        self.files = []
        pictures = [skimage_data.astronaut(), *load_sample_images().images]
        for picture in pictures:
            small = skimage_transform.resize(picture, (32, 32))
            file = io.BytesIO()
            Image.fromarray((small * 255).astype(np.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())
        self.files.append(self.files[0][:-40])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(io.BytesIO(self.files[index])) as picture:
            return torch.from_numpy(np.array(picture.convert("L"), dtype=np.int64))


@cases.add(*WORKERS)
def decoded(kit: Kit, workers: int) -> Any:
    """A setting at the top of a script reaches its workers."""
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        loader = kit.loader(Encoded(), 2, num_workers=workers)
        return batches(loader)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
