"""DET: bugs of activation recomputation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_conformance.backends.native.recomputation import Recomputation
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


@planted(
    Expectation("DET-04", "own-even-bfloat16", "gradient", "with activation recomputation", "dweights of rank 0"),
    real="NVIDIA/Megatron-LM commit 4cd9563a20 (#3165)",
    layout=EP2_EDP2,
)
class OnlyTheFirstArgument(Recomputation):
    """What is recomputed takes the tokens; other arguments get there as constants."""

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        others = [each.detach() for each in inputs[1:]]
        result: Tensor = checkpoint(lambda x: call(x, *others), inputs[0], use_reentrant=False)
        return result


@planted(
    Expectation("DET-04", "own-even-bfloat16", "gradient", "of two microbatches in flight", "of rank 0 token"),
    layout=EP2_EDP2,
)
class LastInFlight(Recomputation):
    """The forward that runs again takes the weights of the last forward, those of another microbatch."""

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        self.last = [each.detach() for each in inputs]

        def again(*given: Tensor) -> Tensor:
            swapped = [own + (last - own).detach() for own, last in zip(given[1:], self.last[1:], strict=True)]
            return call(given[0], *swapped)

        result: Tensor = checkpoint(again, *inputs, use_reentrant=False)
        return result


@planted(
    Expectation("DET-04", "own-even-bfloat16", "gradient", "with activation recomputation"),
    real="pytorch/torchtitan commit a5a60cc2a (#2794)",
    layout=EP2_EDP2,
)
class FirstBufferKept(Recomputation):
    """A queue keeps what the forward made, in order; the first forward makes a buffer too, its repetition does not."""

    made = False

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        kept = [] if self.made else [torch.zeros_like(inputs[0])]
        self.made = True
        kept.append(inputs[0].detach())
        calls: list[int] = []

        def again(x: Tensor, *others: Tensor) -> Tensor:
            calls.append(1)
            return call(x if len(calls) == 1 else x + (kept[0] - x).detach(), *others)

        result: Tensor = checkpoint(again, *inputs, use_reentrant=False)
        return result
