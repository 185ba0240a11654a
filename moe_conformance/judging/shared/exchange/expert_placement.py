"""Judge of the experts that every rank reports to hold, compared with the groups of the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.claims import claims_of
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.verdict import WrongGroups
from moe_conformance.reference.groups.members import groups
from moe_conformance.scenarios.outcome import Outcome


@judge(WrongGroups, "groups")
def judge_placement(outcome: Outcome) -> Comparisons:
    """Decide whether every expert is on one ep coordinate, and its shards and replicas report the same experts.

    A backend with redundant experts claims placement = "replicas"; then an expert is on one ep coordinate or more. The
    order of the experts is the same too. The ids are those that the backend reports. If it reports wrong ones, rows
    are delivered to other experts (EXCH-01), or outputs are those of other parameters (EXPT-01).

    Raises:
        WrongGroups: an expert is on no rank of an ep group, or on two, or is none of the experts; the ranks of an etp
            or edp group name other experts, or in another order.
    """
    require_finished(outcome)
    layout, experts = outcome.workload.layout, outcome.workload.config.experts
    redundant = claims_of(outcome.ranks).placement == "replicas"
    held = {rank.rank: tuple(rank.local_experts) for rank in outcome.ranks}
    sizes = layout.sizes()
    of_axis = groups(**{axis: sizes[axis] for axis in ("world", "tp", "cp", "pp", "ep", "etp")})
    for ranks in of_axis["ep"]:
        yield from _misplaced(ranks, held, experts, redundant=redundant)
    for axis in ("etp", "edp"):
        for first, *others in of_axis[axis]:
            for rank in others:
                if held[rank] != held[first]:
                    words = f"which rank {first} of its {axis} group holds"
                    sentence = f"rank {rank} holds experts {list(held[rank])} instead of {list(held[first])}, {words}"
                    yield Finding(axis, sentence, (rank,))
    for rank in held:
        yield Comparison(rank, pairs=max(1, len(held[rank])))


def _misplaced(
    ranks: Sequence[int], held: Mapping[int, tuple[int, ...]], experts: int, *, redundant: bool
) -> Iterator[Finding]:
    """Yield experts that are on no rank of an ep group, or on several, and ids that are none of an expert."""
    places: list[list[int]] = [[] for _ in range(experts)]
    for rank in ranks:
        for expert in held[rank]:
            if 0 <= expert < experts:
                places[expert].append(rank)
    for expert, holders in enumerate(places):
        if not holders:
            sentence = f"expert {expert} is on none of the ranks {list(ranks)} of an ep group"
            yield Finding("nowhere", sentence, tuple(ranks))
        elif len(holders) > 1 and not redundant:
            sentence = f"expert {expert} is on {len(holders)} places of an ep group instead of one: ranks {holders}"
            design = "a backend that sends a pair to one of several replicas claims placement = 'replicas'"
            yield Finding("twice", f"{sentence}; {design}", tuple(holders))
    for rank in ranks:
        if strange := [expert for expert in held[rank] if not 0 <= expert < experts]:
            sentence = f"rank {rank} holds experts {strange}; expected ids below {experts}"
            yield Finding("strange", sentence, (rank,))
