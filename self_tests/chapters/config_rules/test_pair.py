"""Rules of configurations, worked out twice: reference.config_rules.rules as a table, the longhand as a walk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from random import Random
from typing import Any

import pytest

from moe_conformance.reference.config_rules import cases
from moe_conformance.reference.config_rules import outcomes as config_outcomes
from moe_conformance.reference.config_rules import rules as first
from self_tests.chapters.config_rules.second import rules as second
from self_tests.chapters.config_rules.second.rules import Settings

ALL = [f"RULE-{number:02}" for number in range(6, 28)]
OLD, NEW = (("torch", "2.10", "2.9"),), (("torch", "2.9", "2.10"),)

# Every option at values on both sides of every limit.
VALUES: dict[str, list[Any]] = {
    "experts": [8, None, -2, 0, 1, 2, 3, 9],
    "top_k": [2, -1, 0, 1, 3, 4, 8, 9],
    "groups": [None, -2, 0, 1, 2, 3, 4, 8],
    "groups_chosen": [None, -1, 0, 1, 2, 3, 4],
    "ep": [2, 1, 4],
    "pp": [1, 2],
    "virtual_stages": [None, 1, 2],
    "dispatcher": ["alltoall", "allgather", "fused"],
    "kernel": [None, "quick"],
    "kernel_frees_input": [False, True],
    "kernel_present": [(), (True, True), (True, False)],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "overlap": [False, True],
    "overlap_shared": [False, True],
    "shared_experts": [0, 1],
    "recompute": ["none", "full", "selective"],
    "recompute_method": [None, "uniform"],
    "recompute_layers": [None, 0, 3],
    "recompute_modules": [frozenset(), frozenset({"moe"}), frozenset({"norm"}), frozenset({"norm", "moe"})],
    "prediction_layers": [None, 0, 1, 2],
    "capture": [None, frozenset(), *(frozenset({name}) for name in ("attention", "router", "moe", "mlp", "norm"))],
    "offload_first_product": [False, True],
    "defer_weight_gradients": [False, True],
    "accumulate_in_product": [True, False],
    "attention_bias": [False, True],
    "packed": [False, True],
    "versions": [(), OLD, NEW, (("torch", "2.10", None),), NEW + OLD],
}
BASES = [
    Settings(),
    Settings(overlap=True),
    Settings(overlap=True, defer_weight_gradients=True, groups=4, groups_chosen=2),
    Settings(overlap=True, dispatcher="fused", kernel="quick", kernel_frees_input=True, overlap_shared=True),
]

# What backends are known to change, and to what.
CHANGEABLE: dict[str, list[Any]] = {
    "overlap": [False, False, True],
    "overlap_shared": [False, False, True],
    "kernel": [None, None, "slow"],
    "dispatcher": ["alltoall", "allgather", "fused"],
}


def of_first(settings: Settings) -> first.Settings:
    """Longhand settings as the first oracle takes them."""
    return first.Settings(**settings._asdict())


def of_second(settings: first.Settings) -> Settings:
    """The first oracle's settings as the longhand takes them."""
    return Settings(**{field: getattr(settings, field) for field in Settings._fields})


def neighbours() -> Iterator[Settings]:
    """Every base with any two options at any of their values."""
    for base in BASES:
        for one, other in combinations(VALUES, 2):
            for a in VALUES[one]:
                for b in VALUES[other]:
                    yield base._replace(**{one: a, other: b})


def drawn(random: Random, changes: int) -> Settings:
    """Settings some way from one of the bases."""
    fields = random.sample(list(VALUES), changes)
    return random.choice(BASES)._replace(**{field: random.choice(VALUES[field]) for field in fields})


class TestPair:
    def test_defaults_agree(self) -> None:
        """Both start from the same configuration, and it breaks nothing."""
        assert Settings() == of_second(first.Settings())
        assert () == first.broken(first.Settings())

    def test_the_same_rules_are_broken(self) -> None:
        """Both find the same rules broken two options around four configurations, and every rule somewhere."""
        found = set()
        for settings in neighbours():
            expected = second.broken(settings)
            found |= set(expected)
            assert expected == list(first.broken(of_first(settings))), settings
        assert ALL == sorted(found)

    def test_the_same_outcomes_are_lawful(self) -> None:
        """Both let the same become of 3000 configurations."""
        random, found = Random(5), set()
        for _ in range(3000):
            settings = drawn(random, random.randint(0, 6))
            expected = second.outcomes(settings)
            found.add(frozenset(expected))
            assert expected == set(config_outcomes.outcomes(of_first(settings))), settings
        assert 5 == len(found), "built; refused with neither, either or both of the others"

    def test_the_same_builds_are_lawful(self) -> None:
        """Both judge alike what was built in place of what was asked for, up to three options away."""
        random, lawful = Random(7), 0
        for _ in range(9000):
            asked = drawn(random, random.randint(0, 4))
            fields = random.sample([*CHANGEABLE, *random.sample(list(VALUES), 2)], random.randint(0, 3))
            ran = asked._replace(**{field: random.choice(CHANGEABLE.get(field, VALUES[field])) for field in fields})
            expected = second.lawful_build(asked, ran)
            lawful += expected and ran != asked
            assert expected == config_outcomes.lawful_build(of_first(asked), of_first(ran)), (asked, ran)
        assert lawful > 150, "too few changes were lawful to tell"


class TestCases:
    def test_every_rule_has_an_example(self) -> None:
        """Of each rule one configuration that breaks it at least."""
        assert ALL == sorted({case.rule for case in cases.cases()})

    @pytest.mark.parametrize("case", cases.cases(), ids=lambda case: f"{case.rule}-{case.option}")
    def test_an_example_breaks_its_rule_alone(self, case: cases.Case) -> None:
        """By the longhand too: one rule broken, mended by one option. A lone expert lies on one rank."""
        broken, mended = of_second(case.broken), of_second(case.mended)
        lone = case.rule == "RULE-07" and broken.ep == 1
        assert (["RULE-06", "RULE-07"] if lone else [case.rule]) == second.broken(broken)
        assert [] == second.broken(mended)
        differ = {field for field in Settings._fields if getattr(broken, field) != getattr(mended, field)}
        assert differ <= ({"experts", "top_k", "ep"} if lone else {case.option})
        assert case.option in differ


MOE, NORM, ATTENTION, ROUTER = (frozenset({name}) for name in ("moe", "norm", "attention", "router"))
ON = {"overlap": True}
LATER = {"overlap": True, "defer_weight_gradients": True}
UNFUSED = {**LATER, "accumulate_in_product": False}
KERNEL = {"dispatcher": "fused", "kernel": "quick"}
FREEING = {**ON, **KERNEL, "kernel_frees_input": True}
BOTH, HONOURED, CHANGED = {"refused", "honoured", "changed"}, {"refused", "honoured"}, {"refused", "changed"}

# Rule, what is asked for, what makes it fit, and what may become of it.
TABLE: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("RULE-06", {**ON, "ep": 1}, {"ep": 2}, CHANGED),
    ("RULE-07", {**ON, "experts": None}, {"experts": 2}, CHANGED),
    ("RULE-08", {**ON, "dispatcher": "allgather"}, {"dispatcher": "fused"}, HONOURED),
    ("RULE-09", {**ON, "dtype": "float32"}, {"dtype": "float16"}, HONOURED),
    ("RULE-09", {**ON, "dtype": "float64"}, {"dtype": "bfloat16"}, HONOURED),
    ("RULE-10", {**ON, "pp": 2}, {"virtual_stages": 2}, HONOURED),
    ("RULE-10", {**ON, "pp": 2, "virtual_stages": 1}, {"pp": 1}, HONOURED),
    ("RULE-11", {**ON, "recompute": "full"}, {"recompute": "selective"}, HONOURED),
    ("RULE-12", {**ON, "recompute_method": "block"}, {"recompute_method": None}, HONOURED),
    ("RULE-13", {**ON, "recompute_layers": 0}, {"recompute_layers": None}, HONOURED),
    ("RULE-14", {**ON, "recompute_modules": MOE | NORM}, {"recompute_modules": NORM}, HONOURED),
    ("RULE-15", {**ON, "overlap_shared": True, "shared_experts": 1}, {"overlap": False}, BOTH),
    ("RULE-15", {**ON, "overlap_shared": True, "shared_experts": 1}, {"overlap_shared": False}, BOTH),
    ("RULE-15", {"overlap_shared": True}, {"shared_experts": 1}, CHANGED),
    ("RULE-16", {**ON, "prediction_layers": 2}, {"prediction_layers": 1}, HONOURED),
    ("RULE-17", {**ON, "capture": MOE}, {"capture": ATTENTION}, HONOURED),
    ("RULE-17", {**ON, "capture": ROUTER | {"mlp"}}, {"capture": ROUTER}, HONOURED),
    ("RULE-17", {**ON, "capture": frozenset()}, {"capture": None}, HONOURED),
    ("RULE-18", {**FREEING, "offload_first_product": True}, {"offload_first_product": False}, HONOURED),
    ("RULE-18", {**FREEING, "offload_first_product": True}, {"dispatcher": "alltoall", "kernel": None}, HONOURED),
    ("RULE-19", {"versions": OLD}, {"versions": NEW}, {"refused"}),
    ("RULE-19", {"versions": (("torch", "0.1", None),)}, {"versions": ()}, {"refused"}),
    ("RULE-20", {"defer_weight_gradients": True}, ON, HONOURED),
    ("RULE-21", {**UNFUSED, "capture": ROUTER, "shared_experts": 1}, {"capture": None}, HONOURED),
    ("RULE-21", {**UNFUSED, "capture": ATTENTION}, {"accumulate_in_product": True}, HONOURED),
    ("RULE-22", {**LATER, "capture": ATTENTION, "attention_bias": True}, {"capture": ROUTER}, HONOURED),
    ("RULE-23", {"kernel": "quick"}, {"dispatcher": "fused"}, CHANGED),
    ("RULE-24", {**KERNEL, "kernel_present": (True, False)}, {"kernel_present": (True, True)}, CHANGED),
    ("RULE-25", {"packed": True, "dispatcher": "allgather"}, {"dispatcher": "fused"}, HONOURED),
    ("RULE-26", {"top_k": 0}, {"top_k": 1}, {"refused"}),
    ("RULE-26", {"top_k": 9}, {"top_k": 8}, {"refused"}),
    ("RULE-26", {"experts": 0}, {"experts": 2}, {"refused"}),
    ("RULE-27", {"groups": 3, "groups_chosen": 2}, {"experts": 9}, {"refused"}),
    ("RULE-27", {"groups": 2, "groups_chosen": 3}, {"groups_chosen": 2}, {"refused"}),
    ("RULE-27", {"groups": 2, "groups_chosen": 0}, {"groups_chosen": 1}, {"refused"}),
    ("RULE-27", {"groups": 8, "groups_chosen": 1}, {"groups_chosen": 2}, {"refused"}),
    ("RULE-27", {"groups": 4, "groups_chosen": 2, "top_k": 5}, {"top_k": 4}, {"refused"}),
    ("RULE-27", {"groups": 4}, {"groups_chosen": 4}, {"refused"}),
    ("RULE-27", {"groups_chosen": 1}, {"groups": 1}, {"refused"}),
]  # fmt: skip


class TestByHand:
    @pytest.mark.parametrize(("rule", "asked", "mended", "outcomes"), TABLE)
    def test_one_rule_at_a_time(
        self, rule: str, asked: dict[str, Any], mended: dict[str, Any], outcomes: set[str]
    ) -> None:
        """Broken, it has these outcomes; with one option mended it is built."""
        settings, fits = first.Settings(**asked), first.Settings(**{**asked, **mended})
        assert rule in first.broken(settings)
        assert (rule,) == first.broken(settings) or settings.experts == 0
        assert outcomes == config_outcomes.outcomes(settings)
        assert () == first.broken(fits)
        assert {"built"} == config_outcomes.outcomes(fits)

    def test_a_lone_expert_breaks_both(self) -> None:
        """E = 1 leaves ep = 1: overlap breaks two rules."""
        settings = first.Settings(experts=1, top_k=1, ep=1, overlap=True)
        assert ("RULE-06", "RULE-07") == first.broken(settings)
        assert CHANGED == config_outcomes.outcomes(settings)

    def test_a_captured_router_alone_has_no_deferred_weights(self) -> None:
        """Deferral under a graph of the router is at fault only with shared experts in it, not with overlapped ones."""
        alone = {**UNFUSED, "capture": ROUTER}
        assert () == first.broken(first.Settings(**alone))  # type: ignore[arg-type]
        assert ("RULE-15",) == first.broken(first.Settings(**alone, shared_experts=1, overlap_shared=True))  # type: ignore[arg-type]

    def test_what_was_built_must_be_lawful_as_well(self) -> None:
        """Overlap on one rank may be switched off, and not by adding ranks; what breaks no rule is built as asked."""
        asked = first.Settings(overlap=True, ep=1)
        off, spread = first.Settings(ep=1), first.Settings(overlap=True, ep=2)
        assert [True, False, False] == [config_outcomes.lawful_build(asked, ran) for ran in (off, spread, asked)]
        assert not config_outcomes.lawful_build(spread, first.Settings())

    def test_a_missing_kernel_is_replaced_as_a_whole(self) -> None:
        """Kernel's name and dispatcher together; one of them left behind names what does not run."""
        absent: Any = {"kernel_present": (False, True)}
        asked = first.Settings(dispatcher="fused", kernel="quick", **absent)
        whole = first.Settings(dispatcher="alltoall", **absent)
        halves = [first.Settings(dispatcher="fused", **absent), first.Settings(kernel="quick", **absent)]
        assert config_outcomes.lawful_build(asked, whole)
        assert [False, False] == [config_outcomes.lawful_build(asked, half) for half in halves]

    def test_two_rules_leave_what_both_allow(self) -> None:
        """Overlap in float32 on one rank: to be honoured for its dtype, never for its rank, but off for both."""
        assert CHANGED == config_outcomes.outcomes(first.Settings(overlap=True, ep=1, dtype="float32"))
        assert {"refused"} == config_outcomes.outcomes(first.Settings(overlap=True, ep=1, versions=OLD))
