"""The traits of a workload that a record has, by which floors and comparisons count and a report says what is left out.

They are texts: `float32`, `K=2`, `uneven T` (in some microbatch), `zero tokens` (on some rank), `microbatches` (more
than one), `in flight` (at the same time). Which cases a profile selects depends on two of them only, see
`features.traits`.
"""

from __future__ import annotations

from moe_conformance.workloads.records.features import IN_FLIGHT, ZERO_TOKENS, traits
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, ExpertsStep, LayerStep, Script
from moe_conformance.workloads.records.workload import Workload

UNEVEN, SEVERAL = "uneven T", "microbatches"
CONDITIONS = (UNEVEN, ZERO_TOKENS, SEVERAL, IN_FLIGHT)  # what a workload has or has not
DTYPES = ("float64", "float32", "bfloat16", "float16")
K = "K="  # followed by the number
MOVES = "moves rows"  # to experts and back: an exchange or a whole layer, with experts of whatever origin

_MOVE_ROWS = (ON_EXCHANGE, Script("token_exchange"), Script("places_exchange"))


def told(workload: Workload) -> tuple[str, ...]:
    """Return the traits of a workload: its dtype, K, conditions, and whether it is of an exchange or a layer."""
    found = [str(workload.config.dtype).removeprefix("torch."), f"{K}{workload.config.top_k}"]
    found += [UNEVEN] if any(len(set(tokens)) > 1 for tokens in workload.tokens) else []
    found += [SEVERAL] if len(workload.tokens) > 1 else []
    found += [MOVES] if _moves_rows(workload) else []
    return (*found, *traits(workload))


def _moves_rows(workload: Workload) -> bool:
    return isinstance(workload.run, (ExchangeStep, ExpertsStep, LayerStep)) or workload.run in _MOVE_ROWS


def value_of_K(trait: str) -> int | None:
    """Return the K that a trait names; None if it names none.

    >>> value_of_K("K=2"), value_of_K("float32")
    (2, None)
    """
    return int(trait.removeprefix(K)) if trait.startswith(K) else None
