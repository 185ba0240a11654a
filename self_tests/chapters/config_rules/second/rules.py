"""The rules of configurations by hand: one walk through each feature's preconditions, in the words of the spec."""

from __future__ import annotations

from typing import NamedTuple

from self_tests.chapters.config_rules.second.shown import older


class Settings(NamedTuple):
    """What is asked for, in neutral words. Defaults break nothing."""

    experts: int | None = 8
    top_k: int = 2
    groups: int | None = None
    groups_chosen: int | None = None
    ep: int = 2
    pp: int = 1
    virtual_stages: int | None = None
    dispatcher: str = "alltoall"
    kernel: str | None = None
    kernel_frees_input: bool = False
    kernel_present: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    overlap: bool = False
    overlap_shared: bool = False
    shared_experts: int = 0
    recompute: str = "none"
    recompute_method: str | None = None
    recompute_layers: int | None = None
    recompute_modules: frozenset[str] = frozenset()
    prediction_layers: int | None = None
    capture: frozenset[str] | None = None
    offload_first_product: bool = False
    defer_weight_gradients: bool = False
    accumulate_in_product: bool = True
    attention_bias: bool = False
    packed: bool = False
    versions: tuple[tuple[str, str, str | None], ...] = ()


# What neither user nor backend chooses: how the kernel is made, where it is installed, what versions there are.
FACTS = ("kernel_frees_input", "kernel_present", "versions")


def captured(asked: Settings, *parts: str) -> bool:
    """Does the captured scope take in one of the parts? A scope without names is everything."""
    if asked.capture is None:
        return False
    if len(asked.capture) == 0:
        return True
    return any(part in asked.capture for part in parts)


def broken_by_overlap(asked: Settings) -> list[str]:
    """What overlap of exchange and computation does not go with."""
    found = []
    if asked.ep == 1:
        found.append("RULE-06")
    if asked.experts is None or asked.experts < 2:
        found.append("RULE-07")
    if asked.dispatcher == "allgather":
        found.append("RULE-08")
    if asked.dtype != "bfloat16" and asked.dtype != "float16":
        found.append("RULE-09")
    if asked.pp > 1 and (asked.virtual_stages is None or asked.virtual_stages < 2):
        found.append("RULE-10")
    if asked.recompute == "full":
        found.append("RULE-11")
    if asked.recompute_method is not None:
        found.append("RULE-12")
    if asked.recompute_layers is not None:
        found.append("RULE-13")
    if "moe" in asked.recompute_modules:
        found.append("RULE-14")
    if asked.prediction_layers is not None and asked.prediction_layers > 1:
        found.append("RULE-16")
    if captured(asked, "moe", "mlp"):
        found.append("RULE-17")
    if asked.dispatcher == "fused" and asked.kernel_frees_input and asked.offload_first_product:
        found.append("RULE-18")  # the offloaded input would be read after overlap has freed it
    return found


def broken_by_deferral(asked: Settings) -> list[str]:
    """What deferred weight gradients do not go with."""
    found = []
    if not asked.overlap:
        found.append("RULE-20")
    shared_in_graph = captured(asked, "router") and asked.shared_experts > 0 and not asked.overlap_shared
    if (captured(asked, "attention") or shared_in_graph) and not asked.accumulate_in_product:
        found.append("RULE-21")
    if captured(asked, "attention") and asked.attention_bias:
        found.append("RULE-22")
    return found


def groups_fit(asked: Settings, experts: int) -> bool:
    """Both sizes or none; the groups divide the experts, and the chosen ones hold K of them."""
    if asked.groups is None and asked.groups_chosen is None:
        return True
    if asked.groups is None or asked.groups_chosen is None:
        return False
    if not 1 <= asked.groups_chosen <= asked.groups:
        return False
    size, rest = divmod(experts, asked.groups)
    return rest == 0 and asked.top_k <= asked.groups_chosen * size


def broken(asked: Settings) -> list[str]:
    """The ids of the rules that a configuration breaks, ascending."""
    found = broken_by_overlap(asked) if asked.overlap else []
    if asked.overlap_shared and (asked.overlap or asked.shared_experts == 0):
        found.append("RULE-15")
    if any(older(present, needed) for _, needed, present in asked.versions):
        found.append("RULE-19")
    if asked.defer_weight_gradients:
        found += broken_by_deferral(asked)
    if asked.kernel is not None and asked.dispatcher != "fused":
        found.append("RULE-23")
    if asked.kernel is not None and False in asked.kernel_present:
        found.append("RULE-24")
    if asked.packed and asked.dispatcher == "allgather":
        found.append("RULE-25")
    if asked.experts is not None and not 1 <= asked.top_k <= asked.experts:
        found.append("RULE-26")
    if asked.experts is not None and not groups_fit(asked, asked.experts):
        found.append("RULE-27")
    return sorted(found)


def may_be_honoured(rule: str, asked: Settings) -> bool:
    """May the combination be built as asked, and be right?"""
    if rule == "RULE-15":
        return asked.shared_experts > 0
    return rule not in ("RULE-06", "RULE-07", "RULE-19", "RULE-23", "RULE-24", "RULE-26", "RULE-27")


def may_differ(field: str, asked: Settings, ran: Settings) -> bool:
    """May this option have been changed openly, from what `asked` has to what `ran` has?

    Overlaps may be switched off; a kernel's name may be dropped where the dispatcher has no use for it, or the
    dispatcher chosen that has; a kernel that is missing goes together with its dispatcher.
    """
    rules = broken(asked)
    replaced = "RULE-24" in rules and ran.kernel is None and ran.dispatcher != "fused"
    if field == "overlap":
        return "RULE-06" in rules or "RULE-07" in rules or ("RULE-15" in rules and asked.shared_experts > 0)
    if field == "overlap_shared":
        return "RULE-15" in rules
    if field == "kernel":
        return replaced or ("RULE-23" in rules and ran.kernel is None)
    if field == "dispatcher":
        return replaced or ("RULE-23" in rules and ran.dispatcher == "fused")
    return False


def lawful_build(asked: Settings, ran: Settings) -> bool:
    """May `ran` have been built, with a warning, where `asked` was asked for?"""
    for field in Settings._fields:
        if field in FACTS or getattr(asked, field) == getattr(ran, field):
            continue
        if not may_differ(field, asked, ran):
            return False
    return all(may_be_honoured(rule, ran) for rule in broken(ran))


def outcomes(asked: Settings) -> set[str]:
    """What may become of a configuration."""
    rules = broken(asked)
    if not rules:
        return {"built"}
    found = {"refused"}
    if lawful_build(asked, asked):
        found.add("honoured")
    changed = asked
    if "RULE-06" in rules or "RULE-07" in rules:
        changed = changed._replace(overlap=False)
    if "RULE-15" in rules:
        changed = changed._replace(overlap_shared=False)
    if "RULE-24" in rules:
        changed = changed._replace(kernel=None, dispatcher="alltoall")
    elif "RULE-23" in rules:
        changed = changed._replace(kernel=None)
    if changed != asked and lawful_build(asked, changed):
        found.add("changed")
    return found
