"""Routing: published gates worked out on paper, which both oracles must meet, and laws of the first."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from self_tests.chapters.routing.second import routes as second
from self_tests.chapters.routing.second.routes import Gate, Limit
from self_tests.chapters.routing.test_pair import first_route, first_weights
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
KINDS = get_args(second.Kind)


def assert_both_route(logits: list[float], gate: Gate, ids: list[int], weights: list[float]) -> None:
    """Fail unless both oracles route one token to these experts with these weights."""
    routed = first_route(np.array([logits]), gate)
    assert [ids] == routed.ids_TK.tolist()
    assert weights == pytest.approx(routed.weights_TK[0].tolist(), rel=1e-14)
    ids_TK, weights_TK = second.route(np.array([logits]), gate)
    assert [ids] == ids_TK.tolist()
    assert weights == pytest.approx(weights_TK[0].tolist(), rel=1e-14)


def assert_both_derive(
    logits: list[float], gate: Gate, ids: list[int], upstream: list[float], gradient: list[float]
) -> None:
    """Fail unless both oracles give one token's logits this gradient."""
    leaf, ids_TK, upstream_TK = floats(np.array([logits]), leaf=True), np.array([ids]), np.array([upstream])
    first_weights(leaf, ids_TK, gate).backward(floats(upstream_TK))
    assert leaf.grad is not None
    assert gradient == pytest.approx(leaf.grad[0].tolist(), rel=1e-13, abs=1e-15)
    by_hand = second.gradient(np.array([logits]), ids_TK, gate, upstream_TK)
    assert gradient == pytest.approx(by_hand[0].tolist(), rel=1e-13, abs=1e-15)


class TestPublishedGates:
    def test_switch_takes_the_softmax_of_the_best(self) -> None:
        """Switch, top-1: the weight is the softmax probability itself, and it is the gate's only gradient."""
        # exp(l) = 1, 2, 5, sum 8. p = 1/8, 2/8, 5/8. dw/dl_e = p_2 ([e = 2] - p_e) = 5/8 (-1/8, -2/8, 3/8).
        logits, gate = [math.log(1), math.log(2), math.log(5)], Gate(1, "softmax")
        assert_both_route(logits, gate, [2], [5 / 8])
        assert_both_derive(logits, gate, [2], [1.0], [-5 / 64, -10 / 64, 15 / 64])

    def test_mixtral_takes_the_softmax_of_the_best_two(self) -> None:
        """Mixtral, top-2: softmax over the two chosen logits alone; the others get no gradient."""
        # exp(l) = 1, 2, 1/2, 6, 1/2. The best two: 6 and 2, of 8. dw_0/dl is 3/4 * 1/4 and minus that.
        logits, gate = [math.log(v) for v in (1, 2, 0.5, 6, 0.5)], Gate(2, "softmax_topk")
        assert_both_route(logits, gate, [3, 1], [6 / 8, 2 / 8])
        assert_both_derive(logits, gate, [3, 1], [1.0, 0.0], [0.0, -3 / 16, 0.0, 3 / 16, 0.0])

    def test_olmoe_and_qwen3_differ_in_normalising(self) -> None:
        """Softmax over all: OLMoE keeps the probabilities, Qwen3 divides by their sum, which is Mixtral's."""
        # exp(l) as above, sum 10. Unnormalised 6/10 and 2/10; normalised 6/8 and 2/8.
        logits = [math.log(v) for v in (1, 2, 0.5, 6, 0.5)]
        assert_both_route(logits, Gate(2, "softmax"), [3, 1], [0.6, 0.2])
        assert_both_route(logits, Gate(2, "softmax", normalise=True), [3, 1], [0.75, 0.25])
        # The sum over all five cancels in the quotient, so the gradient is Mixtral's too.
        normalised = Gate(2, "softmax", normalise=True)
        assert_both_derive(logits, normalised, [3, 1], [1.0, 0.0], [0.0, -3 / 16, 0.0, 3 / 16, 0.0])

    def test_gpt_oss_takes_the_softmax_of_the_best_four(self) -> None:
        """GPT-OSS, top-4: softmax over the four chosen logits, best first."""
        # exp(l) = 1, 5, 2, 4, 1/2, 3. The best four: 5, 4, 3, 2, sum 14.
        logits = [math.log(v) for v in (1, 5, 2, 4, 0.5, 3)]
        assert_both_route(logits, Gate(4, "softmax_topk"), [1, 3, 5, 2], [5 / 14, 4 / 14, 3 / 14, 2 / 14])

    def test_deepseek_v4_takes_the_root_of_the_softplus(self) -> None:
        """Square root of softplus: normalised over the chosen, then scaled."""
        # l = log(exp(s^2) - 1) scores s. s = 1/2, 2, 1: the best two 2 and 1, of 3, times 3/2.
        logits = [math.log(math.expm1(s * s)) for s in (0.5, 2.0, 1.0)]
        gate = Gate(2, "sqrtsoftplus", normalise=True, scale=1.5)
        assert_both_route(logits, gate, [1, 2], [1.0, 0.5])
        assert_both_route(logits, Gate(3, "sqrtsoftplus"), [1, 2, 0], [2.0, 1.0, 0.5])


class TestDeepSeekV3:
    """Eight experts in four groups of two, of which two are open; K = 3; sigmoid scores; scale 5/2.

    score          .9   .1 |  .6  .5  |  .2  .7  |  .4  .3        logit = log(s / (1 - s))
    bias         -.15    0 |   0  .15 |   0  -.2 |  .3   0
    choice value  .75   .1 |  .6  .65 |  .2  .5  |  .7  .3
    top2_sum        .85    |   1.25   |    .7    |   1.0          groups 1 and 3
    max             .75    |    .65   |    .5    |    .7          groups 0 and 3
    """

    SCORES = (0.9, 0.1, 0.6, 0.5, 0.2, 0.7, 0.4, 0.3)
    LOGITS = tuple(math.log(s / (1 - s)) for s in SCORES)
    BIAS = (-0.15, 0.0, 0.0, 0.15, 0.0, -0.2, 0.3, 0.0)

    def gate(self, rule: second.GroupRule | None, *, slots: int = 3, biased: bool = True) -> Gate:
        """The gate of the table above."""
        limit = None if rule is None else Limit(4, 2, rule)
        return Gate(slots, "sigmoid", self.BIAS if biased else None, limit, normalise=True, scale=2.5)

    def test_groups_by_the_sum_of_their_best_two(self) -> None:
        """Groups 1 and 3 are open: experts 6 (.7), 3 (.65), 2 (.6), weighed by .4, .5 and .6 of 1.5."""
        assert_both_route(list(self.LOGITS), self.gate("top2_sum"), [6, 3, 2], [1 / 1.5, 1.25 / 1.5, 1.0])

    def test_groups_by_their_best(self) -> None:
        """Groups 0 and 3 are open: experts 0 (.75), 6 (.7), 7 (.3), weighed by .9, .4 and .3 of 1.6."""
        expected = [2.25 / 1.6, 1.0 / 1.6, 0.75 / 1.6]
        assert_both_route(list(self.LOGITS), self.gate("max"), [0, 6, 7], expected)

    def test_groups_by_their_share_of_the_slots(self) -> None:
        """K = 3 of two groups adds up floor(3/2) = 1 score, as `max` does; K = 4 adds up 2, as `top2_sum`."""
        expected = [2.25 / 1.6, 1.0 / 1.6, 0.75 / 1.6]
        assert_both_route(list(self.LOGITS), self.gate("topk_sum"), [0, 6, 7], expected)
        # Groups 1 and 3 whole: choice values .7, .65, .6, .3; scores .4, .5, .6, .3 of 1.8.
        expected = [1.0 / 1.8, 1.25 / 1.8, 1.5 / 1.8, 0.75 / 1.8]
        assert_both_route(list(self.LOGITS), self.gate("topk_sum", slots=4), [6, 3, 2, 7], expected)

    def test_without_bias(self) -> None:
        """Sums 1.0, 1.1, .9, .7 open groups 1 and 0: experts 0, 2, 3 with .9, .6 and .5 of 2."""
        assert_both_route(list(self.LOGITS), self.gate("top2_sum", biased=False), [0, 2, 3], [1.125, 0.75, 0.625])

    def test_without_groups(self) -> None:
        """The three highest choice values are .75, .7 and .65: experts 0, 6, 3 with .9, .4 and .5 of 1.8."""
        assert_both_route(list(self.LOGITS), self.gate(None), [0, 6, 3], [1.25, 1.0 / 1.8, 1.25 / 1.8])

    def test_gradient_passes_the_quotient_and_the_sigmoid(self) -> None:
        """The first weight, .4 of 1.5 times 2.5, pulls its own logit up and the other chosen ones down."""
        # dw/ds_6 = 2.5 (1.5 - .4) / 2.25; dw/ds_3 = dw/ds_2 = -2.5 * .4 / 2.25; ds/dl = s (1 - s):
        # .4 * .6 = .24, .5 * .5 = .25, .6 * .4 = .24. The bias has no part in it.
        gradient = [0.0] * 8
        gradient[6], gradient[3], gradient[2] = 2.75 / 2.25 * 0.24, -1.0 / 2.25 * 0.25, -1.0 / 2.25 * 0.24
        assert_both_derive(list(self.LOGITS), self.gate("top2_sum"), [6, 3, 2], [1.0, 0.0, 0.0], gradient)


class TestLaws:
    """How the first oracle's answers must change, or not, when the question does."""

    LOGITS_TE = np.random.default_rng(11).normal(size=(8, 6))

    def routed(self, logits_TE: Floats, gate: Gate) -> tuple[list[list[int]], Floats]:
        """Ids as lists and weights as an array."""
        routed = first_route(logits_TE, gate)
        return routed.ids_TK.tolist(), routed.weights_TK.numpy()

    @pytest.mark.parametrize("kind", KINDS)
    def test_tokens_are_routed_one_by_one(self, kind: second.Kind) -> None:
        """Permuting the tokens permutes the rows; 1, 2 and 4 ranks route as one does."""
        gate = Gate(3, kind, normalise=True, limit=Limit(3, 2, "top2_sum"))
        ids, weights_TK = self.routed(self.LOGITS_TE, gate)
        order = [5, 2, 7, 0, 1, 6, 4, 3]
        permuted_ids, permuted_TK = self.routed(self.LOGITS_TE[order], gate)
        assert [ids[t] for t in order] == permuted_ids
        assert weights_TK[order].tolist() == permuted_TK.tolist()
        for ranks in (2, 4):
            parts = [self.routed(part, gate) for part in np.split(self.LOGITS_TE, ranks)]
            assert ids == [row for part, _ in parts for row in part]
            assert weights_TK.tolist() == [row for _, part in parts for row in part.tolist()]

    @pytest.mark.parametrize("kind", KINDS)
    def test_new_names_for_experts_are_only_names(self, kind: second.Kind) -> None:
        """Relabelling experts within and among their groups, biases too, relabels the choice."""
        limit, old = Limit(3, 2, "top2_sum"), [4, 5, 1, 0, 2, 3]  # expert `new` was expert old[new]
        bias = (0.3, -0.2, 0.1, 0.7, -0.6, 0.0)
        ids, weights_TK = self.routed(self.LOGITS_TE, Gate(3, kind, bias, limit))
        new_ids, new_TK = self.routed(self.LOGITS_TE[:, old], Gate(3, kind, tuple(bias[e] for e in old), limit))
        assert ids == [[old[e] for e in row] for row in new_ids]
        np.testing.assert_allclose(new_TK, weights_TK, rtol=1e-14)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("normalise", [False, True])
    def test_the_scale_is_one_factor(self, kind: second.Kind, normalise: bool) -> None:
        """Scaling by 4 multiplies every weight by 4 exactly, after normalising, and chooses alike."""
        ids, weights_TK = self.routed(self.LOGITS_TE, Gate(3, kind, normalise=normalise))
        scaled_ids, scaled_TK = self.routed(self.LOGITS_TE, Gate(3, kind, normalise=normalise, scale=4.0))
        assert ids == scaled_ids
        assert (4.0 * weights_TK).tolist() == scaled_TK.tolist()

    @pytest.mark.parametrize("kind", KINDS)
    def test_slots_carry_no_meaning(self, kind: second.Kind) -> None:
        """The weights of a choice in another order are the weights in that order."""
        gate, order = Gate(3, kind, normalise=True, scale=2.5), [2, 0, 1]
        ids_TK, weights_TK = second.route(self.LOGITS_TE, gate)
        permuted_TK = first_weights(floats(self.LOGITS_TE), ids_TK[:, order], gate)
        assert_close(weights_TK[:, order], permuted_TK)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_bias_for_all_decides_nothing(self, kind: second.Kind) -> None:
        """The same bias on every expert changes neither the choice nor a bit of the weights."""
        ids, weights_TK = self.routed(self.LOGITS_TE, Gate(3, kind))
        biased_ids, biased_TK = self.routed(self.LOGITS_TE, Gate(3, kind, (0.5,) * 6))
        assert ids == biased_ids
        assert weights_TK.tolist() == biased_TK.tolist()

    @pytest.mark.parametrize("kind", ["softmax", "softmax_topk"])
    def test_softmax_sees_differences_only(self, kind: second.Kind) -> None:
        """Adding 700 to all logits of a token overflows nothing and changes no weight."""
        ids, weights_TK = self.routed(self.LOGITS_TE, Gate(3, kind))
        shifted_ids, shifted_TK = self.routed(self.LOGITS_TE + 700.0, Gate(3, kind))
        assert ids == shifted_ids
        np.testing.assert_allclose(shifted_TK, weights_TK, rtol=1e-12)

    def test_normalised_softmax_is_the_softmax_of_the_chosen(self) -> None:
        """Softmax over all divided by the chosen sum equals softmax over the chosen: Mixtral's identity."""
        ids, over_all_TK = self.routed(self.LOGITS_TE, Gate(3, "softmax", normalise=True))
        chosen_ids, over_chosen_TK = self.routed(self.LOGITS_TE, Gate(3, "softmax_topk"))
        assert ids == chosen_ids
        np.testing.assert_allclose(over_all_TK, over_chosen_TK, rtol=1e-14)
