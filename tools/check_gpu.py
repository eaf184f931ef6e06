"""Check and measure the loader on this machine's GPU: prints a table and JSON.

Run: ``python tools/check_gpu.py`` (five minutes). First the tests that need a device,
then, for batches of 1, 8 and 64 MB: how many gigabytes per second arrive, against bare
copies of pinned memory, which are the limit; and how long a training step waits for its
batch. ``--dry`` runs all of it, in small, on the fake accelerator of the tests. The
exit status is 0 if all went well, 1 if a test failed, 2 if there is no GPU.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SIDE = 128  # side of a picture: 49 kB
STEPS = 4  # copies per step, so that they can be hidden
CORES = len(os.sched_getaffinity(0))
# `device` is a package of the tests, and a script of the benchmarks
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "benchmarks")]

Feed = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        megabytes: Sizes of batches.
        seconds: How long to read from each feed.
        steps: Number of training steps to time.
        tests: Arguments of pytest besides the folder.
    """

    megabytes: tuple[int, ...] = (1, 8, 64)
    seconds: float = 3.0
    steps: int = 60
    tests: tuple[str, ...] = ("-m", "cuda")


DRY = Size((1, 4), 0.2, 4, ("-k", "by_name_alone"))


@dataclass(frozen=True)
class Row:
    """The figures of one feed.

    Attributes:
        feed: Its name.
        megabytes: Size of a batch.
        gb_per_second: Rate of batches that arrive, with no other work.
        of_limit: The same, as a share of bare copies.
        exposed_ms: Extra time of a step, compared with a batch that stays on the
            device.
        step_ms: Time of a step on such a batch.
    """

    feed: str
    megabytes: int
    gb_per_second: float
    of_limit: float
    exposed_ms: float | None = None
    step_ms: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="on a fake accelerator")
    parser.add_argument("--json", type=Path, help="a file for the JSON, too")
    parser.add_argument("--workers", type=int, default=max(2, min(8, CORES - 2)))
    args = parser.parse_args()
    device = found_device(is_dry=args.dry)
    if device is None:
        from aioloader._device.naming import seen  # noqa: PLC0415

        print(
            f"torch {torch.__version__} sees {seen()} here: there is no GPU to check. "
            "--dry runs all of this on the fake accelerator of the tests",
            file=sys.stderr,
        )
        return 2
    size = DRY if args.dry else Size()
    tests = run_tests(size, is_dry=args.dry)
    rows = [
        row
        for megabytes in size.megabytes
        for row in measure(device, megabytes, size, args.workers)
    ]
    machine = {
        "device": name_of(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": CORES,
        "workers": args.workers,
        "dry": args.dry,
    }
    show(machine, tests, rows)
    found = json.dumps(
        {"machine": machine, "tests": tests, "figures": [*map(asdict, rows)]}
    )
    print(found)
    if args.json:
        args.json.write_text(found + "\n")
    return int(tests["status"] != 0)


def found_device(*, is_dry: bool) -> torch.device | None:
    """Return the device to check, with its index; None if there is none."""
    if is_dry:
        from device import fake_accelerator  # noqa: PLC0415

        if missing := fake_accelerator.missing():
            sys.exit(missing)
        fake_accelerator.begin().set_delay(50)
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else torch.device(found.type, 0)


def name_of(device: torch.device) -> str:
    get_name = getattr(torch.get_device_module(device), "get_device_name", str)
    return str(get_name(device))


def run_tests(size: Size, *, is_dry: bool) -> dict[str, Any]:
    """Run the tests that need a device; return the result, and pytest's last line."""
    folder = ROOT / "tests" / "device"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *size.tests]
        + [str(folder / name) for name in ("test_device.py", "test_races.py")]
        * (not is_dry)
        + [str(folder / "test_users.py")],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "AIOLOADER_TEST_DEVICE": "fake" if is_dry else "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout)
    lines = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    return {"status": done.returncode, "summary": lines[-1]}


# -- figures ------------------------------------------------------------------------


def measure(
    device: torch.device, megabytes: int, size: Size, workers: int
) -> Iterator[Row]:
    """Yield the figures of all feeds for one size of batches."""
    from device_feeds import (  # noqa: PLC0415
        aioloader_feed,
        bare_copies,
        picture_case,
        spdl_feed,
        torch_feed,
    )

    case = picture_case(max(1, round(megabytes * 1e6 / (3 * SIDE * SIDE))), SIDE)
    nbytes = sum(view.nbytes for view in case.empty())
    limit = rate(partial(bare_copies, case, device), nbytes, size)
    yield Row("bare copies", megabytes, limit / 1e9, 1.0)
    feeds: dict[str, Feed] = {
        "aioloader": aioloader_feed,
        "torch, pin_memory + non_blocking": torch_feed,
    }
    if find_spec("spdl") is not None and device.type == "cuda":
        feeds["SPDL"] = spdl_feed
    step = make_step(device, STEPS * nbytes / limit)
    resident = [view.random_(0, 7).to(device) for view in case.empty()]
    alone = step_seconds(lambda: itertools.repeat(resident), step, size)
    for name, feed in feeds.items():
        make = partial(feed, case, device, num_workers=workers)
        arrived = rate(make, nbytes, size)
        exposed = step_seconds(make, step, size) - alone
        share = arrived / limit
        yield Row(name, megabytes, arrived / 1e9, share, exposed * 1e3, alone * 1e3)


def rate(make: Callable[[], Iterable[Any]], nbytes: int, size: Size) -> float:
    """Return the bytes per second that a feed delivers."""
    with closing(iterator(make())) as batches:
        for _ in range(8):
            next(batches)
        torch.accelerator.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + size.seconds or not count:
            next(batches)
            count += 1
            if not count % 4:  # at most that far ahead
                torch.accelerator.synchronize()
        torch.accelerator.synchronize()
        return count * nbytes / (time.perf_counter() - began)


def step_seconds(
    make: Callable[[], Iterable[Any]], step: Callable[[], None], size: Size
) -> float:
    """Return the seconds of a step on the batches of a feed."""
    with closing(iterator(make())) as batches:
        for _ in range(5):
            next(batches)
            step()
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(size.steps):
            batch = next(batches)
            step()
            # Wait before the next step, as if the loss were read.
            batch[1][:1].cpu()
        torch.accelerator.synchronize()
        return (time.perf_counter() - began) / size.steps


def iterator(feed: Iterable[Any]) -> Any:
    """Return a generator over a feed, which ends the feed when closed."""
    batches = iter(feed)
    try:
        yield from batches
    finally:
        for one in (batches, feed):
            getattr(one, "close", int)()


def make_step(device: torch.device, seconds: float) -> Callable[[], None]:
    """Return a function that occupies the device's current stream for ``seconds``."""
    if device.type == "fake":
        module: Any = torch.get_device_module(device)
        return partial(module._sleep, round(seconds * 2e9))  # noqa: SLF001
    one = torch.rand(2048, 2048, device=device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, one)

    multiply(20)
    torch.accelerator.synchronize()
    began = time.perf_counter()
    multiply(200)
    torch.accelerator.synchronize()
    each = (time.perf_counter() - began) / 200
    return partial(multiply, max(1, round(seconds / each)))


def show(machine: dict[str, Any], tests: dict[str, Any], rows: list[Row]) -> None:
    """Print the table."""
    kind = " (a fake one: its figures mean nothing)" if machine["dry"] else ""
    print(f"{machine['device']}{kind}, torch {machine['torch']}")
    print(f"tests: {tests['summary']}")
    print(f"{'':34}{'MB':>5}{'GB/s':>9}{'of limit':>10}{'waits':>11}{'of step':>12}")
    for row in rows:
        line = f"{row.feed:34}{row.megabytes:5}{row.gb_per_second:9.2f}"
        line += f"{row.of_limit:10.0%}"
        if row.exposed_ms is not None:
            line += f"{row.exposed_ms:8.3f} ms{row.step_ms:9.2f} ms"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
