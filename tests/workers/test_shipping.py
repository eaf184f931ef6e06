"""A dataset arrives in workers of the fork server equal, with its surroundings."""

import dataclasses
import functools
import importlib.util
import multiprocessing
import operator
import os
import re
import sys
import threading
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from aioloader import DataLoader
from aioloader.errors import WorkerStartError
from python_process import python
from working import Numbers, first
from working import asked as asked_by

SERVED: dict[str, Any] = {"multiprocessing_context": "forkserver"}


def asked(dataset: Any, question: Any) -> Any:
    """Return the answer of a worker of the fork server about the dataset."""
    return asked_by(dataset, question, **SERVED)


def rich() -> dict[str, Any]:
    """Return data of many kinds, small and big."""
    return {
        "tensor": torch.arange(4096.0).reshape(64, 64),
        "half": torch.ones(20, 70, dtype=torch.bfloat16),
        "array": np.arange(4096).reshape(64, 64),
        "fortran": np.asfortranarray(np.arange(4096).reshape(32, 128)),
        "small": [torch.full((3,), k) for k in range(100)],
        "plain": {"text": "x" * 10_000, "list": [1, 2.5, None, {"a"}], "raw": b"yy"},
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "module": torch.nn.Linear(3, 2),
        "partial": functools.partial(max, 3),
    }


def text_of(data: Any) -> str:
    """Return all data as text, to the last element."""
    data = {**data, "module": dict(data["module"].state_dict())}
    return repr({name: whole(value) for name, value in data.items()})


def whole(value: Any) -> Any:
    """Return tensors and arrays as lists, with their types."""
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [whole(part) for part in value]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        dense = value.to_dense() if isinstance(value, torch.Tensor) else value
        return type(value), value.dtype, dense.tolist()
    return value


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_dataset_arrives_equal(context: Any) -> None:
    """torch, numpy and plain Python objects, to the last element."""
    data = rich()
    assert asked_by(data, text_of, multiprocessing_context=context) == text_of(data)


def test_writes_to_a_dataset_are_not_shared() -> None:
    """Neither with the loader's process nor with other workers."""
    data: Any = {"tensor": torch.zeros(100_000), "array": np.zeros(100_000)}

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            data["tensor"].add_(1)
            data["array"] += 1
            return os.getpid(), int(data["tensor"][-1]), int(data["array"][0])

    loader: Any = DataLoader(Counting(), num_workers=2, collate_fn=first)
    iterator = iter(loader)
    samples = [next(iterator)]
    data["tensor"].fill_(500)
    data["array"].fill(500)
    samples.extend(iterator)
    for process in {pid for pid, *_ in samples}:
        counts = [tuple(counts) for pid, *counts in samples if pid == process]
        assert counts == [(k, k) for k in range(1, len(counts) + 1)]
    assert data["tensor"].unique().tolist() == [500]
    assert set(data["array"]) == {500}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change the surroundings of this process."""
    (tmp_path / "found_by_path.py").write_text("WORD = 'found'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    monkeypatch.setenv("AIOLOADER_TEST_WORD", "set")
    monkeypatch.delenv("HOME", raising=False)
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="known to the parent")
        yield tmp_path
    torch.set_default_dtype(torch.float32)


def has_file(_dataset: Any) -> bool:
    """Return whether a relative path exists here."""
    return Path("kept.txt").exists()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_start_in_a_deleted_directory(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a job whose folder was cleaned up; a relative path does not exist."""
    (tmp_path / "kept.txt").write_text("", encoding="utf-8")
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    question: Any = {"transform": has_file, "multiprocessing_context": method}
    exist = []
    for directory in (tmp_path, tmp_path / "job"):
        os.chdir(directory)
        if directory != tmp_path:
            directory.rmdir()
        exist += next(iter(DataLoader(Numbers(1), num_workers=1, **question))).tolist()
    assert exist == [True, False]


DELETED = """
import os, tempfile
from aioloader import DataLoader
os.chdir(folder := tempfile.mkdtemp())
os.rmdir(folder)

class Dataset:
    async def __getitem__(self, index):
        return index

    def __len__(self):
        return 4

print([batch.tolist() for batch in DataLoader(Dataset(), 2, num_workers=1)])
"""


@pytest.mark.linux
@pytest.mark.slow
def test_the_fork_server_starts_in_a_deleted_directory() -> None:
    """Async datasets need it."""
    run = python("-c", DELETED)
    assert (run.stdout, run.stderr) == ("[[0, 1], [2, 3]]\n", "")


def test_workers_have_the_loaders_surroundings(elsewhere: Path) -> None:
    """Directory, path, arguments, environment, filters, default type."""

    def question(_dataset: Any) -> Any:
        import found_by_path  # type: ignore[import-not-found] # noqa: PLC0415

        try:
            warnings.warn("known to the parent", stacklevel=1)
        except UserWarning:
            raised = True
        environment = os.environ.get("AIOLOADER_TEST_WORD"), os.environ.get("HOME")
        dtype = torch.zeros(1).dtype
        return Path.cwd(), found_by_path.WORD, sys.argv, environment, raised, dtype

    assert asked(None, question) == (
        elsewhere,
        "found",
        ["program", "--flag"],
        ("set", None),
        True,
        torch.float64,
    )


NAMESAKE = """
class Word:
    def __init__(self): self.text = "{word}"
    def read(self): return "{word}", self.text
class Words:
    def __len__(self): return 1
    def __getitem__(self, index): return Word().read()
class AsyncWords(Words):
    async def __getitem__(self, index): return Word().read()
class Stream:
    async def __aiter__(self): yield Word()
"""


@pytest.fixture(params=["rows_of_two", "kit_of_two.rows"])
def namesake(request: Any, tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """Return a module whose name stands for another module on ``sys.path``."""
    name: str = request.param
    namesake = tmp_path.joinpath("path", *name.split(".")).with_suffix(".py")
    namesake.parent.mkdir(parents=True)
    namesake.write_text(NAMESAKE.format(word="other"), encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text(NAMESAKE.format(word="mine"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    list(DataLoader(Numbers(1), num_workers=1, **SERVED))  # before it has a namesake
    monkeypatch.syspath_prepend(tmp_path / "path")
    yield module
    cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_class_is_not_mistaken_for_a_namesake(namesake: Any, method: Any) -> None:
    """Workers use the class of the loader's process, also for samples that it sends."""
    options: Any = {"num_workers": 1, "collate_fn": first}
    options["multiprocessing_context"] = method
    for dataset in (namesake.Words(), namesake.AsyncWords()):
        assert list(DataLoader(dataset, **options)) == [("mine", "mine")]
    read = operator.methodcaller("read")
    loader: Any = DataLoader(namesake.Stream(), transform=read, **options)
    assert list(loader) == [("mine", "mine")]


@pytest.mark.slow
def test_samples_of_a_class_of_the_script_arrive(tmp_path: Path) -> None:
    """From the loader or from a sampler."""
    script = tmp_path / "script.py"
    script.write_text(SAMPLES_OF_A_SCRIPT, encoding="utf-8")
    assert python(script).stdout == "[[3, True]]\n[[4, True]]\n" * 2


SAMPLES_OF_A_SCRIPT = """
from aioloader import DataLoader
class Sample:
    def __init__(self, n): self.n = n
def read(sample): return sample.n, type(sample) is Sample
class Stream:
    async def __aiter__(self): yield Sample(3)
class Read:
    def __len__(self): return 1
    def __getitem__(self, index): return read(index)
for method in "forkserver", "spawn":
    options = dict(num_workers=1, multiprocessing_context=method, batch_size=None)
    print(list(DataLoader(Stream(), transform=read, **options)))
    print(list(DataLoader(Read(), sampler=[Sample(4)], **options)))
"""


@functools.cache
def table() -> dict[str, int]:
    """Return a table that is made once per process."""
    return {"seven": 7}


@functools.singledispatch
def word(_value: Any) -> str:
    return "any"


word.register(int, lambda _value: "int")


class Cached:
    """Computes a value once."""

    @functools.cached_property
    def side(self) -> int:
        return len(table())


def test_functions_with_caches_arrive() -> None:
    """From modules that workers cannot import, such as the script."""

    def question(_dataset: Any) -> Any:
        return table()["seven"], word(1), word(""), Cached().side

    assert asked(None, question) == (7, "int", "any", 1)


def test_workers_use_registered_collate_functions(monkeypatch: Any) -> None:
    """``default_collate`` follows the script's registry."""
    monkeypatch.setitem(default_collate_fn_map, str, lambda words, **_: "|".join(words))
    assert list(DataLoader(["a", "b"], 2, num_workers=1, **SERVED)) == ["a|b"]


class Lost(Numbers):
    """Its pickle refers to a name that other processes lack."""

    def __reduce__(self) -> Any:
        return operator.attrgetter(f"here_{os.getpid()}"), (os,)


def test_what_cannot_be_pickled_is_named() -> None:
    """By path and with a remedy, when the first batch is requested."""
    with pytest.raises(WorkerStartError, match=r"no attribute 'here_.* script imports"):
        list(DataLoader(Lost(), num_workers=1, **SERVED))

    class Opened(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.files = {"index": threading.Lock()}

    with pytest.raises(WorkerStartError, match=r"Opened\.files\['index'\] cannot be"):
        list(DataLoader(Opened(), num_workers=2, **SERVED))
    lock = threading.Lock()
    for name in ("transform", "collate_fn", "worker_init_fn"):
        options: dict[str, Any] = {name: lambda value: lock and value}
        loader: Any = DataLoader(Numbers(), num_workers=2, **options, **SERVED)
        for _ in range(2):
            with pytest.raises(WorkerStartError, match=rf"^{name}\.<lock> cannot be"):
                next(iter(loader))


FRESH = """
import asyncio, contextvars, queue, sys, threading
from aioloader import DataLoader

LOCK, RLOCK, LOCAL = threading.Lock(), threading.RLock(), threading.local()
SAME = LOCK
EVENT, CONDITION, QUEUE = threading.Event(), threading.Condition(), queue.Queue(3)
OVER = threading.Condition(LOCK)
CALLS = contextvars.ContextVar("CALLS", default=[3])
BARE = contextvars.ContextVar("BARE")
EVENT.set()
LOCAL.text = BARE.set("of the loader") and "of the loader"

class Base:
    of_class = threading.Lock()
    def __len__(self): return 1

class Rows(Base):
    def __getitem__(self, index):
        with LOCK, RLOCK, CONDITION, self.of_class:
            CONDITION.notify()
            QUEUE.put(SAME is LOCK and SAME.locked() and OVER._lock is LOCK)
        here = hasattr(LOCAL, "text"), BARE.get(None), EVENT.is_set()
        return QUEUE.get(), CALLS.get(), *here

class AsyncRows(Base):
    async def __getitem__(self, index):
        await asyncio.sleep(0)
        return Rows()[index]

for rows, method in (Rows, "forkserver"), (Rows, "spawn"), (AsyncRows, None):
    options = dict(num_workers=1, multiprocessing_context=method, collate_fn=list)
    print(list(DataLoader(rows(), **options)))
for k in range(3):
    with (LOCK, RLOCK, Base.of_class)[k]:
        try:
            list(DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn"))
        except Exception as error:
            print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_lock_of_the_script_is_fresh_in_workers(tmp_path: Path) -> None:
    """As are events, conditions, queues, locals and context variables."""
    script = tmp_path / "script.py"
    script.write_text(FRESH, encoding="utf-8")
    *lines, lock, rlock, of_class = python(script, check=True).stdout.splitlines()
    assert lines == ["[[(True, [3], False, None, True)]]"] * 3
    for line, name in (lock, "LOCK"), (rlock, "RLOCK"), (of_class, "of_class"):
        assert re.match(rf"WorkerStartError Rows.*\b{name}\b.* is held", line)


class Threaded(Numbers):
    """Starts a thread when it is unpickled, and waits for it to run."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.bell, self.answer = threading.Event(), threading.Event()
        threading.Thread(target=self.live, daemon=True).start()

    def live(self) -> None:
        """Answer the bell."""
        self.bell.wait()
        self.answer.set()

    def __getitem__(self, index: int) -> Any:
        self.bell.set()
        return index if self.answer.wait(10) else -1


@pytest.mark.slow
def test_unpickling_may_start_threads(tmp_path: Path) -> None:
    """Each worker then unpickles for itself, and has the thread."""

    def note(_worker: int) -> None:
        (tmp_path / str(os.getpid())).touch()

    loader: Any = DataLoader(
        Threaded(), 4, num_workers=2, worker_init_fn=note, **SERVED
    )
    for epoch in range(1, 3):
        batches = [batch.tolist() for batch in loader]
        assert len(list(tmp_path.iterdir())) == 2 * epoch
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@dataclasses.dataclass
class Batch:
    """A batch type of a module that workers cannot import."""

    numbers: torch.Tensor


Named = namedtuple("Named", "numbers")  # noqa: PYI024  (as users write it)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Batch, Named])
@pytest.mark.parametrize("n", [4, 40_000])
def test_batch_types_keep_their_identity(kind: Any, n: int) -> None:
    """``isinstance`` holds for delivered batches, small or big."""

    def collate(samples: list[Any]) -> Any:
        return kind(torch.full((n,), samples[0]))

    batches = list(DataLoader(Numbers(3), num_workers=2, collate_fn=collate))
    assert [type(batch) for batch in batches] == [kind] * 3
    assert [int(batch.numbers.sum()) for batch in batches] == [0, n, 2 * n]


CONTEXTS = [
    "fork",
    pytest.param("spawn", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_are_given_by_name_or_as_objects(name: str) -> None:
    """With the same batches."""
    expected = [batch.tolist() for batch in DataLoader(Numbers(), 5, transform=hex2)]
    context = multiprocessing.get_context(name)
    for given in (name, context) if name == "fork" else (context,):
        loader: Any = DataLoader(
            Numbers(),
            5,
            num_workers=2,
            multiprocessing_context=given,
            transform=functools.partial(hex2),
        )
        assert [batch.tolist() for batch in loader] == expected
    if name == "forkserver":
        stop_forkserver()


def hex2(value: int) -> int:
    return value * 16


def stop_forkserver() -> None:
    """Stop the server that multiprocessing would keep until this process ends."""
    from multiprocessing.forkserver import _forkserver  # noqa: PLC0415

    _forkserver._stop()  # type: ignore[attr-defined]
