"""Magnitudes of a whole layer: how large the rounding errors of the results of `whole_layer` may be.

The routed part is `magnitudes.measured` with the errors that the router's weights have. The shared experts are the
same with the gate's factor as the weight of each of them, every token in all of them, tp in place of etp.

Source: the chain rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.exchange.layer import WeightsAt
from moe_conformance.reference.rounding.errors import Measured, Rounding, errors, exact, partial, parts_of
from moe_conformance.reference.rounding.expert_magnitudes import Sharing, biased, swiglu_measured
from moe_conformance.reference.rounding.magnitudes import MeasuredLayer, measured
from moe_conformance.reference.rounding.routing_magnitudes import gradients_measured, logits_measured, weights_measured
from moe_conformance.reference.shared_experts.whole_layer import Key, LayerGradients, Weighing, shared_of


@dataclass(frozen=True)
class Shares:
    """How the work may be shared out; see `expert_magnitudes.Sharing`."""

    etp: int = 1  # parts of a routed expert
    tp: int = 1  # parts of a shared expert
    places: tuple[int, ...] = ()  # how many tokens, in order, a rank has at a time
    expert_sums: int = 0  # roundings of the gradient of a routed expert
    dense_sums: int = 0  # and of everything else


@dataclass(frozen=True)
class LayerMeasured:
    """y, dL/dx and dL/dparameter with their errors."""

    y: Measured
    dx: Measured
    parameters: Mapping[Key, Measured]

    @property
    def errors(self) -> LayerGradients:
        """The errors, in the fields that hold the values elsewhere."""
        return LayerGradients(self.y.error, self.dx.error, errors(self.parameters))


def measured_layer(
    x_TD: Tensor,
    ids_TK: Tensor,
    dy_TD: Tensor,
    parameters: Mapping[Key, Tensor],
    weighing: Weighing,
    *,
    rounding: Rounding,
    shares: Shares,
    weights_at: WeightsAt = "output",
    kept_TK: Tensor | None = None,
    renormalise: bool = False,
) -> LayerMeasured:
    """Measure everything that `whole_layer.gradients` returns. An expert that is not routed to has exact zeros.

    A dropped slot is routed nowhere: its weight has a gradient of exactly zero, and only the scores feel it; not even
    they, if weights are normalised over the kept slots (`renormalise`).

    >>> from moe_conformance.reference.shared_experts.whole_layer import gradients
    >>> sizes = {"gate": (4, 3), "up": (4, 3), "down": (3, 4)}
    >>> p = {(n, e): torch.arange(12.0).add(e).sin().reshape(s) for e in (0, 1) for n, s in sizes.items()}
    >>> p |= {(f"shared_{n}", j): torch.arange(12.0).sub(j).cos().reshape(s) for j in (0, 1) for n, s in sizes.items()}
    >>> p |= {("shared_bias", j): torch.arange(3.0).add(j).sin() for j in (0, 1)}
    >>> p["router", None] = torch.arange(6.0).cos().reshape(2, 3)
    >>> p["shared_score", None] = torch.arange(3.0).sin().reshape(1, 3)
    >>> x, dy = torch.arange(6.0).cos().reshape(2, 3), torch.arange(6.0).sin().reshape(2, 3)
    >>> case = (x, torch.tensor([[0, 1], [1, 0]]), dy, p, Weighing("sigmoid", True, 2.5))
    >>> some = torch.tensor([[True, False], [False, False]])
    >>> for at, kept in (("output", None), ("input", None), ("output", some), ("input", some)):
    ...     right = gradients(*case, weights_at=at, kept_TK=kept)
    ...     ours = measured_layer(*case, rounding=Rounding(1.0, 1.0), shares=Shares(), weights_at=at, kept_TK=kept)
    ...     close = [torch.allclose(ours.parameters[key].value, value) for key, value in right.parameters.items()]
    ...     print(torch.allclose(ours.y.value, right.y_TD), torch.allclose(ours.dx.value, right.dx_TD), all(close))
    True True True
    True True True
    True True True
    True True True
    >>> from functools import partial
    >>> from moe_conformance.reference.capacity.after_drops import after_drop
    >>> right = gradients(*case, kept_TK=some, drop=partial(after_drop, renormalise=True, scale=2.5))
    >>> ours = measured_layer(*case, rounding=Rounding(1.0, 1.0), shares=Shares(), kept_TK=some, renormalise=True)
    >>> close = [torch.allclose(ours.parameters[key].value, value) for key, value in right.parameters.items()]
    >>> torch.allclose(ours.y.value, right.y_TD), torch.allclose(ours.dx.value, right.dx_TD), all(close)
    (True, True, True)
    """
    r, router_ED, how = rounding, parameters["router", None], vars(weighing)
    summed_TK = kept_TK if renormalise else None
    w_TK = weights_measured(r, logits_measured(r, x_TD, router_ED), ids_TK, **how, kept_TK=summed_TK)
    places = shares.places or (len(x_TD),)
    sharing = Sharing(shares.etp, places, shares.expert_sums)
    own = {(name, e): value for (name, e), value in parameters.items() if e is not None}
    left_TK = ids_TK if kept_TK is None else torch.where(kept_TK, ids_TK, -1)
    routed = measured(
        x_TD, left_TK, w_TK, dy_TD, swiglu_measured(r, own, sharing), rounding=r, sharing=sharing, weights_at=weights_at
    )
    dx_router, drouter = gradients_measured(
        r, x_TD, router_ED, ids_TK, routed.dw_TK, **how, places=places, sums=shares.dense_sums, kept_TK=summed_TK
    )
    found = {key: exact(torch.zeros_like(value)) for key, value in parameters.items() if key != ("balance_bias", None)}
    found["router", None] = drouter
    found |= dict(routed.dparameters.items())
    y, dx = routed.y_TD, r.plus(routed.dx_TD, dx_router)
    if not shared_of(parameters):
        return LayerMeasured(y, dx, found)

    score_1D = parameters.get(("shared_score", None))
    factor_T, slope_T = _gate(r, x_TD, score_1D)
    shared = _shared(r, x_TD, dy_TD, factor_T, parameters, Sharing(shares.tp, places, shares.dense_sums))
    found |= {(f"shared_{name}", j): each for (name, j), each in shared.dparameters.items()}
    y, dx = r.plus(y, r.stored(shared.y_TD)), r.plus(dx, r.stored(shared.dx_TD))
    if score_1D is not None and slope_T is not None:
        dz_T = r.products("t,t->t", r.total(shared.dw_TK, 1), slope_T)
        dx = r.plus(dx, r.products("t,d->td", dz_T, exact(score_1D[0])))
        dscore_D = r.products("t,td->d", dz_T, exact(x_TD))
        parts_D = parts_of("t,td->d", dz_T, exact(x_TD), "t", places)
        whole_D = r.stored(dscore_D, of=partial(dscore_D.value, parts_D), times=shares.dense_sums)
        found["shared_score", None] = Measured(whole_D.value[None], whole_D.worst[None], whole_D.spread[None])
    return LayerMeasured(y, dx, found)


def _gate(r: Rounding, x_TD: Tensor, score_1D: Tensor | None) -> tuple[Measured, Measured | None]:
    """Return the gate's factors sigmoid(z) and their slopes s (1 - s), (T,); ones, and None, without a gate."""
    if score_1D is None:
        return exact(torch.ones(len(x_TD))), None
    z_T = r.products("td,d->t", exact(x_TD), exact(score_1D[0]))
    s_T = z_T.value.sigmoid()
    slope_T = s_T * (1 - s_T)
    factor_T = r.function(s_T, slope_T, z_T)
    return factor_T, r.function(slope_T, 1 - 2 * s_T, factor_T, own=2 * slope_T)


def _shared(
    r: Rounding, x_TD: Tensor, dy_TD: Tensor, factor_T: Measured, parameters: Mapping[Key, Tensor], sharing: Sharing
) -> MeasuredLayer:
    """Measure the shared experts as a layer of their own, in which every token has all of them with one weight."""
    T, shared = len(x_TD), shared_of(parameters)
    own = {(name, j): parameters[f"shared_{name}", j] for j in range(len(shared)) for name in ("gate", "up", "down")}
    everywhere_TS = torch.arange(len(shared)).expand(T, -1)
    factor_TS = factor_T.map(lambda each: each[:, None].expand(-1, len(shared)))
    biases = {j: each.bias_D for j, each in enumerate(shared) if each.bias_D is not None}
    experts = biased(r, swiglu_measured(r, own, sharing), biases, sharing)
    return measured(x_TD, everywhere_TS, factor_TS, dy_TD, experts, rounding=r, sharing=sharing)
