"""accelerate: prepared loaders, accumulation, gathers, skipped batches, states."""

from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed

import aioloader
from aioloader import accelerate as ours
from compat.kit import (
    KINDS,
    WORKERS,
    AsyncNumbers,
    Cases,
    Kit,
    batches,
    dataset,
    resumed,
    shift,
    stopped,
)

cases = Cases()


def accelerator(kit: Kit, steps: int = 1, **options: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if kit.world == 1:
        PartialState._reset_state()
    configuration = DataLoaderConfiguration(**options)
    set_seed(7)
    return Accelerator(
        cpu=True, gradient_accumulation_steps=steps, dataloader_config=configuration
    )


def options_of(kind: str) -> dict[str, Any]:
    return {"shuffle": True} if kind in {"map", "async"} else {}


@cases.add(
    *[{**k, "seedable": seedable} for k in KINDS for seedable in (True, False)],
    {"workers": 0, "kind": "sized", "seedable": False},
)
def train(kit: Kit, workers: int, kind: str, seedable: bool) -> Any:
    """Three epochs: batches, steps of the optimizer, losses gathered, the weight."""
    tool = accelerator(kit, steps=3, use_seedable_sampler=seedable)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = kit.loader(dataset(kind), 4, num_workers=workers, **options_of(kind))
    model, optimizer, loader = kit.prepared(tool, model, optimizer, given)
    kit.check_engine(loader.base_dataloader)
    seen: list[Any] = []
    for _ in range(3):
        for batch in loader:
            with tool.accumulate(model):
                loss = (model(batch / 1000) ** 2).mean()
                tool.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            everyone = tool.gather_for_metrics(batch.flatten())
            state = [tool.sync_gradients, tool.gradient_state.end_of_dataloader]
            seen.append([batch.flatten().tolist(), everyone.tolist(), state])
    return [seen, float(next(iter(model.parameters())).detach())]


@cases.add(
    *[
        {"kind": k, "dispatch_batches": d}
        for k in ("map", "stream")
        for d in (False, True)
    ],
    {"kind": "map", "split_batches": True, "even_batches": True},
    {"kind": "map", "split_batches": True, "even_batches": False},
)
def dealt(kit: Kit, kind: str, **how: bool) -> Any:
    """One process reads for all, each reads its part, or batches are split."""
    tool = accelerator(kit, **how)
    shuffle = "split_batches" in how or None
    loader = kit.prepared(tool, kit.loader(dataset(kind), 4, shuffle=shuffle))
    kit.check_engine(loader.base_dataloader)
    return [batches(loader) for _ in range(2)]


@cases.add(*KINDS)
def skipped(kit: Kit, workers: int, kind: str) -> Any:
    """The rest of an epoch, as in a run that is resumed."""
    tool = accelerator(kit)
    given = kit.loader(dataset(kind), 4, num_workers=workers, **options_of(kind))
    loader = kit.prepared(tool, given)
    skip = ours.skip_first_batches if kit.is_ours else skip_first_batches
    rest = skip(loader, 2)
    kit.check_engine(rest.base_dataloader)
    return [batches(rest), batches(loader)]


EPOCHS = tuple({**w, "epoch": epoch} for w in WORKERS for epoch in (0, 1))


@cases.add(*[{**e, "step": step} for e in EPOCHS for step in (0, 1, 2)])
def resume(kit: Kit, workers: int, epoch: int, step: int) -> Any:
    """A state of the prepared loader: in an epoch, or (0) at its last batch."""

    def loader() -> Any:
        tool = accelerator(kit, use_seedable_sampler=True)
        return kit.prepared(
            tool, kit.loader(dataset("map"), 4, True, num_workers=workers)
        )

    whole = loader()
    expected = [batches(whole) for _ in range(3)]
    if not kit.is_ours:
        return expected
    first = loader()
    for _ in range(epoch):
        batches(first)
    _, state = stopped(first, step or len(first))
    left = [expected[epoch][step:]] if step else []  # else the next epoch follows
    left += expected[epoch + 1 :]
    assert resumed(loader(), state, len(left)) == left
    return expected


@cases.add(*[{"dispatch": dispatch} for dispatch in (False, True)])
def async_datasets(kit: Kit, dispatch: bool) -> Any:
    """Ours are read by coroutines; torch's are sync, of the same values."""

    class Async:
        async def __aiter__(self) -> Any:
            for index in range(23):
                yield torch.tensor([float(index)])

    tool = accelerator(kit, dispatch_batches=dispatch)
    data: Any = Async() if kit.is_ours else dataset("stream")
    loader = kit.prepared(tool, kit.loader(data, 4))
    stream = [batches(loader) for _ in range(2)]
    data = AsyncNumbers(23) if kit.is_ours else dataset("map")
    loader = kit.prepared(tool, kit.loader(data, 4, shuffle=True))
    return [stream, [batches(loader) for _ in range(2)]]


@cases.add(*WORKERS)
def prepared_by_accelerate_alone(kit: Kit, workers: int) -> Any:
    """It makes torch's loader: it warns if the batches are the same, else it raises."""
    tool = accelerator(kit)
    cls = kit.cls
    loader = tool.prepare(cls(dataset("map"), 4, shuffle=True, num_workers=workers))
    epochs = [batches(loader) for _ in range(2)]
    if kit.is_ours:
        assert type(loader.base_dataloader) is torch.utils.data.DataLoader
        for lost in (
            {"transform": shift},
            {"rng": "sample"},
            {"on_error": "skip"},
            {"retry": aioloader.Retry()},
        ):
            check_refused(tool, aioloader.DataLoader(dataset("map"), 4, **lost), *lost)
        async_one: Any = aioloader.DataLoader(dataset("async"), 4)
        check_refused(tool, async_one, "an async dataset")
    return epochs


def check_refused(tool: Accelerator, loader: Any, option: str) -> None:
    try:
        tool.prepare(loader)
    except ValueError as error:
        assert option in str(error), error
        assert "aioloader.accelerate.prepare" in str(error)
        return
    raise AssertionError(f"{option} was lost silently")


@cases.add()
def pair_ranks_twice(kit: Kit) -> Any:
    """``rank=`` is an error, for accelerate splits the samples, too."""
    if not kit.is_ours:
        return None
    tool = accelerator(kit)
    loader = kit.loader(dataset("map"), 4, rank=kit.rank, world_size=kit.world)
    try:
        kit.prepared(tool, loader)
    except ValueError as error:
        assert "splits them" in str(error)
        return None
    raise AssertionError("split twice")


@cases.add(*[{"workers": w, "dispatch": d} for w in (0, 2) for d in (0, 1)])
def own_stream(kit: Kit, workers: int, dispatch: int) -> Any:
    """Two epochs of one of our streams; torch's workers would each read a part."""
    tool = accelerator(kit, dispatch_batches=bool(dispatch))
    data = dataset("ours" if kit.is_ours else "stream")
    count = workers if kit.is_ours else 0
    loader = kit.prepared(tool, kit.loader(data, 4, num_workers=count))
    kit.check_engine(loader.base_dataloader)
    return [batches(loader) for _ in range(2)]


@cases.add(*[{"workers": w, "step": s} for w in (0, 2) for s in (1, 2, 3)])
def own_stream_resumed(kit: Kit, workers: int, step: int) -> Any:
    """In the second of three epochs, and at its end; each has its own order."""
    if not kit.is_ours:
        return None

    def loader() -> Any:
        tool = accelerator(kit, dispatch_batches=False)
        data = dataset("ours", 24 if kit.world > 1 else 12).shuffle(8)
        return kit.prepared(tool, kit.loader(data, 4, num_workers=workers))

    whole, first = loader(), loader()
    expected = [batches(whole) for _ in range(3)]
    assert len({str(sorted(epoch)) for epoch in expected}) == 3
    batches(first)
    _, state = stopped(first, step)
    left = [*[expected[1][step:]] * (step < 3), expected[2]]
    assert resumed(loader(), state, len(left)) == left
    return None
