"""Batches as parcels: ``unpack(pack(x)) == x``, in the frame or in a slot."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from aioloader import default_collate
from aioloader._collate.collate import collated
from aioloader._workers.process.messages import Packer, slot_of, unpack
from sendable import DTYPES
from unit.test_arena import Pair

INLINE = 1 << 14


class Post(Pair):
    """A packer, and the reader's side of its arena."""

    def __init__(self) -> None:
        super().__init__()
        self.packer = Packer(self.writer, INLINE)

    def frame(self, value: Any) -> bytes:
        """Return the frame of ``value``."""
        return b"head" + b"".join(self.packer.pack(value))

    def sent(self, value: Any, *, copy: bool = False) -> Any:
        """Return ``value`` as it arrives."""
        return unpack(self.frame(value), 4, self.reader, copy=copy)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are alike to the last bit."""
    return (
        type(one) is type(other)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and one.requires_grad == other.requires_grad
        and torch.equal(octets(one), octets(other))
    )


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of some values."""
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def test_tensors_arrive_on_the_cpu() -> None:
    """Whatever torch's default device is where they are sent and received."""
    value: list[Any] = [
        torch.zeros((0, 3), dtype=torch.bfloat16),
        torch.ones(3).untyped_storage(),
    ]
    with Post() as post, torch.device("meta"):
        empty, storage = post.sent(value)
    assert same(empty, value[0])
    assert (storage.device.type, list(storage)) == ("cpu", list(value[1]))


def leaves() -> st.SearchStrategy[Any]:
    """Return tensors, arrays and plain values."""
    shapes = st.lists(st.integers(0, 90), max_size=3).filter(lambda s: np.prod(s) < 9e4)
    dtypes = st.sampled_from(DTYPES)
    tensors = st.builds(lambda s, d: filled(tuple(s), d), shapes, dtypes)
    plain = st.none() | st.integers() | st.text() | st.binary(max_size=50)
    return tensors | plain | shapes.map(np.ones)


VALUES = st.recursive(
    leaves(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Compare trees of values."""
    if isinstance(one, torch.Tensor):
        return same(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(map(alike, one, other))
        )
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_what_is_sent_arrives(values: list[Any]) -> None:
    """One after the other through the same arena; all are held to the end."""
    with Post() as post:
        found = [post.sent(value) for value in values]
        assert all(map(alike, values, found))


def written(post: Post, n: int = 4, side: int = 200) -> Any:
    """Return a batch that was collated into the slot."""
    post.packer.reset()
    samples = [(torch.full((3, side, side), float(k)), k) for k in range(n)]
    return collated(post.packer.lease, default_collate, samples)


def test_a_collated_batch_is_not_copied() -> None:
    """It is written into the slot once, and read there."""
    with Post() as post:
        batch = written(post)
        frame = post.frame(batch)
        found = unpack(frame, 4, post.reader)
        assert alike(found, batch)
        batch[0][:, 0, 0, 0] = 77.0  # the same memory
        assert found[0][0, 0, 0, 0] == 77
        assert slot_of(frame, 4) is not None


def test_small_batches_take_no_slot() -> None:
    """They travel in the frame, even when a slot was taken in vain."""
    with Post() as post:
        written(post)
        frame = post.frame([torch.zeros(20), "a"])
        assert slot_of(frame, 4) is None
        assert alike(unpack(frame, 4, post.reader), [torch.zeros(20), "a"])


def test_small_batches_of_plain_tensors() -> None:
    """Any nesting; the structure of one is never taken for that of another."""
    with Post() as post:
        for n in range(2, 400):  # more structures than are kept
            x, y = torch.arange(n).float(), torch.arange(n) % 2 == 0
            batches: list[Any] = [x, [x, y], (y, x), {"b": x, "a": (y, [x + 1])}]
            for batch in batches:
                found, structure = tree_flatten(post.sent(batch))
                leaves, expected = tree_flatten(batch)
                assert structure == expected
                assert all(map(torch.equal, found, leaves))
        for batch in ({True: x}, {1: x}, [x.view(1, -1)], [], [[], x], [x, None, "y"]):
            assert str(post.sent(batch)) == str(batch)
