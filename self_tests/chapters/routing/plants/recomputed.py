"""ROUTE: bugs of random routes under activation recomputation."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_conformance.backends.native.recomputation import Recomputation
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted


@planted(
    Expectation("ROUTE-20", "recomputed-jitter", "gradient", "run with activation recomputation, dx of rank 0 token"),
    layout=EP2,
)
class JitterDrawnAgain(Recomputation):
    """The state of the generators is not put back, to save a copy."""

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        with set_checkpoint_early_stop(False):
            result: Tensor = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)
            return result


@planted(
    Expectation("ROUTE-20", "recomputed-forced-random", "gradient", "run with activation recomputation, dx of rank 0"),
    layout=SINGLE,
)
class ForcedDrawnAgain(Recomputation):
    """The default generators are put back, and not those that forced logits are drawn from."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext()
