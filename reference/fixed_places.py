"""Fixed places: receive buffers with C places for each expert, of which the first few are filled.

Which row stands in which of the filled places is free, but where an implementation states a run for each
source rank, that source's rows stand there. Whatever the other places hold must not matter.

Source: behaviour of DeepEP (low_latency_dispatch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Rows by place, all int64: whose token stands in each of the (N, C), how many are filled, and runs by source."""

    source_NC: Tensor
    token_NC: Tensor
    counts_N: Tensor
    begin_NS: Tensor
    run_NS: Tensor


def fixed_places(ids_by_source: Sequence[Tensor], local_experts: Sequence[int], capacity: int) -> Places:
    """Fill the places of a rank's N experts, one allowed way: by source, then token, then slot.

    Args:
        ids_by_source: of every rank of the exchange group in its order, int64 (T_s, K), -1 = empty.
        local_experts: the global ids of the N experts; all other ids belong to other ranks.
        capacity: C, the places of an expert.

    Degenerate: places that are not filled hold -1. A source without rows has a run of 0 that begins where it
    would. An expert in two slots of a token gets two rows.

    Raises:
        ValueError: more rows than places, an expert listed twice or negative, an id below -1.

    Decides: EXCH-29. Source: behaviour of DeepEP (low_latency_dispatch).

    >>> made = fixed_places([torch.tensor([[5, 2]]), torch.tensor([[-1, 2], [2, 9]])], [2, 5], 4)
    >>> made.source_NC.tolist(), made.token_NC.tolist()
    ([[0, 1, 1, -1], [0, -1, -1, -1]], [[0, 0, 1, -1], [0, -1, -1, -1]])
    >>> made.counts_N.tolist(), made.begin_NS.tolist(), made.run_NS.tolist()
    ([3, 1], [[0, 1], [0, 1]], [[1, 2], [1, 0]])
    """
    N, S = len(local_experts), len(ids_by_source)
    source_NC, token_NC = (torch.full((N, capacity), -1, dtype=torch.int64) for _ in range(2))  # (N, C)
    begin_NS, run_NS = (torch.zeros(N, S, dtype=torch.int64) for _ in range(2))  # (N, S)
    filled = [0] * N
    for n, by_source in enumerate(_wanted(ids_by_source, local_experts)):
        for s, tokens in enumerate(by_source):
            end = filled[n] + len(tokens)
            if end > capacity:
                raise ValueError(f"expert {local_experts[n]} gets at least {end} rows and has {capacity} places")
            source_NC[n, filled[n] : end] = s
            token_NC[n, filled[n] : end] = torch.tensor(tokens, dtype=torch.int64)
            begin_NS[n, s], run_NS[n, s] = filled[n], len(tokens)
            filled[n] = end
    return Places(source_NC, token_NC, torch.tensor(filled, dtype=torch.int64), begin_NS, run_NS)


def legal_places(
    places: Places, ids_by_source: Sequence[Tensor], local_experts: Sequence[int], *, runs: bool
) -> tuple[bool, ...]:
    """Say of every local expert whether its places are filled as they must be.

    Args:
        places: what an implementation did.
        ids_by_source: as `fixed_places`.
        local_experts: as `fixed_places`.
        runs: the implementation states where the rows of each source stand.

    Rule: the count is the number of the expert's rows, and the first `count` places hold each of them once.
    With runs, source s has as many as it sent, in the places begin_ns .. begin_ns + run_ns - 1.

    Degenerate: what stands in later places, and where a run of 0 begins, decides nothing. Rows of one token
    in two slots of one expert are alike.

    Decides: EXCH-29. Source: behaviour of DeepEP (low_latency_dispatch).

    >>> ids = [torch.tensor([[2], [2]]), torch.tensor([[2]])]
    >>> made = Places(*map(torch.tensor, ([[0, 1, 0, 7]], [[1, 0, 0, 7]], [3], [[0, 1]], [[2, 1]])))
    >>> legal_places(made, ids, [2], runs=False), legal_places(made, ids, [2], runs=True)
    ((True,), (False,))
    """
    verdicts = []
    for n, by_source in enumerate(_wanted(ids_by_source, local_experts)):
        count = int(places.counts_N[n])
        sources, tokens = places.source_NC[n].tolist(), places.token_NC[n].tolist()
        wanted = Counter((s, t) for s, tokens_of_s in enumerate(by_source) for t in tokens_of_s)
        legal = count == wanted.total() <= len(sources)
        legal = legal and Counter(zip(sources[:count], tokens[:count], strict=True)) == wanted
        for s, tokens_of_s in enumerate(by_source if runs else []):
            begin, run = int(places.begin_NS[n, s]), int(places.run_NS[n, s])
            stands = [place for place, source in enumerate(sources[:count]) if source == s]
            legal = legal and run == len(tokens_of_s) and (run == 0 or stands == list(range(begin, begin + run)))
        verdicts.append(legal)
    return tuple(verdicts)


def enough_places(tokens_max: int, sources: int) -> int:
    """Compute how many places of an expert always suffice: S T_max, as a token selects an expert once at most.

    Decides: EXCH-29. Source: arithmetic.

    >>> enough_places(7, 3)
    21
    """
    if tokens_max < 0 or sources < 1:
        raise ValueError(f"{sources} sources of at most {tokens_max} tokens: need a source and T >= 0")
    return sources * tokens_max


def filled_rows(places_NCD: Tensor, counts_N: Tensor) -> Tensor:
    """Read the rows that are filled, (N, C, D), int64 (N,) -> (R, D), expert by expert, differentiable.

    Degenerate: the other places reach nothing and get no gradient, NaN included. No rows give (0, D).

    Raises:
        ValueError: counts outside 0..C, or not of N experts.

    Decides: EXCH-29. Source: definition.

    >>> places = torch.tensor([[[1.0], [torch.nan]], [[torch.nan], [5.0]], [[2.0], [3.0]]])
    >>> filled_rows(places, torch.tensor([1, 0, 2])).tolist()
    [[1.0], [2.0], [3.0]]
    """
    (N, C, D), counts = places_NCD.shape, counts_N.tolist()
    if len(counts) != N or not all(0 <= count <= C for count in counts):
        raise ValueError(f"counts {counts} for {N} experts of {C} places each")
    return torch.cat([places_NCD.new_zeros(0, D), *(places_NCD[n, :count] for n, count in enumerate(counts))]).double()


def _wanted(ids_by_source: Sequence[Tensor], local_experts: Sequence[int]) -> list[list[list[int]]]:
    """List, for every local expert and source, the tokens that selected it, once for each slot."""
    if len(set(local_experts)) < len(local_experts) or min(local_experts, default=0) < 0:
        raise ValueError(f"local experts {list(local_experts)} are not different ids from 0 up")
    if any(bool((ids_TK < -1).any()) for ids_TK in ids_by_source):
        raise ValueError("an id is below -1; ids are experts, or -1 for an empty slot")
    return [
        [[t for t, ids_K in enumerate(ids_TK.tolist()) for e in ids_K if e == expert] for ids_TK in ids_by_source]
        for expert in local_experts
    ]
