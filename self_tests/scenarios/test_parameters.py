"""Windows on parameters: values go in, gradients come out, and what is no window is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from moe_conformance.contract import Named, Read, Unsupported
from moe_conformance.scenarios import parameters

Windows = Callable[[Tensor, Tensor], Iterator[Named]]


class Holder:
    """Two stacked experts with a gate of (3, 4) each, and a router (2, 4); `windows` is what it names."""

    def __init__(self, windows: Windows) -> None:
        self.gate = nn.Parameter(torch.zeros(2, 3, 4))
        self.router = nn.Parameter(torch.zeros(2, 4))
        self.windows = windows

    def named(self, read: Read) -> Iterator[Named]:
        """Whatever the test says."""
        return self.windows(read(self.gate), read(self.router))


def correct(gate: Tensor, router: Tensor) -> Iterator[Named]:
    """A window on everything."""
    yield from (Named("gate", 4 + n, gate[n]) for n in range(2))
    yield Named("router", None, router)


def copy(gate: Tensor, router: Tensor) -> Iterator[Named]:
    """One window is a copy."""
    yield Named("gate", 4, gate.clone()[0])
    yield from correct(gate, router)


def gap(gate: Tensor, router: Tensor) -> Iterator[Named]:
    """The second expert is left out."""
    yield Named("gate", 4, gate[0])
    yield Named("router", None, router)


def overlap(gate: Tensor, router: Tensor) -> Iterator[Named]:
    """A row of the router is named again."""
    yield from correct(gate, router)
    yield Named("router", None, router[1:])


VALUES = {
    ("gate", 4): torch.arange(12.0).reshape(3, 4),
    ("gate", 5): torch.arange(12.0, 24.0).reshape(3, 4),
    ("router", None): torch.arange(8.0).reshape(2, 4),
}


class TestWrite:
    def test_values_land_in_the_parameters(self) -> None:
        """Writing through the windows fills the parameters themselves."""
        holder = Holder(correct)
        parameters.write(holder, VALUES)
        assert torch.equal(torch.arange(24.0).reshape(2, 3, 4), holder.gate.detach())

    def test_a_shard_takes_its_chunk(self) -> None:
        """A window that is a shard takes that chunk of the full value."""
        holder = Holder(lambda gate, router: iter([Named("router", None, router[:, :2], (1, 1, 2))]))
        parameters.write(holder, VALUES)
        assert torch.equal(VALUES["router", None][:, 2:], holder.router.detach()[:, :2])

    def test_unknown_names_and_wrong_shapes_are_told(self) -> None:
        """A name without a value, or a window of another shape, is an error that says which."""
        with pytest.raises(KeyError, match=r"gate.*9"):
            parameters.write(Holder(lambda gate, router: iter([Named("gate", 9, gate[0])])), VALUES)
        with pytest.raises(ValueError, match=r"\(4, 3\), expected \(3, 4\)"):
            parameters.write(Holder(lambda gate, router: iter([Named("gate", 4, gate[0].T)])), VALUES)

    def test_a_dimension_that_does_not_split_is_told(self) -> None:
        """Shards must divide their dimension."""
        with pytest.raises(ValueError, match="does not split into 2"):
            parameters.shard_of(torch.zeros(3, 4), (0, 0, 2))


class TestGradients:
    def test_absent_is_not_zero(self) -> None:
        """A parameter without a gradient reads as absent, one with zeros as zeros."""
        holder = Holder(correct)
        holder.gate.grad = torch.zeros_like(holder.gate)
        found = parameters.gradients([holder], "grad")
        assert found["router", None].value is None
        assert torch.equal(torch.zeros(3, 4), found["gate", 4].value)

    def test_gradients_are_read_under_another_name(self) -> None:
        """Libraries that keep gradients in an attribute of their own are read there."""
        holder = Holder(correct)
        holder.router.main_grad = torch.ones(2, 4)  # type: ignore[attr-defined]
        found = parameters.gradients([holder], "main_grad")
        assert torch.equal(torch.ones(2, 4), found["router", None].value)


class TestClear:
    def test_leaves_lose_their_gradients(self) -> None:
        """What autograd gives a gradient to has none, or zeros where zeros are asked for."""
        for to_zero in (False, True):
            holder = Holder(correct)
            holder.gate.grad = torch.ones_like(holder.gate)
            parameters.clear([holder], "grad", to_zero=to_zero)
            assert (holder.gate.grad is not None) == to_zero
            assert holder.gate.grad is None or not holder.gate.grad.any()
            assert holder.router.grad is None

    def test_buffers_are_filled_with_zeros(self) -> None:
        """Under another name a gradient stays where it is."""
        holder, buffer = Holder(correct), torch.ones(2, 4)
        holder.router.main_grad = buffer  # type: ignore[attr-defined]
        parameters.clear([holder], "main_grad", to_zero=False)
        assert holder.router.main_grad is buffer  # type: ignore[attr-defined]
        assert not buffer.any()

    def test_parts_are_filled_with_zeros(self) -> None:
        """Through a tensor that stands for a part of a parameter, its gradient is zeroed where it lies."""
        holder, whole = Holder(correct), torch.ones(3, 2, 3, 4)
        holder.gate = holder.gate.detach()  # type: ignore[assignment]
        holder.gate.grad = whole[1]
        parameters.clear([holder], "grad", to_zero=False)
        assert [12 * 2, 0, 12 * 2] == whole.sum((1, 2, 3)).tolist()


class TestCoverage:
    def test_an_honest_surface_has_no_complaints(self) -> None:
        """Views, disjoint and complete: nothing to say."""
        assert () == parameters.coverage(Holder(correct))

    def test_transposed_views_are_views(self) -> None:
        """A window may be a transpose."""

        def transposed(gate: Tensor, router: Tensor) -> Iterator[Named]:
            yield from (Named("gate", n, gate[n].T) for n in range(2))
            yield Named("router", None, router.T)

        assert () == parameters.coverage(Holder(transposed))

    @pytest.mark.parametrize(
        ("windows", "words"),
        [
            (copy, "gate of expert 4 is a copy"),
            (gap, "12 elements of a (2, 3, 4) parameter have no window"),
            (overlap, "4 elements of a (2, 4) parameter have several windows"),
        ],
    )
    def test_what_is_no_window_is_told(self, windows: Windows, words: str) -> None:
        """Copies, gaps and overlaps are each named."""
        assert words in "; ".join(parameters.coverage(Holder(windows)))


class TestUnask:
    def test_a_stacked_tensor_is_read_for_every_expert(self) -> None:
        """Parameters that several windows are cut out of ask for no gradient any more, however often they are read."""

        class Stacked(Holder):
            def named(self, read: Read) -> Iterator[Named]:
                yield from (Named("gate", 4 + n, read(self.gate)[n]) for n in range(2))
                yield Named("router", None, read(self.router))

        stacked = Stacked(correct)
        parameters.unask(stacked)
        assert (False, False) == (stacked.gate.requires_grad, stacked.router.requires_grad)

    def test_what_asks_for_nothing_shows_parts(self) -> None:
        """A tensor that asked for no gradient before is no parameter: it is refused."""
        held = Holder(correct)
        held.gate.requires_grad_(False)
        with pytest.raises(Unsupported, match="show parts of parameters"):
            parameters.unask(held)
