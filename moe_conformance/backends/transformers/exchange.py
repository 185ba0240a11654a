"""The library's expert parallel implementations around the given experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_conformance.backends.shared_batch import SharedBatch
from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.contract import Claims, Delivery, ExpertFn, Routing, Unrouted, refusals


class _Given(nn.Module):
    """Replaces the experts of a model: N of them, which compute the function given for the call."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.num_experts = held
        self.expert: ExpertFn
        self.unrouted: Unrouted

    def forward(self, rows_RD: Tensor, ids_RJ: Tensor, weights_RJ: Tensor) -> Tensor:
        ids_RJ = torch.where(ids_RJ < self.num_experts, ids_RJ, -1)  # N means another rank's expert
        return self.expert(Delivery.listed(rows_RD, ids_RJ, weights_RJ, unrouted=self.unrouted))


class SharedExchange:
    """An EPImplementation as `ep_dispatch_experts` installs it, on the batch that tensor ranks share.

    It shares the tokens that it is given, or, if it `gathers`, those of all tensor ranks.
    """

    def __init__(self, placement: Placement, implementation: str | None, *, gathers: bool) -> None:
        """Install the implementation of that name, or none; Unsupported where the library refuses it."""
        self._gathers = gathers and placement.topology.sizes["tp"] > 1
        self._given, self._placement, self._class = _Given(placement.held), placement, "none"
        self._reduces = self._hands_all = self._chooses = False
        if implementation is None:
            return
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, EPImplementationInterface

        with refusals(ValueError, match="needs every rank of the expert group to hold the same batch"):
            EpDispatchExpertsParallel().install_forward(
                self._given, placement.expert_mesh["ep"], tp_mesh=placement.tp_mesh, ep_implementation=implementation
            )
        self._class = EPImplementationInterface()[implementation].__name__
        self._reduces = self._hands_all = implementation == "all_reduce"
        shared = placement.topology.ranks("tp") == placement.topology.ranks("ep")
        self._chooses = implementation == "auto" and shared

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts: one contiguous range per ep rank."""
        return tuple(range(self._placement.first, self._placement.first + self._placement.held))

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the implementation, and what the adapter gathered."""
        sizes = self._placement.topology.sizes
        resolved = {"implementation": self._class, "ep ranks": str(sizes["ep"])}
        return resolved | ({"tokens": f"gathered from {sizes['tp']} ranks by the adapter"} if self._gathers else {})

    @property
    def claims(self) -> Claims:
        """Where its last forward applied weights, what the experts receive, and what the adapter gathered."""
        return Claims(
            wire="copies" if self._gathers else "pairs",
            handed="tokens" if self._hands_all else "routed",
            weights_at="expert" if self._reduces or self._class == "none" else "combine",
        )

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the installed forward on this rank's tokens, or on those of all tensor ranks, gathered."""
        if self._chooses:  # AutoEP reduces where no gradient goes through the tokens, and exchanges where one does
            self._reduces = not (torch.is_grad_enabled() and x.requires_grad)
        # With the reduction experts receive the tokens of other ranks too.
        self._given.expert, self._given.unrouted = expert, "zero" if self._reduces else "padding"
        x_TD = x.reshape(-1, x.shape[-1])
        if not self._gathers:
            y_TD: Tensor = self._given(x_TD, routing.ids_TK, routing.weights_TK)
        else:
            batch = SharedBatch(x_TD.shape[0], self._placement.topology.group("tp"), x.device)
            arguments = x_TD, routing.ids_TK, routing.weights_TK
            y_TD = batch.local_rows(self._given(*(batch.of_all(argument) for argument in arguments)))
        return y_TD.reshape(x.shape)
