"""Examples of configurations: for every rule one that breaks it, and the nearest that breaks none.

A backend must refuse the one, or do what `outcomes.outcomes` allows, and accept the other (RULE-01).

Source: `rules.RULES`; each example is the smallest that breaks its rule alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moe_conformance.reference.config_rules.rules import Settings


@dataclass(frozen=True)
class Case:
    """One example: `mended` differs from `broken` in `option` alone; RULE-07 says in which else."""

    rule: str
    option: str
    broken: Settings
    mended: Settings


def cases() -> tuple[Case, ...]:
    """List the examples, at least one for each of RULE-06 to RULE-27.

    Degenerate: with no experts, or one, ep = 1 is the only layout, which breaks RULE-06 too: the examples of
    RULE-07 are mended in ep and K as well.

    >>> from moe_conformance.reference.config_rules.rules import broken
    >>> {broken(case.mended) for case in cases()}
    {()}
    >>> [broken(case.broken) for case in cases() if broken(case.broken) != (case.rule,)]
    [('RULE-06', 'RULE-07'), ('RULE-06', 'RULE-07')]
    >>> sorted({case.rule for case in cases()}) == [f"RULE-{n:02d}" for n in range(6, 28)]
    True
    """
    plain = Settings(ep=1)
    on = Settings(overlap=True)
    deferred = Settings(overlap=True, defer_weight_gradients=True)
    grouped = Settings(ep=1, groups=4, groups_chosen=2)
    kernel = Settings(ep=1, dispatcher="fused", kernel="some_kernel")
    return (
        _case("RULE-06", on, "ep", 1),
        Case("RULE-07", "experts", replace(on, experts=1, top_k=1, ep=1), replace(on, experts=2, top_k=1, ep=2)),
        Case("RULE-07", "experts", replace(on, experts=None, ep=1), on),
        _case("RULE-08", on, "dispatcher", "allgather"),
        _case("RULE-08", replace(on, dispatcher="fused"), "dispatcher", "allgather"),
        _case("RULE-09", on, "dtype", "float32"),
        _case("RULE-09", replace(on, dtype="float16"), "dtype", "float64"),
        _case("RULE-10", replace(on, pp=2, virtual_stages=2), "virtual_stages", None),
        _case("RULE-10", replace(on, pp=2, virtual_stages=2), "virtual_stages", 1),
        _case("RULE-10", on, "pp", 2),
        _case("RULE-11", on, "recompute", "full"),
        _case("RULE-12", on, "recompute_method", "uniform"),
        _case("RULE-12", on, "recompute_method", "block"),
        _case("RULE-13", on, "recompute_layers", 1),
        _case("RULE-13", on, "recompute_layers", 0),
        Case(
            "RULE-14",
            "recompute_modules",
            replace(on, recompute="selective", recompute_modules=frozenset({"moe", "layernorm"})),
            replace(on, recompute="selective", recompute_modules=frozenset({"layernorm"})),
        ),
        _case("RULE-15", replace(on, shared_experts=1), "overlap_shared", True),
        _case("RULE-15", plain, "overlap_shared", True),
        _case("RULE-16", on, "prediction_layers", 2),
        _case("RULE-16", replace(on, pp=2, virtual_stages=2, prediction_layers=1), "prediction_layers", 2),
        _case("RULE-17", replace(on, capture=frozenset({"attention"})), "capture", frozenset({"attention", "moe"})),
        _case("RULE-17", replace(on, capture=frozenset({"router"})), "capture", frozenset({"mlp"})),
        _case("RULE-17", on, "capture", frozenset()),
        _case(
            "RULE-18",
            replace(kernel, ep=2, overlap=True, kernel_frees_input=True),
            "offload_first_product",
            True,
        ),
        _case("RULE-19", replace(on, versions=(("torch", "2.10", "2.10"),)), "versions", (("torch", "2.10", "2.9"),)),
        _case("RULE-19", plain, "versions", (("torch", "2.10", None),)),
        _case("RULE-20", deferred, "overlap", False),
        _case("RULE-21", _capturing(replace(deferred, shared_experts=1), "router"), "accumulate_in_product", False),
        _case("RULE-21", _capturing(deferred, "attention"), "accumulate_in_product", False),
        _case("RULE-22", _capturing(deferred, "attention"), "attention_bias", True),
        _case("RULE-23", plain, "kernel", "some_kernel"),
        _case("RULE-23", kernel, "dispatcher", "alltoall"),
        _case("RULE-24", replace(kernel, kernel_present=(True, True)), "kernel_present", (True, False)),
        _case("RULE-24", replace(kernel, kernel_present=(True, True)), "kernel_present", (False, False)),
        _case("RULE-25", replace(plain, packed=True), "dispatcher", "allgather"),
        _case("RULE-25", replace(plain, packed=True, dispatcher="fused"), "dispatcher", "allgather"),
        _case("RULE-26", replace(plain, top_k=8), "top_k", 9),
        _case("RULE-26", replace(plain, top_k=1), "top_k", 0),
        _case("RULE-26", replace(plain, experts=1, top_k=1, ep=1), "experts", 0),
        _case("RULE-27", grouped, "experts", 10),
        _case("RULE-27", replace(grouped, groups_chosen=4), "groups_chosen", 5),
        _case("RULE-27", replace(grouped, groups_chosen=1), "groups_chosen", 0),
        _case("RULE-27", replace(grouped, top_k=4), "top_k", 5),
        _case("RULE-27", grouped, "groups_chosen", None),
        _case("RULE-27", grouped, "groups", None),
    )


def fits() -> tuple[tuple[str, Settings], ...]:
    """List configurations at the limits of a rule that must be accepted, beside the mended ones of `cases`.

    >>> from moe_conformance.reference.config_rules.rules import broken
    >>> {broken(settings) for _, settings in fits()}
    {()}
    """
    plain, on = Settings(ep=1), Settings(overlap=True)
    return (
        ("RULE-06", replace(on, experts=2)),
        ("RULE-08", replace(on, dispatcher="fused")),
        ("RULE-09", replace(on, dtype="float16")),
        ("RULE-10", replace(on, pp=4, virtual_stages=3)),
        ("RULE-15", replace(plain, shared_experts=1, overlap_shared=True)),
        ("RULE-26", replace(plain, experts=1, top_k=1)),
        ("RULE-26", replace(plain, experts=None)),
        ("RULE-27", replace(plain, groups=1, groups_chosen=1)),
        ("RULE-27", replace(plain, groups=8, groups_chosen=2)),
        ("RULE-27", replace(plain, groups=2, groups_chosen=2, top_k=8)),
    )


def _case(rule: str, mended: Settings, option: str, value: Any) -> Case:
    """Break a sound configuration in one option."""
    return Case(rule, option, replace(mended, **{option: value}), mended)


def _capturing(settings: Settings, scope: str) -> Settings:
    """Add a graph of one scope."""
    return replace(settings, capture=frozenset({scope}))
