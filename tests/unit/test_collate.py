"""`default_collate` and `default_convert` do what torch's do."""

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

from aioloader import DataLoader, default_collate, default_convert


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
        for mine, torchs in zip(ours, theirs, strict=True):
            assert_same(mine, torchs)
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
def test_any_structure_collates_as_in_torch(sample: Any, size: int) -> None:
    samples = [sample] * size
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
def test_unusual_containers_collate_as_in_torch(samples: Any) -> None:
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
def test_errors_have_torchs_type_and_message(samples: Any) -> None:
    assert outcome(default_collate, samples) == outcome(torch_collate, samples)


def test_read_only_arrays_collate_without_a_warning() -> None:
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


def test_types_in_torchs_registry_are_collated() -> None:
    class Word:
        """A type nobody knows."""

    default_collate_fn_map[Word] = lambda words, *, collate_fn_map: f"{len(words)}"
    try:
        assert default_collate([(Word(), 1), (Word(), 2)])[0] == "2"
    finally:
        del default_collate_fn_map[Word]
    with pytest.raises(TypeError, match="default_collate: batch must contain"):
        default_collate([Word()])


def test_buffers_of_an_object_store_stay_a_list() -> None:
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
def test_batches_are_on_torchs_default_device(samples: Any) -> None:
    """Numbers and arrays are placed there; tensors stay where they are."""
    with torch.device("meta"):
        ours, theirs = default_collate(samples), torch_collate(samples)
    if isinstance(theirs, dict):
        ours, theirs = [ours["a"], *ours["b"]], [theirs["a"], *theirs["b"]]
    else:
        ours, theirs = [ours], [theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine.device, mine.dtype) == (expected.device, expected.dtype)
        assert mine.shape == expected.shape


def test_default_convert_makes_tensors_of_arrays() -> None:
    converted: Any = default_convert({"a": np.arange(2), "b": "text"})
    assert torch.equal(converted["a"], torch.arange(2))
    assert converted["b"] == "text"


def from_worker(samples: list[Any]) -> Any:
    """Return a batch that a worker thread collates, into memory of a slot."""
    options: Any = {"num_workers": 1, "workers": "thread"}
    (batch,) = DataLoader(samples, len(samples), **options)
    return batch


def test_batches_in_shared_memory_equal_torchs() -> None:
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
            assert torch.equal(batch := from_worker(samples), expected)
            assert batch.is_contiguous()
    for torch_dtype in (torch.bfloat16, torch.complex64, torch.float16, torch.uint8):
        tensors = list(torch.from_numpy(base).to(torch_dtype))
        assert torch.equal(from_worker(tensors), torch.stack(tensors))
    mixed = [torch.zeros(300, 300), torch.zeros(300, 300, dtype=torch.float64)]
    assert from_worker(mixed).dtype == torch.stack(mixed).dtype
    leaf = torch.zeros(300, 300, requires_grad=True)
    assert from_worker([leaf, leaf]).requires_grad
