"""Log a loader's metrics next to the loss, and show a progress bar.

Run it with ``python examples/log_figures.py``: it prints what a logger would get.
"""

import asyncio
import time
from collections.abc import Callable

import torch

from aioloader import DataLoader, LoaderStats, progress

Log = Callable[[dict[str, float], int], None]


class Remote:
    """Samples that take a millisecond to arrive."""

    def __len__(self) -> int:
        return 2048

    async def __getitem__(self, index: int) -> torch.Tensor:
        await asyncio.sleep(0.001)
        return torch.full((16,), float(index % 2))


def figures(stats: LoaderStats, began: float) -> dict[str, float]:
    """Return the metrics worth plotting; ``stats`` has more."""
    seconds = time.perf_counter() - began
    return {
        "loader/wait_share": stats.waited / seconds,
        "loader/batches_per_second": stats.batches / seconds,
        "loader/in_flight": float(stats.in_flight),
    }


def train(log: Log) -> None:
    loader = DataLoader(Remote(), batch_size=64)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.perf_counter()
    for step, batch in enumerate(progress(loader, desc="train")):
        loss = (model(batch) - batch[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            log({"loss": loss.item(), **figures(loader.stats(), began)}, step)


def log_to_terminal(values: dict[str, float], step: int) -> None:
    # Weights & Biases takes them together:  wandb.log(values, step=step)
    # TensorBoard one by one:  writer.add_scalar(name, value, step)
    said = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    print(f"step {step}: {said}")


if __name__ == "__main__":
    train(log_to_terminal)
