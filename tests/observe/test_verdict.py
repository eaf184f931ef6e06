"""The verdict on planted bottlenecks, and its gain against a loader that is changed."""

from dataclasses import dataclass, replace

import pytest

from aioloader._observe.records import LoopLag, Record, Setting
from aioloader._observe.stats import LoaderStats
from aioloader._observe.verdict import Advice, Report, report
from observe.clock import TICK, Clock, Ticks, advised, seconds_per_batch

PROCESSES = Setting(
    "workers", 2, "process", reads_in_workers=True, window=4, batch_size=4, cores=8
)
THREADS = replace(PROCESSES, worker_kind="thread", workers=4, window=8)
LOOP = Setting("loop", concurrency=8, window=12, batch_size=4, cores=8)
ALL_CPU = ("read", "transform", "collate")


@dataclass(frozen=True)
class Plant:
    """A loader with one bottleneck.

    Attributes:
        name: What it is.
        setting: The loader.
        batches: What batches take.
        stage: Which stage is to blame.
        advice: Argument and new value of the advice.
        slow: How many times longer the first worker takes.
        shards: Whether reads take a tenth in what is advised.
    """

    name: str
    setting: Setting
    batches: tuple[Ticks, ...]
    stage: str
    advice: tuple[str, object]
    slow: int = 1
    shards: bool = False

    def records(self) -> list[Record]:
        return Clock(self.setting, self.batches, self.slow).run(320)


PLANTS = [
    Plant(
        "a store of long latency",
        LOOP,
        (Ticks((20,) * 4, collate=1, step=5),),
        "read",
        ("concurrency", 16),
    ),
    Plant(
        "slow plain reads",
        Setting("thread", window=2, batch_size=4, cores=2),
        (Ticks((10,) * 4, collate=1, step=3),),
        "read",
        ("dataset", "async __getitem__, concurrency=64"),
    ),
    Plant(
        "a transform that waits",
        replace(
            LOOP, concurrency=4, window=16, reads_async=False, transforms_async=True
        ),
        (Ticks((0,) * 4, transform=20, collate=1, step=6),),
        "transform",
        ("concurrency", 16),
    ),
    Plant(
        "reads that a few workers hide",
        Setting("thread", window=2, batch_size=4, cores=4),
        (Ticks((5,) * 4, collate=1, step=15),),
        "read",
        ("num_workers", 2),
    ),
    Plant(
        "a slow transform, inline",
        Setting("inline", batch_size=4, cores=8),
        (Ticks((1,) * 4, transform=30, collate=2, step=12, uses_cpu=ALL_CPU),),
        "transform",
        ("num_workers", 4),
    ),
    Plant(
        "a slow collate",
        LOOP,
        (Ticks((4,) * 4, collate=30, step=14, uses_cpu=("collate",)),),
        "collate",
        ("num_workers", 4),
    ),
    Plant(
        "too few workers",
        PROCESSES,
        (Ticks((2,) * 4, transform=30, collate=2, step=10, uses_cpu=ALL_CPU),),
        "transform",
        ("num_workers", 4),
    ),
    Plant(
        "threads that share the interpreter's lock",
        THREADS,
        (Ticks((1,) * 4, transform=30, collate=2, step=5, uses_cpu=ALL_CPU),),
        "transform",
        ("workers", "process"),
    ),
    Plant(
        "an executor's threads, which share it too",
        replace(THREADS, worker_kind="ThreadPoolExecutor"),
        (Ticks((1,) * 4, transform=30, collate=2, step=5, uses_cpu=ALL_CPU),),
        "transform",
        ("workers", "process"),
    ),
    Plant(
        "a tiny prefetch",
        replace(LOOP, window=1, concurrency=64),
        (Ticks((20,) * 4, collate=1, step=8),),
        "read",
        ("prefetch_factor", 4),
    ),
    Plant(
        "a step that an inline loader delays",
        Setting("inline", batch_size=4, cores=8),
        (Ticks((1,) * 4, collate=1, step=20),),
        "consumer",
        ("prefetch_factor", 2),
    ),
    Plant(
        "one slow worker",
        replace(PROCESSES, workers=4, window=8, cores=4),
        (Ticks((1,) * 4, transform=8, step=6, uses_cpu=ALL_CPU),),
        "transform",
        ("prefetch_factor", 8),
        slow=10,
    ),
    Plant(
        "one worker that is far too slow",
        replace(PROCESSES, workers=4, window=8, cores=4),
        (Ticks((1,) * 4, transform=8, step=6, uses_cpu=ALL_CPU),),
        "transform",
        ("in_order", False),
        slow=60,
    ),
    Plant(
        "many small files",
        replace(LOOP, concurrency=1024, batch_size=32, window=40),
        (Ticks(tuple(150 + 37 * at % 100 for at in range(32)), collate=1, step=2),),
        "read",
        ("dataset", "shards"),
        shards=True,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bottleneck(plant: Plant) -> None:
    """Stage and advice are right, and the gain is within 5 points of the truth."""
    records, setting = plant.records(), plant.setting
    found = report(records, setting)
    assert found.stage == plant.stage
    assert found.wait_share > 0.02
    assert abs(found.model_error) < 0.1
    assert found.advice is not None
    assert (found.advice.argument, found.advice.new) == plant.advice

    changed = advised(records, setting)
    ticks = plant.batches
    if plant.shards:
        ticks = tuple(
            one._replace(reads=tuple(read // 10 for read in one.reads)) for one in ticks
        )
    before = seconds_per_batch(records)
    after = seconds_per_batch(Clock(changed, ticks, plant.slow).run(320))
    truth = 100 * (before / after - 1)
    assert truth > 5
    assert found.advice.gain + 100 == pytest.approx(truth + 100, rel=0.05)


def test_training_sets_the_pace() -> None:
    records = Clock(PROCESSES, [Ticks((1,) * 4, collate=1, step=20)]).run(64)
    found = report(records, PROCESSES)
    assert (found.stage, found.advice) == ("nothing", None)
    assert found.limit == "No argument would make training faster."
    used = [room.utilisation for room in found.head_room]
    assert used == pytest.approx([1, 1, 1], abs=0.03)


def test_a_slow_start_holds_nothing_back() -> None:
    """The first batches of each worker are late, and none after them."""
    records = Clock(PROCESSES, [Ticks((1,) * 4, collate=1, step=20)]).run(64)
    late = 0.0
    for at, one in enumerate(records):
        came = one._replace(asked=one.asked + late)
        late += 0.1 if at < 4 else 0.0
        made = tuple(time + late for time in one.made[:5]) + one.made[5:]
        records[at] = came._replace(
            taken=one.taken + late,
            made=made,  # type: ignore[arg-type]
        )
    found = report(records, PROCESSES)
    assert (found.stage, found.advice) == ("nothing", None)
    assert found.wait_share < 0.02


def test_head_room_ends_where_the_loader_does() -> None:
    """8 ms a batch from two workers: a step of 20 ms may get 2.5 times as fast."""
    records = Clock(PROCESSES, [Ticks((4,) * 4, step=20)]).run(64)
    found = report(records, PROCESSES)
    assert found.stage == "nothing"
    rooms = dict(found.head_room)
    assert rooms == pytest.approx({1: 1, 2: 1, 4: 5 / 8}, abs=0.03)


def test_a_slow_copy_has_no_remedy_here() -> None:
    setting = Setting("thread", window=6, on_device=2, cores=8)
    found = report(
        Clock(setting, [Ticks(collate=1, transport=20, step=5)]).run(64), setting
    )
    assert (found.stage, found.advice) == ("device", None)
    assert found.headline.startswith("The copy to the device is the bottleneck: ")
    assert "link to the device" in found.limit
    assert found.wait_share == pytest.approx(0.75, abs=0.03)


def test_batches_that_stay_on_the_host() -> None:
    """There is no copy and no link."""
    setting = Setting("thread", window=6, on_device=2, stays_on_host=True, cores=8)
    clock = Clock(setting, [Ticks(collate=1, transport=20, step=5)])
    found = report(clock.run(64), setting, copies=clock.copies)
    assert (found.stage, found.advice) == ("device", None)
    assert found.headline.startswith(
        "Page-locking batches, or Device.transform, is the bottleneck: "
    )
    assert found.limit == (
        "No argument would bring 5% or more steps per second: this stage must do less "
        "work."
    )


def test_a_slow_copy_of_known_size() -> None:
    """Half the bytes take half the time, as a loader that has them shows."""
    setting = Setting("thread", window=6, on_device=2, cores=8)
    clock = Clock(setting, [Ticks(collate=1, transport=20, step=5)])
    found = report(clock.run(64), setting, copies=clock.copies)
    assert found.stage == "device"
    assert abs(found.model_error) < 0.1
    advice = found.advice
    assert advice is not None
    assert advice.argument == "the size of batches"
    assert (advice.old, advice.new) == ("1.05 MB", "0.524 MB")
    assert "copied at 0.0524 GB/s" in advice.why
    halved = Clock(setting, [Ticks(collate=1, transport=10, step=5)]).run(64)
    truth = seconds_per_batch(clock.records) / seconds_per_batch(halved)
    assert advice.gain == pytest.approx(100 * (truth - 1), abs=5)


def test_copies_that_vary_are_bridged() -> None:
    """More of them ahead, and the step waits for none."""
    setting = Setting("thread", window=12, on_device=1, cores=8)
    ticks = [Ticks(collate=1, transport=40 if at % 4 == 0 else 1, step=12)
             for at in range(8)]  # fmt: skip
    clock = Clock(setting, ticks)
    found = report(clock.run(64), setting, copies=clock.copies)
    assert found.stage == "device"
    assert found.advice is not None
    assert found.advice.argument == "Device.ahead"


def test_busy_cores_have_no_remedy_here() -> None:
    setting = replace(PROCESSES, cores=2)
    ticks = Ticks((1,) * 4, transform=30, collate=2, step=5, uses_cpu=ALL_CPU)
    found = report(Clock(setting, [ticks]).run(64), setting)
    assert (found.stage, found.advice) == ("transform", None)
    assert "all 2 cores are busy" in found.limit


def test_more_workers_than_cores_gain_nothing() -> None:
    setting = replace(PROCESSES, workers=8, window=16, cores=2)
    ticks = Ticks((1,) * 4, transform=30, collate=2, step=5, uses_cpu=ALL_CPU)
    found = report(Clock(setting, [ticks]).run(96), setting)
    assert found.advice is None
    assert abs(found.model_error) < 0.05


def told(records: list[Record], lag: LoopLag, setting: Setting = LOOP) -> Report:
    stats = LoaderStats(0, len(records), 0.0, 0, failures=0, loop_lag=lag)
    return report(records, setting, stats)


def test_a_hogged_loop_outranks_what_it_slows_down() -> None:
    records = Clock(LOOP, [Ticks((20,) * 4, collate=1, step=5)]).run(64)
    lag = LoopLag(0.05, 0.4, "parse_headers")
    found = told(records, lag)
    assert found.stage == "loop"
    assert found.advice is not None
    assert (found.advice.argument, found.advice.new) == (
        "parse_headers",
        "asyncio.to_thread",
    )
    assert found.advice.gain == pytest.approx(100 / 0.6 - 100)
    assert "parse_headers, which blocks the event loop: " in found.headline
    # A loop that is held a little is no verdict, nor one without a name; nor is it if
    # nobody waits.
    assert told(records, replace(lag, share=0.01)).stage == "read"
    assert told(records, replace(lag, culprit="")).stage == "read"
    idle = Clock(LOOP, [Ticks((1,) * 4, step=30)]).run(64)
    assert told(idle, lag).stage == "nothing"


def test_a_hogged_loop_of_the_caller() -> None:
    """The loader may read on a loop of its own instead."""
    records = Clock(LOOP, [Ticks((20,) * 4, collate=1, step=5)]).run(64)
    found = told(records, LoopLag(0.05, 0.4, "train", is_callers=True))
    assert found.stage == "loop"
    assert found.advice is not None
    assert (found.advice.argument, found.advice.new) == ("loop", "'thread'")
    assert "train" in str(found.advice)


def test_a_loop_that_computes() -> None:
    """A thread would not free it."""
    records = Clock(LOOP, [Ticks((20,) * 4, collate=1, step=5)]).run(64)
    found = told(records, LoopLag(0.05, 0.4, "parse", computes=True))
    assert found.advice is not None
    assert found.advice.new != "asyncio.to_thread"


def test_more_reads_do_not_help_a_busy_loop() -> None:
    records = Clock(LOOP, [Ticks((20,) * 4, collate=1, step=5)]).run(64)
    idle = told(records, LoopLag(0.0, 0.0, "", busy=0.1))
    assert idle.advice is not None
    assert idle.advice.argument == "concurrency"
    busy = told(records, LoopLag(0.0, 0.0, "", busy=0.97))
    assert busy.advice is None or busy.advice.argument != "concurrency"


def test_the_cheaper_change_is_preferred() -> None:
    """A thread beside the step hides as much as processes would."""
    setting = Setting("inline", cores=8)
    records = Clock(setting, [Ticks((10,), collate=2, step=12)]).run(64)
    found = report(records, setting)
    assert found.advice is not None
    assert (found.advice.argument, found.advice.new) == ("prefetch_factor", 2)
    assert found.advice.gain == pytest.approx(100, abs=1)


@pytest.mark.parametrize("batches", [0, 1])
def test_too_little_to_tell(batches: int) -> None:
    found = report(Clock(LOOP, [Ticks(step=1)]).run(1)[:batches], LOOP)
    assert found.stage == "unknown"
    assert found.headline == f"Too few batches to name the bottleneck: {batches}."
    assert found.confidence == f"a guess, measured over only {batches} batches"


def test_batches_that_take_no_time() -> None:
    at = 5.0
    made = (at,) * 5 + (0.0,) * 3
    records = [Record(number, at, at, 0, 1, made) for number in range(20)]
    assert report(records, Setting("inline")).stage == "nothing"


def test_a_report_for_people() -> None:
    setting = Setting("thread", window=2, batch_size=4, cores=4)
    stats = LoaderStats(0, 64, 0.1, 2, failures=0, worker_deaths=2, worker_restarts=2)
    records = Clock(setting, [Ticks((5,) * 4, collate=1, step=15)]).run(64)
    assert str(report(records, setting, stats)) == (
        "Your dataset's reads are the bottleneck: training waits for batches 29% of "
        "the time.\n"
        "Change num_workers from 0 to 2, for about 39% more steps per second: more "
        "batches are made at the same time.\n"
        "Accelerator utilisation: 71% now, 36% with steps 2x as fast, 18% with steps "
        "4x as fast.\n"
        "2 worker processes died.\n"
        "2 worker processes were started again.\n"
        "Measured over the latest 63 batches."
    )


def test_confidence_in_words() -> None:
    guessed = Report("", "read", batches=9).confidence
    assert guessed == "a guess, measured over only 9 batches"
    doubtful = Report("", "read", batches=90, model_error=-0.25)
    assert doubtful.confidence == (
        "measured over the latest 90 batches; doubtful: the computed seconds per batch "
        "are off by -25%"
    )
    advice = Advice("concurrency", 8, 16, 99.6, "samples wait")
    assert str(Report("It waits.", "read", advice, batches=90)) == (
        "It waits.\n"
        "Change concurrency from 8 to 16, for about 100% more steps per second: "
        "samples wait.\n"
        "Measured over the latest 90 batches."
    )
    assert TICK == 1e-3


@pytest.mark.parametrize("cost", [2e-6, 2e-5])
def test_batches_that_cost_nothing_stay_where_they_are(cost: float) -> None:
    """To hand one over costs more than to make it."""
    records, now = [], 0.0
    for number in range(64):
        read, end = now + cost, now + 2 * cost
        cpu = 0.0 if number % 16 else 2 * cost
        made = now, read, read, read, end, 0.0, cpu, 0.0
        records.append(Record(number, now, now + 2 * cost, 0, 4, made))
        now += 2.2 * cost
    assert report(records, Setting("inline", batch_size=4, cores=8)).advice is None
