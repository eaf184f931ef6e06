"""Datasets and samplers with a state, in torchdata's protocol."""

from collections.abc import Iterator

from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Numbers(Dataset[int]):
    """Map-style, without a state."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Counted(Numbers):
    """Map-style; its samples contain how many this copy has read."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return 100 * self.read + index

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def mine(n: int) -> range:
    """Return this worker's part of the numbers."""
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class Plain(IterableDataset[int]):
    """Iterable, without a state."""

    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(mine(self.n))


class Kept(Plain):
    """The dataset has a state, and starts again at its end."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        numbers = mine(self.n)
        while self.place < len(numbers):
            self.place += 1
            yield numbers[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Cursor:
    """An iterator with a state."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.place = numbers, 0

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        return self.numbers[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Cursors(Plain):
    """The iterators have states."""

    def __iter__(self) -> Iterator[int]:
        return Cursor(mine(self.n))


class Epochs(Plain):
    """The dataset's state has the epoch, the iterator's the position."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        numbers = mine(self.n)
        return Cursor(range(100 * self.epoch, 100 * self.epoch + len(numbers)))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Batches(Sampler[list[int]]):
    """A stateful batch sampler, with another order each epoch."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < 4:
            self.place += 1
            yield [(self.place + self.epoch) % 10, 3 * self.place % 10]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Streamed(Plain):
    """As Hugging Face's: each epoch starts from a loaded state of the same epoch."""

    def __init__(self, n: int = 10) -> None:
        super().__init__(n)
        self.epoch = 0
        self.start: dict[str, int] | None = None
        self.now = {"epoch": 0, "place": 0}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.now = {"epoch": self.epoch, "place": 0}
        if self.start is not None and self.start["epoch"] == self.epoch:
            self.now = dict(self.start)
        for number in mine(self.n)[self.now["place"] :]:
            self.now["place"] += 1
            yield 100 * self.epoch + number

    def state_dict(self) -> dict[str, int]:
        return dict(self.now)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state


class Started(Plain):
    """A loaded state shows at once, and remains the start of each epoch."""

    start = place = 0

    def __iter__(self) -> Iterator[int]:
        self.place = self.start
        for number in mine(self.n)[self.start :]:
            self.place += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = self.start = state["place"]


class Postponed(Epochs):
    """It applies a loaded state once, when it is iterated, and counts its epochs."""

    loaded: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self.loaded is not None:
            self.epoch, self.loaded = self.loaded, None
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["epoch"]
