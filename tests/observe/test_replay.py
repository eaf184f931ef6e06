"""The replay agrees with closed forms, and with a loader on a simulated clock."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aioloader._observe.batches import Batch, batches_of, scaled
from aioloader._observe.records import Setting
from aioloader._observe.replay import replay
from observe.clock import Clock, Ticks, seconds_per_batch

BATCH = Batch(
    read=0.010, transform=0.004, collate=0.002, transport=0.001, step=0.005, make_cpu=0
)


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
    replayed = replay([BATCH], setting)
    assert replayed.seconds == pytest.approx(seconds)
    assert replayed.waited == pytest.approx(seconds - 0.005)


def test_many_samples_share_the_readers() -> None:
    batch = Batch(read=3.2, reads=32, slowest=0.1, step=0.001)
    for concurrency in (8, 16, 64, 256):
        setting = Setting("loop", concurrency=concurrency, window=None, batch_size=32)
        assert replay([batch], setting).seconds == pytest.approx(3.2 / concurrency)


def test_one_slow_sample_holds_up_a_batch_of_its_own() -> None:
    batch = Batch(read=0.1, reads=10, slowest=0.055, step=0.001)
    setting = Setting("loop", concurrency=10, window=1)
    assert replay([batch], setting).seconds == pytest.approx(0.055)


@pytest.mark.parametrize("kind", ["thread", "ThreadPoolExecutor"])
def test_threads_share_one_processor(kind: str) -> None:
    batch = BATCH._replace(read_cpu=0.5, make_cpu=1.0)
    assert replay([batch], workers(8)).seconds == pytest.approx(0.005)
    threads = replay([batch], workers(8, worker_kind=kind))
    assert threads.seconds == pytest.approx(0.011)


def test_processes_share_the_cores() -> None:
    batch = BATCH._replace(read_cpu=1.0, make_cpu=1.0, step=0.0)
    replayed = replay([batch], workers(8, cores=2))
    assert replayed.seconds == pytest.approx(0.008)


def test_copies_follow_each_other() -> None:
    batch = Batch(collate=0.001, copy=0.010, step=0.004)
    setting = Setting("thread", window=4, on_device=2)
    assert replay([batch], setting).seconds == pytest.approx(0.010)
    batch = Batch(collate=0.001, transport=0.010, step=0.004)
    delayed = Setting("thread", window=16)
    assert replay([batch], delayed).seconds == pytest.approx(0.004)


def test_a_slow_batch_stops_the_others_only_in_order() -> None:
    batches = [Batch(read=0.1 if not at % 8 else 0.004) for at in range(32)]
    ordered = replay(batches, workers(2, window=4)).seconds
    free = replay(batches, workers(2, window=4, in_order=False)).seconds
    assert free < 0.8 * ordered
    assert free >= sum(one.read for one in batches) / 32 / 2 * 0.99


def test_only_one_stage_is_scaled() -> None:
    (faster,) = scaled([BATCH], "transform", 0.5)
    assert faster == BATCH._replace(transform=0.002)
    (faster,) = scaled([BATCH], "consumer", 0.25)
    assert faster == BATCH._replace(step=0.00125)


def test_nothing_cannot_be_replayed() -> None:
    with pytest.raises(ValueError, match="no batches"):
        replay([], Setting("inline"))


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
    sends=st.booleans(),
)
def test_a_changed_loader_does_what_the_replay_says(
    batches: list[Ticks],
    setting: Setting,
    change: str,
    transport: int,
    sends: bool,
) -> None:
    """The recorded one is replayed, too: within 5 points of what truly happens."""
    batches = [one._replace(transport=transport) for one in batches]
    recorded = Clock(setting, batches, sends=sends).run(97)
    changed = setting
    if change == "window" and setting.place != "inline":
        changed = replace(setting, window=2 * (setting.window or 1))
    if change == "workers" and setting.place == "workers":
        changed = replace(setting, workers=setting.workers + 1)
    if change == "concurrency" and setting.concurrency > 1:
        changed = replace(setting, concurrency=2 * setting.concurrency)
    # What is hidden cannot be known: how long copies take that no consumer waits for,
    # and that workers are free during transport, if they have nothing to do then.
    assume((sends and not setting.on_device) or change == "none")
    truth = seconds_per_batch(Clock(changed, batches, sends=sends).run(97))
    replayed = replay(batches_of(recorded, setting), changed)
    assert replayed.seconds == pytest.approx(truth, rel=0.05)
