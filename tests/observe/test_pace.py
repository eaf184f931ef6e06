"""The computed pace agrees with closed forms, and with loaders on a simulated clock."""

from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioloader._observe.costs import Costs, costs_of
from aioloader._observe.pace import pace, seconds_per_batch
from aioloader._observe.records import Setting
from observe.clock import TICK, Clock, Ticks
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


def workers(number: int, **changes: object) -> Setting:
    """Return a loader with processes that read."""
    plain = Setting(
        "workers", number, "process", reads_in_workers=True, window=2 * number, cores=8
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [
        (Setting("inline"), 0.022),
        (Setting("thread", window=2), 0.016),
        # One batch ahead: it is requested when the one before is taken.
        (Setting("thread", window=1), 0.017),
        # Not requested before it is asked for.
        (Setting("thread", window=0), 0.022),
        (workers(2), 0.008),
        (workers(4), 0.005),
        # The window limits: each batch takes 17 ms from request to consumer.
        (workers(4, window=2), 0.0085),
        (Setting("loop", concurrency=1, window=8), 0.010),
        (Setting("loop", concurrency=64, window=8), 0.006),
    ],
)
def test_constant_durations(setting: Setting, seconds: float) -> None:
    assert seconds_per_batch(costs(**BATCH), setting) == pytest.approx(seconds)


def test_many_samples_share_the_readers() -> None:
    batch = costs(read=3.2, reads=32, slowest=0.1, step=0.001)
    for concurrency in (8, 16, 64, 256):
        setting = Setting("loop", concurrency=concurrency, window=None, batch_size=32)
        assert seconds_per_batch(batch, setting) == pytest.approx(3.2 / concurrency)


def test_one_slow_sample_holds_up_a_batch_of_its_own() -> None:
    batch = costs(read=0.1, reads=10, slowest=0.055, step=0.001)
    setting = Setting("loop", concurrency=10, window=1)
    assert seconds_per_batch(batch, setting) == pytest.approx(0.055)


@pytest.mark.parametrize("kind", ["thread", "ThreadPoolExecutor"])
def test_threads_share_one_processor(kind: str) -> None:
    batch = costs(**BATCH | {"read_cpu": 0.5, "make_cpu": 1.0})
    assert seconds_per_batch(batch, workers(8)) == pytest.approx(0.005)
    threads = workers(8, worker_kind=kind)
    assert seconds_per_batch(batch, threads) == pytest.approx(0.011)


def test_processes_share_the_cores() -> None:
    batch = costs(**BATCH | {"read_cpu": 1.0, "make_cpu": 1.0, "step": 0.0})
    assert seconds_per_batch(batch, workers(8, cores=2)) == pytest.approx(0.008)


def test_a_step_waits_for_threads_that_keep_the_lock() -> None:
    batch = costs(collate=0.004, step=0.013, locked=0.005)
    assert seconds_per_batch(batch, Setting("loop", window=4)) == pytest.approx(0.018)
    assert seconds_per_batch(batch, workers(2)) == pytest.approx(0.013)


def test_copies_follow_each_other() -> None:
    batch = costs(collate=0.001, copy=0.010, step=0.004)
    setting = Setting("thread", window=4, on_device=2)
    assert seconds_per_batch(batch, setting) == pytest.approx(0.010)
    batch = costs(collate=0.001, transport=0.010, step=0.004)
    delayed = Setting("thread", window=16)
    assert seconds_per_batch(batch, delayed) == pytest.approx(0.004)


def test_a_slow_batch_stops_the_others_only_in_order() -> None:
    reads = np.array([0.1 if not at % 8 else 0.004 for at in range(32)])
    batches = costs(32, read=reads)
    ordered = seconds_per_batch(batches, workers(2, window=4))
    free = seconds_per_batch(batches, workers(2, window=4, in_order=False))
    assert reads.mean() / 2 * 0.99 <= free < 0.8 * ordered


def test_only_one_stage_is_scaled() -> None:
    for stage, field in (("transform", "transform"), ("consumer", "step")):
        faster, batch = costs(**BATCH).scaled(stage, 0.5), costs(**BATCH)
        for one in ("read", "transform", "collate", "transport", "step"):
            factor = 0.5 if one == field else 1.0
            assert getattr(faster, one) == factor * getattr(batch, one)


def test_the_pace_of_bursts() -> None:
    """Batches that come eight at a time; the ends of the span do not matter much."""
    taken = [float(at // 8) for at in range(60)]
    assert pace(taken) == pytest.approx(1 / 8, rel=0.05)
    assert pace([TICK * at for at in range(7)]) == pytest.approx(TICK)
    assert pace([1.0]) == 0


TICKS = st.builds(
    Ticks,
    reads=st.lists(st.integers(1, 6), min_size=4, max_size=4).map(tuple),
    transform=st.integers(0, 12),
    collate=st.integers(1, 6),
    step=st.integers(1, 20),
)
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
            workers(number, window=number * each, concurrency=8),
            reads_in_workers=False,
        ),
        st.integers(1, 4),
        st.integers(2, 3),
    ),
)


@pytest.mark.slow
@given(
    batches=st.lists(TICKS, min_size=3, max_size=3),
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
