"""The training step of ``device.py``: a small residual net, sized for the device.

Pictures are normalised on the device; weights and activations are bfloat16, channels
last. Run by itself, it prints how many blocks make a step take about ``STEP_MS``.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from device_feeds import picture_case

if TYPE_CHECKING:
    from device_feeds import Batch

STEP_MS = 60.0
_MOST = 24
_CLASSES = 1000


class Block(nn.Module):
    """Two convolutions, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(width, width), *convolution(width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the convolutions' output to the input."""
        found: torch.Tensor = x + self.body(x)
        return found


def convolution(
    inputs: int, outputs: int, size: int = 3, stride: int = 1
) -> tuple[nn.Module, nn.Module, nn.Module]:
    return (
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def make_net(blocks: int) -> nn.Sequential:
    """Build a net whose cost grows with ``blocks``."""
    return nn.Sequential(
        *convolution(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        *(Block(64) for _ in range(blocks)),
        *convolution(64, 128, 3, 2),
        *(Block(128) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, _CLASSES),
    )


class Step:
    """Train on a batch; nothing in it waits for the device."""

    def __init__(self, device: torch.device, blocks: int) -> None:
        torch.manual_seed(0)
        self._net = make_net(blocks).to(
            device,
            torch.bfloat16,
            memory_format=torch.channels_last,  # type: ignore[call-overload]
        )
        self._optimizer = torch.optim.SGD(self._net.parameters(), 1e-3, momentum=0.9)

    def __call__(self, batch: Batch) -> None:
        """Do one forward and one backward pass, and update the weights."""
        images, labels = batch
        x = images.to(torch.bfloat16, memory_format=torch.channels_last)
        scores: torch.Tensor = self._net((x - 127.5) * (1 / 58.0))
        loss = nn.functional.cross_entropy(scores.float(), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def step_seconds(device: torch.device, blocks: int, batch: Batch) -> float:
    """Time one step, after warm-up steps."""
    step = Step(device, blocks)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        step(batch)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def calibrate(device: torch.device) -> int:
    """Find how many blocks make a step take about ``STEP_MS``."""
    batch: Any = [view.random_(0, 7).to(device) for view in picture_case().empty()]
    first, second = (step_seconds(device, blocks, batch) for blocks in (1, 3))
    per_block = max(1e-6, (second - first) / 2)
    return max(1, min(_MOST, 1 + round((STEP_MS / 1e3 - first) / per_block)))


if __name__ == "__main__":
    print(calibrate(torch.device("cuda", 0)))
