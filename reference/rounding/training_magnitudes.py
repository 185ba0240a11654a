"""Magnitudes of training: how large the rounding errors of loss, norm, parameters and moments may be after some steps.

A step is written out by hand, forward and backward, in the measured numbers of `errors`. What parameters are off by
after one step is what the next one begins with. From the gradient on every error is a half width: clipping and
the update are carried through at both ends of every interval. Adam's first step is the sign of the gradient: an
element whose gradient is within its error of 0 may move either way, by no more than `farthest` times the rate.

Source: the chain rule; monotony of m / (sqrt(v) + epsilon) in m and in v; the inequality of Cauchy and Schwarz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.reference.rounding.errors import Measured, Rounding, exact, multiplication
from moe_conformance.reference.rounding.routing_magnitudes import softmax
from moe_conformance.reference.training.model import Key, Parameters, Tokens, layers_of, selected
from moe_conformance.reference.training.optimisers import SGD, AdamW, Optimiser
from moe_conformance.reference.training.steps import Step, begun

_OF_NORM = 2.0**-20  # relative, as GRAD-12 has it
_OF_CLIPPING = 1e-6  # what may be added to the norm, as GRAD-13 has it
_OF_UPDATE = 8  # roundings of an element by an optimiser, at most


@dataclass(frozen=True)
class StepErrors:
    """What a correct step may be off by: in its loss, its norm, and every parameter and what is kept of it."""

    loss: Tensor
    norm: Tensor
    parameters: Mapping[Key, Tensor]
    kept: Mapping[Key, Mapping[str, Tensor]]


def train_measured(
    parameters: Parameters,
    steps: Sequence[tuple[Tokens, Step]],
    optimiser: Optimiser,
    *,
    rounding: Rounding,
    top_k: int,
    largest_norm: float,
    sums: int,
) -> list[StepErrors]:
    """Measure steps that `training.steps.train` has made, each with its tokens. A step that was skipped adds no error.

    `sums` is how often a gradient or the loss is rounded while the parts of microbatches and ranks are put together.
    """
    state, found = begun(parameters, optimiser), list[StepErrors]()
    sizes = {key: value.shape for key, value in parameters.items()}
    of_theta = torch.zeros_like(_flat(state.parameters))
    of_kept = {name: torch.zeros_like(of_theta) for name in optimiser.nothing_kept(of_theta)}
    for tokens, step in steps:
        errors = _apart(of_theta, sizes)
        measured = {key: _carried(value, errors[key]) for key, value in state.parameters.items()}
        loss, gradients = graded_measured(rounding, tokens, measured, top_k, sums)
        g, of_g = _flat({key: gradients[key].value for key in sizes}), _flat({k: gradients[k].error for k in sizes})
        of_norm = of_g.square().sum().sqrt() + _OF_NORM * step.norm
        if step.after.steps > state.steps:
            g, of_g = _clipped(rounding, g, of_g, step.norm, of_norm, largest_norm)
            theta = _flat(state.parameters)
            kept = {name: _flat({key: state.kept[key][name] for key in sizes}) for name in of_kept}
            of_theta, of_kept = _updated(rounding, optimiser, theta, of_theta, kept, of_kept, g, of_g, step.after.steps)
        state = step.after
        by_name = {name: _apart(error, sizes) for name, error in of_kept.items()}
        of_each = {key: {name: by_name[name][key] for name in by_name} for key in sizes}
        found.append(StepErrors(loss.error, of_norm, _apart(of_theta, sizes), of_each))
    return found


def graded_measured(
    r: Rounding, tokens: Tokens, parameters: Mapping[Key, Measured], top_k: int, sums: int
) -> tuple[Measured, dict[Key, Measured]]:
    """Measure the loss and the gradients that `training.model.graded` returns.

    >>> from moe_conformance.reference.training.model import graded
    >>> sizes = {"gate": (4, 3), "up": (4, 3), "down": (3, 4)}
    >>> p = {(f"layer0/{n}", None): torch.arange(12.0).sin().reshape(s) for n, s in sizes.items()}
    >>> p |= {(f"layer1/{n}", e): torch.arange(12.0).add(e).cos().reshape(s) for e in (0, 1) for n, s in sizes.items()}
    >>> p["layer1/router", None] = torch.arange(6.0).cos().reshape(2, 3)
    >>> x, target = torch.arange(9.0).cos().reshape(3, 3), torch.arange(9.0).sin().reshape(3, 3)
    >>> tokens = Tokens(x, target, torch.tensor([True, False, True]))
    >>> loss, ours = graded_measured(Rounding(1.0, 1.0), tokens, {key: exact(v) for key, v in p.items()}, 1, 3)
    >>> right = graded(tokens, p, 1)
    >>> torch.allclose(loss.value, right.loss), {torch.allclose(ours[k].value, g) for k, g in right.gradients.items()}
    (True, {True})
    """
    h_TD, passes = exact(tokens.x_TD.double()), list[_Layer]()
    for layer in layers_of(parameters):  # type: ignore[arg-type]
        passes.append(_Layer(r, h_TD, layer, top_k))  # type: ignore[arg-type]
        h_TD = r.plus(h_TD, passes[-1].y_TD)
    n = max(int(tokens.counted_T.sum()), 1)
    off_TD = r.plus(h_TD, -exact(tokens.target_TD))
    counted_TD = exact(tokens.counted_T.double()[:, None].expand_as(off_TD.value) / n)
    dy_TD = r.stored(r.products("td,td->td", off_TD, counted_TD), times=2)  # divided at the end, or at the beginning
    half_TD = off_TD.map(lambda each: each / 2)
    loss = r.stored(r.products("td,td->", half_TD, dy_TD), times=sums + 2)
    found: dict[Key, Measured] = {}
    for number, each in reversed(list(enumerate(passes))):
        dx_TD, own = each.backward(dy_TD, sums)
        found |= {(f"layer{number}/{name}", e): g for (name, e), g in own.items()}
        dy_TD = r.plus(dy_TD, dx_TD)
    return loss, {key: found[key] for key in parameters}


class _Layer:
    """One layer on all tokens of a step: every expert on every token, times 0 where it was not selected.

    A dense layer has one expert, with a weight of 1.
    """

    def __init__(self, r: Rounding, x_TD: Measured, layer: Mapping[Key, Measured], top_k: int) -> None:
        self.r, self.x_TD, self.router = r, x_TD, layer.get(("router", None))
        self.experts = [e for name, e in layer if name == "gate"]
        gate_EFD, up_EFD, self.down_EDF = (
            _stacked([layer[name, e] for e in self.experts]) for name in ("gate", "up", "down")
        )
        self.gate_GD, self.up_GD = (each.map(lambda a: a.flatten(0, 1)) for each in (gate_EFD, up_EFD))  # G = E F
        self.chosen_TE: Tensor = torch.ones(len(x_TD.value), 1, dtype=torch.float64)
        self.weights_TE = exact(self.chosen_TE)
        if self.router is not None:
            self.scores_TE = softmax(r, r.products("td,ed->te", x_TD, self.router))
            ids_TK = selected(x_TD.value, {("router", None): self.router.value}, top_k)
            self.chosen_TE = torch.zeros_like(self.scores_TE.value).scatter(1, ids_TK, 1.0)
            self.weights_TE = self.scores_TE.map(lambda each: each * self.chosen_TE)
        self.z_TG, self.up_TG = r.products("td,gd->tg", x_TD, self.gate_GD), r.products("td,gd->tg", x_TD, self.up_GD)
        self.act_TG = r.silu(self.z_TG)
        self.hidden_ETF = r.products("tg,tg->tg", self.act_TG, self.up_TG).map(self._by_expert)
        self.out_ETD = r.products("etf,edf->etd", self.hidden_ETF, self.down_EDF)
        self.y_TD = r.products("te,etd->td", self.weights_TE, self.out_ETD)

    def _by_expert(self, each_TG: Tensor) -> Tensor:
        each_ETF: Tensor = each_TG.unflatten(1, (len(self.experts), -1)).transpose(0, 1)
        return each_ETF

    def backward(self, dy_TD: Measured, sums: int) -> tuple[Measured, dict[Key, Measured]]:
        """Return dL/dx without the residual, and the gradients of the layer's parameters."""
        r = self.r
        dout_ETD = r.products("te,td->etd", self.weights_TE, dy_TD)
        dh_TG = r.products("etd,edf->etf", dout_ETD, self.down_EDF).map(lambda a: a.transpose(0, 1).flatten(1))
        dup_TG = r.products("tg,tg->tg", dh_TG, self.act_TG)
        dz_TG = r.products("tg,tg->tg", r.products("tg,tg->tg", dh_TG, self.up_TG), r.silu_slope(self.z_TG))
        gate_GD, up_GD = (self._gathered("tg,td->gd", each, self.x_TD, sums) for each in (dz_TG, dup_TG))
        down_EDF = self._gathered("etd,etf->edf", dout_ETD, self.hidden_ETF, sums)
        gate_EFD, up_EFD = (each.map(lambda a: a.unflatten(0, (len(self.experts), -1))) for each in (gate_GD, up_GD))
        found: dict[Key, Measured] = {}
        for number, e in enumerate(self.experts):
            for name, each in (("gate", gate_EFD), ("up", up_EFD), ("down", down_EDF)):
                found[name, e] = _at(each, number)
        dx_TD = r.plus(r.products("tg,gd->td", dz_TG, self.gate_GD), r.products("tg,gd->td", dup_TG, self.up_GD))
        if self.router is None:
            return dx_TD, found
        dl_TE = self._logits(dy_TD)
        found["router", None] = self._gathered("te,td->ed", dl_TE, self.x_TD, sums)
        return r.plus(dx_TD, r.products("te,ed->td", dl_TE, self.router)), found

    def _logits(self, dy_TD: Measured) -> Measured:
        """Return the gradient of the logits, s_e (ds_e - sum_j s_j ds_j): through scores of the selected alone."""
        r = self.r
        ds_TE = r.products("td,etd->te", dy_TD, self.out_ETD).map(lambda each: each * self.chosen_TE)
        weighted_TE = r.products("te,te->te", self.scores_TE, ds_TE)
        less_TE = r.plus(ds_TE, -r.total(weighted_TE, 1).map(lambda each: each[:, None].expand_as(ds_TE.value)))
        return r.stored(r.products("te,te->te", self.scores_TE, less_TE), of=weighted_TE.value.abs(), times=2)

    def _gathered(self, formula: str, a: Measured, b: Measured, sums: int) -> Measured:
        """Sum over tokens a gradient whose parts, of microbatches and ranks, are stored and added up."""
        of = multiplication(formula)(a.value.abs(), b.value.abs())
        return self.r.stored(self.r.products(formula, a, b), of=of, times=sums)


def _stacked(each: Sequence[Measured]) -> Measured:
    kinds = ([getattr(one, name) for one in each] for name in ("value", "worst", "spread"))
    return Measured(*map(torch.stack, kinds), exact=all(one.exact for one in each))


def _at(a: Measured, number: int) -> Measured:
    return a.map(lambda each: each[number])


def _carried(value: Tensor, error: Tensor) -> Measured:
    """Begin with a parameter that is off by `error` at most, which is no less than its standard deviation."""
    return Measured(value, error, error, exact=not bool(error.any()))


def _flat(values: Mapping[Key, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def _apart(flat: Tensor, sizes: Mapping[Key, torch.Size]) -> dict[Key, Tensor]:
    parts = flat.split([size.numel() for size in sizes.values()])
    return {key: part.reshape(size) for (key, size), part in zip(sizes.items(), parts, strict=True)}


# ---- from the gradient on: half widths -------------------------------------------------------------------------------


def _clipped(
    r: Rounding, g: Tensor, error: Tensor, whole: Tensor, of_norm: Tensor, largest: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped gradient and its error: that of the factor, the same for all, and its own."""
    if bool(whole + of_norm + _OF_CLIPPING <= largest) or not bool(whole > 0):
        return g, error
    low = min(1.0, float(largest / (whole + of_norm + _OF_CLIPPING)))
    factor, high = min(1.0, float(largest / whole)), min(1.0, float(largest / (whole - of_norm).clamp_min(1e-300)))
    off = max(high - factor, factor - low)
    return factor * g, high * error + g.abs() * (off + 2 * r.u * factor)


def _updated(
    r: Rounding,
    optimiser: Optimiser,
    theta: Tensor,
    of_theta: Tensor,
    values: Mapping[str, Tensor],
    errors: Mapping[str, Tensor],
    g: Tensor,
    error: Tensor,
    t: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the errors of a parameter and of what is kept of it after an update."""
    u = _OF_UPDATE * r.u
    if isinstance(optimiser, SGD):
        b = optimiser.momentum * values["momentum"].abs() + g.abs() + optimiser.decay * theta.abs()
        of_b = optimiser.momentum * errors["momentum"] + error + optimiser.decay * of_theta + u * b
        return of_theta + optimiser.rate * of_b + u * (theta.abs() + optimiser.rate * b), {"momentum": of_b}
    beta1, beta2 = optimiser.betas
    m, v = beta1 * values["first"] + (1 - beta1) * g, beta2 * values["second"] + (1 - beta2) * g.square()
    of_m = beta1 * errors["first"] + (1 - beta1) * error + u * (beta1 * values["first"].abs() + (1 - beta1) * g.abs())
    of_v = beta2 * errors["second"] + (1 - beta2) * error * (2 * g.abs() + error) + u * v
    of_direction = direction_error(optimiser, m, of_m, v, of_v, t) + u
    kept = 1 - optimiser.rate * optimiser.decay
    of_direction = torch.where((m == 0) & (of_m == 0), 0.0, of_direction)  # what never had a gradient only decays
    return kept * of_theta + optimiser.rate * of_direction + u * theta.abs(), {"first": of_m, "second": of_v}


def direction_error(optimiser: AdamW, m: Tensor, of_m: Tensor, v: Tensor, of_v: Tensor, t: int) -> Tensor:
    """Return how far Adam's direction may be off, for moments that are off by so much.

    Rule: it grows with m, and comes closer to 0 as v grows; so its ends are at ends of both. By Cauchy and Schwarz it
    is at most `farthest`.

    >>> one, some = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.25, dtype=torch.float64)
    >>> adam = AdamW(1.0, (0.0, 0.0), 0.0)
    >>> direction_error(adam, one, some, one, 0 * one, 1).item()  # between 0.75 and 1, since |m| <= sqrt(v)
    0.25
    >>> direction_error(adam, 0 * one, some, 0 * one, some, 1).item()
    1.0
    """
    beta1, beta2 = optimiser.betas
    of_first, of_second = 1 - beta1**t, 1 - beta2**t

    def direction(m: Tensor, v: Tensor) -> Tensor:
        below = (v.clamp_min(0) / of_second).sqrt() + optimiser.epsilon
        largest = torch.full_like(below, farthest(optimiser, t))
        return torch.where(m == 0, 0.0, m / of_first / below).clamp(-largest, largest)

    here = direction(m, v)
    ends = [direction(m + a * of_m, v + b * of_v) for a in (-1, 1) for b in (-1, 1)]
    return torch.stack([(end - here).abs() for end in ends]).amax(0)


def farthest(optimiser: AdamW, t: int) -> float:
    """Return the largest direction that there is in step t: sqrt(sum of a_i^2 / b_i).

    m = sum a_i g_i and v = sum b_i g_i^2 over the steps i, with a_i and b_i the weights of the two means.

    >>> farthest(AdamW(1.0), 1), round(farthest(AdamW(1.0, (0.9, 0.9)), 5), 6)
    (1.0, 1.0)
    """
    beta1, beta2 = optimiser.betas
    a = [(1 - beta1) * beta1 ** (t - i) / (1 - beta1**t) for i in range(1, t + 1)]
    b = [(1 - beta2) * beta2 ** (t - i) / (1 - beta2**t) for i in range(1, t + 1)]
    return float(sum(x * x / y if y else 0.0 if not x else 1.0 for x, y in zip(a, b, strict=True)) ** 0.5)
