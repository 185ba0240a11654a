"""SHARE: bugs in whole layers, most of them in the experts that every token sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Departed
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import GradientFinisher
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.shared_experts import SharedExperts
from moe_conformance.contract import Delivery, Named, Read, Routed, Routing
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted

# ---- added once ----------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "SHARE-01",
        "shared-even",
        "combine",
        "y is wrong; likely cause: the shared experts were left out; for example y of",
    ),
    real="sgl-project/sglang PR #38963",
)
class SharedExpertsDropped(Layer):
    """The slot of a fused shared expert goes to one more routed expert, and the shared one is dropped."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, None)


@planted(
    Expectation(
        "SHARE-01",
        "shared-even",
        "combine",
        "y is wrong; likely cause: the output of the shared experts was added 2 times",
    )
)
class AddedBeforeAndAfter(Layer):
    """The shared part is added to the output of combine, and once more by the caller of the layer."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(super()._added(y, shared), shared)


@planted(Expectation("SHARE-01", "shared-in-flight-uneven", "combine", "y of rank", "token"))
class SharedPartOfTheLast(Layer):
    """The shared part is kept on the layer, and a microbatch gets that of the one before."""

    kept: Tensor | None = None

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        before, self.kept = self.kept, shared
        late = before if before is not None and before.shape == y.shape else shared
        if late is shared and before is not None and shared is not None:
            late = torch.zeros_like(shared)
        return super()._added(y, late)


@planted(
    Expectation(
        *("SHARE-01", "shared-inference-even", "combine", "y is wrong; likely cause: the shared experts were left out"),
        "only in forwards without gradients",
    )
)
class SharedInTrainingOnly(Layer):
    """The path without gradients has the routed experts alone."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, shared if torch.is_grad_enabled() else None)


@planted(
    Expectation(
        "SHARE-02",
        "shared-scaled-even",
        "combine",
        "the output of the shared experts was divided by the routing scale 2.5",
    ),
    real="sgl-project/sglang PR #28237",
)
class SharedDividedByScale(Layer):
    """The shared part is divided by the routing scale to make up for a later factor, which is not there any more."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, None if shared is None else shared / self.config.routing.scale)


@planted(Expectation("SHARE-02", "shared-scaled-even", "combine", "multiplied by the routing scale 2.5"))
class SumIsScaled(Layer):
    """The routing scale multiplies the sum of both parts, and the weights have been freed of it only for the routed."""

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        return super()._added(y, None if shared is None else shared * self.config.routing.scale)


@planted(Expectation("SHARE-02", "shared-scaled-even", "combine", "y"))
class SlotGivenToTheShared(Layer):
    """The last slot of every token is given to the shared experts, which count as one of its experts."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        route = self.router.forward

        def fewer(*given: Any) -> Routed:
            routed = route(*given)
            ids_TK = routed.routing.ids_TK.clone()
            ids_TK[:, -1] = -1
            return replace(routed, routing=replace(routed.routing, ids_TK=ids_TK))

        self.router.forward = fewer  # type: ignore[assignment, method-assign]


# ---- the gate ------------------------------------------------------------------------------------------------------


class _GateLater(Layer):
    def _shared_part(self, x: Tensor) -> Tensor | None:
        score, self.score = self.score, None
        try:
            return super()._shared_part(x)
        finally:
            self.score = score


@planted(
    Expectation(
        "SHARE-03", "shared-gate-even", "combine", "y is wrong; likely cause: the gate was left out; for example"
    )
)
class GateForgotten(_GateLater):
    """The gate is built and loaded, and a faster path of the forward does not ask for it."""


@planted(
    Expectation("SHARE-03", "shared-gate-even", "combine", "the gate multiplied the output of the routed experts too")
)
class GateOnEverything(_GateLater):
    """The gate is applied to the sum of both parts."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.score is None else (self.score(x) * y).to(y.dtype)


@planted(Expectation("SHARE-03", "shared-gate-even", "gradient", "no gradient passed through the gate"))
class ScoreDetached(Layer):
    """The gate's factor is computed without gradients."""

    def _shared_part(self, x: Tensor) -> Tensor | None:
        if self.shared is None or self.score is None:
            return super()._shared_part(x)
        with torch.no_grad():
            factor = self.score(x)
        return (factor * self.shared(x.reshape(-1, x.shape[-1])).reshape(x.shape)).to(x.dtype)  # type: ignore[no-any-return]


# ---- gradients -----------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "SHARE-04",
        "shared-even",
        "gradient",
        "dx is wrong; likely cause: no gradient passed through the shared experts",
    )
)
class SharedInputDetached(Layer):
    """The shared experts run on a copy of the tokens that has no history."""

    def _shared_part(self, x: Tensor) -> Tensor | None:
        return super()._shared_part(x.detach())


@planted(
    Expectation("GRAD-18", "layer-even", "gradient", "dx of rank 0 token 0 is"),
    real="NVIDIA/Megatron-LM commit 3b1521e29c (#4500)",
)
class LayerDetachesWeights(Layer):
    """The exchange of a layer is handed routing weights without history."""

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super()._dispatched(x, replace(routing, weights_TK=routing.weights_TK.detach()))


@planted(
    Expectation(
        "GRAD-18", "shared-rank-without-tokens", "finish", "expert 1 on rank 0 is 1 instead of 0", "no token reached"
    )
)
class IdleExpertsKeepTheirBuffer(GradientFinisher):
    """The gradient of a routed expert that no token reached is what was in the buffer."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        total = super()._summed(gradient, replicas)
        if replicas == Experts.replicas:
            total[~total.flatten(1).any(1)] = 1.0
        return total


class _SharedFinisher(GradientFinisher):
    """Native's finisher, for plants that change what becomes of the gradients of shared experts alone."""

    groups: tuple[str, ...] = SharedExperts.replicas
    instead: tuple[str, ...] = ()

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        return super()._summed(gradient, self.instead if replicas == self.groups else replicas)


@planted(
    Expectation(
        "SHARE-05",
        "shared-even",
        "finish",
        "it contains only the tokens of its own rank (it was not reduced over ranks)",
    )
)
class SharedTakenForExperts(_SharedFinisher):
    """Shared experts are reduced over the replicas of routed ones, of which there are none."""

    instead = ("edp",)


@planted(
    Expectation(
        *("SHARE-05", "shared-even", "finish", "likely cause: it is the sum over all 2 parts"),
        "it was reduced over ranks that hold other parts",
    ),
    layout=TP2_EP2,
)
class SharedReducedOverTp(_SharedFinisher):
    """Gradients of shared experts, of which every rank of tp holds another part, are summed over tp too."""

    instead = ("dp_cp", "tp")


@planted(
    Expectation(
        *("SHARE-05", "shared-several-gate-uneven", "finish"),
        *("score on rank 0", "likely cause: only the tokens of its own"),
    ),
    layout=TP2_EP2,
)
class ScoreNotReducedOverTp(_SharedFinisher):
    """The gate's gradient is that of the rank's own tokens, though sequence parallelism gave others to tp."""

    groups = ("dp_cp", "tp")
    instead = ("dp_cp",)


# ---- beside the exchange -------------------------------------------------------------------------------------------


@planted(
    Expectation("SHARE-07", "shared-beside-poisoned-uneven", "combine", "y of rank", "nan"),
    real="EfficientMoE/MoE-Infinity PR #197",
)
class ArrivesEarly(AllToAllExchange):
    """The tokens are read while they travel; the wait comes later."""

    def arrive(self, departed: Departed) -> tuple[Delivery, Any]:
        early = departed.exchange.result.clone()
        rows = collectives.arrive(departed.rows, departed.exchange)
        return self.delivered(rows + (early - rows.detach()), departed.plan, departed.permuted)


@planted(
    Expectation("SHARE-07", "shared-beside-poisoned-uneven", "gradient", "dx of rank", "nan"),
    real="NVIDIA-NeMo/Automodel PR #3109",
)
class FencedInForwardOnly(AllToAllExchange):
    """The backward takes the gradients that come back before they have come."""

    def depart(self, x: Tensor, routing: Routing) -> Departed:
        departed = super().depart(x, routing)
        departed.exchange.__class__ = _Unfenced
        return departed


class _Unfenced(collectives.AsyncAllToAll):
    forward = True

    def wait(self) -> Tensor:
        early, self_forward, self.forward = self.result.clone(), self.forward, False
        came = super().wait()
        return came if self_forward else early


@planted(
    Expectation("SHARE-07", "shared-beside-even", "run", "rank 0 calls all_to_all_single on group (0, 1)", "without"),
    real="NVIDIA/Megatron-LM commit dc092cb1e9 (!3143)",
)
class TravelsTwice(AllToAllExchange):
    """What is sent beside the shared experts is sent once more by the usual dispatch, and only one is used."""

    def arrive(self, departed: Departed) -> tuple[Delivery, Any]:
        plan = departed.plan
        rows = departed.rows.detach()
        collectives.all_to_all(rows, plan.sent_C, plan.received_C, self.topology.group("ep"))
        return super().arrive(departed)


# ---- parts ---------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "SHARE-06",
        "shared-even",
        "combine",
        "y is wrong; likely cause: the output of the shared experts was added 2 times (tp)",
    ),
    layout=TP2_EP2,
)
class AddedPerTpRank(SharedExperts):
    """Every rank of tp computes the whole expert, and the answers are summed as if they were parts."""

    def _scatter(self, part: Tensor, sizes_W: Sequence[int]) -> Tensor:
        return super()._scatter(part, sizes_W) * self.group.size()


@planted(Expectation("SHARE-06", "shared-even", "combine", "y of rank", "token"), layout=TP2_EP2)
class OwnPartAlone(SharedExperts):
    """The ranks of tp do not add up their parts."""

    def _scatter(self, part: Tensor, sizes_W: Sequence[int]) -> Tensor:
        own = self.group.rank()
        return super()._scatter(part, sizes_W) * 0 + part.split(list(sizes_W))[own]  # type: ignore[no-any-return]


@planted(Expectation("SHARE-08", "shared-several-even", "combine", "y of rank", "token"))
class FusedInTwoOrders(SharedExperts):
    """Where several shared experts are fused, the columns of down lie in another order than the rows of gate and up."""

    def named(self, read: Read) -> Iterator[Named]:
        down_DF = read(self.down_DF)
        parts = down_DF.split(self.units[::-1], 1)[::-1]
        for window in super().named(read):
            if window.name == "shared_down" and window.expert is not None:
                yield replace(window, view=parts[window.expert])
            else:
                yield window
