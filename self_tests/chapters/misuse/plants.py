"""EXCH: bugs in how wrong use is met: nobody looks, or the one rank that does leaves the others waiting."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import PaddedExchange
from moe_conformance.backends.native.exchange.tp_duplicated_tokens import TokenCopies
from moe_conformance.backends.native.fused.token_exchange import DispatchLayout, TokenExchange
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted


@planted(
    Expectation("EXCH-44", "misuse-id-too-high", "run", "rank 0 hung", "cannot complete"),
    Expectation("EXCH-44", "misuse-weights-of-one-slot", "run", "rank 0 hung", "cannot complete"),
)
class RefusedAlone(AllToAllExchange):
    """The rank with the wrong input raises before its first collective, and the others wait for it in theirs."""

    def withdraw(self, device: torch.device) -> None:
        pass


@planted(Expectation("EXCH-44", "misuse-more-tokens-than-ids-padded", "run", "rank 1 raised in step:1"))
class RefusedBeforeItIsPadded(PaddedExchange):
    """Who pads looks at the input before it asks the others for their largest number, and tells nobody."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if prod(x.shape[:-1]) != len(routing.ids_TK):
            raise ValueError(f"{prod(x.shape[:-1])} tokens, but ids for {len(routing.ids_TK)}")
        return super().dispatch(x, routing)


@planted(
    Expectation("EXCH-44", "misuse-ids-in-float-copies", "run", "hung"),
    Expectation("EXCH-44", "misuse-more-tokens-than-ids-copies", "run", "hung"),
    layout=TP2_EP2,
)
class CopyRefusedAlone(TokenCopies):
    """A copy that cannot be cut raises before its routing is compared with the others'."""

    def _compare(self, ids_TK: Tensor, device: torch.device, problem: str) -> None:
        if problem:
            raise ValueError(problem)
        super()._compare(ids_TK, device, problem)


@planted(Expectation("EXCH-44", "misuse-id-too-high", "run", "rank 0 died"))
class IdOfNobodyIsEmpty(TokenExchange):
    """An id of E is taken for an empty slot: by such an id a rank that refuses its input tells the others."""

    def get_dispatch_layout(self, ids_TK: Tensor) -> DispatchLayout:
        return super().get_dispatch_layout(torch.where(ids_TK == self.experts, -1, ids_TK))


@planted(Expectation("EXCH-44", "misuse-ids-in-float-filled", "run", "rank 0 hung"))
class FilledUpBeforeItIsLookedAt(AllToAllExchange):
    """Ids are counted for the room of every expert before anybody looks at them."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.config.capacity.padded and routing.ids_TK.numel():
            torch.bincount(routing.ids_TK.clamp(min=0).flatten())
        return super().dispatch(x, routing)


@planted(
    Expectation("EXCH-44", "misuse-id-too-low", "dispatch", "step accepted an id of -2 on rank 1 on rank 0, rank 1")
)
class LooksOnce(AllToAllExchange):
    """What the first step brings is looked at, and what later ones bring no more; ids that nobody has are no slots."""

    looked = False

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.looked:
            ids_TK = routing.ids_TK.clamp(min=-1)
            return super().dispatch(x, replace(routing, ids_TK=ids_TK))
        self.looked = True
        return super().dispatch(x, routing)


@planted(
    Expectation("EXCH-44", "misuse-id-too-high", "dispatch", "step accepted an id of E on rank 0 on rank 0, rank 1"),
    Expectation("EXCH-44", "misuse-id-too-low", "dispatch", "step accepted an id of -2 on rank 1"),
)
class IdsBroughtIntoRange(AllToAllExchange):
    """An id that no expert has becomes that of the nearest expert, and the token goes to one that nobody chose."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_TK = routing.ids_TK.where(routing.ids_TK == -1, routing.ids_TK.clamp(0, routing.experts - 1))
        return super().dispatch(x, replace(routing, ids_TK=ids_TK))


@planted(Expectation("EXCH-44", "misuse-narrow-tokens", "run", "handed rows of shape (16, 16), expected (R, 32)"))
class NarrowedForAll(AllToAllExchange):
    """Tokens go out as wide as the narrowest of the group, and it is the experts that meet them."""

    def _check_input(self, x: Tensor, routing: Routing) -> None:
        super()._check_input(x.new_zeros(*x.shape[:-1], self.config.hidden), routing)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        width = -collectives.largest(-x.shape[-1], self.topology.group("ep_etp"), x.device)
        return super().dispatch(x[..., :width], routing)


@planted(
    Expectation(
        *("EXCH-45", "misuse-anothers-handle", "combine"),
        "combine accepted the handle of another microbatch on rank 0, 1; expected: an error",
    )
)
class AnswersCutToFit(AllToAllExchange):
    """Rows are cut to the number that the handle knows, and tokens get the answers of another microbatch."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        missing = len(handle.plan.order_R) - len(rows)
        return super().combine(F.pad(rows, (0, 0, 0, missing)), handle)


@planted(Expectation("EXCH-45", "misuse-narrow-answers-on-a-rank", "run", "rank 0 hung", "cannot complete"))
class MisfitRefusedAlone(AllToAllExchange):
    """Answers that do not fit raise before the first collective of combine, in which the others wait."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if rows.shape[1:] != handle.permuted.shape[-1:]:
            raise ValueError(f"rows of width {rows.shape[1]}")
        return super().combine(rows, handle)


@planted(Expectation("EXCH-44", "misuse-id-too-high", "run", "raised"))
class RefusalStays(AllToAllExchange):
    """What was refused once is remembered, and all that comes later is refused too."""

    broken = False

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.broken:
            raise RuntimeError("a dispatch of this exchange has failed")
        self.broken = True
        dispatched = super().dispatch(x, routing)
        self.broken = False
        return dispatched
