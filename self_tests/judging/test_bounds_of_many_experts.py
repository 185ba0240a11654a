"""Experts are measured together, filled up with padding: no bound differs from that of an expert measured alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import Gradients, WeightsAt
from moe_conformance.reference.rounding.errors import Rounding
from moe_conformance.reference.rounding.expert_magnitudes import Sharing, swiglu_measured
from moe_conformance.reference.rounding.magnitudes import magnitudes

# Experts of no, one, few and so many slots that spreads take the place of the worst case (49 / 3).
IDS = torch.tensor([0] * 20 + [1] + [3] * 5)[:, None]
TOKENS, HIDDEN, PLACES = len(IDS), 8, [3, 0, 13, 10]


def drawn(*shape: int, seed: int) -> Tensor:
    """Draw normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure(ids_TK: Tensor, weights_at: WeightsAt, columns: dict[int, int]) -> Gradients:
    """Measure the layer with some routing; the experts are as wide as asked for."""
    sizes = {"gate": lambda F: (F, HIDDEN), "up": lambda F: (F, HIDDEN), "down": lambda F: (HIDDEN, F)}
    parameters = {(name, e): drawn(*size(F), seed=e) for e, F in columns.items() for name, size in sizes.items()}  # type: ignore[no-untyped-call]
    x_TD, dy_TD, w_TK = (drawn(TOKENS, D, seed=seed) for seed, D in ((100, HIDDEN), (101, HIDDEN), (102, 1)))
    rounding, sharing = Rounding(2**-8, 2**-24), Sharing(etp=2, places=PLACES, sums=3)
    return magnitudes(
        x_TD, ids_TK, w_TK, dy_TD, swiglu_measured, parameters,
        rounding=rounding, sharing=sharing, weights_at=weights_at,
    )  # fmt: skip


@pytest.mark.parametrize("weights_at", ["output", "input"])
@pytest.mark.parametrize(
    "columns", [{0: 6, 1: 6, 2: 6, 3: 6}, {0: 6, 1: 6, 2: 4, 3: 4}], ids=["alike", "of two widths"]
)
class TestExpertsTogether:
    def test_each_is_measured_as_it_would_be_alone(self, weights_at: WeightsAt, columns: dict[int, int]) -> None:
        """Tokens, weights and parameters have the errors that they have when only their expert is routed to."""
        together = measure(IDS, weights_at, columns)
        for expert in columns:
            here_T = IDS[:, 0] == expert
            alone = measure(torch.where(IDS == expert, IDS, -1), weights_at, columns)
            for name in ("gate", "up", "down"):
                ours, theirs = together.parameters[name, expert], alone.parameters[name, expert]
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
            for ours, theirs in (
                (together.y_TD, alone.y_TD),
                (together.dx_TD, alone.dx_TD),
                (together.dweights_TK, alone.dweights_TK),
            ):
                torch.testing.assert_close(ours[here_T], theirs[here_T], rtol=1e-12, atol=0)

    def test_an_expert_without_slots_has_no_error(self, weights_at: WeightsAt, columns: dict[int, int]) -> None:
        """Its gradients are exact zeros."""
        assert 0 == int(measure(IDS, weights_at, columns).parameters["gate", 2].count_nonzero())
