"""Streams that have a state of their own go on when the worker that read them dies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from aioloader import DataLoader
from aioloader.errors import WorkerDiedError
from faulty import FaultyStream, kill_itself, outcomes, outcomes_on_uvloop


class Resumable(FaultyStream):
    """The same, with torchdata's protocol."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        worker: Any = torch.utils.data.get_worker_info()
        while self.place < self.n:
            label = worker.id * 1000 + self.place
            self.place += 1
            self.happen(label)
            yield label

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def labels(batches: list[Any]) -> list[int]:
    """Return the labels of all batches."""
    return [label for batch in batches for label in batch.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("consume", [outcomes, outcomes_on_uvloop])
@pytest.mark.parametrize("places", [(1006,), (1004, 1007, 9), (1005, 1006, 1011)])
def test_goes_on_in_the_successor(
    places: tuple[int, ...], consume: Any, tmp_path: Path
) -> None:
    """Nothing is lost, doubled or out of turn, however often the worker dies."""
    whole = consume(DataLoader(Resumable(12), 3, num_workers=2))
    dataset = Resumable(12, places, kill_itself, tmp_path)
    found = consume(DataLoader(dataset, 3, num_workers=2))
    assert labels(found) == labels(whole)


@pytest.mark.slow
def test_a_batch_that_kills_twice_ends_its_stream() -> None:
    """The others go on."""
    found = outcomes(DataLoader(Resumable(12, (1007,), kill_itself), 3, num_workers=2))
    errors = [one for one in found if isinstance(one, Exception)]
    assert [type(error) for error in errors] == [WorkerDiedError]
    rest = labels([one for one in found if not isinstance(one, Exception)])
    assert [label for label in rest if label < 1000] == list(range(12))
    assert [label for label in rest if label >= 1000] == list(range(1000, 1006))
