"""Blocks of models as the library finds them, the groups of its own, and which experts a rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from moe_conformance.contract import Config, Topology, Unsupported


class Native(nn.Module):
    """A block of a model, before the library replaces it."""

    def __init__(self, gate: nn.Module, experts: list[nn.Module], top_k: int, shared: nn.Module | None) -> None:
        """Take its parts."""
        super().__init__()
        self.gate, self.experts = gate, nn.ModuleList(experts)
        self.num_experts, self.top_k, self.num_experts_per_tok = len(experts), top_k, top_k
        self.config = SimpleNamespace(
            n_routed_experts=len(experts), n_shared_experts=None if shared is None else 1, num_experts_per_tok=top_k
        )
        if shared is not None:
            self.shared_experts = shared


class Placement:
    """The groups of the blocks, and which experts a rank holds."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        """Take a topology."""
        self.topology, self.device = topology, device
        self.ep: Any = topology.group("ep")
        self._alone = topology.ranks("tp") == (topology.rank,)

    def held(self, config: Config) -> range:
        """Return the global ids of this rank's experts.

        Raises:
            Unsupported: the blocks cannot place them.
        """
        sizes = self.topology.sizes
        if sizes["etp"] > 1:
            raise Unsupported(f"etp = {sizes['etp']}: experts are sharded over the tensor ranks of all else")
        if config.experts < 1 or config.experts % sizes["ep"]:
            raise Unsupported(f"every rank holds the same number of experts: {config.experts} on ep = {sizes['ep']}")
        held = config.experts // sizes["ep"]
        first = self.topology.ranks("ep").index(self.topology.rank) * held
        return range(first, first + held)

    def block(self, name: str, native: nn.Module) -> Any:
        """Let the library replace a block of a model."""
        from moe_conformance.backends.colossalai import library

        groups = {"moe_dp_group": self.topology.group("edp"), "ep_group": self.ep}
        if name != "deepseek-v3":
            groups["tp_group"] = self.topology.group("etp")  # of one rank
        return library.blocks[name].from_native_module(native.to(self.device), **groups)
