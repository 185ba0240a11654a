"""Lists what a backend offers and refuses, with the reasons, and runs one step of each surface; nothing is judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from moe_conformance.contract import Backend
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine, Job, JobResult
from moe_conformance.plugin.run import engine_needs
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.offers import WITH_OPTIONS, Offer, OfferRequest
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.selection import profiles
from moe_conformance.workloads.selection.profiles import fitting

Say = Callable[[str], None]

_MIXED = "; routing weights are float32 beside tokens of bfloat16: y is cast back to the dtype of x"
_TRIES, _REFUSED = 5, 20  # cases of one kind that fail, and that are refused, until one runs
_LACKS = "this backend offers no "  # begins the refusal of a method of Session that is not overridden


def examine(target: str, backend: Backend, versions: dict[str, str], ranks: int, say: Say) -> int:
    """Print for each variant the surfaces that it builds, with their layouts, the options that it maps, and its limits.

    What builds may still fail when it is called: of each kind of run one is made, on two ranks where that is possible.

    Returns:
        0; 1 if it offers nothing, or something failed with an exception that is no refusal.
    """
    say(f"{backend.name} ({', '.join(f'{name} {version}' for name, version in versions.items())})")
    layouts = fitting(profiles.quick_layouts(), ranks)
    offered = failed = False
    plan = Plan(backend, "cpu", "quick")
    with Engine(**engine_needs(backend)) as engine:
        for variant in backend.variants:
            say(f"variant {variant}:")
            found = {layout: _offers(engine.run(_job(OfferRequest(target, variant, layout)))) for layout in layouts}
            for line in lines(found):
                say(f"  {line}")
            every = [offer for offers in found.values() for offer in offers]
            offered |= any(offer.how == "offered" for offer in every)
            failed |= any(offer.how == "failed" for offer in every)
            if any(offer.how == "offered" for offer in every):
                ran, faults = _runs(engine, target, [case for case in plan.cases if _is_tried(case, variant, ranks)])
                say(f"  one run of each: {', '.join(ran) or 'none could be made'}")
                for fault in faults:
                    say(f"    {fault}")
                failed |= bool(faults)
            for limit in backend.limits(variant):
                say(f"  limit on {limit.on}: only {', '.join(map(str, limit.allowed))} ({limit.reason})")
    if not offered:
        say("it offers no surface on any layout: no requirement can be judged")
    return int(failed or not offered)


def _is_tried(case: Case, variant: str, ranks: int) -> bool:
    layout = case.cell.layout
    usual = layout.name == ("ep2" if ranks > 1 else "single") and case.workload.asynchrony == "plain"
    return usual and case.cell.variant == variant and broken(case.cell.limits, case.workload, "cpu") is None


def _kind(case: Case) -> str:
    """Return the kind of run of a case; an exchange in bfloat16 is a kind of its own, as its weights are float32."""
    kind = str(case.workload.run).split(",")[0]
    mixed = kind.startswith("exchange with the probe") and case.workload.config.dtype == torch.bfloat16
    return f"{kind} in bfloat16" if mixed else kind


def _runs(engine: Engine, target: str, cases: Sequence[Case]) -> tuple[list[str], list[str]]:
    """Run cases of each kind until one ends; return the kinds that ran, and a sentence about each that never did.

    A known failure of one case does not hide that another of its kind runs.
    """
    by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_kind[_kind(case)].append(case)
    ran: list[str] = []
    faults: dict[str, str] = {}  # by kind, of the first case that failed
    for kind, some in by_kind.items():
        failed = refused = 0
        for case in some:
            if failed == _TRIES or refused == _REFUSED:
                break
            outcome = moe_step(engine, target, case.workload)
            failed, refused = failed + bool(outcome.blamed), refused + (outcome.refusal is not None)
            if outcome.blamed:
                rank = outcome.blamed[0]
                fault = f"{kind} ({case.id}): rank {rank.rank} {rank.status} in {rank.reached}: {rank.error}"
                fault += _MIXED if case.workload.config.dtype == torch.bfloat16 else ""
                faults.setdefault(kind, fault)
            elif outcome.refusal is None:
                ran.append(kind)
                break
    return ran, [fault for kind, fault in faults.items() if kind not in ran]


def lines(found: dict[Layout, Sequence[Offer]]) -> Iterator[str]:
    """Yield the surfaces with their layouts and options, the reasons of refusals, and what the session lacks."""
    by_surface: dict[str, dict[Layout, Offer]] = defaultdict(dict)
    for layout, offers in found.items():
        for offer in offers:
            if not offer.option:
                by_surface[offer.surface][layout] = offer
    nowhere: dict[str, list[str]] = defaultdict(list)
    for surface, by_layout in by_surface.items():
        where = [layout.name for layout, offer in by_layout.items() if offer.how == "offered"]
        gates = dict.fromkeys(offer.gate for offer in by_layout.values() if offer.gate)
        reasons: dict[str, list[str]] = defaultdict(list)
        for layout, offer in by_layout.items():
            if offer.how != "offered":
                reasons[f"{offer.how}: {offer.reason}"].append(layout.name)
        if not where:
            nowhere["; ".join(reasons)].append(surface)
            continue
        yield f"{surface}: {', '.join(where)}" + "".join(f" (with {gate}, not without)" for gate in gates)
        for reason, names in reasons.items():
            yield f"  not on {', '.join(names)}: {reason}"
        if surface in WITH_OPTIONS:
            yield from _options(surface, found)
    lacking = [surface for reason, some in nowhere.items() if _LACKS in reason for surface in some]
    for reason, some in nowhere.items():
        if _LACKS not in reason:
            yield f"{', '.join(some)}: nowhere; {reason}"
    if lacking:
        yield f"not in the session: {', '.join(lacking)}"


def _options(surface: str, found: dict[Layout, Sequence[Offer]]) -> Iterator[str]:
    """Yield the options that a surface maps on some layout, and the reasons why it does not map others."""
    mapped: dict[str, None] = {}
    reasons: dict[str, str] = {}
    for offers in found.values():
        for offer in offers:
            if offer.surface == surface and offer.option:
                if offer.how == "offered":
                    mapped[offer.option] = None
                else:
                    reasons.setdefault(offer.option, f"{offer.how}: {offer.reason}")
    yield f"  maps: {', '.join(mapped) or 'no option'}"
    unmapped = [option for option, reason in reasons.items() if option not in mapped and "does not map" in reason]
    if unmapped:
        yield f"  does not map: {', '.join(unmapped)}"
    for option, reason in reasons.items():
        if option not in mapped and option not in unmapped:
            yield f"  {option}: {reason}"


def _job(request: OfferRequest) -> Job:
    groups = request.layout.groups()
    return Job("moe_conformance.scenarios.offers:run", request, request.layout.world, groups, deadline_s=60.0)


def _offers(result: JobResult) -> Sequence[Offer]:
    """Return the offers to the first rank, or the failure of a rank that did not answer."""
    fault = next((rank for rank in result.ranks if rank.status != "ok"), None)
    if fault is not None:
        return (Offer("session", "", "failed", f"rank {fault.rank} {fault.status}: {fault.error}"),)
    return tuple(result.ranks[0].value or ())
