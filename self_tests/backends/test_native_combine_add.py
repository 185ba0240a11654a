"""Native adds in place only where nobody can tell, and its operator is one that PyTorch takes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from moe_conformance.backends.native.row_ops.combine_add import CombineAdd, may_overlap
from moe_conformance.backends.native.row_ops.scatter import ordered_add
from moe_conformance.contract import Config
from self_tests.backends.strided_pairs import KINDS, pairs


def in_place(out_ND: Tensor, x_ND: Tensor) -> bool:
    """Add nothing and return whether the result is the output itself."""
    index_J, src_JD = torch.empty(0, dtype=torch.int64), torch.empty(0, out_ND.shape[1])
    with torch.no_grad():
        return CombineAdd(Config(variant="alltoall")).add(out_ND, index_J, src_JD, x_ND) is out_ND


class TestGuard:
    def test_no_pair_with_a_common_byte_is_called_safe(self) -> None:
        """Of a thousand pairs in one memory and in two, and none in separate memory is called an alias."""
        found: Counter[tuple[str, bool, bool]] = Counter()
        for pair in pairs(1000, seed=1):
            safe = not may_overlap(pair.out, pair.x)
            found[pair.kind, pair.share, safe] += 1
            assert not (pair.share and safe), pair
            assert safe or pair.kind != "separate", pair
            assert in_place(pair.out, pair.x) == (safe and pair.out.is_contiguous())
        for kind in KINDS:
            assert found[kind, False, True] > 10, kind
            assert kind == "separate" or found[kind, True, False] > 10

    def test_a_gradient_is_recorded_out_of_place(self) -> None:
        """Also where only the source rows ask for one."""
        out_ND, index_J, x_ND = torch.zeros(2, 3), torch.tensor([1]), torch.zeros(2, 3)
        y_ND = CombineAdd(Config(variant="alltoall")).add(out_ND, index_J, torch.ones(1, 3).requires_grad_(), x_ND)
        assert y_ND is not out_ND
        assert y_ND.requires_grad

    def test_inference_tensors_are_left_alone_outside_of_inference_mode(self) -> None:
        """PyTorch refuses to write them there."""
        with torch.inference_mode():
            out_ND, x_ND = torch.zeros(2, 3), torch.zeros(2, 3)
            assert in_place(out_ND, x_ND)
        assert not in_place(out_ND, x_ND)


class TestOperator:
    @pytest.mark.parametrize("added", [0, 7])
    def test_it_does_what_it_declares(self, added: int) -> None:
        """Its schema, fake tensors, gradients and compiled form, by PyTorch's own check of operators."""
        g = torch.Generator().manual_seed(5)
        out_ND = torch.randn(4, 3, generator=g, requires_grad=True)
        src_JD = torch.randn(added, 3, generator=g, requires_grad=True)
        found = torch.library.opcheck(ordered_add, (out_ND, torch.randint(0, 4, (added,), generator=g), src_JD))
        assert {"SUCCESS"} == set(found.values())
