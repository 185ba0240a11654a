"""What a torchtitan with shortcuts does to rows alone: equal splits, permutations, and adding rows back.

R rows, P rows with padding, W sources, N local experts, J slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.torchtitan.fast_layer import dispatcher_config
from moe_conformance.backends.torchtitan.rows import Permutation, Reordering
from moe_conformance.contract import Config


class FastEqualSplits:
    """The dispatcher's functions; the size is that of the largest piece of any rank."""

    def __init__(self, dispatcher: Any, device: torch.device) -> None:
        self._dispatcher, self._device = dispatcher, device

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the dispatcher."""
        return {"equal splits": type(self._dispatcher).__qualname__}

    def size(self, pieces: Sequence[int]) -> int:
        """Return the size of the largest piece of any rank."""
        size: int = self._dispatcher._global_equal_a2a_split_size(list(pieces), self._device, torch.int64)
        return size

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the pieces with zeros behind each."""
        rows_PD: Tensor = self._dispatcher._pad_to_equal_splits(rows_RD, list(pieces), size)
        return rows_PD

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the pieces without what is behind them."""
        rows_RD: Tensor = self._dispatcher._compact_equal_splits(rows_PD, list(pieces), size)
        return rows_RD


def _wide(index_J: Tensor, src_JD: Tensor) -> Tensor:
    """Return the index of every element, which the operators take."""
    return index_J.reshape(-1, 1).expand(-1, src_JD.shape[-1])


class FastPermutation(Permutation):
    """The local dispatcher."""

    def __init__(self, config: Config) -> None:
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        sizes: dict[str, Any] = {"num_experts": config.experts, "top_k": config.top_k}
        self._dispatcher = LocalTokenDispatcher.Config(**sizes, score_before_experts=False).build()


class FastReordering(Reordering):
    """The all-to-all dispatcher: by a view where all counts are equal, as under forced load balance."""

    def __init__(self, config: Config) -> None:
        self._dispatcher = dispatcher_config(config, forced=False).build()

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the dispatcher, and which way it may take."""
        return {"dispatcher": type(self._dispatcher).__qualname__, "equal counts": "by a view"}

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows source by source."""
        shape, _, *index = self._permute(rows_RD, counts_WN)
        rows: Tensor = self._dispatcher._unpermute(rows_RD, shape, *index)
        return rows

    def _permute(self, rows_RD: Tensor, counts_WN: Tensor) -> Any:
        """Return the shape and the rows, then the index or, behind None, the shape of the view."""
        counts, (W, N) = counts_WN.reshape(-1), counts_WN.shape
        if len(set(counts.tolist())) == 1:
            count = int(counts[0])
            shape, rows, _, _, view = self._dispatcher._permute_equal_counts(rows_RD, counts, W, N, count)
            return shape, rows, None, view
        shape, rows, index_R, _ = self._dispatcher._permute(rows_RD, counts, W, N)
        return shape, rows, index_R


class FastScatterAdd:
    """The operator, and the function in place."""

    def __init__(self) -> None:
        from torchtitan.ops import scatter_add

        self._ops: Any = scatter_add

    @property
    def resolved(self) -> Mapping[str, str]:
        """The operator."""
        return {"scatter add": self._ops.deterministic_scatter_add._qualname}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return the sums in new memory."""
        y_ND: Tensor = self._ops.deterministic_scatter_add(out_ND, _wide(index_J, src_JD), src_JD)
        return y_ND

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return the output, into which rows were added."""
        y_ND: Tensor = self._ops.deterministic_scatter_add_(out_ND, _wide(index_J, src_JD), src_JD)
        return y_ND


class FastCombineAdd:
    """The function that chooses between the two."""

    def __init__(self) -> None:
        from torchtitan.models.common import token_dispatcher

        self._add: Any = token_dispatcher._scatter_add_forward_or_autograd

    @property
    def resolved(self) -> Mapping[str, str]:
        """The function."""
        return {"combine add": self._add.__qualname__}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Return the sums, in new memory or in the output."""
        y_ND: Tensor = self._add(out_ND, _wide(index_J, src_JD), src_JD, x_ND)
        return y_ND
