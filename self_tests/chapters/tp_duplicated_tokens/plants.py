"""EXCH: bugs of tokens that the ranks of a tp group hold as copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.tp_duplicated_tokens import Shares, TokenCopies
from moe_conformance.contract import Claims, Delivery, Routing
from self_tests.chapters.gradients.plants.unasked import lost_gradient
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted


@planted(
    Expectation("EXCH-35", "copies-even", "dispatch", "was delivered twice to expert"),
    Expectation("EXCH-35", "copies-own-even", "gradient", "is 2.000 x the expected value", "tp"),
    real="deepspeedai/DeepSpeed PRs #2074, #5626",
    layout=TP2_EP2,
)
class EveryCopySends(TokenCopies):
    """Every tensor rank dispatches all of its tokens, as if they were its own, and experts see each tp times."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return self.inner.dispatch(x, routing)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return self.inner.combine(rows, handle)


@planted(
    Expectation("EXCH-35", "copies-odd-even", "dispatch", "rank 0 token 10 slot 0 was not delivered to expert"),
    Expectation(
        *("EXCH-36", "copies-odd-even", "dispatch"),
        *("y of rank 0 token 10 is zero", "first wrong: the rows at the experts' input (dispatch)"),
    ),
    layout=TP2_EP2,
)
class RestOfADivision(TokenCopies):
    """All tensor ranks take as many tokens, and those that a division by tp leaves over are taken by none."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        T = len(routing.ids_TK)
        left_T = torch.arange(T, device=x.device) >= T - T % self.group.size()
        return super().dispatch(x, replace(routing, ids_TK=routing.ids_TK.masked_fill(left_T[:, None], -1)))


class _SummedBack(torch.autograd.Function):
    """Nothing forward; backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@planted(
    Expectation("EXCH-36", "copies-even", "gradient", "dx", "is 2.000 x the expected value", "tp"),
    Expectation("EXCH-35", "copies-own-even", "gradient", "is 2.000 x the expected value", "tp"),
    layout=TP2_EP2,
)
class UpstreamSummed(TokenCopies):
    """The gather of the answers has a reduce-scatter for a backward, and adds up copies of one upstream gradient."""

    def _join(self, y_SD: Tensor, shares: Shares) -> Tensor:
        summed: Tensor = _SummedBack.apply(super()._join(y_SD, shares), self.group)  # type: ignore[no-untyped-call]
        return summed


@planted(
    Expectation("EXCH-36", "copies-unasked-x-even", "gradient", "the gradient of the weights on rank 0", "is None"),
    layout=TP2_EP2,
)
class WeightsGoBackWithCopies(TokenCopies):
    """The gradients of the weights are gathered with those of the tokens, and are not where tokens ask for none."""

    def _cut(self, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        if not x_TD.requires_grad:
            weights_TK = lost_gradient(weights_TK)
        return super()._cut(x_TD, weights_TK, shares)


@planted(
    Expectation("EXCH-36", "copies-unasked-weights-even", "gradient", "the gradient of x on rank 0", "is None"),
    layout=TP2_EP2,
)
class CopiesGoBackWithWeights(TokenCopies):
    """The gradients of the tokens are gathered with those of the weights, and are not where weights ask for none."""

    def _cut(self, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        if not weights_TK.requires_grad:
            x_TD = lost_gradient(x_TD)
        return super()._cut(x_TD, weights_TK, shares)


class _OwnShareBack(torch.autograd.Function):
    """Nothing forward; backward this rank's share, and zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sizes, rank = ctx.shares.sizes_W, ctx.shares.group.rank()
        own = torch.zeros_like(gradients[0])
        first = sum(sizes[:rank])
        own[first : first + sizes[rank]] = gradients[0][first : first + sizes[rank]]
        return own, None


class PartsOfGradients(TokenCopies):
    """Copies have the gradients of their own share, and say so: no bug, see `Parts`."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, copies="parts")

    def _cut(self, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        x_TD = _OwnShareBack.apply(x_TD, shares)  # type: ignore[no-untyped-call]
        weights_TK = _OwnShareBack.apply(weights_TK, shares)  # type: ignore[no-untyped-call]
        return super()._cut(x_TD, weights_TK, shares)


class Parts(Native):
    """Native, with parts of gradients."""

    session_class = NativeSession.building(PartsOfGradients)


@planted(
    Expectation(
        "EXCH-36", "copies-even", "gradient", "is zero; likely cause: the gradient of expert", "(backward of dispatch)"
    ),
    real="pytorch/torchtitan commit ecae62f15 (#4054)",
    layout=TP2_EP2,
)
class ShareTakenForWhole(PartsOfGradients):
    """Every copy has the gradient of its own share, and nobody adds them up: a layout says that they are whole."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, copies="complete")


@planted(Expectation("EXCH-36", "copies-even", "gradient", "dx", "is 2.000 x the expected value"), layout=TP2_EP2)
class WholeTakenForParts(TokenCopies):
    """Gradients are whole on every copy and are said to be parts, so that the trainer adds them up."""

    @property
    def claims(self) -> Claims:
        return replace(super().claims, copies="parts")


@planted(
    Expectation("EXCH-07", "copies-even-bfloat16", "combine", "has the dtype torch.float32 instead of torch.bfloat16"),
    Expectation(
        "EXCH-07", "copies-own-even-bfloat16", "combine", "has the dtype torch.float32 instead of torch.bfloat16"
    ),
    layout=TP2_EP2,
)
class AnswersStayWide(TokenCopies):
    """Answers are gathered in float32, and every copy keeps them so."""

    def _join(self, y_SD: Tensor, shares: Shares) -> Tensor:
        return super()._join(y_SD.float(), shares)


@planted(Expectation("EXCH-08", "copies-even", "run", "the backend changed its input x on rank"), layout=TP2_EP2)
class OthersSharesCleared(TokenCopies):
    """A rank clears the tokens that other copies dispatch, in the caller's memory."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        x_TD, sizes = x.detach().reshape(-1, x.shape[-1]), handle.shares.sizes_W
        for rank, part_SD in enumerate(torch.split(x_TD, sizes)):
            if rank != self.group.rank():
                part_SD.zero_()
        return delivery, handle


@planted(
    Expectation("EXCH-04", "copies-even", "dispatch", "reports", "rows for expert", "and delivers"), layout=TP2_EP2
)
class CountsOfAllCopies(TokenCopies):
    """Experts are told counts of all that the tensor ranks hold, and are handed the distinct tokens."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        counts_N = delivery.counts_N
        return replace(delivery, counts_N=None if counts_N is None else counts_N * self.group.size()), handle


class _OntoTheFirst(torch.autograd.Function):
    """Nothing forward; backward everything on the first copy, and no gradient at all on the others."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.first = group.rank() == 0
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return gradients[0] if ctx.first else None, None


@planted(
    Expectation(
        *("EXCH-36", "copies-even", "gradient"),
        *("the gradient of x in microbatch 0 is None on rank 1", "while other tp ranks have a part"),
    ),
    Expectation("EXCH-36", "copies-own-even", "gradient", "the gradient of x in microbatch 0 is None on rank 1"),
    layout=TP2_EP2,
)
class NoPartOnTheOthers(PartsOfGradients):
    """Gradients are gathered on the first copy; the others have none to add, and leave the sum over tp to hang."""

    def _cut(self, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        x_TD = _OntoTheFirst.apply(x_TD, self.group)  # type: ignore[no-untyped-call]
        weights_TK = _OntoTheFirst.apply(weights_TK, self.group)  # type: ignore[no-untyped-call]
        return TokenCopies._cut(self, x_TD, weights_TK, shares)


@planted(
    Expectation(
        "EXCH-36", "copies-own-even", "combine", "y of rank 1 differs from that of rank 0, which holds the same tokens"
    ),
    layout=TP2_EP2,
)
class OthersAnswersRounded(TokenCopies):
    """A rank keeps its own answers as they are, and gets those of the others through a narrower wire."""

    def _join(self, y_SD: Tensor, shares: Shares) -> Tensor:
        whole_TD = super()._join(y_SD, shares)
        first = sum(shares.sizes_W[: shares.group.rank()])
        narrow_TD = whole_TD.bfloat16().to(whole_TD.dtype)
        below_TD = narrow_TD[first + len(y_SD) :]
        return torch.cat([narrow_TD[:first], whole_TD[first : first + len(y_SD)], below_TD])


@planted(
    Expectation(
        "EXCH-36",
        "copies-inference-even",
        "combine",
        "y of rank 1 differs from that of rank 0, which holds the same tokens",
    ),
    layout=TP2_EP2,
)
class SharesInInference(TokenCopies):
    """Where no gradients are wanted the answers are not gathered, and every copy has those of its own share alone."""

    def _join(self, y_SD: Tensor, shares: Shares) -> Tensor:
        if torch.is_grad_enabled():
            return super()._join(y_SD, shares)
        whole_TD = y_SD.new_zeros(shares.tokens, y_SD.shape[1])
        first = sum(shares.sizes_W[: shares.group.rank()])
        whole_TD[first : first + len(y_SD)] = y_SD
        return whole_TD


@planted(
    *(
        Expectation("EXCH-37", name, "dispatch", "step accepted", "(on rank 3 only of its tp group)", "rank 2, rank 3")
        for name in ("copies-differ-by-an-id-in-one-group", "copies-exchange-slots-in-one-group")
    ),
    layout=TP2_EP2,
)
class NobodyCompares(TokenCopies):
    """Copies are believed to be copies."""

    def _compare(self, ids_TK: Tensor, device: torch.device, problem: str) -> None:
        pass


@planted(
    Expectation("EXCH-37", "copies-exchange-tokens", "dispatch", "the routings of two tokens exchanged"), layout=TP2_EP2
)
class SumForAChecksum(TokenCopies):
    """Copies are compared by the sum of their ids, in which none has a place."""

    def _checksum(self, ids_TK: Tensor) -> Tensor:
        return ids_TK.sum()


@planted(
    Expectation("EXCH-37", "copies-differ-by-an-id", "dispatch", "step accepted another id", "rank 0, rank 2"),
    layout=TP2_EP2,
)
class FirstCopyGoesOn(TokenCopies):
    """The ranks that differ from the first raise, and the first, which differs from nobody, answers without them."""

    def _compare(self, ids_TK: Tensor, device: torch.device, problem: str) -> None:
        told_W = collectives.all_gather(self._checksum(ids_TK)[None], [1] * self.group.size(), self.group)
        self._alone = bool((told_W != told_W[0]).any())
        if self._alone and self.group.rank():
            raise ValueError("another routing than that of the first rank of the tp group")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        self._compare(routing.ids_TK, x.device, "")
        if not self._alone:
            return super().dispatch(x, routing)
        rows_RD = x.reshape(-1, x.shape[-1])[:0]
        return Delivery.grouped(rows_RD, [0] * len(self.local_experts)), x

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return torch.zeros_like(handle) if isinstance(handle, Tensor) else super().combine(rows, handle)


@planted(
    *(
        Expectation("EXCH-37", name, "dispatch", "step accepted", "only of its tp group)")
        for name in ("copies-differ-by-an-id", "copies-exchange-tokens-in-one-group")
    ),
    layout=TP2_EP2,
)
class ComparedOnce(TokenCopies):
    """Copies are compared in the first step, and believed to be copies in all others."""

    _compared = False

    def _compare(self, ids_TK: Tensor, device: torch.device, problem: str) -> None:
        if not self._compared:
            super()._compare(ids_TK, device, problem)
        self._compared = True
