"""A web service that streams images from a store through a model to its clients.

Run it with ``python examples/service.py``, then ``curl -N localhost:8000/classify``: a
line of JSON for each image. When a client disconnects, its reads end at once.
"""

import asyncio
import io
import json
import tempfile
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import ObjectDataset, Source


def decode(data: bytes) -> torch.Tensor:
    """Decode one image; this runs in a thread."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)), np.float32)) / 16


def make_app(store: str | Source, model: nn.Module) -> FastAPI:
    """Return the service; ``store`` may be an address such as ``s3://bucket``."""
    app = FastAPI()

    async def opened(prefix: str = "") -> AsyncIterator[DataLoader[torch.Tensor]]:
        try:
            images = await ObjectDataset.discover(store, prefix=prefix)
        except ValueError:
            raise HTTPException(404, f"no image in {prefix!r}") from None
        async with DataLoader(images, 32, transform=decode, loop="caller") as loader:
            yield loader  # noqa: ASYNC119  (FastAPI closes it after the response)

    @torch.inference_mode()
    def predict(batch: torch.Tensor) -> Any:
        return model(batch).argmax(1).tolist()

    async def answers(loader: DataLoader[torch.Tensor]) -> AsyncIterator[str]:
        names = iter(loader.dataset.keys)
        async for batch in loader:
            labels = await asyncio.to_thread(predict, batch)
            lines = [{"name": next(names), "label": label} for label in labels]
            yield "".join(f"{json.dumps(line)}\n" for line in lines)

    @app.get("/classify")
    async def classify(loader: Annotated[Any, Depends(opened)]) -> StreamingResponse:
        return StreamingResponse(answers(loader), media_type="application/x-ndjson")

    return app


def train(pixels: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a small classifier of 8 x 8 images."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


if __name__ == "__main__":
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        for number, picture in enumerate(digits.images.astype(np.uint8)):
            Image.fromarray(picture).save(f"{folder}/{number:04}.png")
        pixels, labels = map(torch.from_numpy, (digits.images, digits.target))
        uvicorn.run(make_app(folder, train(pixels.float() / 16, labels)), port=8000)
