"""Goldens of packed sequences: their lengths, rows, layer with every gradient, and shares under context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import nan

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import Chapter, given, named
from goldens.gradients import gradients, leaf, prefixed
from goldens.small_layer import D, E, K, draw_experts, draw_tokens, expert_leaves, experts_of
from reference import context_shares, packed_rows, packed_sequences

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
    """Return sums of lengths right and wrong, packs with gaps, without and of gaps alone, and an order of rows."""
    found: dict[str, Tensor] = {}
    for i, lengths in enumerate(LENGTHS):
        sums_S = packed_sequences.cumulative(packed_sequences.padded_lengths(lengths, 4))
        moved = [sums_S + by * (torch.arange(len(sums_S)) >= int(rng.integers(len(sums_S)))) for by in (4, 4, 1, -4)]
        found |= named(f"lengths-{i}", "in", {"claimed_NS": torch.stack([sums_S, *moved])})
    found |= draw_experts(rng)
    for case, (own, padded, more) in PACKS.items():
        P = sum(padded) + more
        found |= draw_tokens(rng, case, sum(own))
        rows = {"ids_PK": rng.integers(-1, E - 1, size=(P, K)), "weights_PK": rng.standard_normal((P, K))}
        rows |= {"dweights_PK": rng.standard_normal((P, K)), "rows_PD": rng.standard_normal((P, D))}
        found |= named(case, "in", rows)
    return found | named("context", "in", {"order_R": rng.permutation(CUMULATIVE_PADDED[-1])})


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return lengths and verdicts on them, packs with outputs and gradients, and the rows of every cp rank."""
    multiples = [packed_sequences.length_multiple(tp=tp, cp=cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
    found = named("lengths", "out", {"multiples": multiples})
    for i, lengths in enumerate(LENGTHS):
        found |= named(f"lengths-{i}", "out", _of_lengths(lengths, inputs[f"lengths-{i}/in/claimed_NS"]))
    for case in PACKS:
        own = given(inputs, case)
        found |= named(case, "out", {**_packing(own, case), **_layer(own, expert_leaves(inputs), case)})
    return found | named("context", "out", _context(inputs["context/in/order_R"]))


def _of_lengths(lengths: Sequence[int], claimed_NS: Tensor) -> dict[str, object]:
    real_S = packed_sequences.cumulative(lengths)
    judged = [packed_sequences.judge_lengths(lengths, real_S, claimed_S, 4) for claimed_S in claimed_NS]
    padded = [packed_sequences.padded_lengths(lengths, multiple) for multiple in MULTIPLES]
    return {"cumulative_S": real_S, "padded_MS": padded, "judged_N": [JUDGED.index(word) for word in judged]}


def _packed(tokens_TX: Tensor, case: str, fill: float) -> Tensor:
    """Pack the tokens of a case; the rows after the last sequence are filled as its gap is."""
    lengths, padded, more = PACKS[case]
    return packed_rows.pack(tokens_TX.split(list(lengths)), [*padded[:-1], padded[-1] + more], fill=fill)


def _real_rows(case: str) -> Tensor:
    lengths, padded, more = PACKS[case]
    sums = packed_sequences.cumulative(lengths), packed_sequences.cumulative(padded)
    return packed_rows.real_rows(*sums, sum(padded) + more)


def _packing(own: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return what `pack`, `unpack` and `route_gaps_nowhere` make of the case, and their gradients."""
    x_TD, rows_PD, weights_PK = (leaf(own[name]) for name in ("x_TD", "rows_PD", "weights_PK"))
    x_PD = _packed(x_TD, case, 2.5)
    sums = [packed_sequences.cumulative(lengths) for lengths in PACKS[case][:2]]
    unpacked_TD = torch.cat(packed_rows.unpack(rows_PD, sums[0], sums[1]))
    routed = packed_rows.route_gaps_nowhere(own["ids_PK"], weights_PK, _real_rows(case))
    return {
        "real_P": _real_rows(case),
        "pack.ids_PK": _packed(own["ids_TK"], case, -1),
        "pack.x_PD": x_PD,
        **prefixed("pack", gradients([x_PD], {"x_TD": x_TD}, [own["rows_PD"]])),
        "unpack.x_TD": unpacked_TD,
        **prefixed("unpack", gradients([unpacked_TD], {"rows_PD": rows_PD}, [own["dy_TD"]])),
        "routed.ids_PK": routed.ids_TK,
        "routed.weights_PK": routed.weights_TK,
        **prefixed("routed", gradients([routed.weights_TK], {"weights_PK": weights_PK}, [own["dweights_PK"]])),
    }


def _layer(own: Mapping[str, Tensor], parameters: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return the output of the layer on the pack, NaN in its gaps, and all gradients."""
    leaves = {"x_TD": leaf(own["x_TD"]), "weights_PK": leaf(own["weights_PK"]), **parameters}
    x_PD = _packed(leaves["x_TD"], case, nan)
    y_PD = packed_rows.packed_forward(x_PD, own["ids_PK"], leaves["weights_PK"], experts_of(leaves), _real_rows(case))
    return prefixed("layer", {"y_PD": y_PD, **gradients([y_PD], leaves, [own["rows_PD"]])})


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


REQUIREMENTS = ("PACK-03", "PACK-07", "PACK-08", "PACK-09", "PACK-10", "PACK-15")

CHAPTER = Chapter(2405, REQUIREMENTS, draw, work_out)
