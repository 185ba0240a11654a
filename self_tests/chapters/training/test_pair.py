"""Training steps, worked out twice: reference.training by autograd, the longhand by complex steps."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_conformance.reference.training import model, optimisers, steps
from moe_conformance.reference.training.model import Tokens
from moe_conformance.reference.training.optimisers import SGD, AdamW
from self_tests.chapters.training import second
from self_tests.oracles.agreement import assert_close

D, F, E, K, T = 3, 2, 3, 2, 4
ADAMW: dict[str, Any] = {"rate": 0.125, "betas": (0.75, 0.875), "epsilon": 1e-3, "decay": 0.5}
PLAIN_SGD: dict[str, Any] = {"rate": 0.25, "momentum": 0.5, "decay": 0.25}
FIRST: dict[str, Any] = {"adamw": AdamW(**ADAMW), "sgd": SGD(**PLAIN_SGD)}
SECOND: dict[str, Any] = {"adamw": partial(second.adamw, **ADAMW), "sgd": partial(second.sgd, **PLAIN_SGD)}


def drawn_parameters(seed: int) -> dict[model.Key, Tensor]:
    """A dense layer and two MoE layers."""
    g = torch.Generator().manual_seed(seed)
    found: dict[model.Key, Tensor] = {}
    for number in range(3):
        for e in range(E) if number else (None,):
            for name, size in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                found[f"layer{number}/{name}", e] = torch.randn(size, generator=g, dtype=torch.float64)
        if number:
            found[f"layer{number}/router", None] = torch.randn(E, D, generator=g, dtype=torch.float64)
    return found


def drawn_tokens(seed: int, counted: tuple[bool, ...] = (True, False, True, True)) -> Tokens:
    """Some tokens, of which some do not count."""
    g = torch.Generator().manual_seed(1000 + seed)
    x_TD, target_TD = (torch.randn(T, D, generator=g, dtype=torch.float64) for _ in range(2))
    return Tokens(x_TD, target_TD, torch.tensor(counted))


def in_numpy(tokens: Tokens) -> list[tuple[Any, Any, bool]]:
    """Token by token, as the second oracle takes them."""
    return list(zip(tokens.x_TD.numpy(), tokens.target_TD.numpy(), tokens.counted_T.tolist(), strict=True))


def arrays(parameters: model.Parameters) -> dict[model.Key, Any]:
    """Parameters as the second oracle takes them."""
    return {key: value.numpy() for key, value in parameters.items()}


class TestGradedPair:
    @pytest.mark.parametrize("seed", range(2))
    def test_losses_and_gradients_agree(self, seed: int) -> None:
        """Of all parameters, also of experts without tokens."""
        parameters, tokens = drawn_parameters(seed), drawn_tokens(seed)
        first = model.graded(tokens, parameters, K)
        loss, gradients = second.graded(in_numpy(tokens), arrays(parameters), K)
        assert_close(np.array(loss), first.loss)
        largest = max(float(np.abs(each).max()) for each in gradients.values())
        for key, gradient in gradients.items():
            assert_close(gradient, first.gradients[key], addend=largest)

    def test_no_token_counts(self) -> None:
        """Loss and gradients are 0."""
        parameters, tokens = drawn_parameters(0), drawn_tokens(0, (False,) * T)
        first = model.graded(tokens, parameters, K)
        loss, gradients = second.graded(in_numpy(tokens), arrays(parameters), K)
        assert (0.0, 0.0) == (loss, first.loss.item())
        assert all(not each.any() for each in gradients.values())
        assert not any(bool(each.any()) for each in first.gradients.values())


class TestOptimiserPair:
    @pytest.mark.parametrize("name", FIRST)
    def test_updates_agree(self, name: str) -> None:
        """Element by element over several steps, of gradients of 0 too; and with torch's own optimiser."""
        g = torch.Generator().manual_seed(5)
        theta = torch.randn(7, generator=g, dtype=torch.float64)
        elements = [second.Element(each) for each in theta.tolist()]
        kept, leaf = FIRST[name].nothing_kept(theta), theta.clone().requires_grad_()
        torchs = _torch_optimiser(name, leaf)
        for t in range(1, 5):
            gradient = torch.randn(7, generator=g, dtype=torch.float64) * (t != 3)
            theta, kept = FIRST[name].update(theta, gradient, kept, t)
            for element, each in zip(elements, gradient.tolist(), strict=True):
                SECOND[name](element, each, t)
            leaf.grad = gradient.clone()
            torchs.step()
            assert_close(np.array([each.theta for each in elements]), theta, addend=1.0)
            assert_close(leaf.detach().numpy(), theta, addend=1.0)
            for what, value in kept.items():
                assert_close(np.array([each.kept[what] for each in elements]), value, addend=1.0)

    def test_nothing_kept(self) -> None:
        """Moments are 0 at first."""
        theta = torch.ones(2, dtype=torch.float64)
        assert {"first": [0.0, 0.0], "second": [0.0, 0.0]} == _lists(FIRST["adamw"].nothing_kept(theta))
        assert {"momentum": [0.0, 0.0]} == _lists(FIRST["sgd"].nothing_kept(theta))


def _lists(kept: optimisers.Kept) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in kept.items()}


def _torch_optimiser(name: str, leaf: Tensor) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([leaf], lr=0.25, momentum=0.5, weight_decay=0.25)
    return torch.optim.AdamW([leaf], lr=0.125, betas=(0.75, 0.875), eps=1e-3, weight_decay=0.5)


class TestStepsPair:
    @pytest.mark.parametrize(("name", "largest"), [("adamw", 0.5), ("sgd", inf)])
    def test_steps_agree(self, name: str, largest: float) -> None:
        """Loss, norm, parameters and moments, step by step, clipped or not; a step that is not finite is none."""
        parameters = drawn_parameters(2)
        every = [drawn_tokens(seed) for seed in (2, 3, 4)]
        every[1].target_TD[0, 0] = inf
        found = steps.train(parameters, every, FIRST[name], top_k=K, largest_norm=largest)
        model_2 = second.Model.of(arrays(parameters))
        for number, (tokens, each) in enumerate(zip(every, found, strict=True)):
            with np.errstate(invalid="ignore", over="ignore"):
                loss, norm = model_2.step(in_numpy(tokens), SECOND[name], top_k=K, largest=largest)
            if number != 1:
                assert_close(np.array(loss), each.loss)
                assert_close(np.array(norm), each.norm)
            assert not (number == 1 and bool(each.norm.isfinite()))
            assert model_2.steps == each.after.steps
            for key, value in model_2.parameters().items():
                assert_close(value, each.after.parameters[key], addend=10.0)
            for what in FIRST[name].nothing_kept(torch.zeros(1)):
                for key, value in model_2.kept(what).items():
                    assert_close(value, each.after.kept[key][what], addend=10.0)

    def test_one_factor(self) -> None:
        """All gradients are multiplied alike, and their norm is the largest that is allowed."""
        gradients = {("dense", None): torch.tensor([3.0, 0.0]), ("gate", 5): torch.tensor([[-4.0]])}
        clipped = steps.by_one_factor(gradients, 2.5)
        factor = second.clip_factor(second.length({key: each.numpy() for key, each in gradients.items()}), 2.5)
        assert {key: (factor * each).tolist() for key, each in gradients.items()} == {
            key: each.tolist() for key, each in clipped.items()
        }
