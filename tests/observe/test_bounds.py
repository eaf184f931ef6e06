"""Advice that no measurement supports is not given; on a simulated clock."""

from dataclasses import replace

import pytest

from aioloader._base.records import BatchRecord, RecordedSettings
from aioloader._observe.changes import Change, changes, waits_for_store
from aioloader._observe.costs import Costs, costs_of, start_seconds
from aioloader._observe.verdict import report
from observe.clock import Clock, Ticks, delayed
from observe.test_verdict import ALL_CPU, BUSY, INLINE, LOOP
from observe.test_verdict import PROCESSES as EIGHT_CORES

PROCESSES = replace(EIGHT_CORES, cores=2)


def measured(record: BatchRecord, cpu: float, delayed: float) -> BatchRecord:
    """Return a record with CPU time and delay, as shares of its seconds."""
    made = record.made
    seconds = made[4] - made[0]
    return record._replace(made=(*made[:6], cpu * seconds, delayed * seconds))


def costs(records: list[BatchRecord], setting: RecordedSettings) -> Costs:
    costs = costs_of(records, setting)
    assert costs is not None
    return costs


def tried(
    records: list[BatchRecord],
    setting: RecordedSettings,
    argument: str,
    start: float = 0.0,
) -> list[Change]:
    """Return the changes of an argument that are tried."""
    tried = changes(costs(records, setting), setting, start)
    return [change for change in tried if change.argument == argument]


# -- waits -----------------------------------------------------------------------------


def test_no_gain_exceeds_the_time_waited() -> None:
    """One batch in 40 is late."""
    setting = EIGHT_CORES
    late = [Ticks((100 if not number else 4,) * 4, step=20) for number in range(40)]
    records = Clock(setting, late).run(160)
    verdict = report(records, setting)
    assert 0.02 < verdict.wait_share < 0.4
    assert tried(records, setting, "num_workers")
    if verdict.advice is not None:
        bound = 1 / (1 - verdict.wait_share)
        assert verdict.advice.gain <= 100 * (bound - 1) + 1e-6


# -- cores -----------------------------------------------------------------------------


def test_workers_are_advised_only_for_idle_cores() -> None:
    """The step may keep cores busy."""
    setting = replace(PROCESSES, cores=4)
    records = Clock(setting, [BUSY]).run(96)
    free, partly, busy = (
        report(records, replace(setting, used=used)) for used in (0.0, 0.7, 2.0)
    )
    assert free.advice is not None
    assert free.advice.argument == "num_workers"
    assert partly.advice is not None
    assert partly.advice.gain == pytest.approx(100 * (4 / 2.7 - 1), abs=2)
    assert busy.advice is None
    assert "all 4 cores are busy" in busy.limit


def test_busy_cores_are_not_mistaken_for_a_slow_store() -> None:
    """Other processes take the cores for most of the time."""
    setting = RecordedSettings("thread", window=2, batch_size=4, cores=2)
    waits = Clock(setting, [Ticks((10,) * 4, collate=1, step=3)]).run(64)
    crowded = [measured(wait, 0.2, 0.75) for wait in waits]
    idle = [measured(wait, 0.02, 0.0) for wait in waits]
    assert costs(crowded, setting).delay == pytest.approx(0.75 / 0.95)
    assert costs(idle, setting).delay == 0
    assert not waits_for_store(costs(crowded, setting), setting)
    assert waits_for_store(costs(idle, setting), setting)
    assert tried(idle, setting, "dataset")
    assert not tried(crowded, setting, "dataset")


# -- lanes and loops -------------------------------------------------------------------


def test_no_thread_is_advised_beside_a_computing_step() -> None:
    """It may hold the GIL; a step that waits does not."""
    ticks = Ticks((1,) * 4, transform=10, collate=1, step=20, uses_cpu=ALL_CPU)
    records = Clock(INLINE, [ticks]).run(64)
    beside, apart = (
        report(records, replace(INLINE, used=used)).advice for used in (15 / 35, 0.97)
    )
    assert beside is not None
    assert beside.argument == "prefetch_factor"
    assert beside.gain == pytest.approx(75, abs=1)
    assert apart is not None
    assert apart.argument == "num_workers"


# -- starts of workers -----------------------------------------------------------------


def starting(seconds: float) -> list[BatchRecord]:
    """Return the records of an epoch whose workers take ``seconds`` to start."""
    records = Clock(PROCESSES, [Ticks((4,) * 4, step=20)]).run(24)
    first, *rest = (delayed(record, seconds) for record in records)
    return [first._replace(asked=records[0].asked), *rest]


@pytest.mark.parametrize(
    ("setting", "is_advised"),
    [
        (replace(PROCESSES, epochs_before=1, length=24), True),
        (replace(PROCESSES, epochs_before=1, length=24, window=0), True),
        (PROCESSES, False),
        (replace(PROCESSES, epochs_before=1, length=2400), False),
        (replace(PROCESSES, epochs_before=1, length=24, is_persistent=True), False),
    ],
    ids=["short epochs", "pace is off", "one epoch", "long epochs", "kept workers"],
)
def test_workers_are_kept_for_short_epochs(
    setting: RecordedSettings, is_advised: bool
) -> None:
    """If that saves 5 % of the observed epochs."""
    records = starting(0.2)
    assert start_seconds(records[1:], setting) == 0
    assert start_seconds(records, replace(setting, worker_kind="thread")) == 0
    verdict = report(records, setting)
    if not is_advised:
        assert (verdict.stage, verdict.advice) == ("nothing", None)
        return
    assert verdict.stage == "start"
    assert "it takes 200 ms of each epoch" in verdict.headline
    assert verdict.advice is not None
    assert verdict.advice.argument == "persistent_workers"
    assert verdict.advice.gain == pytest.approx(100 * 0.2 / (24 * 0.02), rel=0.02)


@pytest.mark.parametrize("cores", [2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_never_more_workers_than_cores_are_advised(cores: int, workers: int) -> None:
    """Even if reads would be faster with more of them."""
    setting = replace(PROCESSES, cores=cores) if workers else INLINE
    setting = replace(setting, cores=cores)
    records = Clock(setting, [Ticks((20,) * 4, collate=1)]).run(64)
    numbers = [
        int(str(change.new)) for change in tried(records, setting, "num_workers")
    ]
    assert max([workers, *numbers]) == cores


@pytest.mark.parametrize("epochs_before", [0, 40])
@pytest.mark.parametrize("length", [64, 6400])
def test_the_first_start_of_workers_counts(length: int, epochs_before: int) -> None:
    """A fork server imports torch first: seconds, once in a program."""
    setting = replace(LOOP, cores=2, length=length, start_method="forkserver")
    setting = replace(setting, epochs_before=epochs_before)
    ticks = Ticks((4,) * 4, transform=30, step=5, uses_cpu=("transform",))
    advice = report(Clock(setting, [ticks]).run(64), setting).advice
    if length == 64 and not epochs_before:
        assert advice is None
        return
    assert advice is not None
    assert (advice.argument, advice.new) == ("num_workers", 2)


@pytest.mark.parametrize(("batches", "is_advised"), [(16, False), (17, True)])
def test_sixteen_batches_get_no_advice(batches: int, *, is_advised: bool) -> None:
    """One more does; otherwise the report says what is missing."""
    records = Clock(INLINE, [Ticks((10,) * 4, step=30)]).run(batches)
    verdict = report(records, INLINE)
    assert (verdict.advice is not None) == is_advised
    if not is_advised:
        assert verdict.stage == "read"
        assert verdict.limit == (
            "No advice yet: 15 batches are too few to measure a speed-up. Call "
            "report() after more than 16 of one epoch."
        )


# -- unreliable estimates --------------------------------------------------------------


def test_no_advice_is_given_if_the_computed_pace_is_off() -> None:
    """The setting is not that of the records; no utilisation is estimated either."""
    single, waiting = replace(PROCESSES, workers=1), Ticks((40,) * 4, step=30)
    for was, said, ticks in (
        (replace(single, workers=4, window=8), single, BUSY),
        (replace(LOOP, window=1), LOOP, waiting),
    ):
        verdict = report(Clock(replace(was, cores=8), [ticks]).run(96), said)
        assert abs(verdict.model_error) > 0.15
        assert (verdict.advice, verdict.head_room) == (None, ())
        assert verdict.limit.startswith(
            "No advice: the seconds per batch computed from"
        )


@pytest.mark.parametrize("step", [7, 9])
def test_a_gain_within_the_error_is_not_advised(step: int) -> None:
    """The setting says 7 samples in flight, not 8: the pace is off by 14 %."""
    records = Clock(LOOP, [Ticks((20,) * 4, step=step)]).run(96)
    verdict = report(records, replace(LOOP, concurrency=7))
    assert 0.1 < abs(verdict.model_error) < 0.15
    if step == 7:  # the gain is 42 %
        assert verdict.advice is not None
        assert verdict.advice.argument == "concurrency"
    else:  # 11 %
        assert verdict.advice is None
