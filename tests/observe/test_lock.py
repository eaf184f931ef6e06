"""Steps that wait for the interpreter's lock are not taken for slow steps."""

from dataclasses import replace

import pytest

from aioloader._observe.lock import lock_waits
from aioloader._observe.records import Setting
from aioloader._observe.verdict import report
from observe.clock import TICK, Clock, Ticks, advised, seconds_per_batch

LOOP = Setting("loop", concurrency=8, window=6, batch_size=4, cores=8)
THREADS = Setting(
    "workers", 2, "thread", reads_in_workers=True, window=4, batch_size=4, cores=8
)
COLLATE = Ticks((4,) * 4, collate=20, step=13, uses_cpu=("collate",))
TRANSFORM = Ticks((0,) * 4, transform=10, step=7, uses_cpu=("transform",))


@pytest.mark.parametrize(
    ("setting", "ticks", "stage", "advice"),
    [
        (LOOP, COLLATE, "collate", ("num_workers", 2)),
        (THREADS, TRANSFORM, "transform", ("workers", "process")),
    ],
    ids=["a slow collate", "a transform in threads"],
)
def test_a_thread_that_keeps_the_lock(
    setting: Setting, ticks: Ticks, stage: str, advice: tuple[str, object]
) -> None:
    """The consumer hardly waits for batches, and is held back all the same."""
    records = Clock(setting, [ticks], locks=True).run(320)
    waited = sum(one.taken - one.asked for one in records[4:])
    assert waited < 0.25 * (records[-1].taken - records[4].taken)
    found = report(records, setting)
    assert found.stage == stage
    assert found.advice is not None
    assert (found.advice.argument, found.advice.new) == advice
    assert "and for the interpreter's lock" in found.headline
    assert found.wait_share > 0.25
    assert abs(found.model_error) < 0.1

    changed = advised(records, setting)
    before = seconds_per_batch(records)
    after = seconds_per_batch(Clock(changed, [ticks]).run(320))
    assert found.advice.gain + 100 == pytest.approx(100 * before / after, rel=0.15)


def test_at_the_most_the_switch_interval() -> None:
    records = Clock(LOOP, [COLLATE], locks=True).run(64)
    waits = lock_waits(records, LOOP)
    assert len(waits) == len(records) - 1
    assert max(waits) == pytest.approx(5 * TICK)
    true_step = pytest.approx(COLLATE.step * TICK, abs=2.5 * TICK)
    for one, later, wait in zip(records, records[1:], waits, strict=False):
        assert later.asked - one.taken - wait == true_step


def test_nobody_waits_for_a_lock_that_is_free() -> None:
    """A thread that computes without the lock, and processes."""
    records = Clock(LOOP, [COLLATE]).run(64)
    assert not lock_waits(records, LOOP).any()
    processes = replace(THREADS, worker_kind="process")
    records = Clock(processes, [TRANSFORM._replace(transport=6)]).run(64)
    assert not lock_waits(records, processes).any()
