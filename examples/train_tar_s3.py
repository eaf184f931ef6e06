"""Train a small ResNet on JPEGs in tar shards on S3, on several ranks; resume it.

``python examples/train_tar_s3.py`` serves a bucket and trains on two ranks. With yours:
``torchrun --nproc-per-node 8 examples/train_tar_s3.py 's3://digits/*.tar' run.pt 500``.
"""

import asyncio
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (loaded after init, it keeps the group)
from moto_server import bucket
from recipe_parts import small_resnet, torchrun, write_digits
from torch import nn

from aioloader import DataLoader, merge_states
from aioloader.datasets import Decoder, TarDataset


def train(url: str, path: Path, steps: int) -> None:
    torch.manual_seed(0)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    loader: Any = DataLoader(
        TarDataset(url, shuffle=True, interleave=8).shuffle(500),
        batch_size=32,  # of each rank
        transform=Decoder("torchl"),
        rank="auto",  # each rank of the process group reads its share of the shards
        tail="drop",  # and ends each epoch after the same number of batches
        device=device,
    )
    model = nn.parallel.DistributedDataParallel(small_resnet().to(device))
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    step, parts = 0, {"model": model, "adam": adam, "loader": loader}
    if path.exists():
        step, states = torch.load(path, map_location="cpu")
        for name, part in parts.items():
            part.load_state_dict(states[name])
    with loader:
        while step < steps:
            for batch in loader:  # each epoch has its own order, without set_epoch
                loss = nn.functional.cross_entropy(model(batch["jpg"]), batch["cls"])
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                step += 1
                if step % 20 == 0 or step == steps:
                    save(path, step, parts)
                    if dist.get_rank() == 0:
                        print(f"step {step}: loss {loss:.3f}")
                if step == steps:
                    break


def save(path: Path, step: int, parts: dict[str, Any]) -> None:
    states = {name: part.state_dict() for name, part in parts.items()}
    loaders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(loaders, states["loader"])
    if dist.get_rank() == 0:
        states["loader"] = merge_states(loaders)
        torch.save((step, states), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # atomic: a kill leaves a whole file


if __name__ == "__main__" and sys.argv[1:]:
    dist.init_process_group()
    train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    gc.collect()  # the model's reference cycles keep the group's threads alive
    dist.destroy_process_group()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, bucket("digits"):
        asyncio.run(write_digits("s3://digits"))
        for steps in "30", "60":
            options = "s3://digits/*.tar", f"{folder}/run.pt", steps
            torchrun(torch.cuda.device_count() or 2, __file__, *options)
