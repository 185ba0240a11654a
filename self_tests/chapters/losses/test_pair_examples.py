"""Losses: published formulas worked out on paper, which both oracles must meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moe_conformance.reference.losses import balance as first
from moe_conformance.reference.losses import over_ranks as first_over_ranks
from moe_conformance.reference.losses import z_loss as first_z
from moe_conformance.reference.routing.routes import Score
from self_tests.chapters.losses.second import balance as second
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.losses.test_pair import KINDS, derived, every_kind
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]


def logits_of_sigmoids(scores: Sequence[Sequence[float]]) -> Floats:
    """Logits whose sigmoids are these."""
    return np.log(np.array(scores) / (1.0 - np.array(scores)))


def assert_both_charge(
    tokens: Tokens, kind: Score, value: float, *, sequences: list[int] | None = None, of_token_0: list[float]
) -> None:
    """Fail unless both oracles charge this, coefficient 1, and derive this for the first token's logits."""
    logits_TE, ids_TK = floats(tokens.logits_TE, leaf=True), torch.from_numpy(tokens.ids_TK)
    if sequences is None:
        loss = first.auxiliary_loss(logits_TE, ids_TK, score=kind, coefficient=1.0)
        by_hand = second.auxiliary(tokens, kind, 1.0)
    else:
        labels_T = np.array(sequences)
        loss = first.sequence_loss(logits_TE, ids_TK, torch.from_numpy(labels_T), score=kind, coefficient=1.0)
        by_hand = second.by_sequence(tokens, labels_T, kind, 1.0)
    assert [value, value] == pytest.approx([loss.item(), by_hand.value], rel=1e-14)
    assert of_token_0 == pytest.approx(derived(loss, logits_TE)[0].tolist(), rel=1e-13, abs=1e-15)
    assert of_token_0 == pytest.approx(by_hand.gradient_TE[0].tolist(), rel=1e-13, abs=1e-15)


class TestByHand:
    def test_switch(self) -> None:
        """Switch Transformer, equations 4 to 6: alpha N sum_i f_i P_i for four tokens, three experts, top-1."""
        # p: (1/2, 1/4, 1/4) (3/5, 1/5, 1/5) (1/8, 5/8, 1/4) (1/3, 1/6, 1/2); chosen 0, 0, 1, 2: f = (1/2, 1/4, 1/4).
        # P in 480ths: (60+72+15+40, 30+24+75+20, 30+24+30+60) = (187, 149, 144).
        # f.P = (2*187 + 149 + 144) / 1920 = 667/1920, times N = 3: 667/640.
        # Token 0: f.p = 1/4 + 1/16 + 1/16 = 3/8; dL/dl_e = 3/4 p_e (f_e - 3/8) = 3/4 (1/16, -1/32, -1/32).
        powers = [[2, 1, 1], [3, 1, 1], [1, 5, 2], [2, 1, 3]]
        logits_TE = np.log(np.array(powers, dtype=np.float64))
        ids_TK = np.array([[0], [0], [1], [2]])
        assert ids_TK.tolist() == first.choices(floats(logits_TE), score="softmax", top_k=1).tolist()
        assert ids_TK.tolist() == second.own_choices("softmax", logits_TE, 1).tolist()
        assert [2, 1, 1] == first.choice_counts(torch.from_numpy(ids_TK), 3).tolist()
        expected = [3 / 64, -3 / 128, -3 / 128]
        assert_both_charge(Tokens(logits_TE, ids_TK), "softmax", 667 / 640, of_token_0=expected)

    def test_gshard(self) -> None:
        """GShard, section 2.2: (1/E) sum_e (c_e / S) m_e over first choices; times E^2 it is the loss for K = 1."""
        # S = 3 tokens, E = 4: p in 8ths (4,2,1,1) (1,1,4,2) (3,3,1,1), a tie; first choices 0, 2, 0.
        # c/S = (2/3, 0, 1/3, 0). m in 24ths (8, 6, 6, 4). l_aux = 1/4 (16 + 6) / 72 = 22/288. E^2 l_aux = 11/9.
        # Token 0: f.p = 1/3 + 1/24 = 3/8; dL/dl_e = 4/3 p_e (f_e - 3/8): p (1/2, 1/4, 1/8, 1/8).
        logits_TE = np.log(np.array([[4, 2, 1, 1], [1, 1, 4, 2], [3, 3, 1, 1]], dtype=np.float64))
        both_TK = first.choices(floats(logits_TE), score="softmax", top_k=2)
        assert [[0, 1], [2, 3], [0, 1]] == both_TK.tolist()
        assert both_TK.tolist() == second.own_choices("softmax", logits_TE, 2).tolist()
        expected = [4 / 3 * p * d for p, d in [(1 / 2, 7 / 24), (1 / 4, -3 / 8), (1 / 8, -1 / 24), (1 / 8, -3 / 8)]]
        tokens = Tokens(logits_TE, both_TK[:, :1].contiguous().numpy())
        assert_both_charge(tokens, "softmax", 16 * 22 / 288, of_token_0=expected)

    # Sequence A: scores (.8 .4 .2 .6) and (.9 .3 .5 .3), sums 2, p (.4 .2 .1 .3) and (.45 .15 .25 .15).
    # Sequence B: scores (.1 .5 .25 .15) and (.2 .6 .1 .1), sums 1. Top-2: {0,3} {0,2} | {1,2} {1,0}.
    DEEPSEEK = ((0.8, 0.4, 0.2, 0.6), (0.9, 0.3, 0.5, 0.3), (0.1, 0.5, 0.25, 0.15), (0.2, 0.6, 0.1, 0.1))
    CHOSEN = ((0, 3), (0, 2), (1, 2), (1, 0))

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 2, 1]])
    def test_deepseek_v3(self, order: list[int]) -> None:
        """DeepSeek-V3, equations 17 to 20: each sequence alone, in one run or interleaved."""
        # f_i = N_r / (K_r T) n_i = 4 / (2 * 2) n_i = n_i in either.
        # A: n (2,0,1,1), P (.425 .175 .175 .225): .85 + .175 + .225 = 1.25.
        # B: n (1,2,1,0), P (.15 .55 .175 .125): .15 + 1.1 + .175 = 1.425. Mean 1.3375.
        # Token 0: E f = (2,0,1,1), E f.p = .8 + .1 + .3 = 1.2; s (1 - s) / S = (.08 .12 .08 .12);
        # dL/dl_e = 1/2 (sequences) 1/2 (tokens) s (1 - s) / S (E f_e - 1.2).
        logits_TE, ids_TK = logits_of_sigmoids(self.DEEPSEEK)[order], np.array(self.CHOSEN)[order]
        assert ids_TK.tolist() == first.choices(floats(logits_TE), score="sigmoid", top_k=2).tolist()
        assert ids_TK.tolist() == second.own_choices("sigmoid", logits_TE, 2).tolist()
        expected = [0.016, -0.036, -0.004, -0.006]
        labels = [7 if t < 2 else 4 for t in order]
        assert_both_charge(Tokens(logits_TE, ids_TK), "sigmoid", 1.3375, sequences=labels, of_token_0=expected)

    def test_deepseek_v3_as_one_sequence(self) -> None:
        """The same four tokens as one sequence, which is the auxiliary loss of the microbatch."""
        # n (3,2,2,1), E f = n / 2, P (.2875 .3625 .175 .175): .43125 + .3625 + .175 + .0875 = 1.05625.
        # Token 0: E f.p = .6 + .2 + .1 + .15 = 1.05; dL/dl_e = 1/4 (.08 .12 .08 .12) (.45, -.05, -.05, -.55).
        tokens = Tokens(logits_of_sigmoids(self.DEEPSEEK), np.array(self.CHOSEN))
        expected = [0.009, -0.0015, -0.001, -0.0165]
        assert_both_charge(tokens, "sigmoid", 1.05625, of_token_0=expected)
        assert_both_charge(tokens, "sigmoid", 1.05625, sequences=[3, 3, 3, 3], of_token_0=expected)

    def test_root_of_softplus(self) -> None:
        """Two experts scored 1/2 and 2 by sqrt(log(1 + exp(l))), one token, top-1."""
        # p (1/5, 4/5), f (0, 1), L = 2 * 4/5. s'_e = (1 - exp(-s^2)) / (2 s), as sigmoid(l) = 1 - exp(-softplus(l)).
        # dL/dl_e = 2 s'_e / (5/2) (f_e - 4/5).
        logits_TE = np.log(np.expm1(np.array([[0.25, 4.0]])))
        slopes = [-math.expm1(-0.25), -math.expm1(-4.0) / 4.0]
        expected = [0.8 * slopes[0] * -0.8, 0.8 * slopes[1] * 0.2]
        assert_both_charge(Tokens(logits_TE, np.array([[1]])), "sqrtsoftplus", 1.6, of_token_0=expected)

    def test_softmax_over_the_chosen_is_charged_over_all(self) -> None:
        """For a router that weighs by the softmax of the chosen, p is the softmax of all (LOSS-02)."""
        # exp(l) = 1, 2, 5: p (1/8, 2/8, 5/8), top-2 {2, 1}: f (0, 1/2, 1/2), L = 3 * 7/16.
        # f.p = 7/16; dL/dl_e = 3 p_e (f_e - 7/16).
        logits_TE = np.log(np.array([[1.0, 2.0, 5.0]]))
        expected = [3 / 8 * -7 / 16, 6 / 8 * 1 / 16, 15 / 8 * 1 / 16]
        for kind in ("softmax", "softmax_topk"):
            assert_both_charge(Tokens(logits_TE, np.array([[2, 1]])), kind, 21 / 16, of_token_0=expected)

    def test_st_moe(self) -> None:
        """ST-MoE's router z-loss: (1/B) sum of (log sum exp)^2, for sums of 8 and 4."""
        # Z = 3 log 2 and 2 log 2: L = (9 + 4) / 2 log^2 2. Token 0: 2/2 * 3 log 2 * (1/8, 2/8, 5/8).
        logits_TE = np.log(np.array([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]))
        log2 = math.log(2)
        leaf, by_hand = floats(logits_TE, leaf=True), second.z(logits_TE, 1.0)
        loss = first_z.z_loss(leaf, coefficient=1.0)
        assert [6.5 * log2**2] * 2 == pytest.approx([loss.item(), by_hand.value], rel=1e-14)
        expected = [3 * log2 / 8, 6 * log2 / 8, 15 * log2 / 8]
        assert expected == pytest.approx(derived(loss, leaf)[0].tolist(), rel=1e-14)
        assert expected == pytest.approx(by_hand.gradient_TE[0].tolist(), rel=1e-14)

    def test_z_loss_of_uneven_ranks(self) -> None:
        """Tokens of Z = 0, log 2 and 2 log 2, the last on a rank of its own: means of 5/3 and of 9/4 log^2 2."""
        # Together (0 + 1 + 4) / 3; by ranks ((0 + 1) / 2 + 4) / 2; with a third, empty rank ((0 + 1) / 2 + 4) / 3.
        logits_TE, log2 = np.log(np.array([[0.5, 0.5], [1.0, 1.0], [1.0, 3.0]])), math.log(2)
        parts = [floats(logits_TE[:2]), floats(logits_TE[2:]), floats(logits_TE[:0])]
        expected = [5 / 3 * log2**2, 9 / 4 * log2**2, 3 / 2 * log2**2]
        assert expected == pytest.approx(
            [
                first_z.z_loss(floats(logits_TE), coefficient=1.0).item(),
                first_z.z_loss_of_parts(parts[:2], coefficient=1.0).item(),
                first_z.z_loss_of_parts(parts, coefficient=1.0).item(),
            ],
            rel=1e-14,
        )
        by_hand = [(part.numpy(), None) for part in parts]
        assert expected[1:] == pytest.approx(
            [second.z_of_parts(by_hand[:2], 1.0)[0], second.z_of_parts(by_hand, 1.0)[0]], rel=1e-14
        )

    def test_global_loss_of_two_microbatches(self) -> None:
        """Two experts, two microbatches of two groups with one to three tokens; fractions are carried over."""
        # Shares (3/4, 1/4) choose 0, (1/4, 3/4) choose 1. Microbatch 1: group 0 {0}, group 1 {0, 0, 1}; 2: {1} {1, 0}.
        # m = 1: f (3/4, 1/4), P = (3 * 3/4 + 1/4) / 4 = 5/8: L = 2 (15/32 + 3/32) = 9/8.
        # m = 2: f (4/7, 3/7), P = (1/4 + 1/4 + 3/4) / 3 = 5/12: L = 2 (20 + 21) / 84 = 41/42; forgetful: f (1/3, 2/3),
        #        L = 2 (5 + 14) / 36 = 19/18. Gradient of m = 2 for a token with p (1/4, 3/4), d_e = f_e - f.p:
        #        f.p = (4 + 9) / 28: 2/3 p_e (f_e - 13/28) = 2/3 (3/112, -3/112).
        kind = [[3.0, 1.0], [1.0, 3.0]]
        table = [[[0], [0, 0, 1]], [[1], [1, 0]]]
        step = [
            [Tokens(np.log(np.array([kind[e] for e in part])), np.array(part)[:, None]) for part in row]
            for row in table
        ]
        logits = [[floats(part.logits_TE, leaf=True) for part in row] for row in step]
        ids = [[torch.from_numpy(part.ids_TK) for part in row] for row in step]
        for remembers, expected in [(True, [9 / 8, 41 / 42]), (False, [9 / 8, 19 / 18])]:
            losses_M = first_over_ranks.global_losses(
                logits, ids, score="softmax", coefficient=1.0, remembers=remembers
            )
            by_hand = second.over_a_step(step, "softmax", 1.0, remembers=remembers)
            assert expected == pytest.approx(losses_M.tolist(), rel=1e-14)
            assert expected == pytest.approx([value for value, _ in by_hand], rel=1e-14)
            if remembers:
                gradient_E = [2 / 112, -2 / 112]
                assert gradient_E == pytest.approx(derived(losses_M[1], logits[1][0])[0].tolist(), rel=1e-13)
                assert gradient_E == pytest.approx(by_hand[1][1][0][0].tolist(), rel=1e-13)

    @pytest.mark.parametrize("lean", [True, False])
    def test_balance_in_sum_over_unbalanced_sequences(self, lean: bool) -> None:
        """Two sequences, each on one of two experts: balanced in sum, and charged above c if scores lean so."""
        # p (3/4, 1/4) chooses 0 and its mirror 1. Two tokens each: f.P per sequence 3/4, E f.P = 3/2; together 1.
        # Scores need not lean as choices do: with 2 of 3 tokens at p (.51, .49) and one at (0, 1), E f.P is .8933.
        if lean:
            powers, ids, labels = [[3, 1], [3, 1], [1, 3], [1, 3]], [[0], [0], [1], [1]], [0, 0, 1, 1]
            whole, apart = 1.0, 1.5
        else:
            powers, ids, labels = [[51, 49], [51, 49], [1e-300, 100]], [[0], [0], [1]], [0, 0, 0]
            whole = apart = 2 * (2 / 3 * 0.34 + 1 / 3 * 0.66)
        logits_TE, ids_TK = torch.tensor(np.log(np.array(powers, dtype=np.float64))), torch.tensor(ids)
        options = {"score": "softmax", "coefficient": 1.0}
        assert whole == pytest.approx(first.auxiliary_loss(logits_TE, ids_TK, **options).item(), rel=1e-14)
        assert apart == pytest.approx(
            first.sequence_loss(logits_TE, ids_TK, torch.tensor(labels), **options).item(), rel=1e-14
        )


class TestDegenerate:
    """What the spec says of the ends of each rule, asked of both oracles."""

    def charged(self, logits_TE: Floats, ids_TK: NDArray[np.int64], kind: Score) -> list[float]:
        """Loss of both oracles with a coefficient of 1.7."""
        loss = first.auxiliary_loss(floats(logits_TE), torch.from_numpy(ids_TK), score=kind, coefficient=1.7)
        return [loss.item(), second.auxiliary(Tokens(logits_TE, ids_TK), kind, 1.7).value]

    @every_kind
    def test_balanced_counts_cost_the_coefficient(self, kind: Score) -> None:
        """Equal counts give L = c for any logits; a softmax has no gradient then."""
        logits_TE = np.random.default_rng(1).normal(size=(3, 6))
        ids_TK = np.array([[0, 5], [1, 2], [4, 3]])
        assert [1.7, 1.7] == pytest.approx(self.charged(logits_TE, ids_TK, kind), rel=1e-14)
        leaf = floats(logits_TE, leaf=True)
        gradient_TE = derived(first.auxiliary_loss(leaf, torch.from_numpy(ids_TK), score=kind, coefficient=1.7), leaf)
        assert float(gradient_TE.abs().max()) < 1e-15

    @every_kind
    def test_equal_shares_cost_the_coefficient(self, kind: Score) -> None:
        """All logits equal give L = c for any choices."""
        ids_TK = np.array([[0, 5], [0, 5], [0, 3]])
        assert [1.7, 1.7] == pytest.approx(self.charged(np.full((3, 6), 0.3), ids_TK, kind), rel=1e-14)

    @every_kind
    def test_all_experts_chosen_cost_the_coefficient(self, kind: Score) -> None:
        """K = E gives L = c, for E = 1 too."""
        for E in (1, 4):
            logits_TE = np.random.default_rng(2).normal(size=(3, E))
            ids_TK = np.array([list(range(E))] * 3)
            assert [1.7, 1.7] == pytest.approx(self.charged(logits_TE, ids_TK, kind), rel=1e-14)

    @pytest.mark.parametrize("K", [1, 2, 3])
    def test_collapse_costs_its_share(self, K: int) -> None:
        """All tokens on the same K of E experts, with p = 1/K there: L = c E / K."""
        logits_TE = np.array([[0.0] * K + [-math.inf] * (6 - K)] * 5)
        ids_TK = np.array([list(range(K))] * 5)
        for kind in KINDS:
            assert [1.7 * 6 / K] * 2 == pytest.approx(self.charged(logits_TE, ids_TK, kind), rel=1e-14)

    def test_z_loss_of_equal_logits(self) -> None:
        """At l = 0 it is c log(E)^2; a constant added to all logits changes it; -inf adds nothing."""
        rows = [np.zeros((2, 5)), np.full((2, 5), 1.5), np.array([[0.0] * 5 + [-math.inf]] * 2)]
        expected = [1.7 * z**2 for z in (math.log(5), math.log(5) + 1.5, math.log(5))]
        assert expected == pytest.approx([first_z.z_loss(floats(row), coefficient=1.7).item() for row in rows])
        assert expected == pytest.approx([second.z(row, 1.7).value for row in rows])

    @pytest.mark.parametrize("logit", [80.0, -80.0, 0.0])
    @every_kind
    def test_saturation_and_collapse_have_finite_gradients(self, kind: Score, logit: float) -> None:
        """All logits equal and large, or all but one at the other end: nothing is infinite or NaN."""
        for row in ([logit] * 4, [80.0, -80.0, -80.0, -80.0]):
            logits_TE, ids_TK = np.array([row] * 3), np.array([[0]] * 3)
            leaf, ids = floats(logits_TE, leaf=True), torch.from_numpy(ids_TK)
            loss = first.auxiliary_loss(leaf, ids, score=kind, coefficient=1.7)
            expected = second.auxiliary(Tokens(logits_TE, ids_TK), kind, 1.7)
            assert_close(np.array(expected.value), loss)
            assert_close(expected.gradient_TE, derived(loss, leaf), addend=1.0)
            z = first_z.z_loss(leaf, coefficient=1.7)
            assert_close(second.z(logits_TE, 1.7).gradient_TE, derived(z, leaf))
