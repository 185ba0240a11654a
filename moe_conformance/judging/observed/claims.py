"""The claims of a backend, which must be equal on all ranks, and the rows of experts padded to a claimed multiple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from moe_conformance.contract import Claims
from moe_conformance.judging.findings import count
from moe_conformance.judging.verdict import MalformedClaim
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.workloads.records.workload import Workload

_OF_A_RANK = ("weights_at", "dtype")  # the adapter derives these from the tokens of its rank, which may have none


def claims_of(ranks: Sequence[RankOutcome]) -> Claims:
    """Return the claims of all ranks; `weights_at` and `dtype` may differ and are those of the first rank.

    Raises:
        MalformedClaim: two ranks claim different values of another field.
    """
    first = ranks[0]
    names = [claim.name for claim in fields(Claims) if claim.name not in _OF_A_RANK]
    for rank in ranks[1:]:
        for name in names:
            if (other := getattr(rank.claims, name)) != (value := getattr(first.claims, name)):
                sentence = f"rank {rank.rank} claims {name} = {other!r} and rank {first.rank} claims {value!r}"
                raise MalformedClaim("run", f"{sentence}; expected the same", ranks=(rank.rank,))
    return first.claims


def weighed_as_claimed(workload: Workload, claims: Claims) -> Workload:
    """Return the workload as the backend says that it weighs: with `top_1` "score", one slot is not normalised."""
    config = workload.config
    if claims.top_1 == "one" or config.top_k > 1 or not config.routing.normalise:
        return workload
    return replace(workload, config=config.changed({"routing.normalise": False}))


def padded_rows(rows_N: Sequence[int], multiple: int) -> int:
    """Return the number of rows of a rank's experts, each padded: the sum of ceil(rows / multiple) * multiple."""
    return sum(-(-rows // multiple) * multiple for rows in rows_N)


def rows_words(rows_N: Sequence[int], multiple: int) -> str:
    """Return the number of rows without and with padding in words: "16 rows (48 in multiples of 8)"."""
    padded = padded_rows(rows_N, multiple)
    rows = count(sum(rows_N), "row")
    return rows if padded == sum(rows_N) else f"{rows} ({padded} in multiples of {multiple})"
