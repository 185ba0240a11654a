"""The library's expert parallel implementations around the given experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe_conformance.backends.transformers.placement import Placement
from moe_conformance.backends.transformers.shared_batch import SharedBatch
from moe_conformance.contract import Delivery, ExpertFn, Routing, Unrouted, refusals


class _Given(nn.Module):
    """Stands where the experts of a model stood: N of them, which answer by the function given for the call."""

    def __init__(self, held: int, unrouted: Unrouted) -> None:
        super().__init__()
        self.num_experts, self._unrouted = held, unrouted
        self.expert: ExpertFn

    def forward(self, rows_RD: Tensor, ids_RJ: Tensor, weights_RJ: Tensor) -> Tensor:
        ids_RJ = torch.where(ids_RJ < self.num_experts, ids_RJ, -1)  # N means another rank's expert
        return self.expert(Delivery.listed(rows_RD, ids_RJ, weights_RJ, unrouted=self._unrouted))


class SharedExchange:
    """An EPImplementation as `ep_dispatch_experts` installs it, on the batch that tensor ranks share.

    It shares the tokens that it is given, or, if it `gathers`, those of all tensor ranks.
    """

    def __init__(self, placement: Placement, implementation: str | None, *, gathers: bool) -> None:
        """Install the implementation of that name, or none; Unsupported where the library refuses it."""
        self._gathers = gathers and placement.topology.sizes["tp"] > 1
        # All-reduce hands experts the tokens of others too, and so does auto where there are no gradients.
        unrouted: Unrouted = "padding" if implementation in (None, "all_to_all") else "zero"
        self._given, self._placement, self._class = _Given(placement.held, unrouted), placement, "none"
        self._hands_all = False
        if implementation is None:
            return
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, EPImplementationInterface

        with refusals(ValueError, match="needs every rank of the expert group to hold the same batch"):
            EpDispatchExpertsParallel().install_forward(
                self._given, placement.expert_mesh["ep"], tp_mesh=placement.tp_mesh, ep_implementation=implementation
            )
        self._class = EPImplementationInterface()[implementation].__name__
        self._hands_all = implementation == "all_reduce"

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts: one contiguous range per ep rank."""
        return tuple(range(self._placement.first, self._placement.first + self._placement.held))

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the implementation, and what the adapter did to the tokens."""
        sizes = self._placement.topology.sizes
        shared = {"tokens": f"gathered from {sizes['tp']} ranks by the adapter", "wire": "copies"}
        told = {"implementation": self._class, "ep ranks": str(sizes["ep"])}
        return (
            told | ({"handed": "tokens"} if self._hands_all else {}) | (shared if self._gathers else {})
        )

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the installed forward on this rank's tokens, or on those of all tensor ranks, gathered."""
        self._given.expert = expert
        x_TD = x.reshape(-1, x.shape[-1])
        if not self._gathers:
            y_TD: Tensor = self._given(x_TD, routing.ids_TK, routing.weights_TK)
        else:
            batch = SharedBatch(x_TD.shape[0], self._placement.topology.group("tp"), x.device)
            arguments = x_TD, routing.ids_TK, routing.weights_TK
            y_TD = batch.own(self._given(*(batch.of_all(each) for each in arguments)))
        return y_TD.reshape(x.shape)
