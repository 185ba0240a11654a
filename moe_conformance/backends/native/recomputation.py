"""Activation recomputation, which restores the random generators of forced routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_conformance.backends.native.router.forcing import ForcedRouter, State


class Recomputation:
    """Repeats forwards in their backward.

    Implements: DET-04, ROUTE-20.
    """

    def __init__(self, routers: Iterable[ForcedRouter]) -> None:
        """Take the set of routers that have generators, to which routers may be added later."""
        self.routers = routers

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Return `call(*inputs)`; all ranks repeat all collectives."""
        with set_checkpoint_early_stop(False):
            result: Tensor = checkpoint(call, *inputs, use_reentrant=False, context_fn=self.contexts)
            return result

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the forward and of its repetition."""
        stood: list[tuple[ForcedRouter, State]] = []
        return self._noting(stood), self._standing(stood)

    @contextmanager
    def _noting(self, stood: list[tuple[ForcedRouter, State]]) -> Iterator[None]:
        stood += [(router, router.state()) for router in self.routers]
        yield

    @contextmanager
    def _standing(self, stood: list[tuple[ForcedRouter, State]]) -> Iterator[None]:
        now = [(router, router.state()) for router, _ in stood]
        for router, state in stood:
            router.put(state)
        try:
            yield
        finally:
            for router, state in now:
                router.put(state)
