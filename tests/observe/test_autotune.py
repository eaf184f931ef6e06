"""The controller of "auto" arguments, on simulated stores, without a clock."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._pipeline.autotune import BytesInFlight, Controller, Observation

Rate = Callable[[int], float]
LATENCY = 0.03
BATCH = 32
MOST = 1024


def knee(most: int) -> Rate:
    """Return the rate of a store that serves ``most`` reads at a time; others queue."""
    return lambda n: min(n, most) / LATENCY


def thrashing(most: int) -> Rate:
    """Return the rate of a store that slows down with more reads than ``most``."""
    return lambda n: n / LATENCY if n <= most else most / LATENCY * most / n


STORES: dict[str, Rate] = {
    "latency, knee at 16": knee(16),
    "latency, knee at 100": knee(100),
    "latency, knee at 256": knee(256),
    "latency, knee at 500": knee(500),
    "bandwidth": lambda n: min(n / LATENCY, 5_000),
    "one core": lambda n: min(n / 0.001, 500),
    "core and latency": lambda n: 1 / max(LATENCY / n, 0.0004),
    "thrashing from 10": thrashing(10),
    "thrashing from 48": thrashing(48),
    "thrashing from 90": thrashing(90),
}


@dataclass
class Run:
    """A controller that reads from a store.

    Attributes:
        controller: The controller.
        rate: The store's rate.
        noise: Standard deviation of the observed rates.
        waited: Share of the time that the consumer waits.
        batches: Batches that were read so far.
        has_changed: Whether the value is new: its reads have to settle.
    """

    controller: Controller
    rate: Rate
    noise: float = 0.0
    waited: float = 1.0
    batches: float = 0.0
    has_changed: bool = True

    def step(self, *, failures: float = 0.0) -> str | None:
        """Read as many samples as the tuner measures, and let the controller decide."""
        value = self.controller.value
        blur = random.lognormvariate(0, self.noise) if self.noise else 1.0
        rate = self.rate(value) * blur
        settling = value if self.has_changed else 0
        self.batches += (settling + max(16, value / 2)) / BATCH
        seen = Observation(rate, self.waited, failures)
        decision = self.controller.observe(seen)
        self.has_changed = decision is not None
        return decision

    def share(self) -> float:
        """Return the present rate as a share of the best one."""
        best = max(self.rate(value) for value in range(1, self.controller.most + 1))
        return self.rate(self.controller.value) / best


def started(rate: Rate, start: int = 32, **more: Any) -> Run:
    return Run(Controller("concurrency", start, 1, MOST), rate, **more)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("store", STORES)
def test_the_best_rate_is_reached_in_thirty_batches(store: str, noise: float) -> None:
    """To 90 %; with noise, in nine of ten runs."""
    reached = 0
    for seed in range(20):
        random.seed(seed)
        run = started(STORES[store], noise=noise)
        while run.batches < 30 and run.share() < 0.9:
            run.step()
        reached += run.share() >= 0.9
    assert reached >= 18


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_the_controller_stays_near_the_best_rate(store: str) -> None:
    """Most of the time; it tries other values ever more rarely."""
    run = started(STORES[store])
    shares = []
    for _ in range(600):
        run.step()
        shares.append(run.share())
    late = shares[100:]
    assert sum(share >= 0.9 for share in late) >= 0.95 * len(late)


observations = st.builds(
    Observation,
    rate=st.floats(0, 1e6),
    waited=st.floats(0, 1),
    failures=st.floats(0, 1),
)


@given(
    start=st.integers(-10, 5000),
    least=st.integers(1, 50),
    room=st.integers(0, 2000),
    seen=st.lists(st.one_of(observations, st.integers(-5, 3000)), max_size=60),
)
def test_the_controller_never_leaves_its_bounds(
    start: int, least: int, room: int, seen: list[Observation | int]
) -> None:
    """Whatever it observes, and however the upper bound moves."""
    controller = Controller("concurrency", start, least, least + room)
    most = least + room
    for event in seen:
        if isinstance(event, int):
            most = max(least, event)
            decision = controller.limit(event, "memory")
        else:
            decision = controller.observe(event)
        assert least <= controller.value <= most
        if decision is not None:
            _, change, reason = decision.split(": ", 2)
            before, after = map(int, change.split(" -> "))
            assert after == controller.value != before
            assert reason


def test_a_change_that_is_slower_is_reverted() -> None:
    """Twice the value is slower, and so is half of it."""
    run = started(lambda n: 100 - abs(n - 32))
    decisions = [decision for _ in range(5) if (decision := run.step())]
    values = [decision.split(": ")[1] for decision in decisions]
    assert values == ["32 -> 64", "64 -> 16", "16 -> 32"]
    assert "slower" in decisions[-1]
    assert run.share() == 1


def test_failures_that_depend_on_the_value_reduce_it() -> None:
    run = started(knee(500), start=64)
    while run.batches < 200:
        run.step(failures=max(0.0, 1 - 40 / run.controller.value))
    assert run.controller.value <= 50


def test_a_reduction_that_avoids_no_failure_is_reverted() -> None:
    """Once and for all."""
    run = started(knee(500), start=64)
    first, second = run.step(failures=0.1), run.step(failures=0.1)
    assert first
    assert second
    assert "64 -> 32" in first
    assert "32 -> 64" in second
    assert "10.0%" in second
    while run.batches < 300:
        run.step(failures=0.1)
    assert run.controller.value > 300


def test_each_decision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the argument, both values and the reason."""
    run = started(knee(100))
    with caplog.at_level(logging.INFO, logger="aioloader"):
        decisions = [decision for _ in range(10) if (decision := run.step())]
    assert [record.getMessage() for record in caplog.records] == decisions
    assert decisions[0].startswith("concurrency: 32 -> 64: the consumer waits")


def test_as_many_batches_are_held_as_fit_in_bytes() -> None:
    """One until a size is known; then by the largest recent batch, at least one."""
    held = BytesInFlight(1000)
    assert held.batches() == 1
    held.note(b"x" * 100)
    assert held.batches() == 10
    held.note(b"x" * 400)
    held.note(b"x" * 100)
    assert held.batches() == 2
    held.note(b"x" * 5000)
    assert held.batches() == 1
    for _ in range(200):
        held.note(b"x" * 200)
    assert held.batches() == 5
