"""The operations of torchtitan's dispatchers on rows of one rank. R rows, W sources, N local experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Permuted, Routing, Unsupported


class Permutation:
    """A dispatcher without expert parallelism: the local one, or torchao's where rows are padded."""

    def __init__(self, config: Config) -> None:
        from torchtitan.models.common import token_dispatcher

        sizes: dict[str, Any] = {"num_experts": config.experts, "top_k": config.top_k}
        if config.padding.row_multiple == 1:
            self._dispatcher = token_dispatcher.LocalTokenDispatcher.Config(**sizes).build()
        else:
            built = token_dispatcher.TorchAOTokenDispatcher.Config(
                **sizes, pad_multiple=config.padding.row_multiple
            ).build()
            built.wire_meshes(ep_mesh=None)
            self._dispatcher = built

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher."""
        return {"dispatcher": type(self._dispatcher).__qualname__}

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return the rows as the experts would receive them."""
        counts_E = torch.bincount(routing.ids_TK.reshape(-1), minlength=routing.experts)
        rows_RD, counts_N, metadata = self._dispatcher.dispatch(x_TD, routing.weights_TK, routing.ids_TK, counts_E)
        return Permuted(rows_RD, counts_N, None, (metadata, x_TD))

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return the sums."""
        y_TD: Tensor = self._dispatcher.combine(rows_RD, *handle)
        return y_TD


class Reordering:
    """The reordering of the all-to-all dispatcher, which reads only the number of sources from its mesh."""

    def __init__(self, config: Config) -> None:
        from torchtitan.models.common import token_dispatcher

        built = token_dispatcher.AllToAllTokenDispatcher.Config(num_experts=config.experts, top_k=config.top_k)
        self._dispatcher: Any = built.build()

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher, and what stands in for its mesh."""
        return {"dispatcher": type(self._dispatcher).__qualname__, "mesh": "a stand-in of the adapter, of W ranks"}

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows expert by expert."""
        rows: Tensor = self._permute(rows_RD, counts_WN)[1]
        return rows

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows source by source."""
        shape, _, index_R, _ = self._permute(rows_RD, counts_WN)
        rows: Tensor = self._dispatcher._unpermute(rows_RD, shape, index_R)
        return rows

    def _permute(self, rows_RD: Tensor, counts_WN: Tensor) -> Any:
        self._dispatcher.ep_mesh = SimpleNamespace(size=lambda: counts_WN.shape[0])
        return self._dispatcher._permute(rows_RD, counts_WN.reshape(-1))


class ScatterAdd:
    """The operator with which dispatchers put routed rows back, which takes an index of every element."""

    def __init__(self) -> None:
        from torchtitan.ops.scatter_add import deterministic_scatter_add

        self._add: Any = deterministic_scatter_add

    @property
    def resolved(self) -> Mapping[str, str]:
        """The operator."""
        return {"scatter add": self._add._qualname}

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Return the sums in new memory."""
        y_ND: Tensor = self._add(out_ND, index_J.reshape(-1, 1).expand(-1, src_JD.shape[-1]), src_JD)
        return y_ND

    def add_(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Refuse: there is no operator in place."""
        raise Unsupported("torchtitan adds rows out of place only")


class CombineAdd:
    """The same operator, as it adds to what shared experts returned."""

    def __init__(self) -> None:
        self._sums = ScatterAdd()
        self.resolved = self._sums.resolved

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Return the sums in new memory, so that tokens stay as they are."""
        return self._sums.add(out_ND, index_J, src_JD)
