"""Judge of rows that use all bits of their dtype, and must be delivered with every bit."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, apart
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import CorruptRow
from moe_conformance.scenarios.outcome import Handed

_NARROWER = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@judge(CorruptRow, "dispatch")
def judge_every_bit_of_rows(reading: Reading) -> Comparisons:
    """Decide whether every row for an expert equals some token of its exchange group in all bits.

    `judge_deliveries` decides which token it must be. Microbatches with weights other than 1 are left out, since rows
    may be multiplied by weights. All-zero rows are padding.

    Raises:
        CorruptRow: a row has other bits, or is of another dtype.
    """
    group_of = {rank: group for group in reading.outcome.workload.layout.groups()["ep_etp"] for rank in group}
    for m, batches in enumerate(reading.batches):
        if not all(bool((batch.weights_TK == 1).all()) for batch in batches):
            continue
        for rank, group in group_of.items():
            names = [f"rank {source} token {t}" for source in group for t in range(len(batches[source].x_TD))]
            x_TD = torch.cat([batches[source].x_TD for source in group])
            for handed in reading.seen(m, rank).exchange.handed:
                for row in _rows_of_experts(handed):
                    words = _row_words(handed.rows_RD[row], x_TD, names)
                    of = f" of microbatch {m}" if len(reading.batches) > 1 else ""
                    wrong = Finding("other bits", f"row {row}{of} delivered to rank {rank} is {words}", (rank,))
                    yield Comparison(rank, wrong if words else "", elements=x_TD.shape[1], pairs=1)


def _rows_of_experts(handed: Handed) -> list[int]:
    """Return the rows that are for an expert and are not padding."""
    meant_R = (handed.ids_RJ >= 0).any(1) & (handed.rows_RD != 0).any(1)
    return meant_R.nonzero().flatten().tolist()


def _row_words(row_D: Tensor, x_TD: Tensor, names: list[str]) -> str:
    """Return a description of a row that does not equal a token, "" if it equals one."""
    if not len(x_TD):
        return "of no token: there are none"
    if row_D.dtype == x_TD.dtype and bool((x_TD == row_D).all(1).any()):
        return ""
    exact_D, exact_TD = row_D.double(), x_TD.double()
    for dtype in _NARROWER:
        same_T = (x_TD.to(dtype).double() == exact_D).all(1)
        if bool(same_T.any()):
            name = names[int(same_T.long().argmax())]
            return f"{name} with the precision of {dtype}, in {row_D.dtype}; expected precision and dtype {x_TD.dtype}"
    nearest = int((exact_TD - exact_D).square().sum(1).nan_to_num(torch.inf).argmin())
    column = int((exact_TD[nearest] != exact_D).nonzero()[0])
    values = " instead of ".join(apart(float(row_D[column]), float(x_TD[nearest, column])))
    return f"closest to {names[nearest]}, with {values} in column {column}"
