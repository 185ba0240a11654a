"""The routes of a hot spot: some slots of each token go to the hot experts, the rest to the others.

Both lists of experts are dealt in turn, so that the loads of each differ by at most one. No token has an expert twice,
since no token takes more of a list than it holds.

T tokens of this rank, K slots, E experts, N experts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dealt(hot: Sequence[int], others: Sequence[int], slots_T: Tensor, top_k: int) -> Tensor:
    """Return ids (T, K): of token t, `slots_T[t]` of the hot experts, and then K - `slots_T[t]` of the others."""
    if not len(slots_T):
        return slots_T.new_empty(0, top_k)
    slot_K = torch.arange(top_k, device=slots_T.device)
    before_T = slots_T.cumsum(0) - slots_T  # slots that earlier tokens gave to the hot experts
    rest_T = top_k * torch.arange(len(slots_T), device=slots_T.device) - before_T
    hot_TK = _in_turn(hot, before_T[:, None] + slot_K)
    others_TK = _in_turn(others, rest_T[:, None] + slot_K - slots_T[:, None])
    return torch.where(slot_K < slots_T[:, None], hot_TK, others_TK)


def _in_turn(experts: Sequence[int], place: Tensor) -> Tensor:
    if not experts:  # all are hot: nothing is read of it
        return torch.full_like(place, -1)
    return torch.tensor(experts, device=place.device)[place % len(experts)]


def block(first: int, size: int, experts: int) -> tuple[list[int], list[int]]:
    """Return the experts from `first` on, and all others."""
    hot = list(range(first, first + size))
    return hot, [expert for expert in range(experts) if expert not in hot]


def as_many_as_possible(tokens: int, top_k: int, hot: Sequence[int], device: torch.device) -> Tensor:
    """Return (T,): every token takes all hot experts, or K of them."""
    return torch.full((tokens,), min(top_k, len(hot)), device=device)


def by_ratio(tokens: int, top_k: int, ratio: float, ranks: int, held: int, device: torch.device) -> Tensor:
    """Return (T,), as even as may be: in all `ratio` times what each other of the ranks gets, as far as possible."""
    wanted = round(ratio * top_k * tokens / (ratio + ranks - 1))
    share = min(wanted, tokens * min(top_k, held))
    end_T = torch.arange(1, tokens + 1, device=device) * share // max(tokens, 1)
    return end_T.diff(prepend=end_T.new_zeros(1))


def rank_by_rank(experts: Sequence[int], held: int) -> list[int]:
    """Return experts so that neighbours are of different ranks: the first of every rank, then the second, ..."""
    return [experts[place] for first in range(held) for place in range(first, len(experts), held)]
