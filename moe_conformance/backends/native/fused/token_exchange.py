"""The fused token exchange on torch.distributed: the contract of docs/token_exchange.md, portable and without kernels.

A token is sent once to every rank that holds one of its experts, with the ids and weights of these experts; the rows
that are sent back are added. Gradients are in `autograd.py`. What it takes to put a library of kernels
in this module's place is in docs/token_exchange.md.

T tokens of this rank, K slots, E experts, N experts held, D hidden, W ranks, S shards of an expert, M rows sent by this
rank, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.groups import CannotBuild


@dataclass(frozen=True)
class DispatchLayout:
    """Where the tokens of this rank are sent; computed without communication."""

    tokens_W: Tensor  # int64, tokens to every rank; a token counts once, however many of its slots are there
    tokens_E: Tensor  # int64, slots for every expert of all ranks
    in_rank_TW: Tensor  # bool, whether a token is sent to a rank


@dataclass(frozen=True)
class Handle:
    """The layout of one dispatch. It can be used for any number of dispatches and combines of the same routing.

    Implements: EXCH-27.
    """

    token_M: Tensor  # of every sent row: by destination, then token
    place_M: Tensor  # which of its token's destinations it has: 0 for the first
    destinations: int  # at most, of a token
    sent_W: list[int]
    received_W: list[int]
    ids_RK: Tensor  # int64, index among the receiver's experts, -1 = empty slot or another rank's
    counts_N: Tensor  # int64, slots for each of the receiver's experts
    tokens: int  # T

    @property
    def rows(self) -> int:
        """R, rows received."""
        return sum(self.received_W)


@dataclass(frozen=True)
class Arrived:
    """What this rank received in one dispatch: by source rank, then token."""

    rows_RD: Tensor
    weights_RK: Tensor | None  # 0 where the id is -1; None where none were sent
    handle: Handle
    scales_RB: Tensor | None = None  # of the blocks of every row, where they were sent in float8


class TokenExchange:
    """Dispatch and combine between the ranks of one group, which hold E experts in equal blocks of ids, in order.

    With S shards the ranks count shards fastest, and each of the S ranks of a block receives the block's tokens. All
    ranks of the group call each method, in the same order. A group of one rank starts no collective.

    Implements: COST-04.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, shards: int = 1, wire: Float8Wire | None = None) -> None:
        """Take the group, and the format of rows in dispatch (None: their own dtype); no communication.

        Raises:
            CannotBuild: the ranks do not divide into shards, or the experts into blocks.
        """
        self.group, self.experts, self.shards, self.wire = group, experts, shards, wire
        if group.size() % shards:
            raise CannotBuild(f"{group.size()} ranks do not divide into {shards} shards of each expert")
        self.blocks = group.size() // shards
        if experts % self.blocks:
            raise CannotBuild(f"{experts} experts do not divide over {self.blocks} ranks")
        self.held = experts // self.blocks  # N

    # ---- the contract ----------------------------------------------------------------------------------------

    def get_dispatch_layout(self, ids_TK: Tensor) -> DispatchLayout:
        """Return where tokens are sent; ids below 0 are empty slots.

        Raises:
            ValueError: an id is not below E, or the ids are no int64 table.
        """
        self._check_ids(ids_TK)
        block_TK = torch.where(ids_TK >= 0, ids_TK // self.held, self.blocks)  # one more, for empty slots
        in_block_TB = ids_TK.new_zeros(len(ids_TK), self.blocks + 1, dtype=torch.bool).scatter(1, block_TK, True)
        in_rank_TW = in_block_TB[:, : self.blocks].repeat_interleave(self.shards, dim=1)
        return DispatchLayout(
            tokens_W=in_rank_TW.sum(0),
            tokens_E=torch.bincount(ids_TK[ids_TK >= 0], minlength=self.experts),
            in_rank_TW=in_rank_TW,
        )

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
        plain: bool = False,
    ) -> Arrived:
        """Send every token to each rank of its layout, with its weights if there are any.

        Give either the ids or the handle of an earlier dispatch: its layout is used again then, and nothing but rows
        (and weights, if given) is sent. Weights are float32, or float64 for float64 rows. With `plain` rows are sent in
        their own dtype, whatever the format: gradients are.

        Raises:
            ValueError: shapes, dtypes or ids are wrong on this rank.
            DispatchRefused: they are wrong on another rank; not raised by a dispatch with a handle.

        Implements: EXCH-01, EXCH-03.
        """
        handle = self._laid_out(x_TD, ids_TK, weights_TK, handle)
        rows_RD, scales_RB = self._send_rows(x_TD[handle.token_M], handle, None if plain else self.wire)
        if weights_TK is None:
            return Arrived(rows_RD, None, handle, scales_RB)
        weights_RK = self._send(weights_TK[handle.token_M], handle)
        return Arrived(rows_RD, self._own_slots(weights_RK, handle), handle, scales_RB)

    def combine(
        self, rows_RD: Tensor, handle: Handle, weights_RK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send every row back to its token and return the sums; no weight is applied. A token that was not sent gets 0.

        Numbers that belong to the slots of the rows (gradients of weights) may be sent too and are added likewise;
        those of slots whose id is -1 are not.

        Raises:
            ValueError: the dispatch of the handle delivered another number of rows.

        Implements: EXCH-05.
        """
        if len(rows_RD) != handle.rows:
            raise ValueError(
                f"combine received {len(rows_RD)} rows instead of the {handle.rows} that the dispatch of its handle "
                "delivered: "
                "is it the handle of another microbatch?"
            )
        y_TD = _add_up(self._send_back(rows_RD, handle), handle)
        if weights_RK is None:
            return y_TD, None
        return y_TD, _add_up(self._send_back(self._own_slots(weights_RK, handle), handle), handle)

    def withdraw(self, device: torch.device) -> None:
        """Take part in the collectives of a dispatch that this rank refuses: the others raise `DispatchRefused`."""
        refusals_W = torch.full((self.group.size(), 1), collectives.REFUSED, device=device)
        collectives.start_all_to_all(refusals_W, self.group).wait()  # no rank waits for rows then

    # ---- how -------------------------------------------------------------------------------------------------

    def _laid_out(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None, known: Handle | None) -> Handle:
        """Return the handle of a dispatch: the given one, if its shapes fit, or that of a new layout."""
        if known is None:
            return self._lay_out(x_TD, ids_TK, weights_TK)
        if ids_TK is not None:
            raise ValueError("a dispatch with a handle takes its ids from it: give one of the two")
        if problem := _wrong_input(x_TD, known.tokens, weights_TK, known.ids_RK.shape[1]):
            raise ValueError(problem)
        return known

    def _lay_out(self, x_TD: Tensor, ids_TK: Tensor | None, weights_TK: Tensor | None) -> Handle:
        """Exchange the numbers of rows, and send the ids before the rows."""
        try:
            if ids_TK is None:
                raise ValueError("a dispatch needs ids or a handle")
            layout = self.get_dispatch_layout(ids_TK)
            if problem := _wrong_input(x_TD, len(ids_TK), weights_TK, ids_TK.shape[1]):
                raise ValueError(problem)
        except ValueError:
            self.withdraw(x_TD.device)
            raise
        pending = collectives.start_all_to_all(layout.tokens_W.unsqueeze(1), self.group)
        rank_M, token_M = layout.in_rank_TW.t().nonzero(as_tuple=True)
        place_TW = layout.in_rank_TW.cumsum(1) - 1
        told_W = pending.wait().flatten()
        collectives.check_not_refused(told_W)
        received_W = told_W.tolist()
        sent_W = layout.tokens_W.tolist()
        ids_RK = collectives.all_to_all(ids_TK[token_M], sent_W, received_W, self.group)
        ids_RK = self._local_ids(ids_RK)
        return Handle(
            token_M=token_M,
            place_M=place_TW[token_M, rank_M],
            destinations=min(self.group.size(), ids_TK.shape[1] * self.shards),
            sent_W=sent_W,
            received_W=received_W,
            ids_RK=ids_RK,
            counts_N=torch.bincount(ids_RK[ids_RK >= 0], minlength=self.held),
            tokens=len(ids_TK),
        )

    def _local_ids(self, ids_RK: Tensor) -> Tensor:
        """Return the index among this rank's experts, -1 for an expert held elsewhere or an empty slot."""
        local_RK = ids_RK - self.group.rank() // self.shards * self.held
        return torch.where((ids_RK >= 0) & (local_RK >= 0) & (local_RK < self.held), local_RK, -1)

    def _own_slots(self, weights_RK: Tensor, handle: Handle) -> Tensor:
        return torch.where(handle.ids_RK >= 0, weights_RK, 0)

    def _send_rows(self, rows_MD: Tensor, handle: Handle, wire: Float8Wire | None) -> tuple[Tensor, Tensor | None]:
        if wire is None:
            return self._send(rows_MD, handle), None
        return wire.unpack(self._send(wire.pack(rows_MD), handle), rows_MD.shape[1], rows_MD.dtype)

    def _send(self, rows_M: Tensor, handle: Handle) -> Tensor:
        return collectives.all_to_all(rows_M, handle.sent_W, handle.received_W, self.group)

    def _send_back(self, rows_R: Tensor, handle: Handle) -> Tensor:
        return collectives.all_to_all(rows_R, handle.received_W, handle.sent_W, self.group)

    def _check_ids(self, ids_TK: Tensor) -> None:
        if ids_TK.dtype != torch.int64 or ids_TK.dim() != 2:
            raise ValueError(f"ids are {ids_TK.dtype} of shape {tuple(ids_TK.shape)} instead of int64 of shape (T, K)")
        if ids_TK.numel() and int(ids_TK.max()) >= self.experts:
            raise ValueError(f"expert id {int(ids_TK.max())} among {self.experts} experts")


def _wrong_input(x_TD: Tensor, tokens: int, weights_TK: Tensor | None, slots: int) -> str:
    """Return what is wrong with the tokens or their weights, "" if nothing is."""
    if x_TD.dim() != 2 or len(x_TD) != tokens:
        return f"tokens of shape {tuple(x_TD.shape)} for the ids of {tokens}"
    if weights_TK is None:
        return ""
    if tuple(weights_TK.shape) != (tokens, slots):
        return f"weights of shape {tuple(weights_TK.shape)} for ids of shape {(tokens, slots)}"
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return (
        "" if weights_TK.dtype == wide else f"weights are {weights_TK.dtype} with {x_TD.dtype} rows instead of {wide}"
    )


def _add_up(rows_M: Tensor, handle: Handle) -> Tensor:
    """Return the sum over every token's rows, in the order of ranks and in one rounding; zeros without any."""
    table = rows_M.new_zeros(handle.tokens, handle.destinations, rows_M.shape[1])
    return table.index_put((handle.token_M, handle.place_M), rows_M).sum(1)
