"""Hypothesis strategies for routers of any configuration, and for tokens, with ties between experts.

Logits are the product of drawn tokens and a drawn router; ties come from experts with equal rows and from tokens of
zeros. Shrinking leads to one microbatch, few tokens, a plain softmax and float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from moe_conformance.contract import Config, Limit, RoutingOptions
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.drawn.strategies import require_allowed, schedules, token_counts
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.schedule import microbatches
from moe_conformance.workloads.records.workload import Batch, Workload

LARGE = 64.0  # magnitude of tokens at which the exponentials of unshifted logits overflow

_SOFTMAXES = ("softmax", "softmax_topk")  # scores that add up to one; drawn without balance biases
_BIASES = (0.0, 0.3, -0.9)  # the centres of balance biases, see `draw.router_parameters`


@dataclass(frozen=True)
class _Manner:
    """The properties that all ranks of a drawn workload share."""

    magnitude: float
    bias: float
    twins: bool  # experts 2i and 2i + 1 have the same row of the router
    blanks: bool  # every other token is all zeros
    seed: int


def _manners(config: Config) -> st.SearchStrategy[_Manner]:
    """Return a strategy for the shared properties; large tokens only with softmax scores, as others underflow."""
    return st.builds(
        _Manner,
        magnitude=st.sampled_from([1.0, LARGE] if config.routing.score in _SOFTMAXES else [1.0]),
        bias=st.sampled_from(_BIASES),
        twins=st.booleans(),
        blanks=st.booleans(),
        seed=st.integers(0, 2**16),
    )


@st.composite
def route_workloads(
    draw_from: st.DrawFn, variant: str, layout: Layout, limits: Sequence[Limit], device: str
) -> Workload:
    """Draw one router workload within the limits: configuration, sizes, logits with ties, dtype and schedule."""
    freedom = Freedom.under(limits, layout, device)
    config = replace(draw_from(_configs()), variant=variant, dtype=draw_from(st.sampled_from(freedom.dtypes)))
    schedule = draw_from(schedules(freedom))
    manner = draw_from(_manners(config))
    batches = tuple(
        tuple(_batch(m, rank, T, config, manner) for rank, T in enumerate(draw_from(token_counts(freedom))))
        for m in range(microbatches(schedule))
    )
    parameters = draw.router_parameters(config, draw.generator(manner.seed), bias=manner.bias, twins=False)
    if manner.twins:
        router_ED = parameters["router", None]
        router_ED[1::2] = router_ED[: config.experts // 2 * 2 : 2]
    workload = Workload("drawn", RouterStep(), config, layout, batches, schedule, parameters)
    require_allowed(workload, limits, device)
    return workload


@st.composite
def _configs(draw_from: st.DrawFn) -> Config:
    """Draw a config whose scores, weights and groups are compatible."""
    score = draw_from(st.sampled_from(["softmax", "sigmoid", "softmax_topk", "sqrtsoftplus"]))
    plain = Config(
        hidden=draw_from(st.sampled_from([32, 40])),
        routing=RoutingOptions(
            score=score,  # type: ignore[arg-type]  # the strategy gives str
            normalise=score != "softmax_topk" and draw_from(st.booleans()),  # these add up to one already
            scale=draw_from(st.sampled_from([1.0, 2.5])),
            balance_bias=score not in _SOFTMAXES and draw_from(st.booleans()),
        ),
    )
    if not draw_from(st.booleans()):
        E = draw_from(st.integers(1, 8))
        return replace(plain, experts=E, top_k=draw_from(st.integers(1, E)))
    G, size = draw_from(st.integers(2, 4)), draw_from(st.integers(2, 3))
    chosen = draw_from(st.integers(1, G))
    group_score = draw_from(st.sampled_from(["top2_sum", "topk_sum", "max"]))
    fewest = chosen if group_score == "topk_sum" else 1  # it adds up K / chosen scores
    K = draw_from(st.integers(fewest, chosen * size))
    limit = {"routing.groups": (G, chosen), "routing.group_score": group_score}
    return plain.changed({"experts": G * size, "top_k": K, **limit})


def _batch(m: int, rank: int, tokens: int, config: Config, manner: _Manner) -> Batch:
    batch = draw.route_batch(tokens, config, draw.generator(manner.seed, rank, m), manner.magnitude)
    if not manner.blanks:
        return batch
    blank_T1 = (torch.arange(tokens) % 2 == 0)[:, None]
    return replace(batch, x_TD=batch.x_TD.masked_fill(blank_T1, 0.0))
