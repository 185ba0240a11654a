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

from moe_conformance.reference.rounding.errors import Measured, Rounding, exact
from moe_conformance.reference.rounding.routing_magnitudes import softmax
from moe_conformance.reference.training.model import Key, Parameters, Tokens, layers_of, selected
from moe_conformance.reference.training.optimisers import SGD, AdamW, Optimiser
from moe_conformance.reference.training.steps import State, Step

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
    """Measure steps that `training.steps.train` has made, each with its tokens.

    `sums` is how often a gradient or the loss is rounded while the parts of microbatches and ranks are put together.
    """
    before = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in parameters.items()}
    state, kept, found = steps[0][1].after, dict[Key, dict[str, Tensor]](), list[StepErrors]()
    values: Parameters = {key: value.double() for key, value in parameters.items()}
    of_kept = {key: optimiser.nothing_kept(value) for key, value in values.items()}
    kept = {key: {name: torch.zeros_like(value) for name, value in each.items()} for key, each in of_kept.items()}
    for tokens, step in steps:
        measured = {key: _carried(value, before[key]) for key, value in values.items()}
        loss, gradients = graded_measured(rounding, tokens, measured, top_k, sums)
        errors = {key: each.error for key, each in gradients.items()}
        of_norm = _norm(errors.values()) + _OF_NORM * step.norm
        if step.after.steps > state.steps or step is steps[0][1]:
            cut = {
                key: _clipped(rounding, g.value, errors[key], step.norm, of_norm, largest_norm)
                for key, g in gradients.items()
            }
            moved = {
                key: _updated(rounding, optimiser, values[key], before[key], of_kept[key], kept[key], *cut[key],
                              step.after.steps) for key in values
            }  # fmt: skip
            before = {key: each[0] for key, each in moved.items()}
            kept = {key: each[1] for key, each in moved.items()}
        state = step.after
        values, of_kept = state.parameters, dict(state.kept)
        found.append(StepErrors(loss.error, of_norm, before, kept))
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
    layers = layers_of(parameters)  # type: ignore[arg-type]
    h_TD = exact(tokens.x_TD.double())
    passes = []
    for layer in layers:
        passes.append(_Layer(r, h_TD, layer, top_k))  # type: ignore[arg-type]
        h_TD = r.plus(h_TD, passes[-1].output())
    n = max(int(tokens.counted_T.sum()), 1)
    off_TD = r.plus(h_TD, -exact(tokens.target_TD))
    counted_TD = exact(tokens.counted_T.double()[:, None].expand_as(off_TD.value) / n)
    dy_TD = r.stored(r.products("td,td->td", off_TD, counted_TD), times=2)  # divided at the end, or at the beginning
    each = r.products("td,td->", r.products("td,td->td", off_TD, exact(torch.tensor(0.5).expand_as(off_TD.value))), dy_TD)
    loss = r.stored(each, times=sums + 2)
    found: dict[Key, Measured] = {}
    for number, each_pass in reversed(list(enumerate(passes))):
        dx_TD, own = each_pass.backward(dy_TD, sums)
        found |= {(f"layer{number}/{name}", e): g for (name, e), g in own.items()}
        dy_TD = r.plus(dy_TD, dx_TD)
    return loss, {key: found[key] for key in parameters}


class _Layer:
    """One layer on the tokens of a step: its output, and its gradients."""

    def __init__(self, r: Rounding, x_TD: Measured, layer: Mapping[Key, Measured], top_k: int) -> None:
        self.r, self.x_TD, self.layer = r, x_TD, layer
        T = len(x_TD.value)
        self.routed = ("router", None) in layer
        if not self.routed:
            self.parts = {None: _SwiGLU(r, x_TD, layer, None)}
            self.rows: dict[int | None, Tensor] = {None: torch.arange(T)}
            return
        self.scores_TE = softmax(r, r.products("td,ed->te", x_TD, layer["router", None]))
        self.ids_TK = selected(x_TD.value, {("router", None): layer["router", None].value}, top_k)
        self.rows = {e: (self.ids_TK == e).any(1).nonzero()[:, 0] for _, e in layer if e is not None}
        self.parts = {e: _SwiGLU(r, _rows(x_TD, at), layer, e) for e, at in self.rows.items()}

    def output(self) -> Measured:
        """Return what the layer adds to x, (T, D)."""
        if not self.routed:
            return self.parts[None].out_RD
        found = [
            _spread(self.r.products("r,rd->rd", self._weights(e), part.out_RD), self.rows[e], len(self.x_TD.value))
            for e, part in self.parts.items()
        ]
        return self._sum(found)

    def backward(self, dy_TD: Measured, sums: int) -> tuple[Measured, dict[Key, Measured]]:
        """Return dL/dx without the residual, and the gradients of the layer's parameters."""
        if not self.routed:
            return self.parts[None].backward(dy_TD, sums)
        r, T = self.r, len(self.x_TD.value)
        of_x, found, of_scores = [], dict[Key, Measured](), []
        for e, part in self.parts.items():
            dy_RD = _rows(dy_TD, self.rows[e])
            dx_RD, own = part.backward(r.products("r,rd->rd", self._weights(e), dy_RD), sums)
            of_x.append(_spread(dx_RD, self.rows[e], T))
            of_scores.append(_spread(r.products("rd,rd->r", dy_RD, part.out_RD), self.rows[e], T))
            found |= own
        ds_TE = Measured(*(torch.stack(each, 1) for each in zip(*(_three(score) for score in of_scores), strict=True)))
        weighted_TE = r.products("te,te->te", self.scores_TE, ds_TE)
        mean_T = r.total(weighted_TE, 1)
        less_TE = r.plus(ds_TE, -mean_T.map(lambda each: each[:, None].expand_as(ds_TE.value)))
        dl_TE = r.stored(r.products("te,te->te", self.scores_TE, less_TE), of=weighted_TE.value.abs(), times=2)
        found["router", None] = _gathered(r, r.products("te,td->ed", dl_TE, self.x_TD), dl_TE, self.x_TD, sums)
        of_x.append(r.products("te,ed->td", dl_TE, self.layer["router", None]))
        return self._sum(of_x), found

    def _weights(self, e: int | None) -> Measured:
        at = self.rows[e]
        return self.scores_TE.map(lambda each: each[at, e])

    def _sum(self, addends: Sequence[Measured]) -> Measured:
        stacked = Measured(*(torch.stack(each) for each in zip(*map(_three, addends), strict=True)))
        return self.r.total(stacked, 0)


class _SwiGLU:
    """One expert, or a dense layer, on its rows."""

    def __init__(self, r: Rounding, x_RD: Measured, layer: Mapping[Key, Measured], e: int | None) -> None:
        self.r, self.x_RD, self.e = r, x_RD, e
        self.gate, self.up, self.down = (layer[name, e] for name in ("gate", "up", "down"))
        self.z_RF = r.products("rd,fd->rf", x_RD, self.gate)
        self.act_RF, self.up_RF = r.silu(self.z_RF), r.products("rd,fd->rf", x_RD, self.up)
        self.hidden_RF = r.products("rf,rf->rf", self.act_RF, self.up_RF)
        self.out_RD = r.products("rf,df->rd", self.hidden_RF, self.down)

    def backward(self, dy_RD: Measured, sums: int) -> tuple[Measured, dict[Key, Measured]]:
        """Return dL/dx, (R, D), and the gradients of gate, up and down; of no rows they are exactly 0."""
        r, e = self.r, self.e
        if not len(dy_RD.value):
            own = {(name, e): exact(torch.zeros_like(p.value)) for name, p in self._named()}
            return dy_RD, own
        dh_RF = r.products("rd,df->rf", dy_RD, self.down)
        dup_RF = r.products("rf,rf->rf", dh_RF, self.act_RF)
        dz_RF = r.products("rf,rf->rf", r.products("rf,rf->rf", dh_RF, self.up_RF), r.silu_slope(self.z_RF))
        own = {
            ("gate", e): _gathered(r, r.products("rf,rd->fd", dz_RF, self.x_RD), dz_RF, self.x_RD, sums),
            ("up", e): _gathered(r, r.products("rf,rd->fd", dup_RF, self.x_RD), dup_RF, self.x_RD, sums),
            ("down", e): _gathered(r, r.products("rd,rf->df", dy_RD, self.hidden_RF), dy_RD, self.hidden_RF, sums),
        }
        dx_RD = r.plus(r.products("rf,fd->rd", dz_RF, self.gate), r.products("rf,fd->rd", dup_RF, self.up))
        return dx_RD, own

    def _named(self) -> list[tuple[str, Measured]]:
        return [("gate", self.gate), ("up", self.up), ("down", self.down)]


def _gathered(r: Rounding, g: Measured, a: Measured, b: Measured, sums: int) -> Measured:
    """Round a gradient that is the sum of parts of microbatches and ranks: partial sums are at most `of`."""
    return r.stored(g, of=a.value.abs().T @ b.value.abs(), times=sums)


def _rows(a: Measured, at: Tensor) -> Measured:
    return a.map(lambda each: each[at])


def _spread(a: Measured, at: Tensor, T: int) -> Measured:
    """Put rows at their places among T, and zeros elsewhere."""
    return a.map(lambda each: each.new_zeros(T, *each.shape[1:]).index_copy(0, at, each))


def _three(a: Measured) -> tuple[Tensor, Tensor, Tensor]:
    return a.value, a.worst, a.spread


def _carried(value: Tensor, error: Tensor) -> Measured:
    """Begin with a parameter that is off by `error` at most, which is no less than its standard deviation."""
    return Measured(value, error, error, exact=not bool(error.any()))


def _norm(parts: Sequence[Tensor] | object) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum().sqrt()  # type: ignore[attr-defined]


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

    Rule: it grows with m, and comes closer to 0 as v grows; so its ends are at ends of both. By Cauchy and Schwarz it is
    at most `farthest`.

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
