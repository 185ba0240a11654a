"""Which of several sizes of one value a factor equals, by simulated runs of the case on other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.plugin.factors import UNKNOWN, Factors, ratio_of, valued
from moe_conformance.plugin.trial import Ending

TP2_EP2, EP2, CP2_EP2 = Layout(4, tp=2, ep=2), Layout(4, ep=2), Layout(4, cp=2, ep=2)
PASS = Ending("pass")


def case(layout: Layout) -> Any:
    """Return what `Factors` reads of a case."""
    workload = SimpleNamespace(layout=layout, config=Config(top_k=2))
    return SimpleNamespace(cell=SimpleNamespace(layout=layout), workload=workload)


def failure(ratio: float, names: str = "") -> Ending:
    """Return how a check ends that found a factor; the place comes first, and more behind it."""
    said = f"the gradient on rank 0 is {ratio:.3f} x the expected value{f': {names}' if names else ''}"
    return Ending("fail", f"{said}; 3 more of the same kind")


class Simulated(Factors):
    """Runs nothing: the further cases and their endings are given."""

    def __init__(self, *further: tuple[Layout, Ending]) -> None:
        """Take the endings, in order."""
        outcomes = SimpleNamespace(steps=lambda workloads: [None for _ in workloads])
        super().__init__(SimpleNamespace(), outcomes)  # type: ignore[arg-type]
        self.further = list(further)

    def _case(self, case: Any, names: Sequence[str], when: Any, seen: Any) -> Any:
        return case_of(self.further)

    def told(self, ended: Ending, layout: Layout = TP2_EP2) -> str:
        """Return the message that a failure ends with."""
        return self.with_size(ended, case(layout), None, lambda *_: self.further.pop(0)[1]).message


def case_of(further: list[tuple[Layout, Ending]]) -> Any:
    """Return the next further case, None without one."""
    return case(further[0][0]) if further else None


@pytest.fixture(autouse=True)
def _no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_conformance.plugin.factors.Kept", lambda *_: None)


class TestFactors:
    def test_what_follows_the_factor_is_named_where_the_names_were(self) -> None:
        """With dp = 4 the factor is 4: it is dp. Place and numbers stay in front."""
        told = Simulated((EP2, failure(4.0, "dp"))).told(failure(2.0, "tp or dp or K"))
        expected = "the gradient on rank 0 is 2.000 x the expected value: dp; 3 more of the same kind"
        assert f"{expected}; on ep2-edp2, where tp = 1, dp = 4, K = 2, it is 4.000 x: dp" == told

    def test_a_size_that_is_one_where_it_is_right(self) -> None:
        """Without tp the check passes, with K and dp as before or larger: it is tp."""
        told = Simulated((EP2, PASS)).told(failure(0.5, "1/tp or 1/dp or 1/K"))
        assert "0.500 x the expected value: 1/tp; 3 more" in told
        assert told.endswith("on ep2-edp2, where tp = 1, dp = 4, K = 2, it is right")

    def test_a_second_run_distinguishes_what_the_first_left(self) -> None:
        """The first run leaves ep and K, the second K."""
        further = (EP2, failure(2.0, "ep or K")), (Layout(4, ep=4), failure(2.0, "K"))
        told = Simulated(*further).told(failure(2.0, "tp or ep or K"))
        assert "2.000 x the expected value: K; 3 more" in told

    def test_other_causes_that_the_further_run_does_not_have_are_left_out(self) -> None:
        """Each finding of the message is narrowed alike; a cause that is there too stays."""
        factor = "the loss is 2.000 x the expected value: tp or dp"
        said = (
            f"it is 4 instead of 2; likely cause: it is summed; or {factor}; largest error: 8, likely cause: {factor}"
        )
        there = Ending("fail", "it is 8 instead of 2; likely cause: the loss is 4.000 x the expected value: dp")
        told = Simulated((EP2, there)).told(Ending("fail", said))
        factor = "the loss is 2.000 x the expected value: dp"
        expected = f"it is 4 instead of 2; likely cause: {factor}; largest error: 8, likely cause: {factor}"
        assert expected == told.rpartition("; on ")[0]
        there = Ending("fail", f"it is summed; or {factor.replace('2.000', '4.000')}")
        assert "likely cause: it is summed; or the loss" in Simulated((EP2, there)).told(Ending("fail", said))

    def test_what_no_layout_changes_is_not_told_apart(self) -> None:
        """Of three numbers of one value that belong to the workload none is said; of two both are."""
        three = failure(2.0, "K or the number of microbatches or the number of sequences")
        assert f"2.000 x the expected value: {UNKNOWN}; 3 more" in Simulated().told(three)
        two = failure(2.0, "K or the number of microbatches")
        assert two.message == Simulated().told(two)

    def test_another_fault_elsewhere_says_nothing(self) -> None:
        """A factor that none of the names has, and a message without one, leave the names."""
        for other in (failure(3.0), Ending("fail", "rank 0 raised"), Ending("not adapted", "no such layer")):
            told = Simulated((EP2, other)).told(failure(2.0, "tp or dp"))
            assert "2.000 x the expected value: tp or dp; 3 more of the same kind" in told

    def test_one_name_or_none_needs_no_run(self) -> None:
        """Nothing runs, and the message is as it was."""
        for ended in (failure(2.0, "tp"), failure(0.3), Ending("fail", "token 3 was lost or dropped")):
            assert ended.message == Simulated((EP2, PASS)).told(ended)


class TestValues:
    def test_products_and_inverses(self) -> None:
        """A size, one over it, a product; a number of microbatches has the factor that it had."""
        workload = case(Layout(4, tp=2, cp=2)).workload
        names = ("tp", "1/tp * cp", "dp", "1/the number of microbatches")
        assert [2.0, 0.25, 1.0, 0.5] == [valued(name, workload, 0.5) for name in names]

    def test_the_factor_of_a_message(self) -> None:
        """Also of one that names nothing; 1 for a check that passes."""
        assert [1.0, 0.3, None] == [ratio_of(each) for each in (PASS, failure(0.3), Ending("crash", "rank 0 raised"))]
