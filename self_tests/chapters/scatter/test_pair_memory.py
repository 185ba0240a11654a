"""Where tensors lie, worked out three ways: reference.scatter.memory, bytes painted by hand, and real memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_conformance.reference.scatter import memory as first
from self_tests.chapters.scatter import second
from self_tests.chapters.scatter.second import View

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


def of_first(view: View) -> first.View:
    """A longhand view as the first oracle takes it."""
    return first.View(*view)


def of_second(view: first.View) -> View:
    """The first oracle's view as the longhand takes it."""
    return View(view.address, view.shape, view.strides, view.itemsize)


@st.composite
def views(draw: st.DrawFn) -> View:
    """Up to three dims, sizes of 0 and 1, strides of 0 and below; sometimes no data."""
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0 if draw(st.integers(0, 5)) == 0 else 1, 3)) for _ in range(dims))
    strides = tuple(draw(st.integers(-3, 5)) for _ in range(dims))
    address = draw(st.one_of(st.integers(100, 130), st.integers(100, 130), st.integers(100, 130), st.none()))
    return View(address, shape, strides, draw(st.sampled_from([1, 2, 4])))


class TestPair:
    @settings(pairs_agree, max_examples=300)
    @given(views(), views())
    def test_bytes_agree(self, a: View, b: View) -> None:
        """Both find the same bytes, and the same neighbours in each other's way."""
        one, two = of_first(a), of_first(b)
        assert set(second.paint(a)) == first.addresses(one)
        assert second.overlaps_itself(a) == first.overlaps_itself(one)
        assert second.share_bytes(a, b) == first.share_bytes(one, two)
        assert second.in_place_is_lawful(a, b) == first.in_place_is_lawful(one, two)

    @pairs_agree
    @given(views())
    def test_beside_itself(self, view: View) -> None:
        """Byte by byte behind a view: they share as both say."""
        if view.address is None:
            return
        for step in range(-8, 9):
            other = view._replace(address=view.address + step)
            assert second.share_bytes(view, other) == first.share_bytes(of_first(view), of_first(other))

    @pytest.mark.parametrize("wrong", [View(0, (2,), (), 4), View(0, (2, -1), (1, 1), 4), View(0, (2,), (1,), 0)])
    def test_a_view_that_lies_nowhere_is_refused_by_both(self, wrong: View) -> None:
        """A size without a stride, a negative size, elements without bytes."""
        for call in (second.paint, lambda view: first.addresses(of_first(view))):
            with pytest.raises(ValueError, match=r"\w"):
                call(wrong)


def real_pairs() -> dict[str, tuple[Tensor, Tensor, bool, bool]]:
    """Whether a write through the one shows through the other, and whether rows may be added in place."""
    x, wide, columns, array = torch.zeros(2, 3), torch.zeros(12), torch.zeros(2, 6), np.zeros(10, dtype=np.float32)
    one, two = torch.from_numpy(array[0:6]).view(2, 3), torch.from_numpy(array[4:10]).view(2, 3)
    imported = torch.utils.dlpack.from_dlpack(wide.numpy()[4:10]).view(2, 3)
    return {
        "the same": (x, x, True, False),
        "overlapping views": (wide[2:8].view(2, 3), wide[5:11].view(2, 3), True, False),
        "disjoint views": (wide[:6].view(2, 3), wide[6:].view(2, 3), False, True),
        "interleaved columns": (columns[:, 0::2], columns[:, 1::2], False, True),
        "clones": (x.clone(), x, False, True),
        "slices of an array": (one, two, True, False),
        "an import of a slice": (imported, wide[:6].view(2, 3), True, False),
        "both empty": (torch.zeros(0, 3), torch.zeros(0, 3), False, True),
        "one row laid out twice": (torch.zeros(1, 3).expand(2, 3), torch.zeros(2, 3), False, False),
    }


class TestRealMemory:
    @pytest.mark.parametrize("name", real_pairs())
    def test_a_write_shows_where_bytes_are_shared(self, name: str) -> None:
        """Real tensors, written to element by element: x changes exactly where both oracles see bytes shared."""
        out, x, shared, lawful = real_pairs()[name]
        a, b = first.view_of(out), first.view_of(x)
        shown = False
        for place in np.ndindex(*out.shape):
            before = x.clone()
            out[place] = 1 + out[place]
            shown = shown or not torch.equal(before, x)
        assert shared == shown
        assert (shared, lawful) == (first.share_bytes(a, b), first.in_place_is_lawful(a, b))
        longhand = of_second(a), of_second(b)
        assert (shared, lawful) == (second.share_bytes(*longhand), second.in_place_is_lawful(*longhand))

    def test_tensors_without_data_have_no_address(self) -> None:
        """Meta and fake tensors share nothing, and no pointer of theirs is followed."""
        with FakeTensorMode():
            fake = torch.zeros(2, 3)
        meta = torch.zeros(2, 3, device="meta")
        for tensor in (fake, meta):
            view = first.view_of(tensor)
            assert (None, (2, 3), (3, 1), 4) == of_second(view)
            assert first.in_place_is_lawful(view, view)

    def test_a_view_says_where_its_first_element_lies(self) -> None:
        """An offset of seven elements of two bytes, rows two apart and columns six."""
        storage = torch.zeros(4, 6, dtype=torch.bfloat16)
        view = first.view_of(storage[1:, 1::2].T)
        assert View(storage.data_ptr() + 14, (3, 3), (2, 6), 2) == of_second(view)
