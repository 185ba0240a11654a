"""What a build must show, worked out twice: versions, options that are unknown or lost, refusals and changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.config_rules import shown as first
from self_tests.chapters.config_rules.second import shown as second

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

versions = st.builds(
    lambda numbers, tail: ".".join(map(str, numbers)) + tail,
    st.lists(st.sampled_from([0, 1, 2, 9, 10]), min_size=1, max_size=3),
    st.sampled_from(["", "", "a0", ".dev3", "rc1", "+cu121", "a0+git12.3", "dev20251020.1"]),
)
VALUES: list[Any] = [None, "", "a2a", "ag", 1, 2]
options = st.dictionaries(st.sampled_from(["ep", "etp", "mode"]), st.sampled_from(VALUES))
warnings = st.booleans()


class TestPair:
    @settings(pairs_agree, max_examples=300)
    @given(st.one_of(st.none(), versions), versions)
    def test_versions_are_compared_alike(self, found: str | None, needed: str) -> None:
        """Both compare release numbers as numbers, whatever stands behind them."""
        assert second.older(found, needed) == first.older(found, needed)

    @pytest.mark.parametrize(("found", "needed"), [("dev", "2.0"), ("2.0", "x1"), (None, ""), ("", "1")])
    def test_a_version_without_a_number_is_refused_by_both(self, found: str | None, needed: str) -> None:
        """Nothing can be said of it."""
        with pytest.raises(ValueError, match=r"\w"):
            second.older(found, needed)
        with pytest.raises(ValueError, match=r"\w"):
            first.older(found, needed)

    @settings(pairs_agree, max_examples=300)
    @given(options, options, st.sets(st.sampled_from(["ep", "etp", "mode"])), st.integers(0, 10**6), st.booleans())
    def test_unknown_options_agree(
        self, asked: dict[str, Any], defaults: dict[str, Any], heard: set[str], seed: int, rivals: bool
    ) -> None:
        """Both refuse the same options, in the order in which they were asked for."""
        random = Random(seed)
        known = {option: random.choice([None, ["a2a", 1], ["ag", 2, "", None]]) for option in heard}
        exclusive = [frozenset({"ep", "etp"}), frozenset({"ep", "mode"})] if rivals else []
        expected = second.unknown(asked, known, exclusive, defaults)
        assert expected == list(first.unknown(asked, known, exclusive=exclusive, defaults=defaults))

    @settings(pairs_agree, max_examples=300)
    @given(options, options, st.lists(st.tuples(options, warnings), min_size=1, max_size=2), st.booleans())
    def test_hidden_options_agree(
        self, asked: dict[str, Any], defaults: dict[str, Any], ranks: list[tuple[dict[str, Any], bool]], kept: bool
    ) -> None:
        """Both find the same options lost, changed in silence, or shown unlike on two ranks."""
        resolved = [{**(asked if kept else {}), **ran} for ran, _ in ranks]
        warned = [told for _, told in ranks]
        expected = second.hidden(asked, defaults, resolved, warned)
        assert expected == list(first.hidden(asked, defaults, resolved, warned))

    @pairs_agree
    @given(
        st.lists(
            st.one_of(
                st.none(),
                st.tuples(
                    st.sampled_from(["ValueError", "TypeError"]),
                    st.sampled_from(
                        [
                            "rank 1: ep 1 is too small",
                            "rank 10: ep 1 is too small",
                            "step 1",
                            "ep must be 2.",
                            "",
                        ]
                    ),
                ),
            ),
            min_size=1,
            max_size=2,
        ),
        st.booleans(),
    )
    def test_refusals_agree(self, errors: list[tuple[str, str] | None], alike: bool) -> None:
        """Both call the same refusals lawful."""
        errors = [errors[0]] * 2 if alike else errors
        expected = second.lawful_refusal(errors)
        assert expected == first.lawful_refusal(errors)

    @pairs_agree
    @given(
        st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.lists(st.sampled_from([1, 2]), max_size=3), st.booleans()
    )
    def test_changes_agree(self, old: int, new: int, seen: list[int], raised: bool) -> None:
        """Both want the new value in every layer, or after an error the old one."""
        assert second.lawful_change(old, new, seen, raised) == first.lawful_change(old, new, seen, raised)

    def test_no_ranks_are_refused_by_both(self) -> None:
        """Nothing was built; and warnings of other ranks belong to nobody."""
        for oracle in (second, first):
            for call in (
                lambda o=oracle: o.hidden({}, {}, [], []),
                lambda o=oracle: o.hidden({}, {}, [{}], []),
                lambda o=oracle: o.lawful_refusal([]),
            ):
                with pytest.raises(ValueError, match=r"\w"):
                    call()


class TestByHand:
    @pytest.mark.parametrize(
        ("found", "needed", "expected"),
        [
            ("2.9", "2.10", True),
            ("2.10", "2.9", False),
            ("2.10.0", "2.10", False),
            ("2.10", "2.10.0", False),
            ("2.10", "2.10.1", True),
            ("2.8.0a0+git1234", "2.8", False),
            ("2.7.1.dev9", "2.8", True),
            ("2.12rc1", "2.12", False),
            ("3", "2.99", False),
            (None, "0", True),
        ],
    )
    def test_versions(self, found: str | None, needed: str, expected: bool) -> None:
        """Number by number; a suffix counts as its release; what is absent is older than anything."""
        assert expected == first.older(found, needed)
        assert expected == second.older(found, needed)

    def test_options_that_must_be_refused(self) -> None:
        """Misspelt, of an unknown value, nameless; and two that exclude each other, unless one is at its default."""
        known: dict[str, Any] = {"mode": ["a2a", "ag"], "kernel": None, "drop": [True, False], "pad": [True, False]}
        usual = {"kernel": None, "drop": False}
        rivals = [frozenset({"drop", "pad"})]
        for asked, expected in [
            ({"mode": "ag", "kernel": "x"}, ()),
            ({"mode": "AG", "mod": "ag"}, ("mode", "mod")),
            ({"kernel": ""}, ("kernel",)),
            ({"kernel": None, "mode": None}, ("mode",)),
            ({"pad": True, "mode": "ag", "drop": True}, ("pad", "drop")),
            ({"pad": True, "drop": False}, ()),
        ]:
            assert expected == first.unknown(asked, known, exclusive=rivals, defaults=usual)
            assert list(expected) == second.unknown(asked, known, rivals, usual)

    def test_options_that_were_lost(self) -> None:
        """Missing on one rank; changed without a warning; changed alike with one; unlike on two ranks."""
        usual = {"ep": 1, "drop": False}
        quiet, told = [False, False], [False, True]
        for asked, resolved, lines, expected in [
            ({"ep": 4}, [{"ep": 4}, {"ep": 4}], quiet, ()),
            ({"ep": 4}, [{"ep": 4}, {}], told, ("ep",)),
            ({"ep": 1}, [{}, {}], quiet, ()),
            ({"ep": 4}, [{"ep": 2}, {"ep": 2}], quiet, ("ep",)),
            ({"ep": 4}, [{"ep": 2}, {"ep": 2}], told, ()),
            ({"ep": 4}, [{"ep": 2}, {"ep": 4}], told, ("ep",)),
            ({"drop": False, "ep": 1}, [{"drop": True}, {"drop": True}], quiet, ("drop",)),
        ]:
            assert expected == first.hidden(asked, usual, resolved, lines)
            assert list(expected) == second.hidden(asked, usual, resolved, lines)

    @pytest.mark.parametrize(
        ("errors", "expected"),
        [
            (
                [("ValueError", "rank 0: ep must divide 8, not 3"), ("ValueError", "rank 1: ep must divide 8, not 3")],
                True,
            ),
            ([("ValueError", "ep must divide 8, not 3"), None], False),
            ([("ValueError", "ep is 3"), ("TypeError", "ep is 3")], False),
            ([("ValueError", "ep is 3"), ("ValueError", "ep is 4")], False),
            ([("ValueError", "3 does not fit")], True),
            ([("AssertionError", "")], False),
            ([("AssertionError", "  "), ("AssertionError", "  ")], False),
        ],
    )
    def test_refusals(self, errors: list[tuple[str, str] | None], expected: bool) -> None:
        """All ranks, one type, one message but for the ranks' numbers, and one with words."""
        assert expected == first.lawful_refusal(errors)
        assert expected == second.lawful_refusal(errors)

    def test_changes(self) -> None:
        """All new; one left behind; refused with all as before; refused half-way; no layer to reach."""
        seen: list[tuple[list[int], bool]] = [
            ([2, 2], False),
            ([2, 1], False),
            ([1, 1], True),
            ([1, 2], True),
            ([], True),
        ]
        expected = [True, False, True, False, True]
        assert expected == [first.lawful_change(1, 2, layers, raised) for layers, raised in seen]
        assert expected == [second.lawful_change(1, 2, layers, raised) for layers, raised in seen]
