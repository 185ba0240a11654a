"""The steps of a script as events of the balance bias oracle, and the rules by which loads may be counted.

T tokens, K slots, E experts. A router is trained by the ranks of one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.claims import claims_of
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import WrongForm
from moe_conformance.reference.balance_bias.updates import Forward, ForwardKind, Update, router_loads, trained
from moe_conformance.reference.losses.balance import choice_counts
from moe_conformance.reference.routing import routes
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.training import Mode, RouterBatch
from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Rule:
    """A rule by which loads are counted. The defaults, with the claims, are right; others are mistakes."""

    slots: Literal["selected", "kept", "capacity"] = "selected"
    padding: Literal["left out", "counted", "inverted"] = "left out"
    counted: tuple[Mode, ...] = ("training",)
    forced: Literal["ignored", "counted"] = "ignored"
    microbatches: Literal["all", "first", "last"] = "all"
    over: Literal["router", "rank", "world", "tp", "dp x cp"] = "router"
    layer: int = 0  # offset between the layer of a bias and that of its load
    kept: bool = False  # counters are not set to zero after an update
    towards: bool = False  # the bias follows the load instead of going against it


@dataclass(frozen=True)
class Point:
    """The bias of one router after one update, computed by a rule."""

    call: int
    number: int  # the number of the update in its step
    bias_E: Tensor  # float64
    loads_E: Tensor  # int64, of the update
    updates: int  # since the script began

    @property
    def name(self) -> str:
        """The name of the update in messages."""
        return f"update {self.number} of step {self.call}"


@dataclass(frozen=True)
class History:
    """The calls of a script, and what ranks recorded of them."""

    outcome: Outcome
    loads: dict[tuple[Any, ...], Tensor]  # the loads of single forwards, computed once

    @property
    def workload(self) -> Workload:
        """The workload of the script."""
        return self.outcome.workload

    @property
    def layers(self) -> range:
        """The layers that have a router."""
        return range(self.workload.config.balance.layers)

    @property
    def ranks(self) -> range:
        """The numbers of all ranks."""
        return range(self.workload.layout.world)

    @property
    def steps(self) -> list[int]:
        """The numbers of the calls that are steps."""
        return [number for number, call in enumerate(self.workload.calls) if call.method == "step"]

    def batches(self, call: int, rank: int) -> tuple[RouterBatch, ...]:
        """Return the batches of a rank in a step."""
        given: tuple[RouterBatch, ...] = self.workload.calls[call].given[rank]["batches"]
        return given

    def seen(self, call: int, name: str) -> tuple[Any, ...]:
        """Return one recorded field of a call, by rank."""
        return values(self.outcome, call, name)

    def routers(self) -> list[tuple[int, ...]]:
        """Return the ranks of every router: those of a pipeline stage."""
        stages = self.workload.layout.groups()["pp"]
        return [tuple(sorted(ranks)) for ranks in zip(*stages, strict=True)]

    def ids(self, call: int, place: int, layer: int, rank: int) -> Tensor:
        """Return the ids (T, K) that a forward returned, int64.

        Raises:
            WrongForm: they have another shape, or are no integers.
        """
        ids_TK: Tensor = self.seen(call, "forwards")[rank][place]["ids"][layer]
        x = self.batches(call, rank)[place].x[layer]
        shape = (x.shape[0] * x.shape[1], self.workload.config.top_k)
        wide = self.workload.config.capacity.padded and ids_TK.shape[:1] == shape[:1] and ids_TK.ndim == 2
        if not (wide or tuple(ids_TK.shape) == shape) or ids_TK.dtype not in (torch.int32, torch.int64):
            said = f"rank {rank} returned ids {ids_TK.dtype} {tuple(ids_TK.shape)}; expected int64 {shape}"
            raise WrongForm("route", said, ranks=(rank,))
        return ids_TK.long()

    def bias(self, call: int, rank: int, layer: int) -> Tensor:
        """Return the bias before a step."""
        found: Tensor = self.seen(call, "before")[rank]["now"][layer]
        return found

    def choice(self, call: int, place: int, layer: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the ids (T, K) that scores and bias select, and the margins of the selection, (T,)."""
        config, logits_TE = self.workload.config, self.logits(call, place, layer, rank)
        how: dict[str, Any] = {"top_k": config.top_k, "score": config.routing.score}
        how["bias_E"] = self.bias(call, rank, layer)
        return routes.route(logits_TE, **how).ids_TK, routes.margins(logits_TE, **how)

    def logits(self, call: int, place: int, layer: int, rank: int) -> Tensor:
        """Return the logits of a forward (T, E) that the router reports, or else those of its weights, float64.

        Raises:
            WrongForm: a reported logit is NaN or +inf, which has no score.
        """
        logits_TE: Tensor | None = self.seen(call, "forwards")[rank][place]["logits"][layer]
        if logits_TE is None:
            router_ED, x = self.workload.parameters["router", layer], self.batches(call, rank)[place].x[layer]
            return x.reshape(-1, x.shape[-1]).double() @ router_ED.double().T
        if bool((logits_TE.isnan() | (logits_TE == torch.inf)).any()):
            where = f"of router {layer} in step {call}"
            raise WrongForm("route", f"rank {rank} reports logits {where} that are NaN or +inf", ranks=(rank,))
        return logits_TE.double()

    def load(self, call: int, place: int, layer: int, rank: int, rule: Rule) -> Tensor:
        """Return the load of one forward on one rank, int64 (E,)."""
        key = (call, place, layer, rank, rule.slots, rule.padding)
        if key not in self.loads:
            self.loads[key] = self._load(call, place, layer, rank, rule)
        return self.loads[key]

    def _load(self, call: int, place: int, layer: int, rank: int, rule: Rule) -> Tensor:
        config, padding_T = self.workload.config, self.batches(call, rank)[place].padding_T
        ids_TK = self.ids(call, place, layer, rank)
        if config.capacity.factor is not None:
            right_TK = self.choice(call, place, layer, rank)[0]
            # padding to capacity adds ids to the returned ones
            kept_TK = (right_TK[:, :, None] == ids_TK[:, None, :]).any(2)
            ids_TK = right_TK if rule.slots == "selected" else torch.where(kept_TK, right_TK, -1)
        if rule.slots == "capacity":
            return torch.ones(config.experts, dtype=torch.int64)  # the same for every expert
        if padding_T is not None and rule.padding != "left out":
            ids_TK = self.choice(call, place, layer, rank)[0]  # of all tokens, padding included
            padding_T = ~padding_T if rule.padding == "inverted" else None
        return choice_counts(ids_TK, config.experts, padding_T=padding_T)

    def of_step(self, call: int, layer: int, rank: int, rule: Rule) -> list[Forward]:
        """Return the forwards of a step, with the loads in a rank's counters after the reduction."""
        layer = (layer + rule.layer) % len(self.layers)
        places = list(range(len(self.batches(call, rank))))
        training = [place for place in places if self.batches(call, rank)[place].mode in rule.counted]
        if rule.microbatches != "all" and training:
            only = training[0 if rule.microbatches == "first" else -1]
            places = [place for place in places if place not in training or place == only]
        found: list[Forward] = []
        for place in places:
            loads = [self.load(call, place, layer, other, rule) for other in self.ranks]
            load_E = router_loads(loads, self._parts(rule))[rank]
            kind = self.kind(self.batches(call, rank)[place].mode, rule)
            found.append(Forward(kind, load_E))
            if kind == "training" and self.workload.config.balance.recompute:
                found.append(Forward("recomputed", load_E))
        return found

    def _parts(self, rule: Rule) -> Sequence[Sequence[int]]:
        groups = self.workload.layout.groups()
        name = {"rank": "", "world": "world", "tp": "tp", "dp x cp": "dp_cp"}
        if rule.over == "router":
            return self.routers()
        return [[rank] for rank in self.ranks] if rule.over == "rank" else groups[name[rule.over]]

    def kind(self, mode: Mode, rule: Rule) -> ForwardKind:
        """Return the kind of a forward, in the oracle's terms."""
        if mode in rule.counted:
            forced = self.workload.config.routing.forced and rule.forced == "ignored"
            return "forced" if forced else "training"
        return mode

    def points(self, rank: int, layer: int, rule: Rule) -> list[Point]:
        """Return the biases of one router on one rank after each update of the script, by a rule."""
        bias_E = self.workload.parameters["balance_bias", layer].double()
        counters: list[Forward | Update] = []
        saved = (bias_E, counters)
        found: list[Point] = []
        for number, call in enumerate(self.workload.calls):
            if call.method == "save":
                saved = (bias_E, list(counters))
            if call.method == "load":
                bias_E, counters = saved[0], list(saved[1])
            if call.method != "step":
                continue
            counters += self.of_step(number, layer, rank, rule)
            for update in range(call.given[rank]["updates"]):
                moved_E, loads_E = self._updated(bias_E, counters)
                bias_E = 2 * bias_E - moved_E if rule.towards else moved_E
                counters = [Forward("training", loads_E)] if rule.kept else []
                found.append(Point(number, update, bias_E, loads_E, len(found) + 1))
        return found

    def _updated(self, bias_E: Tensor, counters: list[Forward | Update]) -> tuple[Tensor, Tensor]:
        """Return the bias after an update, and the loads that the update used."""
        rate = self.workload.config.balance.rate
        loads_E = trained(bias_E, counters, rate=rate)[1]
        return trained(bias_E, [*counters, Update()], rate=rate)[0], loads_E


def history_of(outcome: Outcome) -> History:
    """Return the history of a script, computed once."""
    return once(outcome, _history)


def _history(outcome: Outcome) -> History:
    return History(outcome, {})


def declared(outcome: Outcome) -> Rule:
    """Return the rule that the backend claims."""
    claims = claims_of(outcome.ranks)
    return Rule(slots=claims.balance_loads, forced=claims.forced_loads)


def mistakes(outcome: Outcome) -> Iterator[tuple[str, Rule]]:
    """Yield wrong rules, each with its description."""
    base, config = declared(outcome), outcome.workload.config
    yield "it follows the load instead of going against it", replace(base, towards=True)
    if config.capacity.factor is not None:
        other: Any = "kept" if base.slots == "selected" else "selected"
        when = "after" if other == "kept" else "before"
        yield f"loads are counted {when} drops, and Claims.balance_loads is {base.slots!r}", replace(base, slots=other)
        yield "rows of padding to capacity are counted", replace(base, slots="capacity")
    yield "padding tokens are counted", replace(base, padding="counted")
    yield "the padding mask is inverted", replace(base, padding="inverted")
    yield "forwards in evaluation are counted", replace(base, counted=("training", "evaluation"))
    yield "forwards without gradients are counted", replace(base, counted=("training", "no_grad"))
    every: tuple[Mode, ...] = ("training", "evaluation", "no_grad")
    yield "forwards in evaluation and without gradients are counted", replace(base, counted=every)
    if config.routing.forced:
        forced: Any = "counted" if base.forced == "ignored" else "ignored"
        yield f"forced loads are {forced}, and Claims.forced_loads is {base.forced!r}", replace(base, forced=forced)
    yield "every rank has counted its own tokens only", replace(base, over="rank")
    yield "loads are summed over all ranks of the world", replace(base, over="world")
    yield "loads are summed over tensor parallel ranks only", replace(base, over="tp")
    yield "loads are not summed over tensor parallel ranks", replace(base, over="dp x cp")
    yield "the last microbatch alone is counted", replace(base, microbatches="last")
    yield "the first microbatch alone is counted", replace(base, microbatches="first")
    yield "counters are not set to zero by an update", replace(base, kept=True)
    if config.balance.layers > 1:
        yield "loads are those of another layer", replace(base, layer=1)
