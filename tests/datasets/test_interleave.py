"""Lanes take turns sample by sample, however their samples come and are pulled."""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pyarrow as pa
import pytest

from aioloader._base.blocks import Bad, Block, weave
from aioloader.datasets._arrow.rows import Rows
from aioloader.datasets._streams import weave as weaving
from aioloader.datasets._streams.cursors import State
from aioloader.datasets._streams.shards import ShardFormat, ShardReader
from aioloader.datasets.sharded import ShardedStream
from datasets.shards import pulled

# Uneven shards, dealt to three lanes: the last lane ends first, the first one last.
LENGTHS = (7, 20, 3, 11, 0, 2, 13)
LANES = 3

Samples = Callable[[list[int]], Block]


def as_rows(numbers: list[int]) -> Block:
    """Return a block of columns, one of which Arrow keeps."""
    return Rows(pa.table({"n": numbers, "text": [f"{n}" for n in numbers]}))


class Reader(ShardReader):
    """A shard in memory, in blocks of at most ``most`` samples."""

    def __init__(self, numbers: list[int], at: int, most: int, make: Samples) -> None:
        self._numbers = numbers
        self._at = at
        self._most = most
        self._make = make

    async def pull(self, limit: int) -> Block:
        """Return the next samples; fail at a negative one."""
        found = self._numbers[self._at : self._at + min(limit, self._most)]
        if found and found[0] < 0:
            raise OSError(f"sample {found[0]}")
        found = list(itertools.takewhile(lambda number: number >= 0, found))
        self._at += len(found)
        return self._make(found) if found else []

    def position(self) -> dict[str, Any]:
        """Return the place of the next sample."""
        return {"at": self._at}

    def is_draining(self) -> bool:
        """Tell whether all was pulled."""
        return self._at >= len(self._numbers)


class Memory(ShardFormat):
    """Shards in memory: sample ``k`` of shard ``s`` is ``100 * s + k``."""

    def __init__(self, make: Samples, most: int = 5, made: Any = None) -> None:
        every = [[100 * s + k for k in range(n)] for s, n in enumerate(LENGTHS)]
        self.made: list[list[int]] = every if made is None else made
        self._make = make
        self._most = most

    async def shards(
        self, stack: AsyncExitStack, _known: Any = None, /
    ) -> list[list[int]]:
        """Return the samples themselves."""
        return self.made

    def summary(self, shards: Any) -> dict[str, Any]:
        """Return their number."""
        return {"count": len(shards)}

    def open(self, shard: Any, position: dict[str, Any], budget: int) -> Reader:
        """Return a reader from a place on."""
        return Reader(shard, position.get("at", 0), self._most, self._make)

    def in_turn(self) -> list[int]:
        """Return what three lanes give."""
        lanes = [list(itertools.chain(*self.made[at::LANES])) for at in range(LANES)]
        found: list[int] = []
        while lanes := [lane for lane in lanes if lane]:
            found += [lane.pop(0) for lane in lanes]
        return found


@pytest.fixture(autouse=True, params=[4, 1 << 14], ids=["few", "many"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weave a few samples at a time, so that there are many ends; or many."""
    monkeypatch.setattr(weaving, "_LANE_SAMPLES", request.param)
    monkeypatch.setattr(weaving, "_LANE_ROWS", 2 * request.param)
    monkeypatch.setattr(weaving, "_WOVEN", 2 * request.param)


def number_of(sample: Any) -> Any:
    """Return the number of a sample of either kind."""
    if isinstance(sample, dict):
        assert sample["text"] == str(sample["n"])
        return int(sample["n"])
    return str(sample.error) if type(sample) is Bad else sample


async def read(
    made: Memory, state: State, sizes: list[int], count: int | None = None
) -> tuple[list[Any], State]:
    """Return the next samples of three lanes, and the state after them."""
    stream: Any = ShardedStream(made, interleave=LANES)
    return await pulled(stream, sizes, count, state or None, show=number_of)


KINDS = pytest.mark.parametrize("make", [list, as_rows], ids=["list", "rows"])


@KINDS
@pytest.mark.parametrize("limits", [[1], [2, 5], [64], [10, 1, 3]])
async def test_each_lane_in_its_turn(make: Samples, limits: list[int]) -> None:
    """Whatever is pulled at once."""
    made = Memory(make)
    found, _ = await read(made, {}, limits)
    assert found == made.in_turn()


@KINDS
async def test_a_lane_that_fails_keeps_its_turn(make: Samples) -> None:
    """Its error stands where its sample would have; the other lanes lose nothing."""
    made = Memory(make)
    expected = [n if n != 105 else "sample -1" for n in made.in_turn()]
    lost = set(range(106, 120))
    made.made[1][5] = -1
    found, _ = await read(made, {}, [64])
    assert sorted(map(str, found)) == sorted(str(n) for n in expected if n not in lost)
    place = expected.index("sample -1")
    assert found[: place + 1] == expected[: place + 1]


@pytest.mark.slow
@KINDS
async def test_goes_on_behind_a_failure(make: Samples) -> None:
    """From any place: what was lost with a shard does not come after all."""
    made = Memory(make)
    made.made[1][5] = -1
    whole, _ = await read(made, {}, [64])
    for count in range(len(whole) + 1):
        first, state = await read(made, {}, [3, 7], count)
        rest, _ = await read(made, state, [5])
        assert first + rest == whole


@KINDS
async def test_a_failure_before_the_position_of_a_state(make: Samples) -> None:
    """Until it is passed on, the samples before that position still count."""
    made = Memory(make)
    whole = made.in_turn()
    first, state = await read(made, {}, [1], 6)
    made.made[1][0] = -1
    one, state = await read(made, state, [1], 1)
    made.made[1][0] = 100
    rest, _ = await read(made, state, [5])
    assert first + one + rest == whole


@KINDS
async def test_the_shard_after_such_a_failure_is_whole(make: Samples) -> None:
    """Nothing of it was passed on before."""
    made = Memory(make)
    whole = made.in_turn()
    _, state = await read(made, {}, [1], 6)
    made.made[0][0] = -1
    rest, _ = await read(made, state, [5])
    lost = {*range(2, 7)}
    assert Counter(rest) == Counter({*whole[6:]} - lost | {"sample -1"})


async def test_columns_stay_columns() -> None:
    """What several lanes give is one block."""
    lanes = [[100 * s + k for k in range(30)] for s in range(LANES)]
    stream: Any = ShardedStream(Memory(as_rows, 100, lanes), interleave=LANES)
    async with aiter(stream) as iterator:
        block = await iterator.pull(5)
        assert type(block) is Rows
        assert block.collate()["n"].tolist() == [0, 100, 200, 1, 101]


def test_blocks_of_several_kinds_are_woven() -> None:
    """As rows, if their columns differ."""
    other = Rows(pa.table({"x": [1, 2]}))
    assert list(weave([as_rows([1, 2]), other]))[1::2] == [{"x": 1}, {"x": 2}]
    assert weave([["a", "b"], as_rows([1, 2])])[::2] == ["a", "b"]
    assert weave([]) == []
