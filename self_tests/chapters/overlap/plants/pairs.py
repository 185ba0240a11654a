"""OVLP: bugs that show where chunks meet another option."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange.chunks import ChunkedExchange
from moe_conformance.contract import ExpertFn, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation("OVLP-13", "pairs-chunks-32", "dispatch", "rank 0 token 8 slot 0 of microbatch 2 was not delivered")
)
class ChunksOfTheFirstCall(ChunkedExchange):
    """Chunks have the size that the first call needed: of later calls with more tokens the last ones are left out."""

    size = 0

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        self.size = self.size or -(-len(x_TD) // self.chunks)
        room = self.size * self.chunks
        first = Routing(routing.ids_TK[:room], routing.weights_TK[:room], routing.experts)
        y_TD = super().__call__(x_TD[:room], first, expert)
        return F.pad(y_TD, (0, 0, 0, len(x_TD) - len(y_TD))).reshape(x.shape)
