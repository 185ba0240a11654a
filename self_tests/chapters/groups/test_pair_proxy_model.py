"""Two oracles of whole layers and of the proxy model: outputs equal, gradients as finite differences say."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_conformance.reference.groups import proxy_model
from moe_conformance.reference.routing import routes
from moe_conformance.reference.shared_experts import whole_layer
from moe_conformance.reference.shared_experts.whole_layer import Weighing
from self_tests.chapters.groups.second import proxy_model as second

D, F, E, K = 5, 4, 6, 2
STEP = 1e-6


def drawn(generator: torch.Generator, gated: bool) -> dict[tuple[str, int | None], Tensor]:
    """Return the parameters of a block with two shared experts of different widths, the second with a bias."""

    def normal(*shape: int) -> Tensor:
        return 0.4 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    made: dict[tuple[str, int | None], Tensor] = {
        ("router", None): normal(E, D),
        ("mix_in", None): normal(3, D),
        ("mix_out", None): normal(D, 3),
    }
    for prefix, number, width in [*(("", e, F) for e in range(E)), ("shared_", 0, 3), ("shared_", 1, 7)]:
        made[f"{prefix}gate", number], made[f"{prefix}up", number] = normal(width, D), normal(width, D)
        made[f"{prefix}down", number] = normal(D, width)
    made["shared_bias", 1] = normal(D)
    if gated:
        made["shared_score", None] = normal(1, D)
    return made


def arrays(parameters: dict[tuple[str, int | None], Tensor]) -> second.Parameters:
    """Return the same for NumPy."""
    return {key: value.numpy() for key, value in parameters.items()}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
class TestLayer:
    @pytest.mark.parametrize("dropped", [(), ((0, 1), (2, 0), (2, 1))], ids=["all-kept", "some-dropped"])
    @pytest.mark.parametrize("score", ["softmax", "sigmoid"])
    def test_oracles_agree(
        self, gated: bool, score: Literal["softmax", "sigmoid"], dropped: tuple[tuple[int, int], ...]
    ) -> None:
        """Outputs are equal, and a step along a random direction changes the loss by what the gradients say."""
        generator = torch.Generator().manual_seed(11)
        p, how = drawn(generator, gated), Weighing(score, True, 2.5)
        x, dy, direction = torch.randn(3, 4, D, generator=generator, dtype=torch.float64)
        logits = x @ p["router", None].T
        assert 1e-3 < float(routes.margins(logits, top_k=K, score=score).min())
        ids = routes.route(logits, top_k=K, score=score).ids_TK
        layer = {key: value for key, value in p.items() if not key[0].startswith("mix")}
        kept = torch.tensor([[(t, k) not in dropped for k in range(K)] for t in range(len(x))])
        found = whole_layer.gradients(x, ids, dy, layer, how, kept_TK=kept if dropped else None)

        def loss(step: float) -> float:
            moved = {key: value + step * torch.ones_like(value) for key, value in layer.items()}
            y = second.layer((x + step * direction).numpy(), arrays(moved), K, score, True, 2.5, dropped)
            return float((y * dy.numpy()).sum())

        by_hand = second.layer(x.numpy(), arrays(layer), K, score, True, 2.5, dropped)
        assert np.allclose(found.y_TD, by_hand, rtol=1e-12)
        slope = float((found.dx_TD * direction).sum()) + sum(float(each.sum()) for each in found.parameters.values())
        assert slope == pytest.approx((loss(STEP) - loss(-STEP)) / (2 * STEP), rel=1e-6)

    def test_without_kept_slots_the_shared_part_is_left(self, gated: bool) -> None:
        """Where everything is dropped the gradients of router and experts are exactly zero, and there."""
        generator = torch.Generator().manual_seed(13)
        p = drawn(generator, gated)
        layer = {key: value for key, value in p.items() if not key[0].startswith("mix")}
        x, dy = torch.randn(2, 3, D, generator=generator, dtype=torch.float64)
        ids, none = torch.tensor([[0, 1], [4, 2], [5, 0]]), torch.zeros(3, K, dtype=torch.bool)
        found = whole_layer.gradients(x, ids, dy, layer, Weighing("softmax"), kept_TK=none)
        alone = {key for key in layer if key[0].startswith("shared")}
        every = [(t, k) for t in range(3) for k in range(K)]
        by_hand = second.layer(x.numpy(), arrays(layer), K, "softmax", False, 1.0, every)
        assert np.allclose(found.y_TD, by_hand, rtol=1e-12)
        assert {key for key, each in found.parameters.items() if bool(each.any())} == alone
        nothing = {key: value for key, value in layer.items() if not key[0].startswith("shared")}
        bare = whole_layer.gradients(x, ids, dy, nothing, Weighing("softmax"), kept_TK=none)
        assert not any(bool(each.any()) for each in (bare.y_TD, bare.dx_TD, *bare.parameters.values()))


class TestModel:
    def test_oracles_agree(self) -> None:
        """Outputs of two sequences are equal, and the gradients are those that finite differences see."""
        generator = torch.Generator().manual_seed(12)
        blocks = [drawn(generator, True), drawn(generator, False)]
        sequences = [torch.randn(S, D, generator=generator, dtype=torch.float64) for S in (5, 3)]
        upstream = [torch.randn(S, D, generator=generator, dtype=torch.float64) for S in (5, 3)]
        found = proxy_model.gradients(sequences, upstream, blocks, K, Weighing("softmax"))
        assert 1e-4 < found.margin

        def outputs(step: float) -> list[second.Array]:
            moved = [arrays({key: value + step * value.cos() for key, value in each.items()}) for each in blocks]
            return [second.model((x + step * x.sin()).numpy(), moved, K, "softmax") for x in sequences]

        def loss(step: float) -> float:
            return sum(float((y * dy.numpy()).sum()) for y, dy in zip(outputs(step), upstream, strict=True))

        for actual, expected in zip(found.y, outputs(0.0), strict=True):
            assert np.allclose(expected, actual, rtol=1e-12)
        slope = sum(float((dx * x.sin()).sum()) for dx, x in zip(found.dx, sequences, strict=True))
        for gradients, each in zip(found.parameters, blocks, strict=True):
            slope += sum(float((gradients[key] * value.cos()).sum()) for key, value in each.items())
        assert slope == pytest.approx((loss(STEP) - loss(-STEP)) / (2 * STEP), rel=1e-5)
