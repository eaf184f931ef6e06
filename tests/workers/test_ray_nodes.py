"""Two nodes, one of which is killed: every sample arrives once, in order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aioloader import DataLoader, RayWorkers
from workers.ray_cluster import ENVIRONMENT, begun, nothing_is_left

__all__ = ["nothing_is_left"]

pytestmark = pytest.mark.slow
# A dead node is noticed after a second, not after a quarter of a minute.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 250,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
MEMORY = 80 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Start a head without room for workers, and two nodes with room for two each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        ray = pytest.importorskip("ray")
        utils = pytest.importorskip("ray.cluster_utils")
        head: Any = {"num_cpus": 0, "object_store_memory": MEMORY}
        head |= {"include_dashboard": False, "_system_config": HEALTH}
        cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        for last in (2, 3):
            cluster.add_node(
                num_cpus=2,
                resources={"loader": 2},
                object_store_memory=MEMORY,
                node_ip_address=f"127.0.0.{last}",
            )
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> Any:
    return pytest.importorskip("ray")


class Rows:
    """Rows of ``nbytes`` bytes, and the node that made them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        import ray  # noqa: PLC0415

        node = ray.get_runtime_context().get_node_id()
        return np.full(self.nbytes, index, np.uint8), index, node


@pytest.mark.fuzz
def test_batches_of_a_killed_node_are_made_again(nodes: Any) -> None:
    """While its results are in flight; the other node makes them."""
    workers = RayWorkers(4, resources={"loader": 1})
    loader: Any = DataLoader(
        Rows(100_000), 4, workers=workers, persistent_workers=True, prefetch_factor=4
    )
    with loader:
        while begun(loader) < 4:
            list(loader)
        batches = []
        for number, (rows, labels, where) in enumerate(loader):
            assert (rows == labels[:, None]).all()
            batches.append((labels.tolist(), set(where)))
            if number == 9:
                nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
        assert [index for labels, _ in batches for index in labels] == list(range(240))
        before, after = batches[:10], batches[-10:]
        assert len(set.union(*(nodes for _, nodes in before))) == 2
        assert len(set.union(*(nodes for _, nodes in after))) == 1
        assert len(list(loader)) == 60
