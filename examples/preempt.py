"""Save on SIGTERM, and resume on fewer ranks: no sample is lost or trained on twice.

``python examples/preempt.py`` runs two ranks, terminates them, and resumes on one. With
your shards: ``torchrun --nproc-per-node 8 examples/preempt.py FOLDER``, each time.
"""

import asyncio
import gc
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (loaded after init, it keeps the group)
from recipe_parts import small_resnet, torchrun, write_digits
from torch import nn

from aioloader import DataLoader, merge_states
from aioloader.datasets import TarDataset

EPOCHS, BATCH = 3, 64  # samples of all ranks together


def train(folder: Path, rank: int, ranks: int) -> None:
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    shards = TarDataset(f"{folder}/*.tar", shuffle=True, interleave=8)
    stream = shards.shuffle(500).decode("torchl")
    loader: Any = DataLoader(stream, BATCH // ranks, rank="auto", tail="pad")
    model = nn.parallel.DistributedDataParallel(small_resnet())
    adam = torch.optim.Adam(model.parameters())
    step, parts = 0, {"model": model, "adam": adam, "loader": loader}
    path, stop = folder / "run.pt", torch.tensor(0)
    if path.exists():
        step, states = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(states[name])
    with loader, (folder / f"from-{step}-rank-{rank}.log").open("w") as log:
        while not stop and (epoch := loader.state_dict()["epoch"]) < EPOCHS:
            for batch, mask in loader:  # the mask is False for padding
                scores, labels = model(batch["jpg"])[mask], batch["cls"][mask]
                loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                adam.zero_grad()
                loss = loss * ranks / BATCH  # DDP averages gradients over ranks
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                step += 1
                log.writelines(f"{epoch} {n}\n" for n in batch["id"][mask].tolist())
                stop.fill_(terminated.is_set())
                dist.all_reduce(stop, dist.ReduceOp.MAX)  # all ranks stop, or none
                if rank == 0 and (stop or step % 20 == 0):
                    print(f"step {step} on {ranks} ranks")
                if stop:
                    break
    loaders: list[Any] = [None] * ranks
    dist.all_gather_object(loaders, loader.state_dict())  # after the same step
    if rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        states["loader"] = merge_states(loaders)
        torch.save((step, states), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # atomic: a kill leaves a whole file


if __name__ == "__main__" and sys.argv[1:]:
    dist.init_process_group()
    train(Path(sys.argv[1]), dist.get_rank(), dist.get_world_size())
    gc.collect()  # the model's reference cycles keep the group's threads alive
    dist.destroy_process_group()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(write_digits(folder))
        torchrun(2, __file__, folder, terminate_after="step 40 on 2 ranks")
        torchrun(1, __file__, folder)
        logs = Path(folder).glob("*.log")
        seen = [line for log in logs for line in log.read_text().splitlines()]
    print(f"{EPOCHS} epochs: {len(seen):,} samples, {len(set(seen)):,} different")
