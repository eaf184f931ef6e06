"""Statistics of stages are exact, and their sums agree."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader._base.records import BatchRecord, Copy, RecordedSettings
from aioloader._observe.stages import StageStats, stage_stats
from aioloader._observe.stats import LoaderStats
from observe.clock import Clock, Ticks, ticks

NOTHING = LoaderStats(epoch=0, batches=4, waited=0.0, in_flight=0, failures=0)


def one_after_the_other(count: int, waits: float = 0.0) -> list[BatchRecord]:
    """Return batches made inline: 3 s read, 2 s transformed, 1 s collated, 4 s used."""
    records = []
    for number in range(count):
        t = 10.0 * number + 100
        made = (t, t + 3, t + 3, t + 5, t + 6, 0.0, 0.0, 0.0)
        records.append(BatchRecord(number, t, t + 6 + waits, 0, 8, made))
    return records


def named(stages: tuple[StageStats, ...], name: str) -> StageStats:
    return next(stage for stage in stages if stage.name == name)


def test_copies_to_a_device_are_a_stage() -> None:
    """One every 10 s: requested at 0, begun at 2, done at 5; then there is no room."""
    records = one_after_the_other(4)
    copies = [
        Copy(n, 100 + 10.0 * n, 102 + 10.0 * n, 105 + 10.0 * n, 1 << 20)
        for n in range(4)
    ]
    setting = RecordedSettings("thread", on_device=1)
    stages = stage_stats(records, setting, copies)
    assert [stage.name for stage in stages][-3:] == ["transport", "device", "consumer"]
    device = named(stages, "device")
    assert (device.busy, device.starved, device.blocked) == (12, 8, 16)
    assert (device.items, device.nbytes, device.p50) == (4, 4 << 20, 3)
    # A copy that begins during another one counts from the end of that.
    copies = [Copy(0, 100, 100, 106, 1), Copy(1, 101, 103, 110, 1)]
    device = named(stage_stats(records[:2], setting, copies), "device")
    assert (device.busy, device.starved, device.blocked) == (10, 0, 6)
    assert device.p99 == pytest.approx(6, abs=0.1)


@pytest.mark.slow
@given(
    batches=st.lists(ticks(1, 6, at_least=0), min_size=1, max_size=4),
    setting=st.sampled_from(
        [
            RecordedSettings("inline"),
            RecordedSettings("thread", window=2),
            RecordedSettings("loop", concurrency=4, window=4),
            RecordedSettings("loop", concurrency=4, window=4, on_device=1),
            RecordedSettings("workers", 3, "process", reads_in_workers=True, window=6),
            RecordedSettings("workers", 2, "process", concurrency=4, window=4),
        ]
    ),
)
def test_the_seconds_of_a_stage_add_up(
    batches: list[Ticks], setting: RecordedSettings
) -> None:
    records = Clock(setting, batches).run(20)
    seconds = records[-1].taken - records[0].asked
    for stage in stage_stats(records, setting):
        parts = stage.busy, stage.starved, stage.blocked
        assert sum(parts) == pytest.approx(stage.lanes * seconds)
        assert min(parts) >= -1e-9


def test_stats_are_printed_as_a_table() -> None:
    records = one_after_the_other(4)
    stats = replace(
        NOTHING,
        waited=0.25,
        worker_deaths=1,
        _records=records,
        _setting=RecordedSettings("inline"),
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
