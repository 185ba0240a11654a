"""Expected results of workloads with the suite's probe experts: deliveries, y, dx and dweights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.chunks import cut, solve_in_chunks
from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import tagged, tagged_experts
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Workload

PerRank = tuple[tuple[Tensor, ...], ...]  # [microbatch][rank]


class Drawn:
    """A workload as a cache key; workloads with the same drawn data are equal, whatever the variant."""

    def __init__(self, workload: Workload) -> None:
        """Compute the key of a workload."""
        self.workload = workload  # kept alive, so that no other object gets an id() that is in the key
        config = replace(workload.config, variant="")
        values = [getattr(workload, field.name) for field in fields(workload) if field.name != "config"]
        self._key = (config, *(value if isinstance(value, (str, frozenset, Layout)) else id(value) for value in values))

    def __hash__(self) -> int:
        """Return the hash of the key."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same drawn data."""
        return isinstance(other, Drawn) and self._key == other._key


@dataclass(frozen=True)
class Expected:
    """The oracles' results in float64, [microbatch][rank]; independent of where weights are applied, and of shards."""

    y: PerRank  # (T, D)
    dx: PerRank  # (T, D)
    dweights: PerRank  # (T, K)
    dweights_allowed: PerRank  # (T, K): zero where dweights is exact in every order of summation


def expect(workload: Workload, parts: Sequence[float]) -> Expected:
    """Compute the results with probe experts, with all tokens of all ranks and microbatches as one batch of the oracle.

    `parts` are the factors of the etp shards' outputs, (1,) where every shard returns the whole output.

    A weight's gradient is a sum over the expert's block. Its terms are multiples of a unit, so that it is exact in the
    tokens' dtype as long as the summed magnitudes stay below 2^p units (p significant bits). Beyond that the allowed
    error is one rounding of those magnitudes per term.

    Cached, since all variants of a backend run the same workloads with the same expected results.
    """
    return _expect(Drawn(workload), tuple(parts))


@lru_cache(maxsize=96)  # as in `stage_expected`
def _expect(drawn: Drawn, parts: tuple[float, ...]) -> Expected:
    workload = drawn.workload
    config = workload.config
    batches = [batch for ranks in workload.batches for batch in ranks]
    oracles = [layer.Batch(b.x_TD, b.ids_TK, b.weights_TK, b.upstream) for b in batches]
    whole = layer.global_batch(oracles)
    gains = {("gain", e): torch.tensor(tags.gain(e), dtype=torch.float64) for e in range(config.experts)}
    result = solve_in_chunks(
        cut(oracles, config.experts),
        config.experts,
        lambda chunk: layer.gradients(
            *layer.global_batch(chunk),
            build=lambda parameters: tagged_experts(config.experts, parameters),
            parameters=gains,
        ),
    )

    unit, shards = 0.25, sum(abs(part) for part in parts)  # upstream gradients are multiples of the unit
    size_TE = whole.dy_TD.double().abs() @ blocks(config.experts, config.hidden).T * shards  # (T, E)
    size_TK = size_TE.gather(1, whole.ids_TK.clamp_min(0)) * (whole.ids_TK >= 0)
    gain_TK = torch.tensor([tags.gain(e) for e in range(config.experts)], dtype=torch.float64)[
        whole.ids_TK.clamp_min(0)
    ]
    eps = torch.finfo(config.dtype).eps
    rounding_TK = size_TK * gain_TK * eps * (config.hidden // config.experts)
    allowed_TK = torch.where(size_TK / unit <= 2 / eps, 0.0, rounding_TK)

    def split(whole_T: Tensor) -> PerRank:
        parts = iter(whole_T.split([len(b.x_TD) for b in batches]))
        return tuple(tuple(next(parts) for _ in ranks) for ranks in workload.batches)

    return Expected(split(result.y_TD), split(result.dx_TD), split(result.dweights_TK), split(allowed_TK))


def blocks(experts: int, hidden: int) -> Tensor:
    """Return the columns of every expert as a 0/1 matrix, float64 (E, D)."""
    one_1D = torch.ones(1, hidden, dtype=torch.float64)
    return torch.cat([tagged(one_1D, e, experts=experts) for e in range(experts)])
