"""The input tensors of a microbatch on a rank, their gradients, and whether they were changed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Routing
from moe_conformance.scenarios.tensors import laid_out, same_bytes, to_cpu
from moe_conformance.workloads.records.workload import Batch, Workload


class Inputs:
    """The inputs of one microbatch, copied to this rank's device.

    `changed` names the inputs whose bytes differ from the batch, including bytes between strides. Gradients are copied
    when their backward returns, since a pipeline sends them on then; `gradients_changed` names those that were
    overwritten later.
    """

    def __init__(self, workload: Workload, batch: Batch, device: torch.device) -> None:
        """Copy the batch to the device."""
        T, D = batch.x_TD.shape
        shape = (*workload.lead_of(T), D)
        strides = workload.twist.strides
        self.given = batch
        x_TD = batch.x_TD.to(device, copy=True)
        if strides.get("x") == "swapped":
            x = x_TD.reshape(shape).transpose(0, 1).contiguous().transpose(0, 1)
        else:
            x = laid_out(x_TD, strides.get("x")).reshape(shape)
        self.x = x.detach().requires_grad_("x" not in workload.twist.unasked)
        self.routing = Routing(
            laid_out(batch.ids_TK.to(device, copy=True), strides.get("ids")),
            laid_out(batch.weights_TK.to(device, copy=True), strides.get("weights"))
            .detach()
            .requires_grad_("weights" not in workload.twist.unasked),
            workload.config.experts,
        )
        self.upstream = laid_out(batch.upstream.to(device, copy=True), strides.get("upstream"))
        self.gradients: dict[str, Tensor] = {}
        self.memory = {name: _memory(held).clone() for name, held in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        ids_TK, weights_TK = self.routing.ids_TK, self.routing.weights_TK
        return {"x": self.x, "ids": ids_TK, "weights": weights_TK, "upstream": self.upstream}

    def _current_gradients(self) -> dict[str, Tensor]:
        hidden = self.given.x_TD.shape[-1]
        now = {"x": to_cpu(self.x.grad, flat=hidden), "weights": to_cpu(self.routing.weights_TK.grad)}
        return {name: grad for name, grad in now.items() if grad is not None}

    def cut_graphs(self) -> None:
        """Detach the gradients from the graphs that a backward with create_graph left."""
        for leaf in (self.x, self.routing.weights_TK):
            leaf.grad = None if leaf.grad is None else leaf.grad.detach()

    def keep_gradients(self) -> None:
        """Store a copy of the present gradients."""
        self.gradients = self._current_gradients()

    def gradients_changed(self) -> tuple[str, ...]:
        """Return the names of the gradients whose bytes differ from the stored copies."""
        now = self._current_gradients()
        return tuple(name for name, kept in self.gradients.items() if not same_bytes(kept, now[name]))

    def changed(self) -> tuple[str, ...]:
        """Return the names of the inputs whose bytes differ from the batch."""
        given = {
            "x": self.given.x_TD,
            "ids": self.given.ids_TK,
            "weights": self.given.weights_TK,
            "upstream": self.given.upstream,
        }
        return tuple(
            name
            for name, held in self._held().items()
            if not same_bytes(held.detach().cpu().reshape(given[name].shape), given[name])
            or not torch.equal(_memory(held), self.memory[name])
        )


def _memory(tensor: Tensor) -> Tensor:
    """Return all bytes of the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
