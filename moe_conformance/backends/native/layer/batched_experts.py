"""SwiGLU experts in two batched products, for forwards without gradients in which all experts have as many rows.

N experts held, D hidden, F expert hidden, R rows, n rows of each expert. The products want the weights in another form,
w13 = [gate; up] and w2^T, which is made once and kept until a weight has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook


class Derived(NamedTuple):
    """What the two products take."""

    w13_NGD: Tensor  # gate above up, G = 2 F
    w2_t_NFD: Tensor


class _Steps:
    """Counts the steps of all optimisers of the process: fused ones change weights without a trace at the tensors."""

    def __init__(self) -> None:
        self.taken = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *step: Any) -> None:
        self.taken += 1


_STEPS = _Steps()


class _Seen:
    """What a tensor shows of its values: equal as long as nothing that leaves a trace has changed them.

    The weak reference to the storage keeps none of its memory, only its name: no other storage gets it meanwhile, even
    at the same address.
    """

    def __init__(self, weight: Tensor) -> None:
        self._storage = StorageWeakRef(weight.untyped_storage())
        self._shown = self._show(weight)

    def holds(self, weight: Tensor) -> bool:
        """Whether this is what the tensor shows now."""
        same = weight.untyped_storage()._cdata == self._storage.cdata and not self._storage.expired()
        return same and self._show(weight) == self._shown

    def _show(self, weight: Tensor) -> tuple[Any, ...]:
        place = weight.data_ptr(), weight.storage_offset(), weight.shape, weight.stride()
        return (*place, weight.dtype, weight.device, weight._version, _STEPS.taken)


class DerivedWeights:
    """The derived weights of one module, kept while every weight shows what it showed when they were made.

    Writes to `weight.data` show nowhere: whoever makes them calls `forget`. Tensors made in inference mode count no
    versions, and of these nothing is kept. Where weights are gathered for every forward, into the same storage, `keep`
    has to be False.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.keep = True
        self._made: tuple[tuple[_Seen, ...], Derived] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DerivedWeights:
        """Give the copy of a module nothing to begin with: it has other weights."""
        copied = DerivedWeights()
        copied.keep = self.keep
        return copied

    def __reduce__(self) -> tuple[type[DerivedWeights], tuple[()]]:
        """Leave out of a pickle what can be made again."""
        return DerivedWeights, ()

    @property
    def made(self) -> Derived | None:
        """What is kept, of the present values or of earlier ones."""
        return None if self._made is None else self._made[1]

    def forget(self) -> None:
        """Keep nothing of what was made."""
        self._made = None

    def of(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        """Return the derived weights of the present values; call it without gradients.

        Implements: FAST-06, FAST-07, FAST-08, FAST-09.
        """
        weights = (gate_NFD, up_NFD, down_NDF)
        if self._made is not None and self._fresh(self._made[0], weights):
            return self._made[1]
        self.forget()  # before there is a second copy
        made = self._derive(*weights)
        if self.keep and not any(weight.is_inference() for weight in weights):
            self._made = tuple(_Seen(weight) for weight in weights), made
        return made

    def _fresh(self, seen: Sequence[_Seen], weights: Sequence[Tensor]) -> bool:
        """Whether the weights are those of which the derived ones were made, with the same values."""
        if any(weight.is_inference() for weight in weights):
            return False
        return all(known.holds(weight) for known, weight in zip(seen, weights, strict=True))

    def _derive(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        w2_t_NFD = down_NDF.detach().transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return Derived(torch.cat([gate_NFD.detach(), up_NFD.detach()], dim=1), w2_t_NFD)


def batched(rows_RD: Tensor, weights: Derived) -> Tensor:
    """Return down (silu(gate x) * up x) of every row x; the first R / N rows are the first expert's, and so on.

    Implements: FAST-11, FAST-13.
    """
    N, (R, D) = len(weights.w13_NGD), rows_RD.shape
    rows_NnD = rows_RD.reshape(N, R // N, D)
    gate_NnF, up_NnF = torch.bmm(rows_NnD, weights.w13_NGD.transpose(1, 2)).chunk(2, dim=2)
    return torch.bmm(F.silu(gate_NnF) * up_NnF, weights.w2_t_NFD).reshape(R, D)
