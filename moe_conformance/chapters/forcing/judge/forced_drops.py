"""Judge of a capacity where logits are forced: what tokens select is seen in the logits alone."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, places_of
from moe_conformance.judging.shared.router.routers import require_ids
from moe_conformance.judging.shared.router.token_drops import Drops
from moe_conformance.judging.verdict import NotOffered, WrongCount, WrongForm


@judge(WrongCount, "route")
def judge_drawn_fit(reading: Reading) -> Comparisons:
    """Decide whether every expert keeps as many of the slots that forced logits select as its capacity allows.

    A router without the capacity draws other logits, and so does not show what was selected before slots are dropped.

    Raises:
        NotOffered: the router does not return its logits.
        WrongForm: logits or ids have another shape, or are not finite.
        WrongCount: an expert keeps more or fewer.
    """
    workload = reading.outcome.workload
    places = places_of(workload, range(len(reading.ranks)))
    selected = {place: _selected(reading, place) for place in places}
    kept = {place: _kept(reading, place, selected[place]) for place in places}
    drops = Drops(workload, selected, 1, kept, DropRule.of(reading.claims))
    for place in places:
        expected = [drops.fits(place, capacity) for capacity in drops.capacities(place)]
        found = drops.kept_loads(place)
        said = f"rank {place[1]} in forward {place[0]}: experts keep {found} slots, expected {expected[0]}"
        wrong = f"{said}, with a capacity of {drops.capacities(place)[0]}"
        yield Comparison(place[1], "" if found in expected else wrong, pairs=workload.config.experts)


def _kept(reading: Reading, place: Place, selected_TK: Tensor) -> Tensor:
    """Return which selected slots are routed, bool (T, K); a table of ids has as many slots as the fullest token."""
    ids_TK, rank = reading.seen(*place).router.ids_TK, place[1]
    if ids_TK is None or len(ids_TK) != len(selected_TK):
        raise WrongForm("route", f"the ids of rank {rank} are not of {len(selected_TK)} tokens", ranks=(rank,))
    require_ids(ids_TK, rank)
    return (selected_TK[:, :, None] == ids_TK[:, None, :]).any(-1)


def _selected(reading: Reading, place: Place) -> Tensor:
    """Return the experts (T, K) of the largest logits."""
    config, logits_TE = reading.outcome.workload.config, reading.seen(*place).router.logits_TE
    if logits_TE is None:
        raise NotOffered("the router does not report the forced logits")
    shape = len(reading.batches[place[0]][place[1]].x_TD), config.experts
    if tuple(logits_TE.shape) != shape or not bool(logits_TE.isfinite().all()):
        raise WrongForm("route", f"the forced logits of rank {place[1]} are not {shape} or not finite", ranks=place[1:])
    return logits_TE.double().topk(config.top_k, dim=-1).indices
