"""The slots that a router with a capacity keeps, of those that the same router selects without a capacity.

Both come from the backend. The selection is judged by the oracle first, so that an error in both is detected; then
`Drops.kept` marks the kept slots among the selected ones, for the judges of `capacity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.finished_gradients import divisor_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, places_of
from moe_conformance.judging.shared.router.expected import RouterExpected, Weigh
from moe_conformance.judging.shared.router.explain_selection import explain_selection
from moe_conformance.judging.verdict import WrongForm, WrongSelection
from moe_conformance.reference.capacity import limits
from moe_conformance.reference.rounding.routing_magnitudes import scores_measured, weights_measured


@dataclass(frozen=True)
class Drops(RouterExpected):
    """The oracle's results for a "capacity" workload, given the selected and the kept slots."""

    kept: Mapping[Place, Tensor]  # bool (T, K), of `ids`, in falling order of selection score
    rule: DropRule  # as claimed

    def ranking(self, place: Place) -> Target:
        """Return the values by which the drop policy "weights" orders slots, and their bounds, (T, K)."""
        return self._rankings[place]

    def weights(self, place: Place) -> Target:
        """Return the expected weights of the selected slots, (T, K), before the drop unless claimed otherwise."""
        before = super().weights(place)
        if not self.rule.renormalises(self.workload.config):
            return before
        after = self.rule.after_drop(self.workload.config)(self.ids[place], before.expected, self.kept[place])
        return Target(after.weights_TK, before.allowed)

    def solve(self, places: Sequence[Place], weigh: Weigh | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradients as `RouterExpected.solve`, by the claimed rule for weights after a drop."""
        summed_TK = self._summed(places)
        if weigh is None and summed_TK is not None:
            drop = self.rule.after_drop(self.workload.config)
            return super().solve(
                places, lambda logits_TE, ids_TK: drop(ids_TK, self.weigh(logits_TE, ids_TK), summed_TK).weights_TK
            )
        return super().solve(places, weigh)

    def by(self, rule: DropRule) -> Drops:
        """Return the results under another drop rule."""
        return replace(self, rule=rule)

    def upstream(self, place: Place) -> Tensor:
        """Return the gradient of the loss with respect to the weights, (T, K); zero for dropped slots."""
        return super().upstream(place) * self.kept[place]

    def capacities(self, place: Place) -> tuple[int, ...]:
        """Return the legal capacities of a rank."""
        return self.capacities_of(len(self.ids[place]))

    def capacities_of(self, tokens: int) -> tuple[int, ...]:
        """Return the legal capacities of a rank with `tokens` tokens."""
        return self.rule.capacities(self.workload.config, tokens)

    def loads(self, place: Place) -> list[int]:
        """Return how many slots of a rank selected each expert."""
        return limits.loads(self.ids[place], self.workload.config.experts).tolist()

    def fits(self, place: Place, room: int) -> list[int]:
        """Return how many of its slots each expert keeps if it has room for `room`."""
        return limits.fits(self.ids[place], self.workload.config.experts, room).tolist()

    def kept_loads(self, place: Place) -> list[int]:
        """Return how many slots of a rank each expert kept."""
        ids_TK = torch.where(self.kept[place], self.ids[place], -1)
        return limits.loads(ids_TK, self.workload.config.experts).tolist()

    @cached_property
    def _rankings(self) -> Mapping[Place, Target]:
        _, ids_TK, _ = self._batch(self.places)
        logits_TE = self._logits_measured
        if self.rule.drop_by == "scores":
            scores_TE = scores_measured(self._rounding, logits_TE, self.weighing["score"])
            values_TK = {place: self.selection_scores(place, None).gather(1, self.ids[place]) for place in self.places}
            allowed_TK = self._allowed(scores_TE).gather(1, ids_TK)
        else:
            values_TK = {place: self.weigh(self.logits(place), self.ids[place]) for place in self.places}
            allowed_TK = self._allowed(weights_measured(self._rounding, logits_TE, ids_TK, **self.weighing))
        allowed = self._by_place(allowed_TK)
        return {place: Target(values_TK[place], allowed[place]) for place in self.places}

    def _summed(self, places: Sequence[Place]) -> Tensor | None:
        if not self.rule.renormalises(self.workload.config):
            return None
        return torch.cat([self.kept[place] for place in places])


def drops_of(reading: Reading) -> Drops:
    """Return the selected and the kept slots of a reading, computed once.

    Raises:
        WrongForm: a selection is missing, or is no (T, K) table.
        WrongSelection: the selection without a capacity is not legal, or with it a slot is kept that was not selected.
    """
    return once(reading, _drops)


def _drops(reading: Reading) -> Drops:
    workload = reading.outcome.workload
    places = places_of(workload, range(len(reading.ranks)))
    divisor = divisor_of(workload, reading.ranks[0].loss_convention)
    chosen = RouterExpected(workload, {place: _chosen(reading, place) for place in places}, divisor)
    illegal = {place: (~chosen.legal(place)).nonzero().flatten().tolist() for place in places}
    if any(illegal.values()) and not workload.config.routing.forced:  # the checks of forcing judge forced selections
        fail(WrongSelection, "route", explain_selection(chosen, illegal))
    ids = {place: _best_first(chosen, place) for place in places}
    kept, findings = dict[Place, Tensor](), list[Finding]()
    for place in places:
        kept[place], strange = _kept(reading, place, ids[place])
        findings += strange
    if findings:
        fail(WrongSelection, "route", findings)
    return Drops(workload, ids, divisor, kept, DropRule.of(reading.claims))


def _chosen(reading: Reading, place: Place) -> Tensor:
    """Return the experts that the router selects without a capacity: K different ones per token, with weights."""
    m, rank = place
    config, seen = reading.outcome.workload.config, reading.seen(m, rank)
    shape = (len(reading.batches[m][rank].x_TD), config.top_k)
    what = f"the selection of rank {rank} without a capacity"
    ids_TK = _of_shape(seen.router.undropped_ids_TK, shape, what, rank)
    _of_shape(seen.router.undropped_weights_TK, shape, f"the table of weights for {what}", rank)
    for t, ids_K in enumerate(ids_TK.tolist()):
        if len(set(ids_K)) < len(ids_K) or not set(ids_K) <= set(range(config.experts)):
            sentence = (
                f"{what} has for token {t} {ids_K}, which is not {len(ids_K)} different experts of {config.experts}"
            )
            raise WrongSelection("route", sentence, ranks=(rank,))
    return ids_TK


def _of_shape(value: Tensor | None, shape: tuple[int, int], what: str, rank: int) -> Tensor:
    if value is None or tuple(value.shape) != shape:
        is_ = "missing" if value is None else f"of shape {tuple(value.shape)} instead of {shape}"
        raise WrongForm("route", f"{what} is {is_}", ranks=(rank,))
    return value


def _best_first(chosen: RouterExpected, place: Place) -> Tensor:
    """Return the selected experts in descending order of selection score."""
    ids_TK = chosen.ids[place]
    scores_TK = chosen.selection_scores(place, chosen.bias_E).gather(1, ids_TK)
    order_TK = scores_TK.argsort(dim=1, descending=True, stable=True)
    return ids_TK.gather(1, order_TK)


def _kept(reading: Reading, place: Place, chosen_TK: Tensor) -> tuple[Tensor, list[Finding]]:
    """Return a bool mask (T, K) of the selected slots that were kept, and findings for unselected ones.

    A slot that was added to fill an expert up to its capacity weighs exactly zero and is not looked at further.
    """
    m, rank = place
    seen, padded = reading.seen(m, rank), reading.outcome.workload.config.capacity.padded
    ids, weights = seen.router.ids_TK, seen.router.weights_TK
    if ids is None or weights is None or ids.dim() != 2 or ids.shape != weights.shape or len(ids) != len(chosen_TK):
        shapes = " and ".join("missing" if value is None else str(tuple(value.shape)) for value in (ids, weights))
        sentence = f"ids and weights of rank {rank} are {shapes}; expected (T, K) with T = {len(chosen_TK)} tokens"
        raise WrongForm("route", sentence, ranks=(rank,))
    kept_TK, findings = torch.zeros_like(chosen_TK, dtype=torch.bool), list[Finding]()
    for t, wanted in enumerate(chosen_TK.tolist()):
        ids_K, weights_K = ids[t].tolist(), weights[t].tolist()
        known = range(-1, reading.outcome.workload.config.experts)
        if foreign := sorted(set(ids_K) - set(known)):
            sentence = f"rank {rank} token {t} has the id {foreign[0]}, which is neither an expert nor -1"
            raise WrongForm("route", sentence, ranks=(rank,))
        held = [e for e, weight in zip(ids_K, weights_K, strict=True) if e >= 0 and not (padded and weight == 0)]
        strange = sorted(set(held) - set(wanted)) or ([held] if len(set(held)) < len(held) else [])
        if strange:
            sentence = (
                f"rank {rank} token {t} is routed to expert {strange[0]}; without the capacity it selected {wanted}"
            )
            findings.append(Finding("never chosen", sentence, (rank,)))
        kept_TK[t] = torch.tensor([e in held for e in wanted], dtype=torch.bool)
    return kept_TK, findings


def weights_at(reading: Reading, place: Place, ids_TK: Tensor) -> Tensor:
    """Return the returned weights (T, K) in the order of the given ids, zero where an id was not returned."""
    seen = reading.seen(*place)
    assert seen.router.ids_TK is not None
    assert seen.router.weights_TK is not None
    table_TE = seen.router.weights_TK.new_zeros(len(ids_TK), reading.outcome.workload.config.experts)
    held_TK = seen.router.ids_TK >= 0
    token_P = held_TK.nonzero()[:, 0]
    table_TE[token_P, seen.router.ids_TK[held_TK]] = seen.router.weights_TK[held_TK]
    return table_TE.gather(1, ids_TK)


def by_design(drops: Drops, holds: Callable[[Drops, Place], bool]) -> str:
    """Return a note with the first other claim under which everything would hold, "" if there is none."""
    for rule, note in drops.rule.others():
        other = drops.by(rule)
        if all(holds(other, place) for place in drops.places):
            return note
    return ""
