"""ROUTE: bugs of router replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from moe_conformance.backends.native.router.replay import Place, ReplayRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Routed
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted

# ---- places ----------------------------------------------------------------------------------------------------------


@planted(
    Expectation("ROUTE-17", "replay", "route", "layer 1 of rank 0 in microbatch 0", "they are those of layer 3"),
    real="verl-project/verl PR #5037",
    layout=SINGLE,
)
class ReplayByPosition(ReplayRouters):
    """Records are a list of the layers that have one, in which the number of a layer in the model is looked up."""

    def recorded(self, place: Place, tokens: int) -> Tensor:
        layers = self.config.replay.layers
        return super().recorded((layers[min(place[0], len(layers) - 1)], place[1]), tokens)


@planted(
    Expectation("ROUTE-17", "replay", "route", "in microbatch 1 replays other ids", "layer 1, microbatch 0"),
    real="verl-project/verl PR #7106",
    layout=EP2,
)
class FirstRecordOfTheLayer(ReplayRouters):
    """A router looks for any record of its layer, and finds the first."""

    def recorded(self, place: Place, tokens: int) -> Tensor:
        return super().recorded(min(each for each in self.kept if each[0] == place[0]), tokens)


class _Queue(ReplayRouters):
    """Every layer has a queue of its records, in the order of microbatches."""

    def load(self, records: Mapping[Place, Tensor]) -> None:
        super().load(records)
        self.queues = {layer: [m for of, m in sorted(self.kept) if of == layer] for layer in self.config.replay.layers}


@planted(
    Expectation("ROUTE-17", "replay", "route", "with 'F1 F2 F0 B2 B0 B1'", "microbatch 1 replays other ids"),
    layout=SINGLE,
)
class ReplayAsQueue(_Queue):
    """Every forward takes the record that is next in the queue of its layer, whichever microbatch it is of."""

    def recorded(self, place: Place, tokens: int) -> Tensor:
        return super().recorded((place[0], self.queues[place[0]].pop(0)), tokens)


@planted(
    Expectation("ROUTE-17", "replay-recomputed", "gradient", "with 'F1 F2 F0 B2 B0 B1'", "replays another record"),
    real="areal-project/AReaL PR #1166",
    layout=SINGLE,
)
class RecomputedFromAQueue(_Queue):
    """The forward that runs again takes the record that is next in the queue of its layer."""

    def load(self, records: Mapping[Place, Tensor]) -> None:
        super().load(records)
        self.ran: set[Place] = set()

    def recorded(self, place: Place, tokens: int) -> Tensor:
        if place in self.ran:
            return super().recorded((place[0], self.queues[place[0]].pop(0)), tokens)
        self.ran.add(place)
        return super().recorded(place, tokens)


@planted(
    Expectation("ROUTE-17", "replay-lacking", "route", "accepted records of which a layer is missing"),
    real="verl-project/verl PR #7340",
    layout=SINGLE,
)
class FreshWithoutRecord(ReplayRouters):
    """A router that has no record routes as usual, and says nothing."""

    def again(self, number: int, microbatch: int, x: Tensor) -> Routed:
        if (self.config.replay.layers[number], microbatch) in self.kept:
            return super().again(number, microbatch, x)
        routed: Routed = self.routers[number](x)
        return routed


@planted(
    Expectation("ROUTE-17", "replay-lacking", "route", "accepted records of which a slot is missing"),
    real="NVIDIA/Megatron-LM 0.16.1, RouterReplay.get_replay_topk",
    layout=SINGLE,
)
class AnySlots(ReplayRouters):
    """A record of another number of slots is replayed as it is."""

    def recorded(self, place: Place, tokens: int) -> Tensor:
        ids_TK = self.kept.get(place)
        return ids_TK if ids_TK is not None and len(ids_TK) == tokens else super().recorded(place, tokens)


# ---- selection and weights -------------------------------------------------------------------------------------------


@planted(Expectation("ROUTE-16", "replay", "route", "replays other ids", "recorded were"))
class ReplaySelectsAnew(Router):
    """A replayed forward selects by its present logits."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None, recorded_TK: Tensor | None = None) -> Routed:
        return super().forward(x, padding_mask_T)


@planted(Expectation("ROUTE-16", "replay", "route", "are not those of the present logits"))
class WeightsOfTheRecording(ReplayRouters):
    """Weights are recorded with the ids, and replayed with them."""

    def record(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        routed = super().record(microbatch, x)
        for layer, each in zip(self.config.replay.layers, routed, strict=True):
            self.weights = {**getattr(self, "weights", {}), (layer, microbatch): each.routing.weights_TK}
        return routed

    def again(self, number: int, microbatch: int, x: Tensor) -> Routed:
        routed, place = super().again(number, microbatch, x), (self.config.replay.layers[number], microbatch)
        present_TK = routed.routing.weights_TK
        kept_TK = self.weights[place] + present_TK - present_TK.detach()
        return replace(routed, routing=replace(routed.routing, weights_TK=kept_TK))


@planted(Expectation("ROUTE-16", "replay-softmax", "gradient", "dx of layer 1 of rank 0"), layout=SINGLE)
class ReplayWithoutGradient(Router):
    """The weights of recorded experts are looked up in scores without a gradient."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None, recorded_TK: Tensor | None = None) -> Routed:
        routed = super().forward(x, padding_mask_T, recorded_TK)
        if recorded_TK is None:
            return routed
        weights_TK = routed.routing.weights_TK
        constant_TK = weights_TK.detach() + 0 * weights_TK
        return replace(routed, routing=replace(routed.routing, weights_TK=constant_TK))
