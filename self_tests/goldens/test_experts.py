"""The goldens of the layer are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from typing import Any

from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU
from self_tests.goldens.golden_layer import stacked, tokens_of
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Output and every gradient, with weights at the output and at the input."""
        own = given(stored("experts"), "layer")
        experts = [SwiGLU(own["gate"][e], own["up"][e], own["down"][e]) for e in range(len(own["gate"]))]
        batch, upstream = [tokens_of(own)], [own["dy_TD"]]
        answers: dict[str, Any] = {}
        for place in ("output", "input"):
            (y_TD,) = layer.forward(batch, experts, place)
            back = layer.backward(batch, experts, place, upstream)
            gradients = {"dx_TD": back.dx[0], "dweights_TK": back.dweights[0]} | stacked(back.experts)
            answers |= told(place, {"y_TD": y_TD} | gradients)
        assert_twins("experts", answers)
