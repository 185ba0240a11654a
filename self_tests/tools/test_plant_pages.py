"""Planted bugs by their source: the page of them, and the list of dated bugs that are not planted."""

from __future__ import annotations

import re

from moe_conformance.spec import load, places
from self_tests.planted_bugs import plants, plants_of_many_ranks
from tools import plant_pages

EVERY = (*plants(), *plants_of_many_ranks())
NUMBER = re.compile(r"\b(?=\w*\d)[0-9a-f]{7,10}\b|#\d+")  # of a commit, an issue or a pull request


class TestPage:
    def test_it_has_every_bug_of_a_real_library(self) -> None:
        """A row for each source, with the plants of it; and one for each bug that is not planted."""
        planted, others = plant_pages.page().split("## Not planted")
        rows = [line for line in planted.splitlines() if line.startswith("| ")][1:]
        assert {source for plant in EVERY for source in plant.real.split("; ") if source} == {
            row.split(" | ")[0].removeprefix("| ") for row in rows
        }
        assert {plant.name for plant in EVERY if plant.real} == set(re.findall(r"`([^`]+)`", "".join(rows)))
        assert (
            len(plant_pages.not_planted()) == len([line for line in others.splitlines() if line.startswith("| ")]) - 1
        )

    def test_every_bug_that_is_not_planted_has_a_reason(self) -> None:
        """In a sentence, beside what the bug does."""
        for each in plant_pages.not_planted():
            assert plant_pages.FIELDS == set(each)
            assert all(len(value) > 10 for value in each.values())

    def test_what_is_planted_is_not_listed_as_not_planted(self) -> None:
        """No commit, issue or pull request of a project is in both lists, but where a letter tells two bugs apart."""
        planted = {
            (source.split()[0].split("#")[0].rstrip(","), number)
            for plant in EVERY
            for source in plant.real.split("; ")
            if source
            for number in NUMBER.findall(source)
        }
        others = {
            (each["project"], number)
            for each in plant_pages.not_planted()
            if not re.search(r"\) [a-z]$", each["reference"])
            for number in NUMBER.findall(each["reference"])
        }
        assert set() == planted & others

    def test_reasons_name_requirements_without_check(self) -> None:
        """A reason that a requirement has no check ends to hold when it gets one."""
        named = {
            name
            for each in plant_pages.not_planted()
            for name in re.findall(r"\b[A-Z]+-\d\d\b", each["reason"])
            if "no check" in each["reason"]
        }
        assert named
        assert set() == named & set(places.checked())
        assert named <= set(load())
