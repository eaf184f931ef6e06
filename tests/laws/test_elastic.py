"""The elastic law: the number of ranks may change after any batch.

Global batch k has the same samples on any number of ranks, also after resuming.
"""

import itertools
import json
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import Phase, assume, given, reject, settings
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
GLOBAL = 12
READERS = 4


def loaders(
    chain: Chain, ranks: int, state: Any = None, *, workers: int | None = None
) -> list[DataLoader[Any]]:
    """Return the loaders of all ranks, with a loaded state if there is one."""
    options: Any = {"num_workers": workers, "fetch": "workers"} if workers else {}
    made = [
        DataLoader(
            chain.stream().readers(READERS) if workers is None else chain.stream(),
            GLOBAL // ranks,
            rank=rank,
            world_size=ranks,
            tail="uneven",
            on_error="skip",
            collate_fn=collated,
            **options,
        )
        for rank in range(ranks)
    ]
    if state is not None:
        for loader in made:
            loader.load_state_dict(json.loads(json.dumps(state)))
    return made


def steps(loaders: list[DataLoader[Any]], count: int | None = None) -> list[Any]:
    shares = [list(itertools.islice(loader, count)) for loader in loaders]
    batches = [
        sorted(itertools.chain.from_iterable(filter(None, parts)))
        for parts in itertools.zip_longest(*shares)
    ]
    while batches and not batches[-1]:
        batches.pop()
    return batches


def saved(loaders: list[DataLoader[Any]], count: int) -> tuple[list[Any], Any]:
    iterators = [iter(loader) for loader in loaders]
    batches = [
        sorted(itertools.chain.from_iterable(next(it, ()) for it in iterators))
        for _ in range(count)
    ]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    for loader in loaders:
        loader.close()
    return batches, merge_states(states)


def whole_of(chain: Chain) -> list[Any]:
    """Return all global batches; reject chains that leave a reader no sample."""
    try:
        return steps(loaders(chain, 1))
    except ValueError as error:
        if "so it has none to repeat" not in str(error):
            raise
        reject()


RANKS = st.sampled_from([1, 2, 3, 4, 6])


@pytest.mark.slow
@given(
    chains(without=("fail",)), RANKS, RANKS, RANKS, st.integers(0, 6), st.integers(0, 2)
)
def test_any_chain_resumes_on_any_number_of_ranks(
    chain: Chain, first: int, second: int, third: int, k: int, more: int
) -> None:
    whole = whole_of(chain)
    k = min(k, len(whole))
    batches, state = saved(loaders(chain, first), k)
    more = min(more, len(whole) - k)
    again, state = saved(loaders(chain, second, state), more)
    batches += again
    batches += steps(loaders(chain, third, state))
    assert batches == whole


@pytest.mark.slow
@given(chains(without=("fail",)), RANKS)
def test_each_sample_goes_to_exactly_one_rank(chain: Chain, ranks: int) -> None:
    whole = Counter(itertools.chain.from_iterable(whole_of(chain)))
    assert Counter(itertools.chain.from_iterable(steps(loaders(chain, ranks)))) == whole


LAYOUTS = st.tuples(st.integers(1, 3), st.integers(0, 3))  # of ranks, and their workers
_UNCUT = ("text_gzip", "tar_zstd")  # eight shards, too few for nine readers


def rest(made: list[DataLoader[Any]]) -> Counter[str]:
    return Counter(sample for loader in made for batch in loader for sample in batch)


# The results of these steps depend on the number of readers.
_OF_READERS = ("skip", "take", "batch", "mix", "pack", "best fit")


@pytest.mark.slow
@given(chains(without=_OF_READERS), LAYOUTS, LAYOUTS, st.integers(0, 3))
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
def test_any_chain_resumes_on_any_ranks_and_workers(
    chain: Chain, first: tuple[int, int], second: tuple[int, int], rounds: int
) -> None:
    """Saved when all workers have delivered equally many batches."""
    assume(chain.make not in _UNCUT or (3, 3) not in {first, second})
    whole = rest(loaders(chain, first[0], workers=first[1]))
    counts: Counter[str] = Counter()
    begun = loaders(chain, first[0], workers=first[1])
    with ExitStack() as stack:
        made = [stack.enter_context(loader) for loader in begun]
        iterators = [iter(loader) for loader in made]
        for _ in range(rounds * max(1, first[1])):
            batches = [next(iterator, None) for iterator in iterators]
            if not any(batches):
                assert counts == whole or chain.has_length
                return  # the states are those of the next epoch
            for batch in filter(None, batches):
                counts.update(batch)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in made]
    again = loaders(chain, second[0], workers=second[1])
    try:
        state = merge_states(states)
        for loader in again:
            loader.load_state_dict(state)
    except StateMismatchError:  # some workers had ended, and others took more turns
        assert first[1] > 1
        assert '"ended": true' in json.dumps(states)
        return
    counts += rest(again)
    # The samples that an epoch of a given length repeats depend on the readers.
    assert counts.total() == whole.total() if chain.has_length else counts == whole
