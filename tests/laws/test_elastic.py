"""The elastic law: ranks may change after any batch, and nothing else does.

Global batch k is the same set of samples on any number of ranks, resumed on others too.
"""

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from aioloader import DataLoader, merge_states
from laws.chains import Chain, chains
from laws.test_resume import collated

pytestmark = [
    pytest.mark.law,
    pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning"),
]
GLOBAL = 12
READERS = 4


def loaders(chain: Chain, ranks: int, state: Any = None) -> list[DataLoader[Any]]:
    made = [
        DataLoader(
            chain.stream().readers(READERS),
            GLOBAL // ranks,
            rank=rank,
            world_size=ranks,
            tail="uneven",
            on_error="skip",
            collate_fn=collated,
        )
        for rank in range(ranks)
    ]
    if state is not None:
        for loader in made:
            loader.load_state_dict(json.loads(json.dumps(state)))
    return made


def steps(loaders: list[DataLoader[Any]], count: int | None = None) -> list[Any]:
    parts = [list(itertools.islice(loader, count)) for loader in loaders]
    found = [
        sorted(itertools.chain.from_iterable(filter(None, batches)))
        for batches in itertools.zip_longest(*parts)
    ]
    while found and not found[-1]:
        found.pop()
    return found


def saved(loaders: list[DataLoader[Any]], count: int) -> tuple[list[Any], Any]:
    iterators = [iter(loader) for loader in loaders]
    found = [
        sorted(itertools.chain.from_iterable(next(one, ()) for one in iterators))
        for _ in range(count)
    ]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for loader in loaders:
        loader.close()
    return found, merge_states(states)


def whole_of(chain: Chain) -> list[Any]:
    """Return all global batches; leave out chains that keep nothing of a reader."""
    try:
        return steps(loaders(chain, 1))
    except ValueError as error:
        if "so it has none to repeat" not in str(error):
            raise
        reject()


RANKS = st.sampled_from([1, 2, 3, 4, 6])


@given(
    chains(without=("fail",)), RANKS, RANKS, RANKS, st.integers(0, 6), st.integers(0, 2)
)
def test_any_chain(
    chain: Chain, first: int, second: int, third: int, k: int, more: int
) -> None:
    whole = whole_of(chain)
    k = min(k, len(whole))
    found, state = saved(loaders(chain, first), k)
    more = min(more, len(whole) - k)
    again, state = saved(loaders(chain, second, state), more)
    found += again
    found += steps(loaders(chain, third, state))
    assert found == whole


@given(chains(without=("fail",)), RANKS)
def test_each_sample_goes_to_one_rank(chain: Chain, ranks: int) -> None:
    whole = Counter(itertools.chain.from_iterable(whole_of(chain)))
    assert Counter(itertools.chain.from_iterable(steps(loaders(chain, ranks)))) == whole
