"""Rows added back into an output by index; N output rows, J source rows, D hidden, M the most source rows of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.offered import Offered


class ScatterAdd(Offered):
    """Puts the source rows of every output row side by side and adds them in one sum, in the order of the index.

    No atomic addition is involved: the bits depend on the inputs alone, on every device, and no setting of the process
    is touched. It is a registered operator, so that programs with it can be exported and compiled.

    Implements: ALIAS-01, ALIAS-02, ALIAS-03, ALIAS-06, ALIAS-08, ALIAS-09, ALIAS-10.
    """

    surface = "scatter_add"

    @property
    def resolved(self) -> Mapping[str, str]:
        """How rows are added."""
        return {"scatter add": "one sum per row, in the order of the index"}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return out with the source rows added, as a new tensor."""
        y_ND: Tensor = ordered_add(out_ND, index_J, src_JD)
        return y_ND

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Add the source rows to out in place, and return it."""
        return out_ND.copy_(self.add(out_ND, index_J, src_JD))


# `torch.library.custom_op` would import torch's compiler in every process that calls the operator: seconds.
_NAME = "moe_conformance_native::ordered_add"
torch.library.define(_NAME, "(Tensor out_ND, Tensor index_J, Tensor src_JD) -> Tensor")


def _ordered_add(out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
    """Return out with the source rows added, as a new tensor."""
    N, D = out_ND.shape
    count_N = torch.bincount(index_J, minlength=N)
    most = int(count_N.max()) if N else 0
    table_NMD = src_JD.new_zeros(N, 1 + most, D)
    table_NMD[:, 0] = out_ND
    table_NMD[index_J, 1 + _place(index_J, count_N)] = src_JD
    return torch.where(count_N[:, None] > 0, table_NMD.sum(1), out_ND)  # -0 + 0 would lose the sign


def _form(out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
    return torch.empty(out_ND.shape, dtype=out_ND.dtype, device=out_ND.device)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, Tensor]:
    (index_J,) = ctx.saved_tensors
    return grad_ND, None, grad_ND[index_J]


torch.library.impl(_NAME, "default", _ordered_add)
torch.library.register_fake(_NAME, _form)
torch.library.register_autograd(_NAME, _backward, setup_context=_setup)
ordered_add = torch.ops.moe_conformance_native.ordered_add.default


def _place(index_J: Tensor, count_N: Tensor) -> Tensor:
    """Return how many earlier source rows name the same output row, (J,)."""
    order_J = index_J.argsort(stable=True)
    first_N = count_N.cumsum(0) - count_N
    place_J = torch.empty_like(index_J)
    place_J[order_J] = torch.arange(len(index_J), device=index_J.device) - first_N[index_J[order_J]]
    return place_J
