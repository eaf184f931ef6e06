"""Stage statistics are exact where they can be, and their sums agree."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._base.records import NOT_MADE, Copy, Record, Setting
from aioloader._base.words import seconds_text
from aioloader._observe.stages import StageStats, held_back, stage_stats
from aioloader._observe.stats import LoaderStats
from observe.clock import TICK, Clock, Ticks, ticks

NOTHING = LoaderStats(epoch=0, batches=4, waited=0.0, in_flight=0, failures=0)


def one_after_the_other(count: int, waits: float = 0.0) -> list[Record]:
    """Return batches made inline: 3 s read, 2 s transformed, 1 s collated, 4 s used."""
    records = []
    for number in range(count):
        at = 10.0 * number + 100
        made = (at, at + 3, at + 3, at + 5, at + 6, 0.0, 0.0, 0.0)
        records.append(Record(number, at, at + 6 + waits, 0, 8, made))
    return records


def named(stages: tuple[StageStats, ...], name: str) -> StageStats:
    """Return one of them."""
    return next(stage for stage in stages if stage.name == name)


def test_one_lane_does_everything() -> None:
    stages = stage_stats(one_after_the_other(4), Setting("inline"))
    assert [stage.name for stage in stages] == [
        *("sampler", "read", "transform", "collate", "transport", "consumer")
    ]
    _, read, transform, collate, transport, consumer = stages
    assert (read.busy, read.starved, read.blocked) == (12, 12, 12)
    assert (transform.busy, transform.starved, transform.blocked) == (8, 24, 4)
    assert (collate.busy, collate.starved, collate.blocked) == (4, 32, 0)
    assert transport.busy == 0
    assert (consumer.busy, consumer.starved, consumer.blocked) == (12, 24, 0)
    assert (read.p50, transform.p95, collate.p99, consumer.p50) == (3, 2, 1, 4)
    assert read.utilisation == pytest.approx(1 / 3)
    assert {stage.items for stage in stages} == {4}


def simulated(setting: Setting, ticks: Ticks) -> tuple[StageStats, ...]:
    """Return the stages of a loader on a simulated clock."""
    return stage_stats(Clock(setting, [ticks]).run(40), setting)


def test_a_slow_consumer_blocks_the_makers() -> None:
    setting = Setting("thread", window=2)
    stages = simulated(setting, Ticks(reads=(2,), collate=1, step=20))
    read = named(stages, "read")
    assert read.blocked > 0.8 * (read.busy + read.starved + read.blocked)
    assert named(stages, "consumer").utilisation > 0.95


def test_copies_to_a_device() -> None:
    """One every 10 s: asked for at 0, begun at 2, there at 5; then there is no room."""
    records = one_after_the_other(4)
    copies = [
        Copy(at, 100 + 10.0 * at, 102 + 10.0 * at, 105 + 10.0 * at, 1 << 20)
        for at in range(4)
    ]
    setting = Setting("thread", on_device=1)
    stages = stage_stats(records, setting, copies)
    assert [stage.name for stage in stages][-3:] == ["transport", "device", "consumer"]
    device = named(stages, "device")
    assert (device.busy, device.starved, device.blocked) == (12, 8, 16)
    assert (device.items, device.nbytes, device.p50) == (4, 4 << 20, 3)
    # One that is begun while another is under way counts from the end of that.
    copies = [Copy(0, 100, 100, 106, 1), Copy(1, 101, 103, 110, 1)]
    device = named(stage_stats(records[:2], setting, copies), "device")
    assert (device.busy, device.starved, device.blocked) == (10, 0, 6)
    assert device.p99 == pytest.approx(6, abs=0.1)


def test_slow_reads_starve_the_rest() -> None:
    setting = Setting("loop", concurrency=4, window=3)
    stages = simulated(setting, Ticks((20,) * 4, transform=2, collate=1, step=3))
    assert named(stages, "read").utilisation == pytest.approx(1, abs=0.1)
    transform = named(stages, "transform")
    assert transform.starved > 0.7 * (
        transform.busy + transform.starved + transform.blocked
    )
    assert named(stages, "consumer").starved > named(stages, "consumer").busy


def test_transport_is_exact_where_the_consumer_waits() -> None:
    setting = Setting("workers", 1, "process", reads_in_workers=True, window=2)
    stages = simulated(setting, Ticks((5,), collate=1, transport=4, step=1))
    # The part that is as short as taking a batch is counts as taking it.
    near = pytest.approx(4 * TICK, abs=0.25 * TICK)
    assert named(stages, "transport").p50 == near


def test_copies_count_from_the_one_before() -> None:
    setting = Setting("thread", window=6, on_device=2)
    stages = simulated(setting, Ticks(collate=1, transport=10, step=2))
    transport = named(stages, "transport")
    assert transport.p50 == pytest.approx(10 * TICK)
    assert transport.utilisation > 0.9


def test_batches_held_back_for_an_earlier_one_are_counted_apart() -> None:
    batches = [Ticks(reads=(40 if not at % 8 else 2,), step=1) for at in range(8)]
    setting = Setting("workers", 4, "process", reads_in_workers=True, window=8)
    records = Clock(setting, batches).run(64)
    assert held_back(records, setting) > 40 * TICK
    assert held_back(records, replace(setting, in_order=False)) == 0
    assert replace(NOTHING, _records=records, _setting=setting).held > 40 * TICK


def test_batches_whose_making_is_not_known() -> None:
    records = [Record(at, 2.0 * at, 2.0 * at + 1, 0, 8, NOT_MADE) for at in range(4)]
    stages = stage_stats(records, Setting("inline"))
    assert [stage.name for stage in stages] == ["sampler", "transport", "consumer"]
    assert [stage.busy for stage in stages] == [0, 4, 3]
    assert stage_stats([], Setting("inline")) == ()


@pytest.mark.slow
@given(
    batches=st.lists(ticks(1, 6, at_least=0), min_size=1, max_size=4),
    setting=st.sampled_from(
        [
            Setting("inline"),
            Setting("thread", window=2),
            Setting("loop", concurrency=4, window=4),
            Setting("loop", concurrency=4, window=4, on_device=1),
            Setting("workers", 3, "process", reads_in_workers=True, window=6),
            Setting("workers", 2, "process", concurrency=4, window=4),
        ]
    ),
)
def test_sums_agree(batches: list[Ticks], setting: Setting) -> None:
    records = Clock(setting, batches).run(20)
    seconds = records[-1].taken - records[0].asked
    for stage in stage_stats(records, setting):
        parts = stage.busy, stage.starved, stage.blocked
        assert sum(parts) == pytest.approx(stage.lanes * seconds)
        assert min(parts) >= -1e-9


def test_a_table_for_people() -> None:
    records = one_after_the_other(4)
    stats = replace(
        NOTHING,
        waited=0.25,
        worker_deaths=1,
        _records=records,
        _setting=Setting("inline"),
    )
    assert str(stats) == (
        "epoch 0: 4 batches, 0 in flight; waited 250 ms\n"
        "worker deaths: 1\n"
        "latest 4 batches: 36.0 s, 0.1111 batches/s, 0.8889 samples/s\n"
        "wait per batch, p50 / p95 / p99: 6.00 s / 6.00 s / 6.00 s\n"
        "batches ready when one was requested, mean: 0.0\n"
        "\n"
        "stage      lanes  busy  starved  blocked     p50     p95     p99\n"
        "sampler        1    0%       0%     100%     0 s     0 s     0 s\n"
        "read           1   33%      33%      33%  3.00 s  3.00 s  3.00 s\n"
        "transform      1   22%      67%      11%  2.00 s  2.00 s  2.00 s\n"
        "collate        1   11%      89%       0%  1.00 s  1.00 s  1.00 s\n"
        "transport      1    0%     100%       0%     0 s     0 s     0 s\n"
        "consumer       1   33%      67%       0%  4.00 s  4.00 s  4.00 s"
    )
    assert str(NOTHING) == "epoch 0: 4 batches, 0 in flight; waited 0 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.0123456, "12.3 ms"), (1.5, "1.50 s"), (12345.6, "12,346 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    """In fitting units."""
    assert seconds_text(seconds) == text
