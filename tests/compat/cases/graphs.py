"""torch_geometric's loaders, subclasses of ``torch.utils.data.DataLoader``."""

from typing import Any

import torch
import torch.utils.data

from compat.kit import SHIFT, WORKERS, Cases, Kit, Shifted, plain

cases = Cases()


def shift(graph: Any) -> Any:
    """Add ``SHIFT`` to the nodes of a copy."""
    shifted = graph.clone()
    shifted.x = shifted.x + SHIFT
    return shifted


def graphs() -> list[Any]:
    """Return graphs of three to seven nodes."""
    from torch_geometric.data import Data

    made = []
    for number in range(20):
        n = 3 + number % 5
        edges = torch.stack([torch.arange(n), torch.arange(n).roll(1)])
        nodes = torch.full((n, 2), float(number))
        made.append(Data(x=nodes, edge_index=edges, y=number % 3, name=f"{number}"))
    return made


def geometric(kit: Kit) -> Any:
    """Import the loaders with this engine's class in torch's place."""
    # The package looks the class up when it is imported, and all its parts are then.
    torch.utils.data.DataLoader = kit.cls  # type: ignore[misc]
    from torch_geometric import loader

    return loader


def two_epochs(kit: Kit, loader: Any) -> Any:
    kit.check_engine(loader)
    return [
        [plain(batch.to_dict()), [plain(g.to_dict()) for g in batch.to_data_list()]]
        for _ in range(2)
        for batch in loader
    ]


def arguments(kit: Kit, workers: int) -> dict[str, Any]:
    data = graphs()
    how = {"num_workers": workers}
    if kit.is_ours:
        return {"dataset": data, "transform": shift, **how}
    return {"dataset": Shifted(data, shift), **how}


@cases.add(*WORKERS)
def batches_of_graphs(kit: Kit, workers: int) -> Any:
    """Two epochs of batches, and the graphs of each."""
    cls = geometric(kit).DataLoader  # before the graphs are made
    given = arguments(kit, workers)
    return two_epochs(kit, cls(batch_size=6, shuffle=True, follow_batch=["x"], **given))


@cases.add(*WORKERS)
def batches_by_nodes(kit: Kit, workers: int) -> Any:
    """A batch sampler whose ``len()`` raises."""
    loaders = geometric(kit)
    sampler = loaders.DynamicBatchSampler(graphs(), max_num=20, shuffle=True)
    given = arguments(kit, workers)
    return two_epochs(kit, loaders.DataLoader(batch_sampler=sampler, **given))


def ring() -> Any:
    """Return a graph of 20 nodes, with an edge from each."""
    from torch_geometric.data import Data

    edges = torch.stack([torch.arange(20), torch.arange(20).roll(3)])
    return Data(x=torch.arange(40.0).view(20, 2), edge_index=edges)


@cases.add(*WORKERS)
def parts_of_a_graph(kit: Kit, workers: int) -> Any:
    """A loader whose dataset is a range, and whose collate function cuts the graph."""
    loaders = geometric(kit)
    loader = loaders.RandomNodeLoader(
        ring(), num_parts=4, shuffle=True, num_workers=workers
    )
    kit.check_engine(loader)
    return [plain(part.to_dict()) for part in loader]


@cases.add(*WORKERS)
def nodes_with_neighbours(kit: Kit, workers: int) -> Any:
    """A loader that keeps its own ``transform``, and applies it to batches."""
    loaders = geometric(kit)
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class Neighbours(BaseSampler):  # type: ignore[misc]
        """The two nodes that each node of a ring has an edge from."""

        def sample_from_nodes(self, inputs: Any, **_options: Any) -> Any:
            nodes = inputs.node
            edges = torch.arange(2 * len(nodes)) % len(nodes)
            return SamplerOutput(
                node=torch.cat([nodes, (nodes + 1) % 20]),
                row=edges,
                col=edges,
                edge=edges,
                metadata=(inputs.input_id, inputs.time),
            )

        def sample_from_edges(self, *_: Any, **_options: Any) -> Any:
            raise NotImplementedError

    how: dict[str, Any] = {"batch_size": 6, "shuffle": True, "num_workers": workers}
    loader = loaders.NodeLoader(ring(), Neighbours(), transform=shift, **how)
    kit.check_engine(loader)
    return [plain(part.to_dict()) for _ in range(2) for part in loader]
