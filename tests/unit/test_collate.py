"""Collating as torch does."""

import ctypes
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from aioloader import default_collate, default_convert
from aioloader._collate.collate import collated
from aioloader._transport.slots import SlotPool


class Point(NamedTuple):
    """A structure whose type must survive."""

    x: Any
    y: Any


Loose = namedtuple("Loose", ["a", "b"])  # noqa: PYI024  (an untyped one, too)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare structures: types, dtypes, layouts, values."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous() == theirs.is_contiguous()
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, (dict, UserDict)):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


LEAVES: list[Any] = [
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.just(None).map(lambda _: torch.arange(6.0).reshape(2, 3)),
    st.just(None).map(lambda _: torch.ones((), dtype=torch.bfloat16)),
    st.just(None).map(lambda _: np.arange(4, dtype=np.int16)),
    st.just(None).map(lambda _: np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)),
    st.just(None).map(lambda _: np.zeros((3, 0, 2))),
    st.just(None).map(lambda _: np.float32(1.5)),
    st.just(None).map(lambda _: np.array(2.5)),
    st.just(None).map(lambda _: np.float64(2.5)),
    st.just(None).map(lambda _: np.bool_(True)),
]


def shapes(leaf: Any) -> Any:
    """Return structures of ``leaf``s of the kinds torch knows."""
    return st.one_of(
        st.lists(leaf, min_size=1, max_size=3),
        st.lists(leaf, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), leaf, min_size=1),
        st.tuples(leaf, leaf).map(lambda pair: Point(*pair)),
        st.dictionaries(st.sampled_from("abc"), leaf, min_size=1).map(OrderedDict),
    )


@given(st.recursive(st.one_of(LEAVES), shapes, max_leaves=6), st.integers(1, 4))
def test_equals_torch(one: Any, size: int) -> None:
    """Any structure torch collates comes out equal, types included."""
    samples = [one] * size
    assert_same(default_collate(samples), torch_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [Loose(1, 2.0), Loose(3, 4.0)],
        [defaultdict(int, a=1), defaultdict(int, a=2)],
        [UserDict(a=1), UserDict(a=2)],
        [range(3), range(3)],
        [np.arange(3), np.arange(3.0)],
        [np.memmap.__mro__[1](2), np.zeros(2)],
        [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))],
        [True, 2],
        [1, 2.5],
    ],
)
def test_unusual_samples_equal_torch(samples: Any) -> None:
    """Odd containers and mixed leaves do what torch does."""
    assert_same(default_collate(samples), torch_collate(samples))


def outcome(collate: Any, samples: Any) -> tuple[type, str]:
    """Return what collating raises."""
    with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
        collate(samples)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    "samples",
    [
        [object(), object()],
        [None, None],
        [{1, 2}, {1, 2}],
        [np.array(["a"]), np.array(["b"])],
        [[1, 2], [1]],
        [torch.zeros(2), torch.zeros(3)],
        [np.zeros(2), np.zeros(3)],
        [torch.zeros(2).to_sparse()] * 2,
        [np.zeros(1, "f4,i8")[0]] * 2,
        [ctypes.c_int(3)] * 2,
    ],
)
def test_errors_are_torchs(samples: Any) -> None:
    """Same type, same words."""
    assert outcome(default_collate, samples) == outcome(torch_collate, samples)


def test_read_only_arrays_pass_quietly() -> None:
    """Arrays over immutable bytes are stacked without torch's warning."""
    arrays = [np.frombuffer(bytes([i] * 4), dtype=np.uint8) for i in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = default_collate(arrays)
    batch[0, 0] = 9
    assert arrays[0][0] == 0


def test_batches_do_not_share_memory_with_samples() -> None:
    """Even a batch of one is a copy."""
    sample = torch.zeros(3)
    default_collate([sample])[0, 0] = 1
    assert sample[0] == 0


def test_registered_types_are_honoured() -> None:
    """Torch's registry extends ours."""

    class Word:
        """A type nobody knows."""

    default_collate_fn_map[Word] = lambda words, *, collate_fn_map: f"{len(words)}"
    try:
        assert default_collate([(Word(), 1), (Word(), 2)])[0] == "2"
    finally:
        del default_collate_fn_map[Word]
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        default_collate([Word()])


def test_buffers_stay_a_list() -> None:
    """What an object store returns is kept, as bytes are."""
    obstore = pytest.importorskip("obstore")
    bodies = [obstore.Bytes(b"ab"), obstore.Bytes(b"c")]
    assert default_collate(bodies) == bodies
    with torch.device("meta"):
        assert default_collate(bodies) == bodies


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [1.5, 2.5],
        [True, 2],
        [np.float32(1.5), np.float32(2.5)],
        [np.arange(3), np.arange(3)],
        [np.zeros(1 << 16), np.zeros(1 << 16)],
        [torch.zeros(2), torch.ones(2)],
        [{"a": 1, "b": [np.int16(1)]}, {"a": 2, "b": [np.int16(2)]}],
    ],
)
def test_the_default_device_is_torchs(samples: Any) -> None:
    """Numbers and arrays are placed there; tensors stay where they are."""
    with torch.device("meta"):
        ours, theirs = default_collate(samples), torch_collate(samples)
    if isinstance(theirs, dict):
        ours, theirs = [ours["a"], *ours["b"]], [theirs["a"], *theirs["b"]]
    else:
        ours, theirs = [ours], [theirs]
    for one, expected in zip(ours, theirs, strict=True):
        assert (one.device, one.dtype) == (expected.device, expected.dtype)
        assert one.shape == expected.shape


def test_default_convert_is_torchs() -> None:
    """Arrays become tensors, the rest stays."""
    converted: Any = default_convert({"a": np.arange(2), "b": "text"})
    assert torch.equal(converted["a"], torch.arange(2))
    assert converted["b"] == "text"


def lent(samples: list[Any]) -> Any:
    """Collate into lent memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return collated(SlotPool().lease, default_collate, samples)


def test_lent_memory_changes_no_batch() -> None:
    """Any dtype, any layout, arrays and tensors, read-only ones too."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 200, (8, 300, 300))
    dtypes = [np.uint8, np.int16, np.int64, np.float32, np.float64, np.bool_]
    for dtype in dtypes:
        arrays = list(base.astype(dtype))
        strided = [array.T for array in arrays]
        read_only: Any = [np.frombuffer(array.tobytes(), dtype) for array in arrays]
        for samples in (arrays, strided, read_only):
            expected = torch.stack([torch.from_numpy(s.copy()) for s in samples])
            assert torch.equal(batch := lent(samples), expected)
            assert batch.is_contiguous()
    for torch_dtype in (torch.bfloat16, torch.complex64, torch.float16, torch.uint8):
        tensors = list(torch.from_numpy(base).to(torch_dtype))
        assert torch.equal(lent(tensors), torch.stack(tensors))
    mixed = [torch.zeros(300, 300), torch.zeros(300, 300, dtype=torch.float64)]
    assert lent(mixed).dtype == torch.stack(mixed).dtype
    leaf = torch.zeros(300, 300, requires_grad=True)
    assert lent([leaf, leaf]).requires_grad
