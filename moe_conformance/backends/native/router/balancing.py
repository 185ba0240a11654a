"""The routers of a model whose balance bias is updated by their loads, at the end of every step.

T tokens, K slots, E experts, L layers with a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Topology


class BalancingRouters(Replicated):
    """One router for each layer, each with counters of its own loads.

    Implements: BIAS-08, BIAS-10, BIAS-11.
    """

    replicas = ("dp_cp", "tp")
    takes_mask = True
    loads_LE: Tensor

    def __init__(self, config: Config, topology: Topology, routers: Sequence[Router]) -> None:
        """Take the routers; their biases are buffers, and are saved with them."""
        super().__init__()
        self.config, self.topology = config, topology
        self.routers = nn.ModuleList(routers)
        device = next(self.parameters()).device
        counters_LE = torch.zeros(len(routers), config.experts, dtype=torch.int64, device=device)
        self.register_buffer("loads_LE", counters_LE, persistent=False)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes that were built."""
        return {"routers": type(self).__name__}

    @property
    def claims(self) -> Claims:
        """Loads are counted before slots are dropped, on each rank by itself, and not where routing is forced."""
        return Claims()

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router of every layer under its number, and its balance bias."""
        for number, router in enumerate(self.routers):
            for window in router.named(read):  # type: ignore[operator]
                yield Named(window.name, number, window.view)

    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Route every layer's tokens, and count them."""
        return tuple(self._one(number, x_SBD, padding_mask_T) for number, x_SBD in enumerate(x))

    def _one(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        """Count once, whether the forward runs again in the backward or not.

        Implements: BIAS-06.
        """
        if self.config.balance.recompute and torch.is_grad_enabled():
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            routed: Routed = checkpoint(self.route, number, x, padding_mask_T, **how)
        else:
            routed = self.route(number, x, padding_mask_T)
        if self.counts():
            self.count(number, self.load(routed, padding_mask_T))
        return routed

    def route(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        """Return what the router of a layer returns."""
        routed: Routed = self.routers[number](x, padding_mask_T)
        return routed

    def counts(self) -> bool:
        """Whether a forward counts: those of training do, unless routing is forced.

        Implements: BIAS-06, BIAS-07.
        """
        return self.training and torch.is_grad_enabled() and not self.config.routing.forced

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        """Return the selected slots of valid tokens by expert, int64 (E,): the router gives padding no slots.

        Implements: BIAS-05.
        """
        assert routed.counts_E is not None  # native's router returns them
        return routed.counts_E

    def count(self, number: int, load_E: Tensor) -> None:
        """Add a load to the counters of a layer.

        Implements: BIAS-04.
        """
        self.loads_LE[number] += load_E

    def loads(self) -> Sequence[Tensor] | None:
        """Return the counters."""
        return tuple(self.loads_LE)

    @torch.no_grad()
    def update(self) -> None:
        """Move every bias by the loads of the step over all ranks, in place, and begin to count anew.

        Implements: BIAS-03, BIAS-04, BIAS-08.
        """
        total_LE = self.over_ranks(self.loads_LE.clone())
        for number, n_E in enumerate(total_LE):
            self.move(number, self.change(n_E))
        self.begin()

    def move(self, number: int, change_E: Tensor) -> None:
        """Add a change to the bias of a layer.

        Implements: BIAS-08, BIAS-09.
        """
        bias_E = self.routers[number].balance_bias
        assert isinstance(bias_E, Tensor)  # the session builds no routers without
        bias_E += change_E

    def begin(self) -> None:
        """Set the counters to zero."""
        self.loads_LE.zero_()

    def change(self, n_E: Tensor) -> Tensor:
        """Return the rate with the sign of the mean load minus each load; in integers, n - E n_e.

        Implements: BIAS-01.
        """
        return self.config.balance.rate * torch.sign(n_E.sum() - len(n_E) * n_E).double()

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        """Sum over the ranks that hold tokens of these routers.

        Implements: BIAS-02.
        """
        for name in ("tp", "dp_cp"):
            if self.topology.group(name).size() > 1:
                dist.all_reduce(loads_LE, group=self.topology.group(name))
        return loads_LE
