"""Bounds of training steps hold for a plain float32 trainer, and are far below what mistakes change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_conformance.chapters.training.judge.expected import PARAMETERS, Expected, of_state
from moe_conformance.chapters.training.workloads import NAMES, QUICK, script
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.training.model import Key, Parameters, Tokens, layers_of
from moe_conformance.reference.training.optimisers import SGD
from moe_conformance.workloads.chapter import EP2_EDP2

_MARGIN = 1e-4  # least difference of logits, between a token's last selected expert and the next


def outputs(x_TD: Tensor, parameters: Parameters) -> Tensor:
    """All layers in float32, experts one after the other."""
    h_TD = x_TD
    for layer in layers_of(parameters):
        if ("router", None) not in layer:
            h_TD = h_TD + _swiglu(h_TD, layer, None)
            continue
        scores_TE = (h_TD @ layer["router", None].T).softmax(1)
        best_TE = torch.zeros_like(scores_TE).scatter(1, scores_TE.topk(2).indices, 1.0)
        experts = range(scores_TE.shape[1])
        h_TD = h_TD + sum((scores_TE * best_TE)[:, e : e + 1] * _swiglu(h_TD, layer, e) for e in experts)
    return h_TD


def _swiglu(x_TD: Tensor, layer: Parameters, e: int | None) -> Tensor:
    hidden_TF = torch.nn.functional.silu(x_TD @ layer["gate", e].T) * (x_TD @ layer["up", e].T)
    return hidden_TF @ layer["down", e].T


def trained(expected: Expected) -> list[dict[Key, Tensor]]:
    """Parameters after each step of torch's optimiser and clipping in float32, on one device."""
    leaves = {key: value.clone().requires_grad_() for key, value in expected.workload.parameters.items()}
    how, given = expected.optimiser, expected.workload.config.training
    optimiser: torch.optim.Optimizer
    if isinstance(how, SGD):
        optimiser = torch.optim.SGD(leaves.values(), how.rate, how.momentum, weight_decay=how.decay)
    else:
        optimiser = torch.optim.AdamW(leaves.values(), how.rate, how.betas, how.epsilon, how.decay)
    found = []
    for number in range(len(expected.steps)):
        optimiser.zero_grad()
        tokens = expected.tokens(number)
        _loss(tokens, leaves).backward()
        for leaf in leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), given.largest_norm or torch.inf)
        if bool(norm.isfinite()):
            optimiser.step()
        found.append({key: leaf.detach().clone() for key, leaf in leaves.items()})
    return found


def _loss(tokens: Tokens, leaves: Parameters) -> Tensor:
    off_TD = (outputs(tokens.x_TD, leaves) - tokens.target_TD)[tokens.counted_T]
    return off_TD.square().sum() / 2 / int(tokens.counted_T.sum())


class TestBounds:
    @pytest.mark.parametrize("name", NAMES)
    def test_they_hold_and_say_something(self, name: str) -> None:
        """Float32 stays within them; half of all elements change by a hundred times what is allowed in every step.

        In bfloat16 parameters may change by what is allowed, and the gradient is known by the first moments.
        """
        expected = Expected(script(name, EP2_EDP2))
        for number, parameters in enumerate(trained(expected)):
            ratios = []
            for key, value in parameters.items():
                target = expected.after(number, PARAMETERS, key)
                off = (value.double() - target.expected).abs()
                assert bool((off <= target.allowed).all()), (number, key, float((off / target.allowed).max()))
                before = of_state(expected.state_before(number), PARAMETERS, key)
                ratios.append(((target.expected - before).abs() / target.allowed).flatten())
            if expected.workload.config.dtype == torch.bfloat16:
                for key in parameters:
                    moment = expected.after(number, "first", key)
                    assert 2 * float(moment.allowed.norm()) <= float(moment.expected.norm()), (number, key)
            elif bool(expected.steps[number].norm.isfinite()):
                assert float(torch.cat(ratios).median()) > 100

    @pytest.mark.parametrize("layout", QUICK, ids=lambda layout: layout.name)
    @pytest.mark.parametrize("name", NAMES)
    def test_no_selection_is_nearly_a_tie(self, name: str, layout: Layout) -> None:
        """Neither with the parameters that are written nor with those after some steps."""
        expected = Expected(script(name, layout))
        for number in range(len(expected.steps)):
            parameters = expected.state_before(number).parameters
            h_TD = expected.tokens(number).x_TD.double()
            for depth, layer in enumerate(layers_of(parameters)):
                if ("router", None) in layer:
                    best_T3 = (h_TD @ layer["router", None].T).topk(3).values
                    assert _MARGIN < float((best_T3[:, 1] - best_T3[:, 2]).min()), depth
                one = {(f"layer0/{name_}", e): value for (name_, e), value in layer.items()}
                h_TD = outputs(h_TD, one)

    @pytest.mark.parametrize("name", ["train-adamw", "train-sgd"])
    def test_experts_without_tokens(self, name: str) -> None:
        """In every step some expert of each MoE layer has none, after the first step one that has had some."""
        expected = Expected(script(name, EP2_EDP2))
        for number in range(len(expected.steps)):
            idle = {(key[0].split("/")[0], key[1]) for key in expected.idle(number)}
            assert {("layer1", number), ("layer2", number)} <= idle
