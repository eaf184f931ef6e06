"""Lightning's Trainer: fit, validate, predict, accumulation, checkpoints."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import aioloader
from aioloader.datasets import from_iterable
from compat.kit import KINDS, WORKERS, Cases, Kit, dataset, seed

cases = Cases()


class Model(L.LightningModule):
    """One weight; records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append(["train", index, batch.flatten().tolist()])
        loss = ((batch / 1000 * self.weight) ** 2).mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(["val", index, batch.flatten().tolist()])
        self.log("val", batch.mean(), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        self.seen.append(["predict", index, batch.flatten().tolist()])
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stop(Callback):
    """Save at a step, or as Lightning does after the first epoch, and end there."""

    def __init__(self, step: int | None, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        if trainer.global_step == self.step:
            self.stop(trainer)

    def on_train_epoch_end(self, trainer: Any, *_args: Any) -> None:
        if self.step is None:
            self.stop(trainer)

    def stop(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def trainer(kit: Kit, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=kit.world,
        strategy="ddp" if kit.world > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=kit.folder,
        **options,
    )


def gathered(model: Model, training: L.Trainer) -> list[Any]:
    metrics = {key: float(value) for key, value in training.callback_metrics.items()}
    weight = model.weight.item()
    return [model.seen, training.global_step, metrics, weight]


@cases.add(*KINDS)
def fit(kit: Kit, workers: int, kind: str) -> Any:
    """Three epochs, with validation and gradients of three batches."""
    loader = kit.loader(
        dataset(kind), 4, shuffle=kind == "map" or None, num_workers=workers
    )
    check = kit.loader(dataset(kind, 9), 2, num_workers=workers)
    model, training = Model(), trainer(kit, max_epochs=3, accumulate_grad_batches=3)
    training.fit(model, loader, check)
    kit.check_engine(training.train_dataloader)
    return gathered(model, training)


@cases.add(*WORKERS)
def fit_from_a_hook(kit: Kit, workers: int) -> Any:
    """Lightning records the arguments of loaders that are made in hooks."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return kit.loader(
                dataset("map"), 4, shuffle=True, num_workers=workers, drop_last=True
            )

        def val_dataloader(self) -> Any:
            return [kit.loader(dataset("map", 5), 2), kit.loader(dataset("map", 3))]

    class Several(Model):
        def validation_step(  # type: ignore[override]
            self, batch: Any, index: int, dataloader_idx: int
        ) -> None:
            self.seen.append(["val", dataloader_idx, index, batch.tolist()])

    model, training = Several(), trainer(kit, max_epochs=2)
    training.fit(model, datamodule=Data())
    kit.check_engine(training.train_dataloader)
    return gathered(model, training)


@cases.add(*WORKERS)
def predict(kit: Kit, workers: int) -> Any:
    """Lightning replaces the batch sampler by its own."""
    loader = kit.loader(dataset("map"), 4, num_workers=workers)
    model, training = Model(), trainer(kit)
    given = training.predict(model, loader)
    return [[batch.tolist() for batch in given or []], model.seen]


@cases.add(*WORKERS)
def a_sub_class(kit: Kit, workers: int) -> Any:
    """With arguments that Lightning does not know in ``**kwargs``.

    Its persistent workers end with Lightning's teardown.
    """

    class Mine(kit.cls):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = Mine(kit.data(dataset("map")), 4, True, **options, **kit.options())
    model, training = Model(), trainer(kit, max_epochs=3, limit_train_batches=4)
    training.fit(model, loader)
    return gathered(model, training)


@cases.add(*[{**w, "step": step} for w in WORKERS for step in (3, 6, 9)])
def resume(kit: Kit, workers: int, step: int) -> Any:
    """In mid-epoch, and after an epoch's last batch, as torchdata's loader does."""
    if kit.world > 1:
        return None  # torchdata's loader under Lightning is exact in one process alone

    def loader() -> Any:
        generator = torch.Generator().manual_seed(3)
        return kit.loader(
            dataset("map"),
            4,
            True,
            num_workers=workers,
            generator=generator,
            stateful=True,
        )

    path = kit.folder / f"resume-{workers}-{step}.ckpt"
    whole = Model()
    trainer(kit, max_epochs=3).fit(whole, loader())
    first = Model()
    stopped = trainer(kit, max_epochs=3, callbacks=[Stop(step, path)])
    stopped.fit(first, loader())
    seed(8)
    second, training = Model(), trainer(kit, max_epochs=3)
    training.fit(second, loader(), ckpt_path=str(path), weights_only=False)
    assert first.seen == whole.seen[:step]
    rest = -step % 6  # batches of the epoch that was left
    assert second.seen[:rest] == whole.seen[step : step + rest]
    if kit.is_ours and rest:  # torchdata's later epochs come in another order
        assert second.seen == whole.seen[step:]
    return [[index for _, index, _ in second.seen], training.global_step]


def numbers() -> Any:
    yield from (torch.tensor([float(number)]) for number in range(24))


LIMITS = {
    # the dataset, the step after which it is saved (None: after the epoch),
    # and the steps of the whole run that follow it in the resumed one
    "a keyed order": ("keyed", 3, range(3, 18)),
    "a keyed order, after an epoch": ("keyed", None, range(6, 18)),
    "a drawn order, after an epoch": ("drawn", None, range(12)),
    "the last step of an epoch": ("keyed", 6, range(12, 18)),
    "no length": ("stream", 3, range(4, 18)),
    "a length": ("sized stream", 3, range(3, 18)),
}


@cases.add(*({"limit": limit} for limit in LIMITS))
def resume_within_lightnings_limits(kit: Kit, limit: str) -> Any:
    """As in the table of ``docs/compatibility.md``."""
    if kit.world > 1 or not kit.is_ours:
        return None
    kind, step, steps = LIMITS[limit]

    def loader() -> Any:
        if "stream" in kind:
            stream: Any = from_iterable(numbers)
            return kit.loader(stream.epoch_length(24) if "sized" in kind else stream, 4)
        order: dict[str, Any] = {"sampler": aioloader.ShuffledIndices(24, 3)}
        if kind == "drawn":
            order = {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        return kit.loader(dataset("map"), 4, **order)

    path = kit.folder / f"limit-{limit}.ckpt"
    whole = Model()
    trainer(kit, max_epochs=3).fit(whole, loader())
    trainer(kit, max_epochs=3, callbacks=[Stop(step, path)]).fit(Model(), loader())
    resumed = Model()
    training = trainer(kit, max_epochs=3)
    training.fit(resumed, loader(), ckpt_path=str(path), weights_only=False)
    expected = [whole.seen[step][2] for step in steps]
    assert [batch for _, _, batch in resumed.seen] == expected
    return None


@cases.add()
def rank_and_a_sampler_of_lightnings(kit: Kit) -> Any:
    """Both would split the samples: an error, for data would be lost silently."""
    if kit.world == 1 or not kit.is_ours:
        return None
    loader = kit.loader(dataset("map"), 4, rank=kit.rank, world_size=kit.world)
    try:
        trainer(kit, max_epochs=1).fit(Model(), loader)
    except ValueError as error:
        assert "would both split" in str(error)
        return None
    raise AssertionError("split twice")


@cases.add(*[{"workers": w, "step": s} for w, s in ((0, 2), (0, 4), (2, 4))])
def own_stream(kit: Kit, workers: int, step: int) -> Any:
    """Each rank's part of one of our streams: whole epochs, and a resumed one."""

    class Merging(Model):
        """Saves the states of all ranks; Lightning saves those of one rank."""

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            loop = checkpoint["loops"]["fit_loop"]["state_dict"]
            loop["combined_loader"] = [*map(kit.merged, loop["combined_loader"])]

    whole, trained = Model(), trainer(kit, max_epochs=3)
    trained.fit(whole, kit.stream_loader(workers))
    kit.check_engine(trained.train_dataloader)
    if kit.is_ours:
        path = kit.folder / f"own-{workers}-{step}.ckpt"
        stopped = trainer(kit, max_epochs=3, callbacks=[Stop(step, path)])
        stopped.fit(Merging(), kit.stream_loader(workers))
        second, training = Model(), trainer(kit, max_epochs=3)
        loader = kit.stream_loader(workers)
        training.fit(second, loader, ckpt_path=str(path), weights_only=False)
        assert second.seen == whole.seen[step:]
    return gathered(whole, trained)
