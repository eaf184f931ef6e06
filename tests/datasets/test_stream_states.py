"""States of streams: of one rank, of all ranks as one, and those that do not fit."""

import json
import warnings
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import DataLoader
from aioloader._order.stream_states import merge_states, opened, sealed
from aioloader.datasets import TextDataset
from aioloader.errors import StateMismatchError
from beside import beside
from datasets.ranks import Ranks, numbers
from datasets.shards import read, write_lines


async def states_of(ranks: int, count: int = 2) -> list[Any]:
    async with Ranks(numbers(), ranks) as reading:
        await reading.batches(ranks, count)
        return reading.states()


async def test_a_state_that_lacks_a_reader() -> None:
    states = await states_of(3)
    for state, rank, ranks, words in (
        (states[1], 0, 3, r"readers 1 of 3, but rank 0 of 3 also reads 0: .*merge_s"),
        (states[0], 1, 2, r"readers 0 of 3, but rank 1 of 2 also reads 1, 2"),
    ):
        stream = numbers().shard(rank, ranks)
        stream.load_state_dict(state)
        for _ in range(2):  # it is not forgotten, and the beginning taken instead
            with (
                pytest.raises(StateMismatchError, match=words) as caught,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                aiter(stream)
        assert caught.value.expected == [int(one) for one in state["streams"]]


def changed(state: Any, **values: Any) -> Any:
    return sealed({**opened(state), **values})


async def test_a_state_between_batches() -> None:
    state = merge_states(await states_of(4))
    found: list[Any] = []
    for rank in range(3):
        stream = numbers().shard(rank, 3)
        stream.load_state_dict(state)
        with pytest.warns(UserWarning, match="3 ranks .* at 4 readers"):
            found += (await read(stream))[0]
    assert sorted(found) == sorted((await read(numbers()))[0])[8:]


async def test_states_that_do_not_belong_together() -> None:
    three, later, four = await states_of(3), await states_of(3, 5), await states_of(4)
    for states, words in (
        (three[:2], r"readers 0, 1 of 3; 2 are missing"),
        ([*three[:2], later[2]], r"after 15 samples of all ranks, others after 6"),
        ([*three, four[0]], r"one has readers 3, another one has readers 4"),
        (
            [three[0], changed(three[1], epoch=9)],
            r"has epoch 2, another one has epoch 9",
        ),
        (
            [three[0], {**three[1], "version": 1}],
            r"of version 1, and this .* version 5: r",
        ),
    ):
        with pytest.raises(StateMismatchError, match=words):
            merge_states(states)
    with pytest.raises(ValueError, match="no states"):
        merge_states([])
    with pytest.raises(
        StateMismatchError, match=r"of version 0, and .* version 5"
    ) as caught:
        numbers().load_state_dict({"version": 0})
    assert (caught.value.expected, caught.value.found) == (0, 5)


async def test_a_rank_that_had_a_batch_less(tmp_path: Path) -> None:
    write_lines(tmp_path, (9, 2, 9, 2))
    stream = TextDataset(str(tmp_path / "*"), interleave=4).readers(4)
    async with Ranks(stream, 2) as reading:
        found = await reading.batches(4, 2)
        over = changed(reading.states()[1], ended=True)
        found += await reading.batches(4, 1)
        state = merge_states([reading.states()[0], over])
    async with Ranks(stream, 1, state) as reading:
        found += await reading.batches(4)
    assert len({*chain(*found)}) == len([*chain(*found)]) == 9 + 2 + 9 + 2


async def test_integers_of_numpy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{n}\n" for n in range(40)))
    two: Any = np.int64(2)
    order: Any = {"shuffle": True, "seed": two, "interleave": two}
    stream: Any = TextDataset([str(tmp_path / "a.txt")] * 4, **order)
    stream = (
        stream.skip(two).take(two * 9).shuffle(two, seed=two).batch(two).repeat(two)
    )
    stream = stream.mix(stream, seed=two).readers(two).epoch_length(two * 8)
    stream.set_epoch(two)
    _, state = await read(stream.shard(two - 1, two), 1)
    assert json.loads(json.dumps(state)) == state
    loader: Any = DataLoader(stream, 2, rank=two - 1, world_size=two)
    async with loader:
        await anext(aiter(loader))
        json.dumps(loader.state_dict())


async def test_a_rank_that_ended_too_far_on() -> None:
    """All ended behind the second batch, and one says that it is at the first."""
    async with Ranks(numbers(4), 2) as reading:
        first = (await reading.batches(2, 1), reading.states())[1]
        await reading.batches(2)
        ended = reading.states()
    assert merge_states(ended)["position"] == 4
    with pytest.raises(StateMismatchError, match="after 2 samples of all ranks"):
        merge_states([first[0], ended[1]])


async def test_a_state_is_small_and_of_the_samples_given() -> None:
    stream = numbers(1000)
    assert aiter(stream).state_dict()["position"] == 0
    _, state = await read(stream, 300)
    # What was read ahead of the position is read again.
    at = state["streams"]["0"]["state"]
    assert at["read"] + at["taken"] == 300
    assert opened(state) == {
        "version": 5,
        "stream": {"kind": "iterable", "function": "builtins.range"},
        "epoch": 1,
        "begun": 1,
        "position": 300,
        "readers": 1,
        "streams": {"0": {"taken": 300, "state": {**at, "failed": []}}},
    }
    stream.load_state_dict(state)
    assert (await read(stream))[0] == [*range(300, 1000)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 0, "world_size": 1},
        {"num_workers": 1, "fetch": "workers"},
        {"num_workers": 1, "fetch": "workers", "persistent_workers": True},
    ],
    ids=["alone", "a rank", "a worker", "a worker that stays"],
)
async def test_a_loaded_state_is_for_one_epoch_of_a_loader(options: Any) -> None:
    stream = numbers(20)
    _, state = await read(stream.shard(0, 1), 8)
    stream.load_state_dict(state)
    loader: Any = DataLoader(stream, 4, collate_fn=list, **options)
    for begin in (8, 0, 0):
        batches: Any = await beside(partial(list, loader))
        assert [*chain(*batches)] == [*range(begin, 20)]
    loader.close()
