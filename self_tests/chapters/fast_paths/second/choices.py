"""When a shortcut is right, found by trying it: the long way is walked, and the shortcut held against it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from self_tests.chapters.fast_paths.second.equal_splits import Floats, demand


def equal_counts(counts: Sequence[int] | None, rows: int) -> bool:
    """Are the counts known, and all the same?"""
    if counts is None:
        return False
    demand(all(count >= 0 for count in counts) and sum(counts) == rows, f"counts {counts} of {rows} rows")
    return all(one == other for one in counts for other in counts)


def as_batch(rows_RD: Floats, held: int, each: int) -> Floats:
    """Deal the rows out in their order, `each` to every one of the `held` experts."""
    demand(rows_RD.ndim == 2 and held >= 0 and each >= 0, f"{rows_RD.shape} for {held} experts of {each} rows")
    demand(len(rows_RD) == held * each, f"{len(rows_RD)} rows are not {held} x {each}")
    batch_NnD = np.zeros((held, each, rows_RD.shape[1]))
    row = 0
    for expert in range(held):
        for place in range(each):
            batch_NnD[expert, place] = rows_RD[row]
            row += 1
    return batch_NnD


def as_batch_backward(g_NnD: Floats) -> Floats:
    """Gradients of the rows: those of their places, in the same order."""
    return np.array([g_NnD[n, j] for n in range(g_NnD.shape[0]) for j in range(g_NnD.shape[1])]).reshape(
        -1, g_NnD.shape[2]
    )


def check_sizes(offset: int, top_k: int, experts: int, ep: int) -> None:
    """Refuse sizes that make no round robin."""
    demand(ep >= 1 and experts % ep == 0, f"{experts} experts over ep {ep}")
    demand(1 <= top_k <= experts and offset >= 0, f"top {top_k} of {experts} from {offset}")


def tokens_of(expert: int, tokens: int, offset: int, top_k: int, experts: int) -> list[int]:
    """The tokens that a round robin sends to one expert, walking through all slots."""
    chosen = []
    slot = offset
    for token in range(tokens):
        for _ in range(top_k):
            if slot % experts == expert:
                chosen.append(token)
            slot += 1
    return chosen


def round_robin_shortcut(offset: int, top_k: int, experts: int, ep: int) -> bool:
    """Is some every-ep-th selection of tokens what each of the rank's experts is sent, for every rank?

    Tried on tokens enough for the round robin to come round twice.
    """
    check_sizes(offset, top_k, experts, ep)
    held, tokens = experts // ep, 2 * experts
    for rank in range(ep):
        wanted = [tokens_of(rank * held + n, tokens, offset, top_k, experts) for n in range(held)]
        starts = [start for start in range(ep) if all(list(range(start, tokens, ep)) == each for each in wanted)]
        if not starts:
            return False
    return True


def round_robin_rows(x_TD: Floats, rank: int, offset: int, top_k: int, experts: int, ep: int) -> Floats:
    """Rows that a source sends to one rank, expert by expert, found slot by slot."""
    check_sizes(offset, top_k, experts, ep)
    demand(0 <= rank < ep and round_robin_shortcut(offset, top_k, experts, ep), "no shortcut here")
    held = experts // ep
    rows = []
    for n in range(held):
        for token in tokens_of(rank * held + n, len(x_TD), offset, top_k, experts):
            rows.append(x_TD[token])
    return np.array(rows).reshape(len(rows), x_TD.shape[1])


def round_robin_rows_backward(
    tokens: int, g_RD: Floats, rank: int, offset: int, top_k: int, experts: int, ep: int
) -> Floats:
    """Each token's gradient is the sum over the rows that are copies of it."""
    dx_TD = np.zeros((tokens, g_RD.shape[1]))
    row = 0
    for n in range(experts // ep):
        for token in tokens_of(rank * (experts // ep) + n, tokens, offset, top_k, experts):
            dx_TD[token] += g_RD[row]
            row += 1
    return dx_TD


def decision_counts(taken: Sequence[bool]) -> tuple[int, int]:
    """How often a shortcut was taken, and how often not."""
    yes = no = 0
    for one in taken:
        if one:
            yes += 1
        else:
            no += 1
    return yes, no


def look_up_counts(events: Sequence[str]) -> tuple[int, int]:
    """Hits and misses of a cache that holds one value until that changes."""
    hits = misses = 0
    warm = False
    for event in events:
        demand(event in ("look_up", "change", "reset"), f"unknown {event}")
        if event == "look_up":
            hits, misses = (hits + 1, misses) if warm else (hits, misses + 1)
            warm = True
        elif event == "change":
            warm = False
        else:
            hits = misses = 0
    return hits, misses
