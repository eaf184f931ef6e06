"""What is relied upon in frameworks is still there.

A name that fails here has changed with a new version: read what became of it, and the
module of ours that is named, before the cases are looked at.
"""

import inspect
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import ignite.engine.deterministic
import lightning.fabric.utilities.data
import lightning.pytorch.utilities.combined_loader
import lightning.pytorch.utilities.data
import torch
import transformers.trainer
from torch.utils.data import dataloader as torch_loader

from aioloader import DataLoader


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function: Any) -> str:
    return inspect.getsource(function)


def test_accelerate_wraps_a_base_dataloader() -> None:
    """``aioloader.accelerate`` replaces it behind the wrapper's back."""
    adapter = accelerate.data_loader.DataLoaderAdapter
    assert parameters(adapter.__init__) == [
        "self",
        "dataset",
        "use_stateful_dataloader",
        "batch_sampler",
        "kwargs",
    ]
    text = source(adapter)
    assert "self.base_dataloader = DataLoader(dataset, batch_sampler=" in text
    assert "self.dl_state_dict = self.base_dataloader.state_dict()" in text
    for cls in ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"):
        assert issubclass(getattr(accelerate.data_loader, cls), adapter)
        iterates = source(getattr(accelerate.data_loader, cls).__iter__)
        assert "self.base_dataloader.__iter__()" in iterates


def test_accelerate_asks_before_it_takes_a_loader() -> None:
    """``_torch_face`` answers, warns or refuses there."""
    text = source(accelerate.accelerator.Accelerator.prepare_data_loader)
    asked = 'getattr(data_loader, "_is_accelerate_prepared", False)'
    assert text.index(asked) < text.index("= prepare_data_loader(\n")


def test_accelerate_takes_these_arguments() -> None:
    """``aioloader.accelerate`` hides some of them, and gives them all afterwards."""
    known = set(accelerate.data_loader._PYTORCH_DATALOADER_KWARGS)
    assert known <= set(parameters(DataLoader))
    assert "prefetch_factor" in known


def test_accelerates_shards() -> None:
    """Ranks dealt twice are found by these names; async streams have a twin."""
    shard = accelerate.data_loader.BatchSamplerShard([[1], [2]], 2, 0)
    assert shard.num_processes == 2
    assert shard.process_index == 0
    assert parameters(accelerate.data_loader.IterableDatasetShard) == [
        "dataset",
        "batch_size",
        "drop_last",
        "num_processes",
        "process_index",
        "split_batches",
    ]
    sampler = accelerate.data_loader.SeedableRandomSampler([1, 2], data_seed=3)
    assert (sampler.epoch, sampler.initial_seed) == (0, 3)


def test_accelerates_loaders_have_an_iteration() -> None:
    """It seeds their sampler, and is set when a state is loaded."""
    assert "self.set_epoch(self.iteration)" in source(
        accelerate.data_loader.DataLoaderShard.__iter__
    )


def test_the_trainer_gets_loaders_in_one_place() -> None:
    """``TrainerMixin`` overrides it, and the function that skips batches."""
    trainer = transformers.trainer.Trainer
    assert parameters(trainer._get_dataloader)[:3] == ["self", "dataset", "description"]
    for name in ("train", "eval", "test"):
        text = source(getattr(trainer, f"get_{name}_dataloader"))
        assert "self._get_dataloader(" in text
    assert "self.accelerator.prepare(DataLoader(" in source(trainer._get_dataloader)
    assert "= skip_first_batches(train_dataloader," in source(trainer._run_epoch)
    assert hasattr(transformers.trainer, "skip_first_batches")


def test_lightning_takes_loaders_apart_by_their_attributes() -> None:
    """Public attributes that the signature names are kept: all of ours."""
    for module in (
        lightning.pytorch.utilities.data,
        lightning.fabric.utilities.data,
    ):
        text = source(module._get_dataloader_init_args_and_kwargs)
        assert 'vars(dataloader).items() if not k.startswith("_")' in text
        assert "inspect.signature(dataloader.__init__).parameters" in text
        assert "isinstance(dataset, IterableDataset)" in text


def test_lightning_ends_workers_by_the_iterator() -> None:
    """The setter of ``_iterator`` closes."""
    text = inspect.getsource(lightning.pytorch.utilities.combined_loader)
    assert "dataloader._iterator = None" in text


def test_ignite_calls_the_class_with_its_attributes() -> None:
    """All public attributes are arguments."""
    text = source(ignite.engine.deterministic.update_dataloader)
    assert 'not k.startswith("_")' in text
    assert "type(dataloader)(**params)" in text


def test_torchs_private_names() -> None:
    """A loader of ours has all that torch's keeps in an instance."""
    data: Any = [1]
    theirs: Any = torch_loader.DataLoader(data)
    ours: Any = DataLoader(data)
    missing = {name for name in vars(theirs) if not hasattr(ours, name)}
    assert missing <= {"_DataLoader__multiprocessing_context"}
    assert torch_loader._DatasetKind.Map == 0
    assert isinstance(torch_loader._InfiniteConstantSampler(), torch.utils.data.Sampler)
