"""Lightning's Fabric: loaders that it sets up, in loops of the user's own."""

from typing import Any

import lightning as L
import torch

from compat.kit import KINDS, WORKERS, Cases, Kit, batches, dataset, plain

cases = Cases()


def fabric(kit: Kit) -> L.Fabric:
    tool = L.Fabric(
        accelerator="cpu",
        devices=kit.world,
        strategy="ddp" if kit.world > 1 else "auto",
    )
    tool.launch()
    return tool


@cases.add(*KINDS)
def train(kit: Kit, workers: int, kind: str) -> Any:
    """A loop of three epochs, with ``set_epoch`` as Fabric's users write it."""
    tool = fabric(kit)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = tool.setup(model, optimizer)
    loader = tool.setup_dataloaders(
        kit.loader(dataset(kind), 4, shuffle=kind == "map" or None, num_workers=workers)
    )
    kit.check_engine(loader._dataloader)
    seen: list[Any] = []
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = (model(batch / 1000) ** 2).mean()
            tool.backward(loss)
            optimizer.step()
            both = tool.all_gather(loss.detach())
            seen.append([batch.flatten().tolist(), both.flatten().tolist()])
    return [seen, float(model.weight.detach())]


@cases.add(*WORKERS)
def several_and_moved(kit: Kit, workers: int) -> Any:
    """Two loaders in one loop, which leaves the longer one in the middle."""
    tool = fabric(kit)
    first, second = tool.setup_dataloaders(
        kit.loader(dataset("map"), 4, num_workers=workers),
        kit.loader(dataset("map", 9), 2, True, num_workers=workers, drop_last=True),
    )
    kit.check_engine(first._dataloader)
    return [plain([*zip(first, second, strict=False)]), len(first), len(second)]


@cases.add(*WORKERS)
def own_stream(kit: Kit, workers: int) -> Any:
    """Each rank's part of one of our streams; resumed from the states of all ranks."""
    tool = fabric(kit)

    def loader() -> Any:
        made = tool.setup_dataloaders(kit.stream_loader(workers))
        kit.check_engine(made._dataloader)
        return made

    expected = [batches(whole := loader()), batches(whole), len(whole)]
    if kit.is_ours:
        first, second = loader(), loader()
        iterator = iter(first)
        head = [plain(next(iterator)) for _ in range(2)]
        state = kit.merged(first._dataloader.state_dict())
        second._dataloader.load_state_dict(state)
        assert [head + batches(second), batches(second), len(second)] == expected
    return expected
