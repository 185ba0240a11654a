"""Fixed places: receive buffers with C places for each expert, of which the first few are filled.

Which row stands in which of the filled places is free, but where an implementation states a run for each
source rank, that source's rows stand there. Whatever the other places hold must not matter.

Source: behaviour of DeepEP (low_latency_dispatch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Rows by place, all int64: whose token stands in each of the (N, C), how many are filled, and runs by source."""

    source_NC: Tensor
    token_NC: Tensor
    counts_N: Tensor
    begin_NS: Tensor
    run_NS: Tensor


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

    >>> import torch
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


def _wanted(ids_by_source: Sequence[Tensor], local_experts: Sequence[int]) -> list[list[list[int]]]:
    """List, for every local expert and source, the tokens that selected it, once for each slot."""
    if len(set(local_experts)) < len(local_experts) or min(local_experts, default=0) < 0:
        raise ValueError(f"local experts {list(local_experts)} are not different ids from 0 up")
    if any(bool((ids_TK < -1).any()) for ids_TK in ids_by_source):
        raise ValueError("an id is below -1; ids are experts, or -1 for an empty slot")
    # A slot is a row of (t, k), in the order of tokens, so that a token is listed once for each of its slots.
    return [
        [[t for t, _ in (ids_TK == expert).nonzero().tolist()] for ids_TK in ids_by_source] for expert in local_experts
    ]
