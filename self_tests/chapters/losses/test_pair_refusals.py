"""What no balance loss is defined for, refused by both oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypedDict

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moe_conformance.reference.losses import balance as first
from moe_conformance.reference.losses import over_ranks as first_over_ranks
from moe_conformance.reference.losses import z_loss as first_z
from moe_conformance.reference.routing.routes import Score
from self_tests.chapters.losses.second import balance as second
from self_tests.chapters.losses.second import scaling as second_scaling
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.losses.test_pair import KINDS, padding_of

LOGITS_2 = np.zeros((2, 3))
IDS_2 = np.array([[0, 2], [1, 0]])


class Options(TypedDict):
    """What every balance loss is told by name."""

    score: Score
    coefficient: float


def refused(question: Callable[[], object]) -> bool:
    """Say whether a question is answered by a ValueError."""
    try:
        question()
    except ValueError:
        return True
    return False


class TestRefusals:
    """What has no loss is a ValueError on both sides."""

    @pytest.mark.parametrize(
        ("case", "kinds"),
        [
            (Tokens(np.array([[0.0, math.nan, 0.0], [0.0] * 3]), IDS_2), KINDS),
            (Tokens(np.array([[0.0] * 3, [math.inf, 0.0, 0.0]]), IDS_2), KINDS),
            (Tokens(np.array([[0.0] * 3, [-math.inf] * 3]), IDS_2), ("softmax", "softmax_topk")),
            (Tokens(LOGITS_2, np.array([[0, 3], [1, 0]])), KINDS),
            (Tokens(LOGITS_2, np.array([[0, -2], [1, 0]])), KINDS),
            (Tokens(LOGITS_2, IDS_2[:, :0]), KINDS),
            (Tokens(LOGITS_2, IDS_2[:1]), KINDS),
            (Tokens(LOGITS_2, IDS_2.astype(np.int32)), KINDS),
            (Tokens(LOGITS_2, IDS_2, np.array([False])), KINDS),
            (Tokens(LOGITS_2, IDS_2, np.array([[False], [True]])), KINDS),
            (Tokens(LOGITS_2, IDS_2, np.array([0, 1])), KINDS),
        ],
    )
    def test_of_balance_losses(self, case: Tokens, kinds: tuple[Score, ...]) -> None:
        """Logits without scores, ids outside the experts, masks and ids of another form."""
        logits_TE, ids_TK, padding_T = torch.tensor(case.logits_TE), torch.from_numpy(case.ids_TK), padding_of(case)
        labels_T = np.zeros(2, dtype=np.int64)
        masks = None if padding_T is None else [[padding_T]]
        labels = torch.from_numpy(labels_T)

        def all_refuse(kind: Score) -> bool:
            """Ask every balance loss of both oracles."""
            options = Options(score=kind, coefficient=1.0)
            questions = [
                lambda: first.auxiliary_loss(logits_TE, ids_TK, padding_T=padding_T, **options),
                lambda: first.sequence_loss(logits_TE, ids_TK, labels, padding_T=padding_T, **options),
                lambda: first_over_ranks.global_losses([[logits_TE]], [[ids_TK]], padding=masks, **options),
                lambda: second.auxiliary(case, kind, 1.0),
                lambda: second.by_sequence(case, labels_T, kind, 1.0),
                lambda: second.over_a_step([[case]], kind, 1.0),
            ]
            return all(map(refused, questions))

        assert all(map(all_refuse, kinds))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_of_z_losses(self, value: float) -> None:
        """A token whose sum of exponentials is no positive number."""
        logits_TE = np.array([[0.0] * 3, [value] * 3])
        assert refused(lambda: first_z.z_loss(torch.tensor(logits_TE), coefficient=1.0))
        assert refused(lambda: second.z(logits_TE, 1.0))
        hidden_T = np.array([False, True])
        assert second.z(logits_TE, 1.0, hidden_T).value == pytest.approx(math.log(3) ** 2, rel=1e-14)
        hidden = first_z.z_loss(torch.tensor(logits_TE), coefficient=1.0, padding_T=torch.from_numpy(hidden_T))
        assert hidden.item() == pytest.approx(math.log(3) ** 2, rel=1e-14)

    def test_of_no_rank(self) -> None:
        """There is no mean over no ranks, and nothing to put together."""
        assert refused(lambda: first_z.z_loss_of_parts([], coefficient=1.0))
        assert refused(lambda: second.z_of_parts([], 1.0))

    def test_of_masks_for_other_ranks(self) -> None:
        """Every rank has a mask, or none has."""
        ranks = [torch.zeros(2, 3), torch.ones(2, 3)]
        assert refused(lambda: first_z.z_loss_of_parts(ranks, coefficient=1.0, padding_by_rank=[None]))

    @pytest.mark.parametrize("slots", [0, 4])
    def test_of_choices(self, slots: int) -> None:
        """No experts to choose, or more than there are."""
        assert refused(lambda: first.choices(torch.tensor(LOGITS_2), score="softmax", top_k=slots))
        assert refused(lambda: second.own_choices("softmax", LOGITS_2, slots))

    @pytest.mark.parametrize(
        ("labels_T", "divisor"),
        [
            (np.array([0, 1]), 1),
            (np.array([4]), None),
            (np.array([0, 1], dtype=np.int32), None),
            (np.array([[0], [1]]), None),
        ],
    )
    def test_of_sequences(self, labels_T: NDArray[np.int64], divisor: int | None) -> None:
        """Fewer sequences than have tokens, or labels of another form."""
        ids, labels = torch.from_numpy(IDS_2), torch.from_numpy(labels_T)
        assert refused(
            lambda: first.sequence_loss(
                torch.tensor(LOGITS_2), ids, labels, score="softmax", coefficient=1.0, divisor=divisor
            )
        )
        assert refused(lambda: second.by_sequence(Tokens(LOGITS_2, IDS_2), labels_T, "softmax", 1.0, divisor))

    @pytest.mark.parametrize(
        "step",
        [
            [[]],
            [[Tokens(LOGITS_2, IDS_2)], []],
            [[Tokens(LOGITS_2, IDS_2)], [Tokens(LOGITS_2, IDS_2)] * 2],
            [[Tokens(LOGITS_2, IDS_2), Tokens(LOGITS_2, IDS_2[:, :1])]],
            [[Tokens(LOGITS_2, IDS_2)], [Tokens(np.zeros((2, 4)), IDS_2)]],
        ],
    )
    def test_of_steps(self, step: list[list[Tokens]]) -> None:
        """No group, another number of groups, of slots or of experts from part to part."""
        assert refused(
            lambda: first_over_ranks.global_losses(
                [[torch.tensor(part.logits_TE) for part in row] for row in step],
                [[torch.from_numpy(part.ids_TK) for part in row] for row in step],
                score="softmax",
                coefficient=1.0,
            )
        )
        assert refused(lambda: second.over_a_step(step, "softmax", 1.0))

    @pytest.mark.parametrize(
        ("parts", "places"),
        [
            ([], []),
            ([[1.0, 2.0]], []),
            ([[1.0, 2.0]], [[0]]),
            ([[1.0, 2.0]], [[0, 2]]),
            ([[1.0, 2.0]], [[0, -1]]),
            ([[1.0, 2.0], [3.0]], [[0, 1], [1]]),
            ([[1.0, 2.0]], [[0, 0]]),
        ],
    )
    def test_of_parts(self, parts: list[list[float]], places: list[list[int]]) -> None:
        """No rank, lengths that differ, a place that is missing or negative, copies that differ."""
        assert refused(
            lambda: first_over_ranks.whole([torch.tensor(part) for part in parts], [torch.tensor(at) for at in places])
        )
        assert refused(
            lambda: second_scaling.put_together([np.array(part) for part in parts], [np.array(at) for at in places])
        )
