"""Train with Lightning's Trainer; stop in mid-epoch, and resume exactly.

Run it with ``python examples/lightning_module.py``. It needs ``lightning`` and
``scikit-learn``. Lightning's checkpoints contain the loader's state.
"""

import tempfile
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from aioloader import DataLoader, ShuffledIndices


def noisy(scan: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Add noise; runs in a worker process."""
    return scan[0].float() / 16 + torch.randn(64) / 10, scan[1]


class Digits(L.LightningDataModule):
    """Scanned digits, in 30 batches per epoch."""

    def __init__(self) -> None:
        super().__init__()
        scans = TensorDataset(*map(torch.from_numpy, load_digits(return_X_y=True)))
        self.train, self.val = random_split(scans, [1500, 297])

    def train_dataloader(self) -> Any:
        order = ShuffledIndices(1500, seed=0)  # Lightning sets its epoch
        return DataLoader(self.train, 50, sampler=order, transform=noisy, num_workers=2)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 99, transform=noisy)


class Model(L.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(64, 10)

    def on_train_start(self) -> None:
        print(f"training starts at step {self.global_step}")

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scores(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        right = self.scores(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def fit(folder: str, max_steps: int = -1) -> torch.Tensor:
    """Train two epochs, from the last checkpoint, if there is one."""
    L.seed_everything(0)
    # Not after the last step of an epoch: Lightning would skip the next epoch.
    save = ModelCheckpoint(folder, save_last=True, every_n_train_steps=20)
    trainer = L.Trainer(max_epochs=2, max_steps=max_steps, callbacks=save, logger=False)
    model = Model()
    trainer.fit(model, datamodule=Digits(), ckpt_path="last")
    return model.scores.weight


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(f"{folder}/whole")
        fit(f"{folder}/stopped", max_steps=45)
        resumed = fit(f"{folder}/stopped")
    print("the same weights after the stop:", torch.equal(whole, resumed))
