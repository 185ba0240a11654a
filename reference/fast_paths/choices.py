"""Shortcuts: when one may be taken, what it computes where it may, and how often it was.

A shortcut that is taken where it does not hold gives wrong numbers of the right shape.

Sources: arithmetic: R / N rows per expert say nothing of each expert's rows; slot k of token t of a
round-robin reaches rank ((o + t K + k) mod E) div N; definition of a counter; behaviour of torch.Tensor.view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def equal_counts(counts: Sequence[int] | None, rows: int) -> bool:
    """Return whether the shortcut for equal counts holds on a rank (FAST-12).

    Args:
        counts: rows of each of the N local experts, None if they are not known.
        rows: R.

    Degenerate: all counts 0 are equal, and so are those of no expert. Counts that are not known are not
    equal, also where N divides R.

    Raises:
        ValueError: a negative count, or a sum other than R.

    >>> equal_counts([3, 3], 6), equal_counts([2, 4], 6), equal_counts([0, 0], 0), equal_counts(None, 6)
    (True, False, True, False)
    """
    if counts is None:
        return False
    if any(n < 0 for n in counts) or sum(counts) != rows:
        raise ValueError(f"counts {list(counts)} do not say where {rows} rows belong")
    return len(set(counts)) <= 1


def as_batch(rows_RD: Tensor, held: int, each: int) -> Tensor:
    """Shape rows for batched experts, (R, D) -> float64 (N, n, D) of its own memory, differentiable (FAST-13).

    Rule: rows e n to e n + n - 1 are expert e's, by their index, whatever the strides of the memory.

    Degenerate: R = 0 with n = 0 or N = 0 is allowed. R != N n is an error, never another grouping.

    >>> columns = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    >>> as_batch(columns.T, 2, 2).tolist()
    [[[1.0, 5.0], [2.0, 6.0]], [[3.0, 7.0], [4.0, 8.0]]]
    """
    if rows_RD.dim() != 2 or min(held, each) < 0 or len(rows_RD) != held * each:
        raise ValueError(f"rows {tuple(rows_RD.shape)} are not {held} experts' {each} rows each")
    return rows_RD.double().clone(memory_format=torch.contiguous_format).view(held, each, rows_RD.shape[1])


def round_robin_shortcut(offset: int, top_k: int, experts: int, ep: int) -> bool:
    """Return whether a round-robin's exchange may be computed without routing (FAST-14).

    Args:
        offset: o of the source rank: slot k of its token t goes to expert (o + t K + k) mod E.
        top_k: K.
        experts: E.
        ep: over how many ranks the experts are spread, N = E / ep each.

    Rule: K = N, and N divides o or ep = 1: then every token goes to all experts of one rank, and to no other.

    >>> round_robin_shortcut(4, 2, 6, 3), round_robin_shortcut(3, 2, 6, 3), round_robin_shortcut(0, 3, 6, 3)
    (True, False, False)
    """
    if ep < 1 or experts < 1 or experts % ep or not 1 <= top_k <= experts or offset < 0:
        raise ValueError(f"offset {offset}, K = {top_k}, E = {experts}, ep = {ep}: no round-robin over ep ranks")
    held = experts // ep
    return top_k == held and (offset % held == 0 or ep == 1)


def round_robin_rows(x_TD: Tensor, rank: int, *, offset: int, top_k: int, experts: int, ep: int) -> Tensor:
    """List the rows that a rank receives from one source by the shortcut, float64, differentiable (FAST-14).

    Args:
        x_TD: the source rank's tokens.
        rank: the receiving rank's index in the ep group.
        offset: o of the source rank.
        top_k: K.
        experts: E.
        ep: ranks in the ep group.

    Rule: x[q::ep], q = (rank - o / N) mod ep, N times over: once for each local expert, one behind the other.

    Degenerate: fewer tokens than ep: some ranks receive nothing, (0, D). ep = 1: every token to every expert.

    >>> x = torch.arange(5.0)[:, None]
    >>> [round_robin_rows(x, r, offset=2, top_k=2, experts=6, ep=3).flatten().tolist() for r in range(3)]
    [[2.0, 2.0], [0.0, 3.0, 0.0, 3.0], [1.0, 4.0, 1.0, 4.0]]
    """
    if not round_robin_shortcut(offset, top_k, experts, ep):
        raise ValueError(f"the shortcut does not hold for offset {offset}, K = {top_k}, N = {experts // ep}")
    if not 0 <= rank < ep:
        raise ValueError(f"rank {rank} is none of 0..{ep - 1}")
    held = experts // ep
    first = (rank - offset // held) % ep
    return x_TD.double()[first::ep].repeat(held, 1)  # (N rows of x[q::ep], D)


def decision_counts(taken: Sequence[bool]) -> tuple[int, int]:
    """Count decisions, (taken, not taken): together the calls that could have taken the shortcut.

    Decides: FAST-16. Source: definition of a counter.

    >>> decision_counts([True, False, True])
    (2, 1)
    """
    return sum(taken), len(taken) - sum(taken)


def look_up_counts(events: Sequence[str]) -> tuple[int, int]:
    """Count hits and misses of a cache of derived weights, (hits, misses).

    Decides: FAST-16. Source: definition of a counter.

    Rule: the first "look_up", and the first after each "change" of a weight, is a miss, every other a hit;
    "reset" sets the counters to 0 and leaves the cache as it is.

    >>> look_up_counts(["look_up", "look_up", "change", "change", "look_up"]), look_up_counts(["look_up", "reset"])
    ((1, 2), (0, 0))
    """
    hits = misses = 0
    warm = False
    for event in events:
        if event == "look_up":
            hits, misses = (hits + 1, misses) if warm else (hits, misses + 1)
            warm = True
        elif event == "change":
            warm = False
        elif event == "reset":
            hits = misses = 0
        else:
            raise ValueError(f"{event!r} is neither 'look_up', nor 'change' or 'reset'")
    return hits, misses
