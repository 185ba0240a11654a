"""Every clause of every requirement with a check is violated by a bug of its own."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from moe_conformance import spec
from moe_conformance.spec import places
from self_tests.spec.clauses import CHAPTERS, Clause, bugs, clauses, problems


class TestClauses:
    def test_every_requirement_with_a_check_has_its_clauses(self) -> None:
        """None is missing, and none is of a requirement that nothing checks."""
        assert set(places.checked()) == set(clauses())

    def test_every_clause_has_a_bug_that_violates_it(self) -> None:
        """Texts are those of the spec, and bugs exist and expect the requirement, each for one clause."""
        found = [each for id, of_it in clauses().items() for each in problems(spec.load()[id], of_it, bugs())]
        assert [] == found

    def test_they_are_in_the_chapter_of_their_requirement(self) -> None:
        """A file has the clauses of its own chapter."""
        for id in clauses():
            text = (CHAPTERS / spec.load()[id].chapter / "clauses.toml").read_text(encoding="utf-8")
            assert f"{id} =" in text or f"[{id}]" in text


class TestProblems:
    requirement = replace(spec.load()["BIAS-10"], sentence="It MUST be A and MUST NOT be B.", formula="a = b")
    known = MappingProxyType(
        {"bug-a": frozenset({"BIAS-10"}), "bug-b": frozenset({"BIAS-10"}), "other": frozenset({"BIAS-09"})}
    )

    def of(self, **bug_by_text: str) -> list[str]:
        """Return the problems of clauses."""
        found = tuple(Clause("BIAS-10", text, bug) for text, bug in bug_by_text.items())
        return list(problems(self.requirement, found, self.known))

    def test_parts_of_sentence_and_formula_with_bugs_of_their_own(self) -> None:
        """There is nothing wrong with them."""
        assert [] == self.of(**{"MUST be A": "bug-a", "a = b": "bug-b"})

    def test_a_demand_without_a_clause(self) -> None:
        """Each MUST is at least one clause."""
        (said,) = self.of(**{"MUST be A": "bug-a"})
        assert "1 clauses, and the sentence has 2 times MUST or SHOULD" in said

    def test_other_words(self) -> None:
        """The text is copied."""
        (said,) = self.of(**{"MUST be A": "bug-a", "must be b": "bug-b"})
        assert "'must be b' is neither in the sentence nor in the formula" in said

    def test_a_bug_of_another_requirement_or_of_none(self) -> None:
        """The bug is expected to violate this one."""
        said = self.of(**{"MUST be A": "other", "NOT be B": "nobody"})
        expected = [f"BIAS-10: no planted bug {bug!r} is expected to violate it" for bug in ("other", "nobody")]
        assert expected == said

    def test_one_bug_for_two_clauses(self) -> None:
        """It would show only that one of them is compared."""
        (said,) = self.of(**{"MUST be A": "bug-a", "NOT be B": "bug-a"})
        assert "bug-a stands for several clauses" in said
