"""What a build must show, worked out twice: versions, options that are unknown or lost, refusals and changes."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.config_rules import shown as first
from self_tests.chapters.config_rules.second import shown as second
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


def first_unknown(asked: dict[str, Any]) -> Any:
    """Which of these options must be refused, says the first oracle."""
    return first.unknown(asked, KNOWN, exclusive=RIVALS, defaults=USUAL)


KNOWN: dict[str, Any] = {"mode": ["a2a", "ag"], "kernel": None, "drop": [True, False], "pad": [True, False]}
USUAL, RIVALS = {"kernel": None, "drop": False}, [frozenset({"drop", "pad"})]
EP, QUIET, TOLD = {"ep": 1, "drop": False}, [False, False], [False, True]
BAD_EP, LONE = ("ValueError", "ep is 3"), ("ValueError", "3 does not fit")

test_by_hand = by_hand(
    # Number by number; a suffix counts as its release; what is absent is older than anything.
    *rows(first.older, second.older,
        *(
            (f"{found} for {needed}", (found, needed), expected)
            for found, needed, expected in [
                ("2.10", "2.9", False), ("2.10.0", "2.10", False), ("2.10", "2.10.1", True),
                ("2.7.1.dev9", "2.8", True), ("2.12rc1", "2.12", False), ("3", "2.99", False),
                ("dev", "2.0", REFUSED), ("2.0", "x1", REFUSED), (None, "", REFUSED), ("", "1", REFUSED),
            ]
        ),
    ),
    *rows(first_unknown, lambda asked: second.unknown(asked, KNOWN, RIVALS, USUAL),
        ("known options", ({"mode": "ag", "kernel": "x"},), []),
        ("an unknown value and a misspelt name", ({"mode": "AG", "mod": "ag"},), ["mode", "mod"]),
        ("a kernel without a name", ({"kernel": ""},), ["kernel"]),
        ("none where that is no default", ({"kernel": None, "mode": None},), ["mode"]),
        ("two that exclude each other", ({"pad": True, "mode": "ag", "drop": True},), ["pad", "drop"]),
        ("unless one is at its default", ({"pad": True, "drop": False},), []),
    ),
    *rows(first.hidden, second.hidden,
        ("as asked", ({"ep": 4}, EP, [{"ep": 4}, {"ep": 4}], QUIET), []),
        ("missing on one rank", ({"ep": 4}, EP, [{"ep": 4}, {}], TOLD), ["ep"]),
        ("a default may be missing", ({"ep": 1}, EP, [{}, {}], QUIET), []),
        ("changed without a warning", ({"ep": 4}, EP, [{"ep": 2}, {"ep": 2}], QUIET), ["ep"]),
        ("changed with one", ({"ep": 4}, EP, [{"ep": 2}, {"ep": 2}], TOLD), []),
        ("unlike on two ranks", ({"ep": 4}, EP, [{"ep": 2}, {"ep": 4}], TOLD), ["ep"]),
        ("a default that was changed", ({**EP}, EP, [{"drop": True}, {"drop": True}], QUIET), ["drop"]),
        ("no rank", ({}, {}, [], []), REFUSED),
        ("warnings of other ranks", ({}, {}, [{}], []), REFUSED),
    ),
    # All ranks, one type, one message but for the ranks' numbers, and one with words.
    *rows(first.lawful_refusal, second.lawful_refusal,
        ("one type and one message", ([BAD_EP, BAD_EP],), True),
        ("two types", ([BAD_EP, ("TypeError", "ep is 3")],), False),
        ("two messages", ([BAD_EP, ("ValueError", "ep is 4")],), False),
        ("one rank", ([LONE],), True),
        ("blanks", ([("AssertionError", "  "), ("AssertionError", "  ")],), False),
        ("no rank refuses", ([],), REFUSED),
    ),
    *rows(first.lawful_change, second.lawful_change,
        ("refused with all as before", (1, 2, [1, 1], True), True),
        ("refused half-way", (1, 2, [1, 2], True), False),
        ("no layer to reach", (1, 2, [], True), True),
    ),
)  # fmt: skip
