"""The library's permutation and its sort of chunks, by themselves. T tokens, E experts, R rows, W sources, N local."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.contract import Config, Dense, Permuted, Routing

_SHIMS = {"shims": "; ".join(library.SHIMS) or "none"}


class Permutation:
    """`permute` and `unpermute` of moe_utils, unfused; unpermute applies the weights."""

    resolved: Mapping[str, str] = {"permute": "unfused"} | _SHIMS

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        """Return the rows; the library leaves it to its callers to count them."""
        probs_TE, map_TE = routing.dense()
        rows = int(map_TE.sum())  # as the dispatchers tell it; newer versions require it, and return more
        rows_RD, weights_R, index_R, *_ = library.moe_utils.permute(x_TD, map_TE, probs=probs_TE, num_out_tokens=rows)
        return Permuted(rows_RD, None, weights_R, (index_R, x_TD.shape, probs_TE, map_TE))

    def unpermute(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Return the sums."""
        index_R, shape, probs_TE, map_TE = handle
        y_TD: Tensor = library.moe_utils.unpermute(rows_RD, index_R, shape, probs=probs_TE, routing_map=map_TE)
        return y_TD


class RoutingForms:
    """The two conversions of the flex dispatcher's manager for DeepEP, which needs no DeepEP for them.

    Slots are empty where the router has a capacity factor, and nowhere else.
    """

    resolved: Mapping[str, str] = {
        "to a dense map": "_DeepepManager._indices_to_multihot",
        "to indices": "_DeepepManager.setup_metadata, with a capacity factor",
    } | _SHIMS

    def __init__(self, config: Config) -> None:
        """Give a manager what the two read: its own constructor asks for DeepEP."""
        self._manager: Any = object.__new__(library.token_dispatcher._DeepepManager)
        vars(self._manager).update(
            num_local_experts=config.experts,
            num_experts=config.experts,
            router_topk=config.top_k,
            capacity_factor=float(config.experts),
        )

    def to_dense(self, routing: Routing) -> Dense:
        """Return the map, as for the ids that a rank received."""
        map_TE, weights_TE = self._manager._indices_to_multihot(routing.ids_TK, routing.weights_TK)
        return Dense(weights_TE, map_TE)

    def to_indices(self, weights_TE: Tensor, map_TE: Tensor) -> Routing:
        """Return the ids, as they are sent."""
        self._manager.setup_metadata(map_TE, weights_TE)
        return Routing(self._manager.token_indices, self._manager.token_probs, self._manager.num_experts)


class Reordering:
    """`sort_chunks_by_idxs`, with the order that the all-to-all dispatcher gives it."""

    resolved: Mapping[str, str] = {"sort of chunks": "unfused"} | _SHIMS

    def to_expert_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows expert by expert."""
        order = self._chunks(counts_WN).T.reshape(-1)
        rows: Tensor = library.moe_utils.sort_chunks_by_idxs(rows_RD, counts_WN.reshape(-1), order)[0]
        return rows

    def to_source_major(self, rows_RD: Tensor, counts_WN: Tensor) -> Tensor:
        """Return the rows source by source."""
        order = self._chunks(counts_WN.T).T.reshape(-1)
        rows: Tensor = library.moe_utils.sort_chunks_by_idxs(rows_RD, counts_WN.T.reshape(-1), order)[0]
        return rows

    def _chunks(self, counts: Tensor) -> Tensor:
        """Return the numbers of the chunks in their order."""
        return torch.arange(counts.numel()).reshape(counts.shape)
