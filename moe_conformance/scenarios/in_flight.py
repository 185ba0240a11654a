"""The state of one microbatch on one rank, from its first operation to the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_conformance.scenarios.inputs import Inputs
from moe_conformance.scenarios.outcome import ExchangeSeen, Grad, Microbatch, RouterSeen
from moe_conformance.scenarios.padding import PaddingGradients
from moe_conformance.scenarios.tensors import same_bytes, to_cpu


@dataclass
class InFlight:
    """The state of one microbatch.

    Attributes:
        delivered: The delivery and the handle, between the halves of a forward.
        output: What the forward returned.
        returned: A copy of the output, made when it was returned.
        weights_at: Where the exchange applied routing weights, as claimed when the forward returned.
        outputs_changed: Which outputs held other bytes after the backward; None before that is known.
        spoilt: The experts that replace the gradients at padding rows, if the workload has them.
        overflow: The message with which a dispatch refused the microbatch.
    """

    inputs: Inputs
    delivered: Any = None
    output: Tensor | None = None
    returned: Tensor | None = None
    routed: RouterSeen = field(default_factory=RouterSeen)
    weights_at: str | None = None
    outputs_changed: tuple[str, ...] | None = None
    spoilt: PaddingGradients | None = None
    overflow: str | None = None

    def output_kept(self) -> bool:
        """Return whether the output still holds the bytes that were returned."""
        assert self.output is not None
        assert self.returned is not None
        return same_bytes(self.returned.cpu(), self.output.detach().cpu())

    def seen(self, exchange: ExchangeSeen, hidden: int | None) -> Microbatch:
        """Return the record for the judge; y is flattened to (T, hidden), and left out if `hidden` is None."""
        if self.overflow is not None:
            return Microbatch(None, (), None, Grad(None), Grad(None), exchange)
        assert self.output is not None
        # y as it was returned: what later microbatches may do to its memory is judged for itself.
        y = None if hidden is None else to_cpu(self.returned).reshape(-1, hidden)  # type: ignore[union-attr]
        return Microbatch(
            y=y,
            y_shape=tuple(self.output.shape),
            y_dtype=self.output.dtype,
            dx_TD=Grad(self.inputs.gradients.get("x")),
            dweights_TK=Grad(self.inputs.gradients.get("weights")),
            exchange=exchange,
            router=self.routed,
            inputs_changed=self.inputs.changed(),
            outputs_changed=self.outputs_changed or (),
            gradients_changed=self.inputs.gradients_changed(),
        )
