"""A stream that user code reads within another one resumes with it."""

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
    # The outer one is read again; one within is not aioloader's to know about.
    pytest.mark.filterwarnings("ignore:.*has no state_dict:UserWarning"),
]

NESTINGS = st.builds(
    lambda outer, within: [outer, *within],
    st.sampled_from(sorted(OUTER)),
    st.lists(st.sampled_from(sorted(INNER)), max_size=3),
)


def epochs(within: Nesting, workers: int, stop: int) -> tuple[Any, Any]:
    """Return the rest of the second epoch and the third one, and what resumes them."""
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
def test_a_new_process_reads_the_rest_and_the_next_epoch(cases: Any) -> None:
    """Whatever is within what, and wherever it stops."""
    found = [epochs(*case) for case in cases]
    sent = json.dumps([resumed for _, resumed in found])
    printed = python(Path(nesting.__file__), input=sent, check=True).stdout
    assert json.loads(printed) == [expected for expected, _ in found]


@pytest.mark.parametrize("name", INNER)
def test_workers_share_the_outer_stream_alone(name: str) -> None:
    """Each worker reads what is within it whole, so no sample is lost."""
    stream = INNER[name](from_iterable(range(40)).shuffle(7))
    whole = asyncio.run(collected(stream))
    options: Any = {"num_workers": 2, "fetch": "workers"}
    with DataLoader(stream, None, **options) as loader:
        assert sorted(loader) == sorted(whole)
