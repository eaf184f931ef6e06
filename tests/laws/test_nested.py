"""A stream that user code reads inside another one resumes with it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from laws import nesting
from laws.nesting import INNER, OUTER, Nesting, collected, listed, loader_of
from python_process import python

pytestmark = [
    pytest.mark.slow,
    # The loader rereads the outer stream, and cannot know about user code in it.
    pytest.mark.filterwarnings("ignore:.*has no state_dict:UserWarning"),
]

NESTINGS = st.builds(
    lambda outer, within: [outer, *within],
    st.sampled_from(sorted(OUTER)),
    st.lists(st.sampled_from(sorted(INNER)), max_size=3),
)


def epochs(within: Nesting, workers: int, stop: int) -> tuple[Any, Any]:
    """Return the rest of epoch 2 and epoch 3, and the case that resumes there."""
    with loader_of(within, workers) as loader:
        first = listed(loader, 99)
        iterator = iter(loader)
        begun = listed(iterator, stop)
        state = loader.state_dict()
        rest = listed(iterator, 99)
        third = listed(loader, 99)
    assert first != begun + rest  # it is shuffled again
    return [rest, third], [within, workers, state]


@settings(
    max_examples=3,
    phases=[Phase.generate],  # each example is a process
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    cases=st.lists(
        st.tuples(NESTINGS, st.sampled_from([0, 0, 0, 1]), st.integers(0, 3)),
        min_size=8,
        max_size=8,
    )
)
def test_a_new_process_resumes_nested_streams(cases: Any) -> None:
    """The new process reads the rest of the epoch and the next epoch."""
    pairs = [epochs(*case) for case in cases]
    sent = json.dumps([resumed for _, resumed in pairs])
    printed = python(Path(nesting.__file__), input=sent, check=True).stdout
    assert json.loads(printed) == [expected for expected, _ in pairs]


@pytest.mark.parametrize("name", INNER)
def test_workers_shard_only_the_outer_stream(name: str) -> None:
    """Each worker reads inner streams completely, so no sample is lost."""
    stream = INNER[name](from_iterable(range(40)).shuffle(7))
    whole = asyncio.run(collected(stream))
    options: Any = {"num_workers": 2, "fetch": "workers"}
    with DataLoader(stream, None, **options) as loader:
        assert sorted(loader) == sorted(whole)
