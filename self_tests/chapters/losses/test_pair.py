"""Losses of a router, worked out twice: reference with tensors and autograd, the longhand token by token."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.losses import balance as first
from moe_conformance.reference.losses import over_ranks as first_over_ranks
from moe_conformance.reference.losses import z_loss as first_z
from moe_conformance.reference.routing.routes import Score
from self_tests.chapters.losses.second import balance as second
from self_tests.chapters.losses.second import scaling as second_scaling
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.routing.second.routes import Limit
from self_tests.chapters.routing.test_pair import limits
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
KINDS = get_args(Score)
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
every_kind = pytest.mark.parametrize("kind", KINDS)

# Into both tails: sigmoid is 1 at 60 and 1e-304 at -700; a token of nothing but -800 has a sum of 0 under sigmoid.
LOGITS = [-700.0, -90.7, -30.3, -8.21, -2.7, -1.13, -0.4, 0.0, 0.31, 1.3, 2.29, 6.1, 19.7, 20.9, 25.1, 60.3]
COEFFICIENTS = [0.0, 0.013, 1.0, 1.7]


def padding_of(tokens: Tokens) -> Tensor | None:
    """The mask as the first oracle takes it."""
    return None if tokens.padding_T is None else torch.from_numpy(tokens.padding_T)


def leaf(tokens: Tokens) -> Tensor:
    """Logits that keep their gradient."""
    return floats(tokens.logits_TE, leaf=True)


def told_apart(logits_TE: Floats) -> Floats:
    """The same logits, but none so far out that its score would round to that of another."""
    return np.where(np.isfinite(logits_TE), np.clip(logits_TE, -31.0, 26.0), logits_TE)


def assert_gradient(expected: Floats, logits_TE: Tensor, tokens: Tokens, size: float) -> None:
    """Fail unless the leaf's gradient is this one up to rounding, and of padding exactly 0."""
    assert logits_TE.grad is not None
    assert_close(expected, logits_TE.grad, addend=size)
    if tokens.padding_T is not None:
        assert not logits_TE.grad[torch.from_numpy(tokens.padding_T)].any()


@st.composite
def tokens(draw: st.DrawFn, experts: int | None = None, slots: int | None = None) -> Tokens:
    """Logits with ties, tails and masked experts; any choices; any mask, with what must not be read under it."""
    E = draw(st.integers(1, 7)) if experts is None else experts
    K = draw(st.integers(1, 4)) if slots is None else slots
    T = draw(st.sampled_from([0, 1, 2, 3, 5]))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits_TE = random.choice(LOGITS, size=(T, E)) if draw(st.booleans()) else random.normal(size=(T, E))
    if E > 1 and draw(st.booleans()):
        logits_TE[:, draw(st.integers(0, E - 1))] = -math.inf
    least = -1 if draw(st.booleans()) else 0  # with empty slots or without; an expert may come twice
    ids_TK = random.integers(least, E, size=(T, K))
    kind = draw(st.sampled_from(["none", "some", "all", "no token"]))
    if kind == "none":
        return Tokens(logits_TE, ids_TK)
    padding_T = random.random(T) < {"some": 0.4, "all": 1.0, "no token": 0.0}[kind]
    logits_TE[padding_T] = random.choice([math.nan, math.inf, -math.inf, 3.0], size=E)
    ids_TK[padding_T] = 99
    return Tokens(logits_TE, ids_TK, padding_T)


class TestSharePair:
    @every_kind
    @pairs_agree
    @given(tokens(), st.integers(0, 10**6))
    def test_shares_and_gradients_agree(self, kind: Score, case: Tokens, seed: int) -> None:
        """Both normalise over all experts alike, and derive alike: sum over e of u_e p_e has one gradient."""
        valid = second.valid_tokens(len(case.logits_TE), case.padding_T)
        rows_TE = case.logits_TE[valid]
        upstream_TE = np.random.default_rng(seed).normal(size=rows_TE.shape)
        logits_TE = floats(rows_TE, leaf=True)
        shares_TE = first.normalised_scores(logits_TE, kind)
        assert_close(second.shares(kind, rows_TE), shares_TE)
        shares_TE.backward(floats(upstream_TE))
        expected_TE = np.zeros(rows_TE.shape)
        for t, row in enumerate(rows_TE):
            share_E, slope_E = second.share_of_token(kind, row.tolist())
            mean = math.fsum(u * p for u, p in zip(upstream_TE[t], share_E, strict=True))
            expected_TE[t] = [slope * (u - mean) for u, slope in zip(upstream_TE[t], slope_E, strict=True)]
        assert logits_TE.grad is not None
        assert_close(expected_TE, logits_TE.grad, addend=float(np.abs(upstream_TE).max(initial=0.0)))


class TestChoicePair:
    @every_kind
    @pairs_agree
    @given(tokens(), st.integers(0, 3))
    def test_plain_choices_agree(self, kind: Score, case: Tokens, left_out: int) -> None:
        """Both choose the best K of their shares, lower ids first among equals; padding chooses nothing."""
        logits_TE = told_apart(case.logits_TE)
        K = max(1, logits_TE.shape[1] - left_out)
        expected = second.own_choices(kind, logits_TE, K, padding_T=case.padding_T)
        ids_TK = first.choices(floats(logits_TE), score=kind, top_k=K, padding_T=padding_of(case))
        assert (torch.int64, expected.shape) == (ids_TK.dtype, tuple(ids_TK.shape))
        assert expected.tolist() == ids_TK.tolist()

    @every_kind
    @pairs_agree
    @given(limits(), st.integers(0, 10**6))
    def test_choices_within_groups_agree(self, kind: Score, case: tuple[int, int, Limit | None], seed: int) -> None:
        """Both open the groups that a router without a bias opens, and choose within them."""
        E, K, limit = case
        logits_TE = told_apart(np.random.default_rng(seed).choice(LOGITS, size=(4, E)))
        expected = second.own_choices(kind, logits_TE, K, limit)
        ids_TK = first.choices(
            floats(logits_TE),
            score=kind,
            top_k=K,
            groups=None if limit is None else (limit.groups, limit.chosen),
            group_score="max" if limit is None else limit.rule,
        )
        assert expected.tolist() == ids_TK.tolist()

    @pairs_agree
    @given(tokens())
    def test_counts_agree(self, case: Tokens) -> None:
        """Both count choices of valid tokens, repeated ones as often as they come, empty slots never."""
        E = case.logits_TE.shape[1]
        counts_E = first.choice_counts(torch.from_numpy(case.ids_TK), E, padding_T=padding_of(case))
        assert torch.int64 == counts_E.dtype
        assert second.count_choices(case.ids_TK, E, case.padding_T) == counts_E.tolist()


class TestBalanceLossPair:
    @every_kind
    @pairs_agree
    @given(tokens(), st.sampled_from(COEFFICIENTS), st.sampled_from([1.0, -2.3]))
    def test_auxiliary_losses_agree(self, kind: Score, case: Tokens, c: float, upstream: float) -> None:
        """Value and gradient agree, for any choices and masks."""
        logits_TE = leaf(case)
        loss = first.auxiliary_loss(
            logits_TE, torch.from_numpy(case.ids_TK), score=kind, coefficient=c, padding_T=padding_of(case)
        )
        expected = second.auxiliary(case, kind, c)
        assert_close(np.array(expected.value), loss)
        loss.backward(torch.tensor(upstream, dtype=torch.float64))
        assert_gradient(upstream * expected.gradient_TE, logits_TE, case, 3.0 * c * case.logits_TE.shape[1])

    @every_kind
    @pairs_agree
    @given(tokens(), st.sampled_from(COEFFICIENTS), st.sampled_from([None, 0, 2]), st.integers(0, 10**6))
    def test_sequence_losses_agree(self, kind: Score, case: Tokens, c: float, empty: int | None, seed: int) -> None:
        """Value and gradient agree, for sequences in one run or in several, empty ones counted or not."""
        labels_T = np.random.default_rng(seed).choice([8, -5, 0], size=len(case.logits_TE)).astype(np.int64)
        valid = second.valid_tokens(len(labels_T), case.padding_T)
        divisor = None if empty is None else empty + len({int(labels_T[t]) for t in valid})
        logits_TE = leaf(case)
        loss = first.sequence_loss(
            logits_TE,
            torch.from_numpy(case.ids_TK),
            torch.from_numpy(labels_T),
            score=kind,
            coefficient=c,
            padding_T=padding_of(case),
            divisor=divisor,
        )
        expected = second.by_sequence(case, labels_T, kind, c, divisor)
        assert_close(np.array(expected.value), loss)
        loss.backward()
        assert_gradient(expected.gradient_TE, logits_TE, case, c * case.logits_TE.shape[1])

    @every_kind
    @pairs_agree
    @given(st.data(), st.sampled_from([2, 3, 5]), st.integers(0, 3), st.integers(1, 3), st.booleans())
    def test_global_losses_agree(
        self, kind: Score, data: st.DataObject, E: int, M: int, dp: int, remembers: bool
    ) -> None:
        """All losses of a step agree, and each has a gradient in its own microbatch alone."""
        K = data.draw(st.integers(1, 2))
        step = [[data.draw(tokens(E, K)) for _ in range(dp)] for _ in range(M)]
        logits = [[leaf(part) for part in row] for row in step]
        losses_M = first_over_ranks.global_losses(
            logits,
            [[torch.from_numpy(part.ids_TK) for part in row] for row in step],
            score=kind,
            coefficient=1.7,
            padding=[[padding_of(part) for part in row] for row in step],
            remembers=remembers,
        )
        expected = second.over_a_step(step, kind, 1.7, remembers=remembers)
        assert_close(np.array([value for value, _ in expected]), losses_M)
        if M == 0:
            return
        upstream_M = np.random.default_rng(M).normal(size=M)
        losses_M.backward(floats(upstream_M))
        for m, (_, gradients) in enumerate(expected):
            for part, logits_TE, gradient_TE in zip(step[m], logits[m], gradients, strict=True):
                assert_gradient(upstream_M[m] * gradient_TE, logits_TE, part, 4.0 * E)


class TestZLossPair:
    @pairs_agree
    @given(tokens(), st.sampled_from(COEFFICIENTS))
    def test_z_losses_agree(self, case: Tokens, c: float) -> None:
        """Value and gradient agree, from logits so low that exp alone underflows to 60."""
        logits_TE = leaf(case)
        loss = first_z.z_loss(logits_TE, coefficient=c, padding_T=padding_of(case))
        expected = second.z(case.logits_TE, c, case.padding_T)
        assert_close(np.array(expected.value), loss)
        loss.backward()
        assert_gradient(expected.gradient_TE, logits_TE, case, 0.0)

    @pairs_agree
    @given(st.lists(tokens(5), min_size=1, max_size=4))
    def test_means_of_ranks_agree(self, parts: list[Tokens]) -> None:
        """The mean over ranks of their own means agrees; a rank without valid tokens counts as one."""
        logits = [leaf(part) for part in parts]
        loss = first_z.z_loss_of_parts(logits, coefficient=1.7, padding_by_rank=[padding_of(part) for part in parts])
        value, gradients = second.z_of_parts([(part.logits_TE, part.padding_T) for part in parts], 1.7)
        assert_close(np.array(value), loss)
        loss.backward()
        for part, logits_TE, gradient_TE in zip(parts, logits, gradients, strict=True):
            assert_gradient(gradient_TE, logits_TE, part, 0.0)


class Held(NamedTuple):
    """Rows of a microbatch, and the places of those that each rank holds."""

    rows_TE: Floats
    places: list[list[int]]


@st.composite
def held(draw: st.DrawFn) -> Held:
    """Every row on at least one of some ranks, in any order; ranks with nothing among them."""
    T, ranks = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1)) for _ in range(T)]
    places = [draw(st.permutations([t for t in range(T) if r in holders[t]])) for r in range(ranks)]
    return Held(np.random.default_rng(T).normal(size=(T, 3)), places)


class TestWhole:
    @pairs_agree
    @given(held(), st.sampled_from([torch.float64, torch.float32, torch.int64, torch.bool]))
    def test_parts_are_put_together_alike(self, case: Held, dtype: torch.dtype) -> None:
        """Rows come back in order of place and in their own type, whoever holds them and how often."""
        rows = torch.tensor(4.0 * case.rows_TE).to(dtype)
        parts = [rows[places] for places in case.places]
        at = [torch.tensor(places, dtype=torch.int64) for places in case.places]
        put = first_over_ranks.whole(parts, at)
        assert (dtype, tuple(rows.shape)) == (put.dtype, tuple(put.shape))
        by_hand = second_scaling.put_together([part.numpy() for part in parts], [place.numpy() for place in at])
        assert by_hand == put.tolist()
        assert rows.tolist() == put.tolist()
        one_column = first_over_ranks.whole([part[:, 0] for part in parts], at)
        assert rows[:, 0].tolist() == one_column.tolist()

    @pairs_agree
    @given(held())
    def test_a_copy_counts_once(self, case: Held) -> None:
        """The gradient of a row goes to the first rank that holds it, and to no copy."""
        parts = [floats(case.rows_TE[places].reshape(-1, 3), leaf=True) for places in case.places]
        at = [torch.tensor(places, dtype=torch.int64) for places in case.places]
        upstream_TE = np.random.default_rng(9).normal(size=case.rows_TE.shape)
        first_over_ranks.whole(parts, at).backward(floats(upstream_TE))
        seen: set[int] = set()
        for part, places in zip(parts, case.places, strict=True):
            expected = [[0.0] * 3 if t in seen else upstream_TE[t].tolist() for t in places]
            assert expected == (torch.zeros_like(part) if part.grad is None else part.grad).tolist()
            seen.update(places)


class TestNarrowLogits:
    @every_kind
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_narrow_logits_are_widened_first(self, kind: Score, dtype: torch.dtype) -> None:
        """Logits of fewer bits are taken as exact numbers and computed in float64."""
        narrow_TE = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
        wide, ids_TK = narrow_TE.double().numpy(), np.array([[5, 1], [0, 2], [3, 1], [1, 5]])
        ids, case = torch.from_numpy(ids_TK), Tokens(wide, ids_TK)
        assert second.own_choices(kind, wide, 2).tolist() == first.choices(narrow_TE, score=kind, top_k=2).tolist()
        assert_close(second.shares(kind, wide), first.normalised_scores(narrow_TE, kind))
        loss = first.auxiliary_loss(narrow_TE, ids, score=kind, coefficient=1.0)
        assert_close(np.array(second.auxiliary(case, kind, 1.0).value), loss)
        loss = first.sequence_loss(narrow_TE, ids, torch.tensor([0, 0, 1, 0]), score=kind, coefficient=1.0)
        assert_close(np.array(second.by_sequence(case, np.array([0, 0, 1, 0]), kind, 1.0).value), loss)
        losses = first_over_ranks.global_losses([[narrow_TE]], [[ids]], score=kind, coefficient=1.0)
        assert_close(np.array([second.auxiliary(case, kind, 1.0).value]), losses)
        assert_close(np.array(second.z(wide, 1.0).value), first_z.z_loss(narrow_TE, coefficient=1.0))
