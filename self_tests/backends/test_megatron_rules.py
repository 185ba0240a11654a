"""The rules that Megatron-LM's trainer checks on its command line, as the adapter asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_conformance.backends.megatron_core import MegatronCore
from moe_conformance.contract import Settings, Unsupported
from moe_conformance.engine import Engine, Job, RankContext

try:
    MegatronCore().versions()  # importing the library here would take seconds: only the ranks need it
except Unsupported as missing:
    pytest.skip(str(missing), allow_module_level=True)

GRAPH = Settings(ep=2, overlap=True, defer_weight_gradients=True, capture=("attention",))
ROUTER = replace(GRAPH, capture=("router",))
ASKED = {
    "a graph of attention": GRAPH,
    "whose products do not accumulate": replace(GRAPH, accumulate_in_product=False),
    "whose attention has a bias": replace(GRAPH, attention_bias=True),
    "a graph of the router alone": ROUTER,
    "a graph of the router with shared experts": replace(ROUTER, shared_experts=1),
    "whose products do not accumulate either": replace(ROUTER, shared_experts=1, accumulate_in_product=False),
}


def answers(context: RankContext, _: None) -> dict[str, str] | None:
    """On a rank: what the command line says to each of the settings; None where the library has no trainer."""
    from moe_conformance.backends.megatron_core import command_line

    if not command_line.checks(GRAPH):
        return None
    said = {}
    for words, asked in ASKED.items():
        try:
            if command_line.checks(asked):
                command_line.validate(asked, 16, 12)
                said[words] = "accepted"
            else:
                said[words] = "not asked"
        except AssertionError as error:
            said[words] = str(error).partition(" to be enabled")[0]
    return said


def test_graphs_of_deferred_weights_need_products_that_accumulate_and_no_bias() -> None:
    """Valid settings are accepted, and what it has no rule for is not asked."""
    with Engine(preload=MegatronCore.preload, environment=MegatronCore.environment) as engine:
        (rank,) = engine.run(Job(f"{__name__}:answers", None, 1, {}, deadline_s=60.0)).ranks
    assert rank.status == "ok", rank.error
    if rank.value is None:
        pytest.skip("this version has no trainer")
    needed = "CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion"
    assert rank.value == {
        "a graph of attention": "accepted",
        "whose products do not accumulate": needed,
        "whose attention has a bias": "CUDA graph with delay_wgrad_compute doesn't support attn bias for now.",
        "a graph of the router alone": "not asked",
        "a graph of the router with shared experts": "accepted",
        "whose products do not accumulate either": needed,
    }
