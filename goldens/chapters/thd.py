"""Goldens of packed sequences: their lengths, which rows are tokens, and shares under context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, named
from moe_conformance.goldens.small_layer import D, E, K, draw_experts, draw_tokens
from moe_conformance.reference.thd import context_shares, packed_rows, packed_sequences

SIZES = tuple(product((1, 2, 3), (1, 2, 3), (False, True)))  # tp, cp, sequence parallel
LENGTHS: tuple[tuple[int, ...], ...] = ((5, 0, 4, 7), (), (0,), (12, 1))
MULTIPLES = (1, 4, 6)
JUDGED = ("smallest", "larger", "wrong")
# name: lengths, padded lengths, rows after the last sequence
PACKS: Mapping[str, tuple[Sequence[int], Sequence[int], int]] = {
    "pack": ((3, 0, 5, 1), (4, 0, 8, 4), 2), "tight": ((2, 3), (2, 3), 0), "gaps": ((0, 0), (0, 3), 1),
}  # fmt: skip
CONTEXTS = (1, 2, 3)  # cp
CUMULATIVE_PADDED = (0, 12, 12, 36)


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return sums of lengths right and wrong, and an order of rows."""
    found: dict[str, Tensor] = {}
    for i, lengths in enumerate(LENGTHS):
        sums_S = packed_sequences.cumulative(packed_sequences.padded_lengths(lengths, 4))
        moved = [sums_S + by * (torch.arange(len(sums_S)) >= int(rng.integers(len(sums_S)))) for by in (4, 4, 1, -4)]
        found |= named(f"lengths-{i}", "in", {"claimed_NS": torch.stack([sums_S, *moved])})
    draw_experts(rng)  # not stored, nor what follows: what is drawn after it stays what it was
    for case, (own, padded, more) in PACKS.items():
        P = sum(padded) + more
        draw_tokens(rng, case, sum(own))
        rng.integers(-1, E - 1, size=(P, K))
        rng.standard_normal(2 * P * K + P * D)
    return found | named("context", "in", {"order_R": rng.permutation(CUMULATIVE_PADDED[-1])})


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return lengths and verdicts on them, the tokens of packs, and the rows of every cp rank."""
    multiples = [packed_sequences.length_multiple(tp=tp, cp=cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
    found = named("lengths", "out", {"multiples": multiples})
    for i, lengths in enumerate(LENGTHS):
        found |= named(f"lengths-{i}", "out", _of_lengths(lengths, inputs[f"lengths-{i}/in/claimed_NS"]))
    for case in PACKS:
        found |= named(case, "out", {"real_P": _real_rows(case)})
    return found | named("context", "out", _context(inputs["context/in/order_R"]))


def _of_lengths(lengths: Sequence[int], claimed_NS: Tensor) -> dict[str, object]:
    real_S = packed_sequences.cumulative(lengths)
    judged = [packed_sequences.judge_lengths(lengths, real_S, claimed_S, 4) for claimed_S in claimed_NS]
    padded = [packed_sequences.padded_lengths(lengths, multiple) for multiple in MULTIPLES]
    return {"cumulative_S": real_S, "padded_MS": padded, "judged_N": [JUDGED.index(word) for word in judged]}


def _real_rows(case: str) -> Tensor:
    lengths, padded, more = PACKS[case]
    sums = packed_sequences.cumulative(lengths), packed_sequences.cumulative(padded)
    return packed_rows.real_rows(*sums, sum(padded) + more)


def _context(order_R: Tensor) -> dict[str, object]:
    halves, twice = (order_R[:7], order_R[7:]), (order_R[:7], order_R[6:])
    verdicts = [context_shares.is_partition(held, len(order_R)) for held in (halves, twice, halves[:1])]
    found: dict[str, object] = {"halves-twice-part-are-partitions": verdicts}
    for cp in CONTEXTS:
        rows = context_shares.context_rows(torch.tensor(CUMULATIVE_PADDED), cp)
        found[f"share-cp{cp}_CP"] = context_shares.context_share(12, cp)
        found[f"rows-cp{cp}_CR"] = torch.stack(rows)
        found[f"none-cp{cp}_CR"] = torch.stack(context_shares.context_rows(torch.tensor([0, 0]), cp))
    return found


REQUIREMENTS = ("PACK-07", "PACK-08", "PACK-10", "PACK-15")

CHAPTER = Chapter(2405, REQUIREMENTS, draw, work_out)
