"""Permute: orders that carry no meaning, and the order in which an expert's rows are expected.

Which token comes first on a rank, which slot first in a token and which number an expert has are names only.
The functions here rename inputs, and results likewise, so that the two can be compared. What a permutation
by expert produces is listed row by row; padding is in `padded_segments.py`, rows found by index in
`row_index.py`, received rows put in another order in `reorder.py`.

Sources: arithmetic: the layer is a sum over a set; behaviour of a stable sort by expert (MegaBlocks,
Megatron-Core).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.token_padding.padding import aligned


@dataclass(frozen=True)
class Rows:
    """What every row of an expert-major buffer is, int64 (R,): a pair, or -1 thrice where it is padding."""

    source: Tensor
    token: Tensor
    slot: Tensor
    expert: Tensor  # of padding rows: the expert whose segment they fill


def reorder_tokens(values_T: Tensor, order_T: Tensor) -> Tensor:
    """Put the tokens of a rank into another order, (T, ...) -> (T, ...): out_i = values_order(i).

    For x and dL/dy going in, and for y and dL/dx coming out. Values are moved, never cast.

    Degenerate: T = 0 and T = 1 have one order.

    Raises:
        ValueError: the order is no permutation of 0 .. T - 1.

    Source: arithmetic.

    >>> reorder_tokens(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([2, 0, 1])).tolist()
    [[5, 6], [1, 2], [3, 4]]
    """
    _check_permutation(order_T, values_T.shape[0], "the order of tokens")
    return values_T[order_T]  # (T, ...)


def reorder_slots(values_TK: Tensor, order_T: Tensor, slots_TK: Tensor) -> Tensor:
    """Put tokens and, in each token, slots into another order: out_ij = values[p(i), q_p(i)(j)].

    For ids, weights and dL/dweights.

    Args:
        values_TK: (T, K), any dtype; moved, never cast.
        order_T: int64, p: the token that comes i-th.
        slots_TK: int64, q: in row t, the slots of token t (in the old numbering of tokens) in their new order.

    Degenerate: K = 1 leaves the slots. Empty slots move like all others.

    Raises:
        ValueError: the order, or a row of slots, is no permutation; shapes that differ.

    Source: arithmetic.

    >>> values, slots = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[0, 1, 2], [1, 2, 0]])
    >>> reorder_slots(values, torch.tensor([1, 0]), slots).tolist()
    [[5, 6, 4], [1, 2, 3]]
    """
    if slots_TK.shape != values_TK.shape:
        raise ValueError(f"slots {tuple(slots_TK.shape)} and values {tuple(values_TK.shape)} differ in shape")
    for t, slots_K in enumerate(slots_TK):
        _check_permutation(slots_K, values_TK.shape[1], f"the order of slots of token {t}")
    return reorder_tokens(values_TK.gather(1, slots_TK), order_T)  # (T, K)


def relabel(ids_TK: Tensor, new_E: Tensor) -> Tensor:
    """Give experts other numbers: s(id), where s(e) = new_E[e]. An empty slot (-1) stays empty.

    Raises:
        ValueError: new_E is no permutation of 0 .. E - 1, or an id is outside -1 .. E - 1.

    Source: the layer names an expert by its parameters only.

    >>> relabel(torch.tensor([[0, 2], [-1, 1]]), torch.tensor([1, 2, 0])).tolist()
    [[1, 0], [-1, 2]]
    """
    E = new_E.shape[0]
    _check_permutation(new_E, E, "the new numbers of experts")
    if bool(((ids_TK < -1) | (ids_TK >= E)).any()):
        raise ValueError(f"an id is outside -1 .. {E - 1}: {ids_TK.tolist()}")
    new_or_empty = torch.cat([new_E, torch.tensor([-1])])  # (E + 1,); the last stands for the empty slot
    return new_or_empty[ids_TK]  # (T, K)


def relabel_parameters(parameters: Mapping[tuple[str, int], Tensor], new_E: Tensor) -> dict[tuple[str, int], Tensor]:
    """Move every expert's parameters, or their gradients, to its new number: theta'_s(e) = theta_e.

    Raises:
        ValueError: new_E is no permutation of 0 .. E - 1, or an expert is outside of it.

    Source: the layer names an expert by its parameters only.

    >>> relabel_parameters({("gain", 0): torch.tensor(7.0)}, torch.tensor([2, 0, 1]))
    {('gain', 2): tensor(7.)}
    """
    E = new_E.shape[0]
    _check_permutation(new_E, E, "the new numbers of experts")
    if any(not 0 <= e < E for _, e in parameters):
        raise ValueError(f"there are parameters of experts outside 0 .. {E - 1}")
    return {(name, int(new_E[e])): value for (name, e), value in parameters.items()}


def expert_major(
    ids_by_rank: Sequence[Tensor],
    local_experts: Sequence[int],
    *,
    multiple: int = 1,
    pad_empty: bool = False,
) -> Rows:
    """List the rows of a rank's experts: one segment per expert, in it the pairs, then the padding.

    Args:
        ids_by_rank: of every rank of the exchange group, in its order, int64 (T, K) global ids, -1 = empty.
        local_experts: the ids of the rank's experts, in the order of their segments.
        multiple: M; a segment of n > 0 pairs has M ceil(n / M) rows.
        pad_empty: whether, for M > 1, a segment without a pair has M rows of padding, or none; both are allowed.

    Rule: in a segment, pairs ascend by source rank, then token, then slot. Experts of other ranks are left
    out. The source is counted in the order of the group.

    Degenerate: M = 1 pads nothing, `pad_empty` or not: the rows are exactly the pairs. No pair, no row.

    Raises:
        ValueError: a local expert twice or negative, an id below -1, a multiple below 1.

    Decides: EXCH-18, EXCH-21. Source: behaviour of a stable sort by expert.

    >>> rows = expert_major([torch.tensor([[7, 5]]), torch.tensor([[-1, 7], [7, 9]])], [5, 7], multiple=2)
    >>> rows.expert.tolist(), rows.source.tolist(), rows.token.tolist(), rows.slot.tolist()
    ([5, 5, 7, 7, 7, 7], [0, -1, 0, 1, 1, -1], [0, -1, 0, 0, 1, -1], [1, -1, 0, 1, 0, -1])
    """
    if len(set(local_experts)) != len(local_experts) or min(local_experts, default=0) < 0:
        raise ValueError(f"local experts {list(local_experts)} must be different ids from 0")
    if any(bool((ids_TK < -1).any()) for ids_TK in ids_by_rank):
        raise ValueError("an id is below -1, which stands for the empty slot")
    found: list[tuple[int, int, int, int]] = []  # (source, token, slot, expert)
    for expert in local_experts:
        pairs = []
        for source, ids_TK in enumerate(ids_by_rank):
            pairs += [(source, token, slot, expert) for token, slot in (ids_TK == expert).nonzero().tolist()]
        rows = aligned(len(pairs), alignment=multiple)
        if rows == 0 and pad_empty and multiple > 1:
            rows = multiple
        found += sorted(pairs) + [(-1, -1, -1, expert)] * (rows - len(pairs))
    columns = torch.tensor(found, dtype=torch.int64).reshape(-1, 4).T  # (4, R)
    return Rows(*columns)


def in_order(rows: Rows) -> dict[int, bool]:
    """Say of every expert whether its rows stand by source rank, then token, then slot, ascending.

    Padding rows (source -1) are passed over, wherever they stand. Another order is allowed, and reported.

    Degenerate: an expert of at most one row, or of padding alone, is in order; one without a row is not named.

    Raises:
        ValueError: columns of different lengths.

    Decides: EXCH-21. Source: behaviour of a stable sort by expert.

    >>> source, token, slot = torch.tensor([0, 1, 0]), torch.tensor([9, 0, 8]), torch.tensor([0, 0, 0])
    >>> in_order(Rows(source, token, slot, torch.tensor([5, 5, 5]))), in_order(
    ...     Rows(source, token, slot, torch.tensor([5, 5, 3]))
    ... )
    ({5: False}, {5: True, 3: True})
    """
    columns = (rows.expert, rows.source, rows.token, rows.slot)
    keys: dict[int, list[tuple[int, int, int]]] = {}
    for expert, source, token, slot in zip(*(column.tolist() for column in columns), strict=True):
        of_expert = keys.setdefault(expert, [])
        if source >= 0:
            of_expert.append((source, token, slot))
    return {expert: found == sorted(set(found)) for expert, found in keys.items()}


def _check_permutation(order: Tensor, size: int, what: str) -> None:
    """Raise ValueError unless the order holds each of 0 .. size - 1 once."""
    if order.dtype != torch.int64 or sorted(order.tolist()) != list(range(size)):
        raise ValueError(f"{what}, {order.tolist()}, is no permutation of 0 .. {size - 1}")
