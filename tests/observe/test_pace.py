"""The computed pace agrees with closed forms, and with loaders on a simulated clock."""

from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioloader._base.records import Setting
from aioloader._observe.costs import Costs, costs_of
from aioloader._observe.pace import pace, seconds_per_batch
from observe.clock import TICK, Clock, Ticks, ticks
from observe.clock import seconds_per_batch as seconds_of


def costs(count: int = 1, **given: Any) -> Costs:
    """Return the costs of batches; what is not given takes no time."""
    arrays = {one.name: np.zeros(count) for one in fields(Costs)
              if one.default is MISSING}  # fmt: skip
    arrays |= {"reads": np.ones(count), "samples": np.ones(count)}
    return Costs(**arrays | {
        name: arrays[name] * 0 + one if name in arrays else one
        for name, one in given.items()
    })  # fmt: skip


BATCH: dict[str, Any] = {
    "read": 0.010,
    "transform": 0.004,
    "collate": 0.002,
    "transport": 0.001,
    "step": 0.005,
    "make_cpu": 0.0,
}


READS = {"read": 3.2, "reads": 32, "slowest": 0.1, "step": 0.001}
SLOWEST = {"read": 0.1, "reads": 10, "slowest": 0.055, "step": 0.001}
LOCKED = {"collate": 0.004, "step": 0.013, "locked": 0.005}
MOVED = {"collate": 0.001, "step": 0.004}


def workers(number: int, **changes: object) -> Setting:
    """Return a loader with processes that read."""
    plain = Setting(
        "workers", number, "process", reads_in_workers=True, window=2 * number, cores=8
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


THREADS = workers(8, worker_kind="thread")
CLOSED: list[tuple[dict[str, Any], Setting, float]] = [
    (BATCH, Setting("inline"), 0.022),
    (BATCH, Setting("thread", window=2), 0.016),
    # One batch ahead: it is requested when the one before is taken.
    (BATCH, Setting("thread", window=1), 0.017),
    # Not requested before it is asked for.
    (BATCH, Setting("thread", window=0), 0.022),
    (BATCH, workers(2), 0.008),
    (BATCH, workers(4), 0.005),
    # The window limits: each batch takes 17 ms from request to consumer.
    (BATCH, workers(4, window=2), 0.0085),
    (BATCH, Setting("loop", concurrency=1, window=8), 0.010),
    (BATCH, Setting("loop", concurrency=64, window=8), 0.006),
    # Many samples share the readers; one slow one holds up a batch of its own.
    (READS, Setting("loop", concurrency=8, window=None, batch_size=32), 3.2 / 8),
    (READS, Setting("loop", concurrency=256, window=None, batch_size=32), 3.2 / 256),
    (SLOWEST, Setting("loop", concurrency=10, window=1), 0.055),
    # Threads share one processor; processes share the cores.
    (BATCH | {"read_cpu": 0.5, "make_cpu": 1.0}, workers(8), 0.005),
    (BATCH | {"read_cpu": 0.5, "make_cpu": 1.0}, THREADS, 0.011),
    (
        BATCH | {"read_cpu": 0.5, "make_cpu": 1.0},
        replace(THREADS, worker_kind="ThreadPoolExecutor"),
        0.011,
    ),
    (
        BATCH | {"read_cpu": 1.0, "make_cpu": 1.0, "step": 0.0},
        workers(8, cores=2),
        0.008,
    ),
    # The step waits for threads that keep the lock.
    (LOCKED, Setting("loop", window=4), 0.018),
    (LOCKED, workers(2), 0.013),
    # Copies follow each other.
    (MOVED | {"copy": 0.010}, Setting("thread", window=4, on_device=2), 0.010),
    (MOVED | {"transport": 0.010}, Setting("thread", window=16), 0.004),
]


@pytest.mark.parametrize(("batch", "setting", "seconds"), CLOSED)
def test_constant_durations(
    batch: dict[str, Any], setting: Setting, seconds: float
) -> None:
    assert seconds_per_batch(costs(**batch), setting) == pytest.approx(seconds)


def test_a_slow_batch_stops_the_others_only_in_order() -> None:
    reads = np.array([0.1 if not at % 8 else 0.004 for at in range(32)])
    batches = costs(32, read=reads)
    ordered = seconds_per_batch(batches, workers(2, window=4))
    free = seconds_per_batch(batches, workers(2, window=4, in_order=False))
    assert reads.mean() / 2 * 0.99 <= free < 0.8 * ordered


def test_the_pace_of_bursts() -> None:
    """Batches that come eight at a time; the ends of the span do not matter much."""
    taken = [float(at // 8) for at in range(60)]
    assert pace(taken) == pytest.approx(1 / 8, rel=0.05)
    assert pace([TICK * at for at in range(7)]) == pytest.approx(TICK)
    assert pace([1.0]) == 0


SETTINGS = st.one_of(
    st.just(Setting("inline")),
    st.builds(
        Setting,
        st.sampled_from(["thread", "loop"]),
        window=st.integers(1, 6),
        concurrency=st.sampled_from([4, 8, 16]),
        on_device=st.integers(0, 2),
    ).map(lambda one: one if one.place == "loop" else replace(one, concurrency=1)),
    st.builds(
        lambda number, each, in_order: workers(
            number, window=number * each, in_order=in_order
        ),
        st.integers(1, 4),
        st.integers(2, 3),
        st.booleans(),
    ),
    st.builds(
        lambda number, each: replace(
            workers(number, window=number * each, concurrency=8), reads_in_workers=False
        ),
        st.integers(1, 4),
        st.integers(2, 3),
    ),
)


@pytest.mark.slow
@given(
    batches=st.lists(ticks(4, 4, at_least=1), min_size=3, max_size=3),
    setting=SETTINGS,
    change=st.sampled_from(["window", "workers", "concurrency", "none"]),
    transport=st.integers(0, 6),
)
def test_a_changed_loader_is_as_fast_as_computed(
    batches: list[Ticks], setting: Setting, change: str, transport: int
) -> None:
    """The recorded one is, too: within 5 points of what truly happens."""
    batches = [one._replace(transport=transport) for one in batches]
    recorded = Clock(setting, batches).run(97)
    changed = setting
    if change == "window" and setting.place != "inline":
        changed = replace(setting, window=2 * (setting.window or 1))
    if change == "workers" and setting.place == "workers":
        changed = replace(setting, workers=setting.workers + 1)
    if change == "concurrency" and setting.concurrency > 1:
        changed = replace(setting, concurrency=2 * setting.concurrency)
    # What is hidden cannot be known: copies that no consumer waits for.
    assume(not setting.on_device or change == "none")
    truth = seconds_of(Clock(changed, batches).run(97))
    found = costs_of(recorded, setting)
    assert found is not None
    assert seconds_per_batch(found, changed) == pytest.approx(truth, rel=0.05)
