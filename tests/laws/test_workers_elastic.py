"""The elastic law where workers read: each is a reader, and their number may change."""

import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aioloader import DataLoader, merge_states
from aioloader.errors import StateMismatchError
from laws.chains import Chain, chains
from laws.test_resume import collated

pytestmark = [
    pytest.mark.law,
    pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*take turns at:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
LAYOUTS = st.tuples(st.integers(1, 3), st.integers(0, 3))


def loaders(chain: Chain, layout: tuple[int, int]) -> list[DataLoader[Any]]:
    ranks, workers = layout
    more: dict[str, Any] = {"num_workers": workers, "fetch": "workers"}
    return [
        DataLoader(
            chain.stream(),
            12 // ranks,
            rank=rank,
            world_size=ranks,
            tail="uneven",
            on_error="skip",
            collate_fn=collated,
            **(more if workers else {}),
        )
        for rank in range(ranks)
    ]


def rest(made: list[DataLoader[Any]]) -> Counter[str]:
    return Counter(sample for loader in made for batch in loader for sample in batch)


# What these do depends on how many readers there are.
_OF_READERS = ("skip", "take", "batch", "mix")


@given(chains(without=_OF_READERS), LAYOUTS, LAYOUTS, st.integers(0, 3))
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
def test_any_number_of_workers(
    chain: Chain, first: tuple[int, int], second: tuple[int, int], rounds: int
) -> None:
    """Saved where all workers have delivered as much, resumed in another layout."""
    whole = rest(loaders(chain, first))
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        made = [stack.enter_context(loader) for loader in loaders(chain, first)]
        iterators = [iter(loader) for loader in made]
        for _ in range(rounds * max(1, first[1])):
            batches = [next(one, None) for one in iterators]
            if not any(batches):
                assert found == whole or chain.has_length
                return  # the states are those of the next epoch
            for batch in filter(None, batches):
                found.update(batch)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in made]
    again = loaders(chain, second)
    try:
        state = merge_states(states)
        for loader in again:
            loader.load_state_dict(state)
    except StateMismatchError:  # some workers had ended, and others took more turns
        assert first[1] > 1
        assert '"ended": true' in json.dumps(states)
        return
    found += rest(again)
    # Which samples an epoch of a given length repeats, readers decide.
    assert found.total() == whole.total() if chain.has_length else found == whole
