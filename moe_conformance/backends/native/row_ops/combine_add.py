"""Routed rows added to the output of a shared expert; N rows of it, J routed rows, D hidden."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered
from moe_conformance.backends.native.row_ops.scatter import ScatterAdd
from moe_conformance.contract import Config


class CombineAdd(Offered):
    """Adds in place where that saves memory and nobody can tell, else out of place.

    Nobody can tell if no gradient is recorded, out overlaps neither itself nor an argument that must stay, and its
    bytes are known by now: not under a compiler, nor without data.

    Implements: ALIAS-04, ALIAS-05, ALIAS-06, ALIAS-07.
    """

    surface = "combine_add"

    def __init__(self, config: Config) -> None:
        """Take the scatter-add of this backend."""
        self.sums = ScatterAdd(config)

    @property
    def resolved(self) -> Mapping[str, str]:
        """How rows are added."""
        return {"combine add": "in place where neither autograd nor an alias can tell"}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Return out with the routed rows added; x keeps its bytes."""
        if self._in_place(out_ND, (x_ND, src_JD, index_J)):
            return self.sums.add_(out_ND, index_J, src_JD)
        return self.sums.add(out_ND, index_J, src_JD)

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        if torch.compiler.is_compiling() or out_ND.untyped_storage().device.type == "meta":
            return False
        if torch.is_grad_enabled() or out_ND.requires_grad:
            return False
        if out_ND.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return out_ND.is_contiguous() and not any(may_overlap(out_ND, tensor) for tensor in kept)


def may_overlap(out_ND: Tensor, other: Tensor) -> bool:
    """Compare the addresses between which two tensors lie: views of two storages may lie over one memory.

    Rows between which others lie count as overlapping.
    """
    if not out_ND.numel() or not other.numel():
        return False
    first, last = _extent(out_ND)
    other_first, other_last = _extent(other)
    return first <= other_last and other_first <= last


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first and of the last byte of a tensor that is not empty; strides are positive."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size() - 1
