"""Steps that split samples or tokenize texts: unbatch, flat_map and tokenize."""

import asyncio
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.implementations.base_tokenizer import BaseTokenizer

from aioloader import DataLoader
from aioloader.datasets import TextDataset, from_arrow, from_iterable
from aioloader.errors import ShardChangedError, StateMismatchError
from beside import beside
from datasets import shards
from datasets.shards import read


def shown(sample: Any) -> Any:
    return str(sample.error) if hasattr(sample, "error") else sample


pulled = partial(shards.pulled, show=shown)


def plain(samples: Sequence[Any]) -> list[Any]:
    return [x.tolist() if hasattr(x, "tolist") else x for x in samples]


async def check_resumes(
    make: Callable[[], Any], sizes: Sequence[int] = (64,), step: int = 1
) -> list[Any]:
    """Check that streams resume after every ``step``-th sample; return all samples."""
    whole = plain((await pulled(make(), sizes))[0])
    for count in range(0, len(whole) + 1, step):
        head, state = await pulled(make(), sizes, count)
        rest, _ = await pulled(make(), sizes, state=state)
        assert plain(head + rest) == whole, count
    return whole


# -- unbatch --------------------------------------------------------------------------

KINDS = ("list", "tuple", "array", "generator", "broken", "failed", "text", "number")


def sample_of(kind: str, items: range) -> Any:
    def generator() -> Iterator[int]:
        yield from items
        if kind == "broken":
            raise ValueError(f"broken after {items}")

    if kind == "failed":
        raise ValueError(f"failed before {items}")
    makes: dict[str, Any] = {"list": list, "tuple": tuple, "array": np.array}
    if kind in makes:
        return makes[kind](items)
    return {"text": "text", "number": 5}.get(kind) or generator()


def expected(kind: str, items: range) -> list[Any]:
    """Return the items of a sample, and how it ends."""
    refused = (
        "unbatch() cannot split a sample of type {!r} into samples; it needs lists, "
        "arrays or other iterables of samples"
    )
    instead = {
        "text": [refused.format("str")],
        "number": [refused.format("int")],
        "failed": [f"failed before {items}"],
        "broken": [*items, f"broken after {items}"],
    }
    return instead.get(kind, [*items])


SAMPLES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=12)


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.one_loop
@given(SAMPLES, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans())
async def test_flat_map_keeps_the_order_and_resumes_anywhere(
    samples: list[tuple[str, int]], sizes: list[int], is_async: bool
) -> None:
    ends = itertools.accumulate(length for _, length in samples)
    each = [
        (kind, range(end - length, end))
        for (kind, length), end in zip(samples, ends, strict=True)
    ]

    async def awaited(sample: Any) -> Any:
        for _ in range(len(sample[1]) % 3):
            await asyncio.sleep(0)
        return sample_of(*sample)

    def make() -> Any:
        function: Any = awaited if is_async else lambda sample: sample_of(*sample)
        return from_iterable(each).flat_map(function, concurrency=3)

    whole = await check_resumes(make, sizes)
    assert whole == [item for sample in each for item in expected(*sample)]


async def test_resuming_makes_only_the_open_sample_again() -> None:
    made: list[int] = []

    def split(number: int) -> list[int]:
        made.append(number)
        return [number] * 10

    stream = from_iterable(range(20)).flat_map(split)
    head, state = await pulled(stream, (1,), 25)
    made.clear()
    stream.load_state_dict(state)
    rest, _ = await pulled(stream)
    assert head + rest == [number for number in range(20) for _ in range(10)]
    assert made == [*range(2, 20)]
    assert state["streams"]["0"]["state"] == {
        "up": {"up": {"read": 2}}, "taken": 5, "failed": []
    }  # fmt: skip


async def test_generators_are_read_as_needed_off_the_loop() -> None:
    read_to, threads, closed = 0, set[threading.Thread](), False

    def forever(_number: int) -> Iterator[int]:
        nonlocal read_to, closed
        try:
            for read_to in itertools.count(1):
                threads.add(threading.current_thread())
                yield read_to
        finally:
            closed = True

    items, _ = await pulled(from_iterable([0]).flat_map(forever), (3, 5), 16)
    assert items == [*range(1, 17)]
    assert read_to == 16
    assert closed
    assert threading.current_thread() not in threads


async def test_a_sample_that_fails_on_resume_is_one_failure() -> None:
    is_broken = False

    def split(number: int) -> Iterator[int]:
        yield from [number] * 3
        if is_broken and number == 1:
            raise OSError("connection lost")
        yield from [number] * 3

    def split_list(number: int) -> list[int]:
        return [*split(number)]

    for function in (split, split_list):
        is_broken = False
        stream = from_iterable(range(3)).flat_map(function)
        _, state = await pulled(stream, (1,), 10)  # four items of number 1
        stream.load_state_dict(state)
        is_broken = True
        items, _ = await pulled(stream)
        assert items == ["connection lost", *[2] * 6]


async def test_items_missing_on_resume_are_an_error(tmp_path: Path) -> None:
    lists = [[1, 2, 3]]
    (tmp_path / "a.txt").write_text("abc")
    lines = TextDataset(f"{tmp_path}/a.txt").flat_map(list)
    cases: list[tuple[Any, Callable[[], Any], str]] = [
        (lines, (tmp_path / "a.txt").unlink, "now it cannot: .*no such file"),
        (from_iterable(lambda: iter(lists)).unbatch(), lists.clear, "there are 0 now"),
    ]
    for stream, lose, words in cases:
        _, state = await pulled(stream, (1,), 2)
        lose()
        stream.load_state_dict(state)
        with pytest.raises(ShardChangedError, match=words):
            await read(stream)


TABLE = pa.table({"n": range(50), "s": [f"t {n}" for n in range(50)]})


def no_rows(_block: Any) -> Any:
    raise AssertionError("rows were made")


async def test_unbatched_rows_stay_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        return from_arrow(TABLE).batch(7).unbatch()

    whole = await check_resumes(make, (5, 11))
    assert [row["n"] for row in whole] == [*range(50)]
    async with aiter(make()) as iterator:
        columns = type(await iterator.pull(5))
    monkeypatch.setattr(columns, "__iter__", no_rows)
    loader: Any = DataLoader(make(), 8)
    batches: Any = await beside(partial(list, loader))
    assert torch.equal(torch.cat([batch["n"] for batch in batches]), torch.arange(50))


async def test_unbatching_rows_is_an_error() -> None:
    stream = from_arrow(TABLE[:1]).unbatch()
    with pytest.raises(TypeError, match="cannot split a sample of type 'dict'") as info:
        await read(stream)
    assert info.value.__notes__ == ["aioloader: in 'unbatch' of the stream"]
    assert repr(stream).endswith(".unbatch(...)")


# -- tokenize -------------------------------------------------------------------------

WORDS = {"[PAD]": 0, "[BOS]": 1, "[UNK]": 2, "red": 3, "fox": 4, "sees": 5, "dogs": 6}
TEXTS = [" ".join([*WORDS][3 + n % 4 :][: n % 5]) for n in range(40)]


def tokenizer(words: dict[str, int] = WORDS) -> Any:
    made: Any = Tokenizer(models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    made.add_special_tokens(["[BOS]"])
    return made


def codes(texts: list[str]) -> list[list[int]]:
    return [[*map(ord, text)] for text in texts]


IDS = [[1, *(WORDS[word] for word in text.split())] for text in TEXTS]


async def test_a_tokenizer_gives_the_ids_of_texts() -> None:
    def make() -> Any:
        return from_iterable(TEXTS).tokenize(tokenizer(), batch=7)

    assert await check_resumes(make, (5, 1)) == IDS
    whole, _ = await read(make())
    assert {(ids.dtype, ids.ndim) for ids in whole} == {(np.dtype(np.int64), 1)}
    assert make().epoch_length(9).tokenize(codes).total() == 9


FUNCTIONS: dict[str, Callable[[list[str]], Any]] = {
    "lists": codes,
    "arrays": lambda texts: tuple(np.array(ids, np.uint8) for ids in codes(texts)),
    "tensors": lambda texts: [torch.tensor(t, dtype=torch.int) for t in codes(texts)],
    "a dict": lambda texts: {"input_ids": codes(texts), "attention_mask": ...},
}


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_a_function_may_tokenize(function: str) -> None:
    arrays, _ = await read(from_iterable(TEXTS).tokenize(FUNCTIONS[function]))
    assert plain(arrays) == codes(TEXTS)
    assert all(isinstance(ids, np.ndarray) for ids in arrays)
    assert all(ids.dtype.kind in "iu" for ids in arrays)


NO_COLUMN = (
    "\"tokenize() found no column 'text' in a sample of {}; pass the column of the "
    'texts"'
)
NOT_ONE_EACH = (
    "the tokenizer returned 0 arrays of tokens for 1 texts; return one for each"
)
NO_TEXT = (
    "tokenize() needs texts, got one of type {!r}; decode bytes, and name the column "
    "of the texts in rows or dicts"
)


def picky(texts: list[str]) -> list[Any]:
    """Refuse one text; return floats, a table and too little for others."""
    if "bad" in texts:
        raise ValueError("no bad texts")
    special: dict[str, Any] = {"floats": [0.5], "table": [[1]], "words": ["a"]}
    return [special.get(text, [*map(ord, text)]) for text in texts if text != "none"]


async def test_a_bad_text_fails_alone() -> None:
    samples = ["a", b"b", "bad", None, "floats", {"text": "c"}, "table", "none", "d"]
    stream = from_iterable(samples).tokenize(picky)
    block: Any
    async with aiter(stream) as iterator:
        block = await iterator.pull(64)
    assert [block[i].tolist() for i in (0, 8)] == [[97], [100]]
    errors = [(type(bad.error), str(bad.error)) for bad in block[1:-1]]
    tokens = "the tokens of a text must be integers in one dimension, got"
    assert errors == [
        (TypeError, NO_TEXT.format("bytes")),
        (ValueError, "no bad texts"),
        (TypeError, NO_TEXT.format("NoneType")),
        (TypeError, f"{tokens} float64 of shape (1,)"),
        (TypeError, NO_TEXT.format("dict")),
        (TypeError, f"{tokens} int64 of shape (1, 1)"),
        (ValueError, NOT_ONE_EACH),
    ]
    notes = {bad.error.__notes__[0] for bad in block[1:-1]}
    assert notes == {"aioloader: in 'tokenize' of the stream"}


async def test_a_missing_text_column_is_an_error() -> None:
    sources = [{"text": "a"}, {"body": "b"}, "c", {"text": None}]
    samples, _ = await pulled(from_iterable(sources).tokenize(codes, "text"))
    assert samples[0].tolist() == [97]
    assert samples[1:] == [
        NO_COLUMN.format(["body"]),
        "tokenize() needs samples with a column 'text', got one of type 'str'",
        NO_TEXT.format("NoneType"),
    ]
    samples, _ = await pulled(from_arrow(TABLE[:2]).tokenize(codes, "text"))
    assert samples == [NO_COLUMN.format(["n", "s"])] * 2


async def test_a_text_refused_by_the_tokenizer_fails_alone() -> None:
    texts = ["red fox", "\udc80", "dogs"]
    samples, _ = await pulled(from_iterable(texts).tokenize(tokenizer()))
    assert [samples[0].tolist(), samples[2].tolist()] == [[1, 3, 4], [1, 6]]
    assert isinstance(samples[1], str)


async def test_later_changes_to_a_tokenizer_have_no_effect() -> None:
    made = tokenizer()
    made.enable_padding(pad_id=0, length=9)
    made.enable_truncation(3)
    stream = from_iterable(TEXTS).tokenize(made)
    made.no_truncation()
    made.add_tokens(["foxes"])
    for copy in (stream, pickle.loads(pickle.dumps(stream))):
        assert plain((await read(copy))[0]) == [ids[:3] for ids in IDS]


def described(made: Any) -> str:
    stream = from_iterable(TEXTS).tokenize(made)
    text: str = stream.describe()["tokenizer"]
    return text


async def test_a_tokenizers_implementation_is_unwrapped() -> None:
    """It truncates as set, like the tokenizer that it wraps."""
    made = BaseTokenizer(tokenizer())
    made.enable_truncation(3)
    assert described(made) == described(made._tokenizer) != described(tokenizer())
    ids, _ = await read(from_iterable(TEXTS).tokenize(made))
    assert plain(ids) == [ids[:3] for ids in IDS]


async def test_a_state_of_another_tokenizer_is_refused() -> None:
    def split(made: Any) -> Any:
        made.encode_special_tokens = True
        return made

    def short(made: Any) -> Any:
        made.enable_truncation(4)
        return made

    def padded(made: Any) -> Any:
        made.enable_padding()
        return made

    same = described(tokenizer())
    assert same == described(padded(tokenizer()))
    assert same.startswith("7 tokens, ")
    changed = [split(tokenizer()), short(tokenizer()), tokenizer({**WORDS, "cat": 7})]
    swapped = tokenizer({**WORDS, "red": 4, "fox": 3})
    assert len({same, *map(described, [*changed, swapped])}) == 5
    _, state = await read(from_iterable(TEXTS).tokenize(tokenizer()), 3)
    for function in (swapped, codes):
        stream = from_iterable(TEXTS).tokenize(function)
        with pytest.raises(StateMismatchError, match="tokenizer of tokenize was '7 "):
            stream.load_state_dict(state)
    stream = from_iterable(TEXTS).tokenize(tokenizer(), "text")
    with pytest.raises(StateMismatchError, match="column of tokenize was None"):
        stream.load_state_dict(state)
