"""Files of waivers: where they are, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe_conformance.waiving import Unreadable, load, path_for
from self_tests.plugin.test_waivers import GOOD, ITEM, NAMES, TODAY, loaded


class TestProblems:
    @pytest.mark.parametrize(
        ("old", "new", "sentence"),
        [
            ('owner = "a person"', 'ovner = "a person"', "unknown fields ovner"),
            ('owner = "a person"\n', "", "owner is missing"),
            ('owner = "a person"', 'owner = " "', "owner is a sentence"),
            ('["EXCH-05"]', '["EXCH-50"]', "'EXCH-50' names none of EXCH-05, EXCH-06"),
            ('["EXCH-05"]', '"EXCH-05"', "requirements is a list of strings"),
            ('["alltoall"]', '["all2all"]', "'all2all' names none of allgather, alltoall"),
            ('["ep*"]', '["tp*"]', "names none of ep2, ep2-etp2, ep4"),
            ('["even"]', '["evn"]', "'evn' names none of"),
            ("2026-12-31", "2026-04-30", "expired on 2026-04-30"),
            ("2026-12-31", '"soon"', "expires is a date"),
            ("2026-12-31", "2027-12-31", "more than 400 days ahead"),
            ('"line 7"', '"?"', "line 9, W-1: evidence is '?', which says nothing; say where the failure can be seen"),
            ('"a person"', '"."', "line 10, W-1: owner is '.', which says nothing; name who answers for it"),
            ('"line 7"', '"."', "line 9, W-1: evidence is '.', which says nothing"),
            ('["EXCH-05"]', '["*"]', "'*' names none of EXCH-05, EXCH-06"),
            ('["instead of", "y of rank"]', '["instead of", " "]', "words is a list of pieces of the message"),
            ('["instead of", "y of rank"]', '["nan"]', "words ['nan'] are in many messages"),
            ("at_most = 100", "at_most = inf", "at_most is a number of allowed errors, 1 to 1e+300, not inf"),
            ("at_most = 100", "at_most = nan", "at_most is a number of allowed errors"),
            ("at_most = 100", "at_most = true", "at_most is a number of allowed errors"),
            ('"a person"', '"TODO"', "line 10, W-1: owner is 'TODO', which says nothing; name who answers for it"),
            (
                '"WrongOutput"',
                '"WrongOutputs"',
                "line 15, W-1: failure: kind 'WrongOutputs' is none of AbandonedCollective",
            ),
            ('"combine"', '"combining"', "stage 'combining' is none of route, dispatch"),
            ('["instead of", "y of rank"]', '["?"]', "words is a list of pieces of the message"),
            ('["instead of", "y of rank"]', "[]", "words is a list of pieces of the message"),
            ("at_most = 100", "at_most = 0.5", "at_most is a number of allowed errors, 1 to 1e+300"),
            ("at_most = 100", "most = 100", "most is missing or unknown"),
            (">=1.4,<2", "", "sets no bounds"),
            (">=1.4,<2", "=?4", "is not of the form"),
            ("[alltoall-ep2-even]", "[alltoall-ep2-uneven]", "is no test_name[variant-layout-workload]"),
            ("some_library", "other", "the backend reports no other, only some-library, torch"),
        ],
    )
    def test_a_wrong_waiver_does_not_hold_and_says_why(self, tmp_path: Path, old: str, new: str, sentence: str) -> None:
        """Misspelt or expired, it waives nothing, and a sentence names the file and the waiver."""
        assert old in GOOD
        waivers = loaded(tmp_path, GOOD.replace(old, new))
        assert () == waivers.held
        problem = waivers.problems[0]
        assert sentence in problem
        assert re.match(r"some\.toml, line \d+, W-1: ", problem)

    @pytest.mark.parametrize(
        ("bounds", "held"), [(">=1.4,<2", ["W-1"]), (">=1.5,<2", []), ("<1.4.2", []), ("==1.4.2", ["W-1"])]
    )
    def test_one_of_other_versions_is_not_applied(self, tmp_path: Path, bounds: str, held: list[str]) -> None:
        """It waives nothing and fails nothing; its id is known, and occurs once all the same."""
        waivers = loaded(tmp_path, GOOD.replace(">=1.4,<2", bounds))
        assert (held, ()) == ([waiver.id for waiver in waivers.held], waivers.problems)
        assert {"W-1"} - set(held) == set(waivers.elsewhere)
        assert 1 == len(loaded(tmp_path, GOOD.replace(">=1.4,<2", bounds) + GOOD).problems)

    def test_a_checkout_counts_as_the_version_that_it_declares(self, tmp_path: Path) -> None:
        """A commit behind the version, or a release candidate, does not take it out of the bounds."""
        for version in ("1.4.2+d98e8a64ddf3", "1.5rc1"):
            names = replace(NAMES, versions={**NAMES.versions, "some-library": version})
            (tmp_path / "some.toml").write_text(GOOD)
            assert ["W-1"] == [waiver.id for waiver in load(tmp_path / "some.toml", names, TODAY).held]

    def test_an_id_occurs_once(self, tmp_path: Path) -> None:
        """The second waiver of the same id does not hold."""
        waivers = loaded(tmp_path, GOOD + GOOD)
        assert 1 == len(waivers.held)
        second = len(GOOD.splitlines()) + 3
        assert (f"some.toml, line {second}, W-1: its id occurs twice",) == waivers.problems

    @pytest.mark.parametrize("text", ["not toml", "waiver = 3", 'title = "x"\n'])
    def test_a_file_that_is_no_waivers_is_refused(self, tmp_path: Path, text: str) -> None:
        """What cannot be read cannot be ignored either."""
        with pytest.raises(Unreadable, match=r"some\.toml"):
            loaded(tmp_path, text)


class TestExample:
    def test_an_example_is_a_check(self, tmp_path: Path) -> None:
        """Where its case was selected, a check of that name must be among the items."""
        waivers = loaded(tmp_path, GOOD)
        assert [] == list(waivers.misnamed([ITEM.name]))
        assert [] == list(waivers.misnamed(["test_outputs[alltoall-ep4-even]"]))
        (sentence,) = waivers.misnamed(["test_other[alltoall-ep2-even]"])
        assert f"W-1: its example {ITEM.name} is no check" in sentence


class TestPath:
    def test_only_a_registered_name_has_a_file(self, tmp_path: Path) -> None:
        """A backend given by dotted path brings its own file or has none."""
        assert path_for("native", "") is None
        assert path_for("../waivers:README", "") is None
        assert tmp_path / "mine.toml" == path_for("mine:Backend", str(tmp_path / "mine.toml"))
