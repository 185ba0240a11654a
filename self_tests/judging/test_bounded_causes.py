"""Why a tensor is out of its bounds: one order of causes, of everything, of a rank or of a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.explain.bounded import Candidate, Found, cause_of, fits
from moe_conformance.judging.explain.bounded_tokens import explain_tokens
from moe_conformance.judging.observed.scopes import Place

RIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
TARGET = Target(RIGHT, torch.full_like(RIGHT, 1e-6))
NAMES = {"ep": 2.0}


def never() -> Iterator[Candidate]:
    """Fail as soon as a candidate is asked for."""
    raise AssertionError("computed")
    yield "", RIGHT


class TestOrder:
    @pytest.mark.parametrize(
        ("value", "candidates", "words"),
        [
            (0 * RIGHT, [("slot 0 was empty", 0 * RIGHT)], "zero"),
            (2 * RIGHT, [("it was added 2 times", 2 * RIGHT)], "it was added 2 times"),
            (2 * RIGHT, [("it was added 3 times", 3 * RIGHT)], "2.000 x "),
            ((RIGHT + 0.01).bfloat16(), [], "it was computed "),
        ],
    )
    def test_the_first_cause_that_fits_is_told(self, value: Tensor, candidates: list[Candidate], words: str) -> None:
        """Zero comes first, then the candidates, then a factor, then a narrower dtype."""
        cause = cause_of(value, Target(RIGHT, torch.full_like(RIGHT, 2.0**-22)), candidates, NAMES, torch.float32)
        assert cause is not None
        assert cause.words.startswith(words)

    @pytest.mark.parametrize("off", [1e-5, 1.0])
    def test_an_error_of_another_size_is_no_narrower_dtype(self, off: float) -> None:
        """Bounds of the worst case would allow it in bfloat16, which has larger errors, or smaller ones."""
        wrong = RIGHT + torch.tensor([[off, 0.0], [0.0, 0.0]], dtype=torch.float64)
        target = Target(RIGHT, torch.full_like(RIGHT, min(off / 10, 2.0**-15)))
        assert cause_of(wrong, target, [], NAMES, torch.float32) is None

    def test_candidates_are_computed_as_they_are_asked_for(self) -> None:
        """What is zero or not finite asks for none."""
        assert cause_of(0 * RIGHT, TARGET, never(), NAMES, torch.float32) is not None
        assert cause_of(RIGHT * torch.nan, TARGET, never(), NAMES, torch.float32) is None

    def test_a_candidate_that_is_right_explains_nothing(self) -> None:
        """Where the largest bound would let the right value pass, each element is held to its own."""
        target = Target(RIGHT, torch.tensor([[1e-6, 1e-6], [1e-6, 1.0]], dtype=torch.float64))
        assert [False, True] == [fits(RIGHT + 0.5, RIGHT, target), fits(RIGHT + 0.5, RIGHT + 0.5, target)]


def explained(actual: Mapping[Place, Tensor], right: Mapping[Place, Tensor]) -> Found:
    """Explain y, of which one candidate says that it was negated."""

    def candidates(places: Sequence[Place]) -> Iterator[Candidate]:
        yield "the sign was changed", -torch.cat([right[place] for place in places])

    targets = {place: Target(value, torch.full_like(value, 1e-6)) for place, value in right.items()}
    return explain_tokens("y", actual, targets, candidates, names=NAMES, dtype=torch.float32)


class TestScopes:
    RIGHT: Mapping[Place, Tensor] = {(m, rank): RIGHT * (1 + m) + rank for m in range(2) for rank in range(2)}

    def test_a_cause_of_all(self) -> None:
        """One sentence tells of all ranks, with one token for example."""
        findings, _ = explained({place: -value for place, value in self.RIGHT.items()}, self.RIGHT)
        (finding,) = findings
        assert (
            "y is wrong; likely cause: the sign was changed; for example y of rank 0 token 0 is -1" in finding.sentence
        )
        assert (0, 1) == finding.ranks

    def test_a_cause_holds_in_the_wrong_microbatches(self) -> None:
        """A microbatch that is right need not be explained."""
        findings, ratio = explained({place: (1 + place[0]) * value for place, value in self.RIGHT.items()}, self.RIGHT)
        assert 2.0 == ratio
        assert findings[0].sentence.startswith("every element of y is 2.000 x ")

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ((1, 0), "y of rank 1 only is wrong; likely cause: it is that of rank 0; for"),
            ((0, 1), "y of rank 1 only is wrong; likely cause: it is that of microbatch 0; for"),
        ],
    )
    def test_what_belongs_to_another_is_recognised(self, source: Place, words: str) -> None:
        """The value of another rank, or one that is stale by a microbatch."""
        (finding,), _ = explained({**self.RIGHT, (1, 1): self.RIGHT[source]}, self.RIGHT)
        assert finding.sentence.startswith(words)
        assert (1,) == finding.ranks

    def test_ranks_with_different_causes(self) -> None:
        """Each has a sentence of its own, and one rank without a cause makes every token be told."""
        actual = {place: -value if place[1] else 2 * value for place, value in self.RIGHT.items()}
        findings, _ = explained(actual, self.RIGHT)
        assert ["every element of y on rank 0 is 2.000", "y of rank 1 only is wrong; likely cause:"] == [
            findings[0].sentence[:37],
            findings[1].sentence[:40],
        ]
        findings, _ = explained({**actual, (0, 0): actual[0, 0] + RIGHT.square()}, self.RIGHT)
        assert 8 == len(findings)
