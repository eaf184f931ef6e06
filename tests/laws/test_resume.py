"""The law of resuming, for any chain of steps over any format, in any mode."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aioloader import DataLoader
from laws.chains import Chain, chains, upper
from resuming import assert_resumes_exactly, assert_resumes_exactly_async

pytestmark = [
    pytest.mark.law,
    pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning"),
]


def collated(samples: Any) -> Any:
    if not isinstance(samples, list):
        return upper(samples)
    return [upper(sample) for sample in samples]


@st.composite
def loading(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    size = draw(st.sampled_from([None, 1, 2, 3, 7, 20]))
    options = {"batch_size": size, "on_error": "skip", "collate_fn": collated}
    if size is not None:
        options["drop_last"] = draw(st.booleans())
    if draw(st.booleans()):
        options["prefetch_factor"] = draw(st.integers(1, 4))
    return options, draw(st.integers(0, 60 // (size or 1)))


@given(chains(), loading())
def test_any_chain_resumes(chain: Chain, drawn: tuple[dict[str, Any], int]) -> None:
    options, k = drawn
    assert_resumes_exactly(lambda: DataLoader(chain.stream(), **options), stops=[k])


@pytest.mark.slow
@pytest.mark.one_loop
@given(chains(), loading(), st.sampled_from(["thread", "caller"]))
async def test_any_chain_resumes_by_async_for(
    chain: Chain, drawn: tuple[dict[str, Any], int], loop: Any
) -> None:
    options, k = drawn
    await assert_resumes_exactly_async(
        lambda: DataLoader(chain.stream(), loop=loop, **options), stops=[k]
    )


@pytest.mark.slow
@given(chains(), loading(), st.integers(1, 2), st.sampled_from(["loader", "workers"]))
@settings(
    max_examples=settings().max_examples // 30,
    phases=[Phase.generate],  # making it smaller would take minutes
)
def test_any_chain_resumes_in_workers(
    chain: Chain, drawn: tuple[dict[str, Any], int], num_workers: int, fetch: Any
) -> None:
    """If the loader reads, the number of workers may change."""
    options, k = drawn
    workers = {"num_workers": num_workers, "fetch": fetch}
    resumed = workers if fetch == "workers" else {"num_workers": 2 - num_workers}
    assert_resumes_exactly(
        lambda: DataLoader(chain.stream(), **options, **workers),
        stops=[k],
        resume_in=lambda: DataLoader(chain.stream(), **options, **resumed),
    )
