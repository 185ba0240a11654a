"""Losses: laws of the first oracle, held against the longhand where that has more to say."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.losses import balance as first
from moe_conformance.reference.losses import over_ranks as first_over_ranks
from moe_conformance.reference.losses import scaling
from moe_conformance.reference.losses import z_loss as first_z
from moe_conformance.reference.routing.routes import Score
from self_tests.chapters.losses.second import balance as second
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.losses.test_pair import derived, every_kind
from self_tests.oracles.agreement import assert_close, floats

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class TestLaws:
    @every_kind
    @pairs_agree
    @given(st.randoms(use_true_random=False), st.integers(1, 7), st.integers(2, 6))
    def test_tokens_and_experts_may_be_renamed(self, kind: Score, random: Random, T: int, E: int) -> None:
        """Permuting tokens leaves the losses; relabelling experts in logits and ids does too, gradients along."""
        numbers = np.random.default_rng(random.randrange(10**6))
        logits_TE, K = numbers.normal(size=(T, E)), min(2, E)
        ids_TK = second.own_choices(kind, logits_TE, K)
        tokens, names = random.sample(range(T), T), random.sample(range(E), E)
        renamed_TE, renamed_TK = np.empty((T, E)), np.array(names)[ids_TK[tokens]]
        renamed_TE[:, names] = logits_TE[tokens]
        assert sorted(map(sorted, renamed_TK.tolist())) == sorted(
            map(sorted, first.choices(floats(renamed_TE), score=kind, top_k=K).tolist())
        )
        labels_T = numbers.integers(0, 3, size=T)
        pair = [(logits_TE, ids_TK, labels_T), (renamed_TE, renamed_TK, labels_T[tokens])]
        found = []
        for logits, ids, labels in pair:
            leaf = floats(logits, leaf=True)
            options = {"score": kind, "coefficient": 1.7}
            losses = [
                first.auxiliary_loss(leaf, torch.from_numpy(ids), **options),
                first.sequence_loss(leaf, torch.from_numpy(ids), torch.from_numpy(labels), **options),
                first_z.z_loss(leaf, coefficient=1.7),
            ]
            found.append(([loss.item() for loss in losses], derived(sum(losses, torch.zeros(())), leaf).numpy()))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
        np.testing.assert_allclose(found[1][1][:, names], found[0][1][tokens], rtol=1e-11, atol=1e-13)

    @every_kind
    @pytest.mark.parametrize("dp", [1, 2, 4])
    def test_a_step_on_several_groups_is_the_step_on_one(self, kind: Score, dp: int) -> None:
        """The global losses of eight tokens in two microbatches do not see how groups share them (LOSS-08)."""
        logits_TE = np.random.default_rng(6).normal(size=(8, 5))
        ids_TE = second.own_choices(kind, logits_TE, 2)
        # Uneven parts: the first group has the remainder, and with four groups one has nothing.
        cuts = {1: [0, 4], 2: [0, 3, 4], 4: [0, 2, 3, 3, 4]}[dp]
        parts = [[slice(4 * m + a, 4 * m + b) for a, b in pairwise(cuts)] for m in range(2)]
        leaf = floats(logits_TE, leaf=True)
        losses_M = first_over_ranks.global_losses(
            [[leaf[part] for part in row] for row in parts],
            [[torch.from_numpy(ids_TE[part]) for part in row] for row in parts],
            score=kind,
            coefficient=1.7,
        )
        whole = [[Tokens(logits_TE[:4], ids_TE[:4])], [Tokens(logits_TE[4:], ids_TE[4:])]]
        expected = second.over_a_step(whole, kind, 1.7)
        assert_close(np.array([value for value, _ in expected]), losses_M)
        gradients = [
            derived(loss, leaf) if m else torch.autograd.grad(loss, leaf, retain_graph=True)[0]
            for m, loss in enumerate(losses_M)
        ]
        finished = scaling.mean_gradient([[gradient] for gradient in gradients])
        by_hand = np.concatenate([gradients[0] / 2 for _, gradients in expected])
        assert_close(by_hand, finished, addend=1.0)

    @pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
    def test_sequences_may_be_cut_into_microbatches(self, microbatches: int) -> None:
        """Six sequences in 1, 2, 3 or 6 microbatches give the router the same finished gradient (LOSS-06)."""
        random = np.random.default_rng(8)
        labels_T = np.repeat(np.arange(6), [1, 3, 2, 5, 1, 4])
        x_TD, router_ED = random.normal(size=(16, 3)), random.normal(size=(5, 3))
        logits_TE = x_TD @ router_ED.T
        ids_TK = second.own_choices("sigmoid", logits_TE, 2)
        gradients = []
        for m in range(microbatches):
            mine = [t for t in range(16) if labels_T[t] * microbatches // 6 == m]
            leaf, ids = floats(logits_TE[mine], leaf=True), torch.from_numpy(ids_TK[mine])
            loss = first.sequence_loss(leaf, ids, torch.from_numpy(labels_T[mine]), score="sigmoid", coefficient=1.7)
            _, drouter_ED = scaling.router_gradients(floats(x_TD[mine]), floats(router_ED), derived(loss, leaf))
            gradients.append([drouter_ED])
        whole = second.by_sequence(Tokens(logits_TE, ids_TK), labels_T, "sigmoid", 1.7)
        np.testing.assert_allclose(
            scaling.mean_gradient(gradients).numpy(), whole.gradient_TE.T @ x_TD, rtol=1e-11, atol=1e-13
        )

    @every_kind
    def test_padding_is_as_if_it_were_not_there(self, kind: Score) -> None:
        """With a mask that differs on its two sides every loss is that of the rows it leaves (LOSS-14)."""
        random = np.random.default_rng(4)
        logits_TE, padding_T = random.normal(size=(7, 4)), np.array([True, False, False, True, False, False, False])
        ids_TK, labels_T = random.integers(0, 4, size=(7, 2)), np.array([2, 2, 1, 1, 1, 0, 2])
        left = np.flatnonzero(~padding_T)
        masked = second.by_sequence(Tokens(logits_TE, ids_TK, padding_T), labels_T, kind, 1.7)
        without = second.by_sequence(Tokens(logits_TE[left], ids_TK[left]), labels_T[left], kind, 1.7)
        assert masked.value == pytest.approx(without.value, rel=1e-14)
        values = []
        for rows, mask in [(list(range(7)), torch.from_numpy(padding_T)), (left.tolist(), None)]:
            logits, ids = floats(logits_TE[rows]), torch.from_numpy(ids_TK[rows])
            options = {"coefficient": 1.7, "padding_T": mask}
            values.append(
                [
                    first.auxiliary_loss(logits, ids, score=kind, **options).item(),
                    first.sequence_loss(logits, ids, torch.from_numpy(labels_T[rows]), score=kind, **options).item(),
                    first_z.z_loss(logits, **options).item(),
                ]
            )
        assert values[0] == pytest.approx(values[1], rel=1e-14)
        assert masked.value == pytest.approx(values[0][1], rel=1e-13)

    @every_kind
    @pytest.mark.parametrize(
        "places",
        [
            [[0, 1, 2], [3, 4, 5]],
            [[0, 5], [1, 4], [2, 3]],
            [[0, 5], [0, 5], [1, 2, 3, 4], [1, 2, 3, 4]],
            [[0, 1, 2, 3, 4, 5], []],
        ],
        ids=["sharded", "zigzag", "replicated", "one rank empty"],
    )
    def test_a_group_is_charged_for_its_microbatch(self, kind: Score, places: list[list[int]]) -> None:
        """However tp and cp cut or copy six tokens, value and summed gradient are those of one rank (LOSS-12)."""
        logits_TE = np.random.default_rng(11).normal(size=(6, 5))
        ids_TK, labels_T = second.own_choices(kind, logits_TE, 2), np.array([0, 0, 1, 1, 1, 0])
        at = [torch.tensor(place, dtype=torch.int64) for place in places]
        leaves = [floats(logits_TE[place], leaf=True) for place in places]
        loss = first.sequence_loss(
            first_over_ranks.whole(leaves, at),
            first_over_ranks.whole([torch.from_numpy(ids_TK[place]) for place in places], at),
            first_over_ranks.whole([torch.from_numpy(labels_T[place]) for place in places], at),
            score=kind,
            coefficient=1.7,
        )
        expected = second.by_sequence(Tokens(logits_TE, ids_TK), labels_T, kind, 1.7)
        assert_close(np.array(expected.value), loss)
        total_TE = np.zeros((6, 5))
        for place, gradient in zip(places, torch.autograd.grad(loss, leaves, materialize_grads=True), strict=True):
            np.add.at(total_TE, place, gradient.numpy())
        np.testing.assert_allclose(total_TE, expected.gradient_TE, rtol=1e-11, atol=1e-14)
