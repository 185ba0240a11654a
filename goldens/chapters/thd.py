"""Golden of packed sequences: their lengths, which rows are tokens, and shares under context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, D, E, K, Oracle, draw_experts, draw_tokens, functions, named
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
    draw_experts(rng)  # not stored, as below; keeps later draws the same
    for case, (real, padded, more) in PACKS.items():
        P = sum(padded) + more
        draw_tokens(rng, case, sum(real))
        rng.integers(-1, E - 1, size=(P, K))
        rng.standard_normal(2 * P * K + P * D)
    return found | named("context", "in", {"order_R": rng.permutation(CUMULATIVE_PADDED[-1])})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return lengths and verdicts on them, the tokens of packs, and the rows of every cp rank."""
    multiples = [oracle.length_multiple(tp=tp, cp=cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
    found = named("lengths", "out", {"multiples": multiples})
    for i, lengths in enumerate(LENGTHS):
        found |= named(f"lengths-{i}", "out", _of_lengths(lengths, inputs[f"lengths-{i}/in/claimed_NS"], oracle))
    for case in PACKS:
        found |= named(case, "out", {"real_P": _real_rows(case, oracle)})
    return found | named("context", "out", _context(inputs["context/in/order_R"], oracle))


def _of_lengths(lengths: Sequence[int], claimed_NS: Tensor, oracle: Oracle) -> dict[str, object]:
    real_S = oracle.cumulative(lengths)
    judged = [oracle.judge_lengths(lengths, real_S, claimed_S, 4) for claimed_S in claimed_NS]
    padded = [oracle.padded_lengths(lengths, multiple) for multiple in MULTIPLES]
    return {"cumulative_S": real_S, "padded_MS": padded, "judged_N": [JUDGED.index(word) for word in judged]}


def _real_rows(case: str, oracle: Oracle) -> Sequence[bool]:
    lengths, padded, more = PACKS[case]
    real_P: Sequence[bool] = oracle.real_rows(oracle.cumulative(lengths), oracle.cumulative(padded), sum(padded) + more)
    return real_P


def _context(order_R: Tensor, oracle: Oracle) -> dict[str, object]:
    halves, twice = (order_R[:7], order_R[7:]), (order_R[:7], order_R[6:])
    verdicts = [oracle.is_partition(held, len(order_R)) for held in (halves, twice, halves[:1])]
    found: dict[str, object] = {"halves-twice-part-are-partitions": verdicts}
    for cp in CONTEXTS:
        found[f"share-cp{cp}_CP"] = oracle.context_share(12, cp)
        found[f"rows-cp{cp}_CR"] = oracle.context_rows(torch.tensor(CUMULATIVE_PADDED), cp)
        found[f"none-cp{cp}_CR"] = oracle.context_rows(torch.tensor([0, 0]), cp)
    return found


REQUIREMENTS = ("PACK-07", "PACK-08", "PACK-10", "PACK-15")

CHAPTER = Chapter(2405, REQUIREMENTS, functions(packed_sequences, packed_rows, context_shares), draw, work_out)
