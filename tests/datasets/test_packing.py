"""Documents packed into samples of one length: their arrays, and exact positions."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioloader import DataLoader, varlen_collate
from aioloader.datasets import from_iterable, mix
from aioloader.errors import ShardChangedError
from datasets import shards
from datasets.shards import read

IGNORED, PAD, BOS, EOS = -100, 7_000, 7_001, 7_002


# -- documents ------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A document of ``size`` tokens, all different from those of other documents.

    Attributes:
        number: Its tokens are ``100 * number`` and those after it.
        size: How many.
        form: How they are given: a kind of array, a dict with a mask, or a failure.
    """

    number: int
    size: int
    form: str

    @property
    def tokens(self) -> list[int]:
        return [100 * self.number + place for place in range(self.size)]

    @property
    def mask(self) -> list[bool]:
        if self.form != "masked":
            return [True] * self.size
        return [(self.number + place) % 3 > 0 for place in range(self.size)]


def given_as(text: Text) -> Any:
    if text.form == "fails":
        raise ValueError(f"no {text.number}")
    match text.form:
        case "list":
            return text.tokens
        case "tensor":
            return torch.tensor(text.tokens, dtype=torch.int32)
        case "masked":
            return {"input_ids": text.tokens, "loss_mask": np.array(text.mask, bool)}
        case "dict":
            return {"input_ids": np.array(text.tokens, np.uint16), "name": "x"}
        case "text":
            return f"no {text.number}"
    kinds: list[Any] = [np.int64, np.int32, np.uint64, ">i4"]
    return np.array(text.tokens, kinds[text.number % len(kinds)])


FORMS = ["array", "array", "list", "tensor", "dict", "masked", "fails", "text"]
SIZES = st.one_of(st.integers(0, 5), st.integers(0, 40))


@st.composite
def texts(draw: st.DrawFn) -> list[Text]:
    drawn = draw(st.lists(st.tuples(SIZES, st.sampled_from(FORMS)), max_size=30))
    return [Text(number, *fields) for number, fields in enumerate(drawn, 1)]


@st.composite
def options(draw: st.DrawFn, strategy: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "length": draw(st.integers(1, 12)),
        "strategy": strategy,
        "bos": draw(st.sampled_from([None, BOS])),
        "eos": draw(st.sampled_from([None, EOS])),
        "shift": draw(st.booleans()),
        "pad": PAD,
    }
    if strategy == "concat":
        return {**drawn, "last": draw(st.sampled_from(["drop", "pad"]))}
    drawn["overlong"] = draw(st.sampled_from(["split", "truncate", "drop"]))
    return drawn | {"window": draw(st.integers(1, 12)), "seed": draw(st.integers(0, 3))}


STRATEGIES: list[Any] = ["concat", "best_fit"]
EITHER = st.sampled_from(STRATEGIES).flatmap(options)


# -- reading --------------------------------------------------------------------------


def plain(sample: Any) -> Any:
    """Return a sample, or a failure, as values that can be compared."""
    if hasattr(sample, "error"):
        assert "in 'pack' of the stream" in "".join(sample.error.__notes__) or (
            "in 'map' of the stream" in "".join(sample.error.__notes__)
        )
        return repr(sample.error)
    for array in sample.values():
        assert array.dtype == np.int64
    return {name: array.tolist() for name, array in sample.items()}


pulled = partial(shards.pulled, show=plain)


def documents(texts: list[Text]) -> Any:
    return from_iterable(texts).map(given_as)


# -- what is in the samples ----------------------------------------------------------


def sample(rows: list[Any], how: dict[str, Any]) -> dict[str, list[int]]:
    """Return a sample of rows of (token, target, next target, whether it starts)."""
    short = how["length"] - len(rows)
    positions: list[int] = []
    for place, (*_, starts) in enumerate(rows):
        positions.append(0 if starts or not place else positions[-1] + 1)
    labels = [after for _, _, after, _ in rows]
    if not how["shift"]:
        labels = [
            target if positions[place] else IGNORED
            for place, (_, target, _, _) in enumerate(rows)
        ]
    return {
        "input_ids": [token for token, *_ in rows] + [how["pad"]] * short,
        "labels": labels + [IGNORED] * short,
        "position_ids": [*positions, *range(short)],
    }


def framed(text: Text, how: dict[str, Any]) -> list[Any]:
    """Return each token of a document, as ``sample`` takes it."""
    before = [] if how["bos"] is None else [how["bos"]]
    after = [] if how["eos"] is None else [how["eos"]]
    mask = text.mask
    counts = [False] * len(before) + mask + [(mask or [True])[-1]] * len(after)
    tokens = before + text.tokens + after
    targets = [
        token if is_counted else IGNORED
        for token, is_counted in zip(tokens, counts, strict=True)
    ]
    each = zip(tokens, targets, [*targets[1:], IGNORED], strict=False)
    return [(*row, not place) for place, row in enumerate(each)]


def concatenated(texts: list[Text], how: dict[str, Any]) -> list[Any]:
    """Return the samples of ``pack``, made token by token."""
    made, rows = list[Any](), list[Any]()
    for text in texts:
        if text.form in {"fails", "text"}:
            made.append(text.number)
            continue
        for row in framed(text, how):
            rows.append(row)
            if len(rows) == how["length"]:
                made.append(sample(rows, how))
                rows = []
    if rows and how["last"] == "pad":
        made.append(sample(rows, how))
    return made


@given(texts(), options("concat"), st.integers(1, 9))
async def test_concat_packs_token_by_token(
    drawn: list[Text], how: Any, limit: int
) -> None:
    """Failures come in the places of their documents."""
    samples, _ = await pulled(documents(drawn).pack(**how), [limit])
    expected = concatenated(drawn, how)
    assert len(samples) == len(expected)
    for packed, wanted in zip(samples, expected, strict=True):
        if isinstance(wanted, int):
            assert isinstance(packed, str)
            assert f"no {wanted}'" in packed or "got str" in packed
        else:
            assert packed == wanted


@given(texts(), options("best_fit"), st.integers(1, 9))
async def test_best_fit_keeps_documents_whole(
    drawn: list[Text], how: Any, limit: int
) -> None:
    """Samples consist of whole documents, and each document is in one sample."""
    samples, _ = await pulled(documents(drawn).pack(**how), [limit])
    length = how["length"]
    failed = [text for text in drawn if text.form in {"fails", "text"}]
    assert sum(isinstance(x, str) for x in samples) == len(failed)
    pieces = []
    for text in drawn:
        rows = [] if text in failed else framed(text, how)
        if len(rows) > length and how["overlong"] != "split":
            rows = rows[:length] if how["overlong"] == "truncate" else []
            rows[-1:] = [(*x[:2], IGNORED, x[3]) for x in rows[-1:]]
        for start in range(0, len(rows), length):
            piece = sample(rows[start : start + length], {**how, "length": 0})
            pieces.append(tuple(zip(*piece.values(), strict=True)))
    held: list[Any] = []
    for x in samples:
        if isinstance(x, str):
            continue
        columns = [*zip(*x.values(), strict=True)]
        starts = [start for start, row in enumerate(columns) if row[2] == 0]
        for start, stop in itertools.pairwise([*starts, length]):
            held.append(tuple(columns[start:stop]))
    padding = [x for x in held if x[0][0] == PAD]
    assert Counter(held) == Counter(pieces) + Counter(padding)
    assert all({row[:2] for row in x} == {(PAD, IGNORED)} for x in padding)


def real(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    sizes = np.maximum(1, rng.lognormal(6.2, 1.1, count).astype(np.int64))
    return [rng.integers(1, 50_000, size) for size in sizes]


async def test_best_fit_fills_samples() -> None:
    stream = from_iterable(real(2_000)).pack(4_096, "best_fit")
    samples, _ = await pulled(stream, [32])
    tokens = [token for sample in samples for token in sample["input_ids"]]
    assert np.mean(np.array(tokens) > 0) >= 0.995


async def test_best_fit_windows_are_shuffled() -> None:
    """Each epoch and seed has another order of the same samples."""
    texts = [np.full(4, number) for number in range(1, 41)]

    async def order(epoch: int = 0, **how: Any) -> list[int]:
        stream = from_iterable(texts).pack(4, "best_fit", window=20, **how)
        stream.set_epoch(epoch)
        return [int(sample["input_ids"][0]) async for sample in stream]

    orders = [await order(), await order(1), await order(seed=1)]
    assert await order() == orders[0]
    assert len({*map(tuple, orders)}) == 3
    for numbers in orders:
        assert {*numbers[:20]} == {*range(1, 21)}
        assert numbers[:20] != sorted(numbers[:20])


async def test_a_pass_continues_the_open_sample() -> None:
    stream = from_iterable([np.arange(3)]).repeat(4).pack(4)
    samples = [sample["input_ids"].tolist() async for sample in stream]
    assert samples == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2]]


async def test_a_long_document_is_packed_as_it_is_pulled() -> None:
    stream = from_iterable([np.zeros(1 << 20, np.int64)]).pack(1)
    async with aiter(stream) as iterator:
        assert len(await iterator.pull(3)) == 3


# -- positions -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.one_loop
@given(texts(), EITHER, st.lists(st.integers(1, 9), min_size=1, max_size=4))
async def test_packing_resumes_after_any_sample(
    drawn: list[Text], how: Any, limits: list[int]
) -> None:
    """However many samples are pulled at once."""

    def made() -> Any:
        return documents(drawn).pack(**{**how, "last": "pad"})

    whole, _ = await pulled(made(), [5])
    for count in range(min(len(whole), 20) + 1):
        head, state = await pulled(made(), limits, count)
        middle, state = await pulled(made(), limits, 1, state)
        rest, _ = await pulled(made(), limits, None, state)
        assert head + middle + rest == whole, count


async def test_resuming_reads_few_documents_again() -> None:
    """Those of the open sample, and at most 64."""
    seen: list[int] = []

    def noted(number: int) -> Any:
        seen.append(number)
        return np.full(100, number)

    for count in (1, 7, 30, 77):
        stream = from_iterable(range(1_000)).map(noted).pack(1_000)
        seen.clear()
        _, state = await pulled(stream, [8], count)
        seen.clear()
        rest, _ = await pulled(stream, [8], 1, state)
        assert rest[0]["input_ids"][0] == 10 * count
        assert seen[0] >= 10 * count - 64
        assert len(seen) < 200


async def test_states_hold_no_tokens() -> None:
    """The state of 8 readers has less than 8 KB."""
    for strategy in STRATEGIES:
        stream = from_iterable(real(300)).pack(4_096, strategy).readers(8)
        _, state = await pulled(stream, [8], 40)
        assert len(json.dumps(state)) < 8_000


async def test_a_delivered_failure_is_not_read_again() -> None:
    """Even if the document could be read now."""
    refused = {3, 5}

    def made(number: int) -> Any:
        if number in refused:
            raise OSError(f"no {number}")
        return np.full(3, number)

    def stream() -> Any:
        return from_iterable(range(9)).map(made).pack(10)

    whole, _ = await pulled(stream(), [9])
    head, state = await pulled(stream(), [9], 1)
    assert head == ["OSError('no 3')"]
    refused.remove(3)
    rest, _ = await pulled(stream(), [9], None, state)
    assert head + rest == whole


@pytest.mark.parametrize("size", [4, 0])
async def test_another_document_is_refused_on_resume(size: int) -> None:
    stream = from_iterable([np.arange(9), np.arange(9)]).pack(5)
    _, state = await pulled(stream, [9], 1)
    changed = from_iterable([np.arange(size), np.arange(9)]).pack(5)
    with pytest.raises(ShardChangedError, match="after 5 tokens of a document that"):
        await pulled(changed, [9], None, state)


# -- bad input -----------------------------------------------------------------------


class Ragged(list[Any]):
    """A list of lists of different lengths."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("document", "error", "words"),
    [
        ("some text", TypeError, "got str of shape"),
        (["some", "text"], TypeError, "tokenize texts first"),
        (np.zeros(3), TypeError, "dtype float64"),
        (torch.zeros(3, requires_grad=True), TypeError, "got Tensor"),
        (np.zeros(0), TypeError, "dtype float64"),
        ([True, False], TypeError, "dtype bool"),
        (np.zeros((2, 3), int), TypeError, "of shape \\(2, 3\\)"),
        (Ragged([[1, 2], [3]]), TypeError, "got Ragged: "),
        (5, TypeError, "got int of shape \\(\\)"),
        (None, TypeError, "got NoneType"),
        ({"tokens": [1]}, KeyError, "has no 'input_ids', only \\['tokens'\\]"),
        ({"input_ids": [1.0]}, TypeError, "dtype float64"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, ValueError, "1 entries for 2 tok"),
        ({"input_ids": [1], "loss_mask": [0.5]}, TypeError, "a loss_mask must be"),
        (np.array([2**63], np.uint64), ValueError, "above int64's limit"),
    ],
    ids=repr,
)
async def test_a_bad_document_fails_alone(
    strategy: Any, document: Any, error: type[Exception], words: str
) -> None:
    good = np.arange(4)
    stream = from_iterable([good, document, good]).pack(4, strategy, last="pad")
    samples, _ = await read(stream, errors=error)
    (failure,) = (sample for sample in samples if isinstance(sample, error))
    samples.remove(failure)
    assert [sample["input_ids"].tolist() for sample in samples] == [[0, 1, 2, 3]] * 2
    assert re.search(words, str(failure))
    assert failure.__notes__ == ["aioloader: in 'pack' of the stream"]


@pytest.mark.parametrize(
    "chain",
    [
        lambda stream: stream.pack(4),
        lambda stream: stream.pack(4, "best_fit", window=10, overlong="drop"),
        lambda stream: stream.unbatch(),
        lambda stream: stream.filter(len),
        lambda stream: mix([stream, stream]).pack(4),
        lambda stream: stream.filter(len).take(3).repeat(),
    ],
    ids=["concat", "best fit", "unbatch", "filter", "mix", "take"],
)
async def test_passes_without_a_sample_are_an_error(chain: Any) -> None:
    """They would be an endless loop, for which other ranks would wait."""
    with pytest.raises(ValueError, match=r"had no samples in|no sample of 8 passes"):
        await anext(aiter(chain(from_iterable([np.zeros(0, int)] * 3).repeat())))


async def test_a_sample_may_span_many_passes() -> None:
    stream = from_iterable([np.array([7]), np.zeros(0, int)]).repeat().pack(50)
    assert (await anext(aiter(stream)))["input_ids"].tolist() == [7] * 50


# -- flat batches --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
async def test_varlen_collate_joins_samples(kind: Any) -> None:
    texts = [kind([1, 2, 3]), kind([4, 5, 6, 7]), kind([8])]
    stream = from_iterable(texts).pack(5, last="pad", pad=9)
    batch = varlen_collate([sample async for sample in stream])
    assert batch["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert batch["labels"].tolist() == [2, 3, -100, 5, 6, 7, -100, -100, -100, -100]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 7, 8, 10]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 3
    assert type(batch["max_seqlen"]) is int


FOUR, THREE = np.arange(4), np.arange(3)


@pytest.mark.parametrize(
    ("sample", "error", "words"),
    [
        (
            {"input_ids": FOUR, "position_ids": THREE},
            ValueError,
            r"sample 1 .* shapes {'input_ids': \(4,\), 'position_ids': \(3,\)}; var",
        ),
        ({"input_ids": FOUR, "position_ids": FOUR[None]}, ValueError, r"\(1, 4\)"),
        ({"input_ids": 0, "position_ids": 0, "n": 0}, KeyError, "sample 1 .*, 'n'"),
    ],
)
def test_varlen_refuses_uneven_samples(sample: Any, error: Any, words: str) -> None:
    """Missing entries would shift those of all later samples."""
    good = {"input_ids": FOUR, "position_ids": FOUR}
    with pytest.raises(error, match=words):
        varlen_collate([good, sample, good])


def test_each_sample_starts_a_sequence() -> None:
    """Even if its positions start later, as those of a part of a document."""
    rows = [{"position_ids": np.array(p, int)} for p in ([5, 6], [], [0, 1, 0])]
    assert varlen_collate(rows)["cu_seqlens"].tolist() == [0, 2, 4, 5]
    lists: list[Any] = [{"position_ids": p} for p in ([0], [])]
    assert varlen_collate(lists)["position_ids"].dtype == torch.int64


def test_varlen_collate_needs_positions() -> None:
    with pytest.raises(KeyError, match=r"sample 0 .* needs 'position_ids'"):
        varlen_collate([{"input_ids": FOUR}])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_makes_flat_batches(num_workers: int) -> None:
    """Large batches are written directly to the memory that workers send."""
    stream = from_iterable(real(100)).pack(4_096)
    samples = [*DataLoader(stream, None, collate_fn=lambda sample: sample)]
    options: Any = {"num_workers": num_workers, "collate_fn": varlen_collate}
    with DataLoader(stream, 4, **options) as loader:
        batches = [*loader]
    assert len(batches) == -(-len(samples) // 4)
    for i, batch in enumerate(batches):
        alone = varlen_collate(samples[4 * i : 4 * i + 4])
        assert batch.keys() == alone.keys()
        assert batch["max_seqlen"] == alone["max_seqlen"]
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
            assert torch.equal(batch[name], alone[name])
