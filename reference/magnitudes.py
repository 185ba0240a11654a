"""Magnitudes: how large the rounding error of every result of the layer may be, in units of u.

The layer's formula and its derivative, y_t = sum_k w_tk f_{e_tk}(x_t), in the measured numbers of
`rounding.py`. The derivative is written out by hand, as autograd carries no magnitudes; that its values are
those of autograd is checked below.

Source: the chain rule; SwiGLU as in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference.experts import Parameters
from reference.layer import Gradients, WeightsAt
from reference.rounding import Measured, exact, plus, products, silu, silu_slope

MeasuredExpert = Callable[[Measured, Measured, int], tuple[Measured, Measured, dict[str, Measured]]]
"""(rows (R, D), dL/dout (R, D), expert id) -> out, dL/drows, and dL/dparameter by name."""


def swiglu_measured(parameters: Parameters) -> MeasuredExpert:
    """Make the measured twin of `experts.swiglu_experts`.

    >>> from reference.experts import swiglu
    >>> sizes = {"gate": (3, 2), "up": (3, 2), "down": (2, 3)}
    >>> p = {name: torch.arange(6.0).sin().double().reshape(size) for name, size in sizes.items()}
    >>> rows, dout = torch.arange(20.0).cos().double().reshape(2, 5, 2)
    >>> out, *gradients = swiglu_measured({(name, 7): p[name] for name in p})(exact(rows), exact(dout), 7)
    >>> leaves = [leaf.requires_grad_() for leaf in (rows.clone(), *p.values())]
    >>> drows, *dp = torch.autograd.grad(swiglu(*leaves), leaves, dout)
    >>> torch.allclose(gradients[0].value, drows)
    True
    >>> [torch.allclose(gradients[1][name].value, dvalue) for name, dvalue in zip(p, dp)]
    [True, True, True]
    """

    def expert(x_RD: Measured, dout_RD: Measured, e: int) -> tuple[Measured, Measured, dict[str, Measured]]:
        gate_FD, up_FD, down_DF = (exact(parameters[name, e]) for name in ("gate", "up", "down"))
        z_RF = products("rd,fd->rf", x_RD, gate_FD)
        up_RF = products("rd,fd->rf", x_RD, up_FD)
        silu_RF = silu(z_RF)
        hidden_RF = products("rf,rf->rf", silu_RF, up_RF)
        out_RD = products("rf,df->rd", hidden_RF, down_DF)

        dhidden_RF = products("rd,df->rf", dout_RD, down_DF)
        dup_RF = products("rf,rf->rf", dhidden_RF, silu_RF)
        dsilu_RF = products("rf,rf->rf", dhidden_RF, up_RF)
        dz_RF = products("rf,rf->rf", dsilu_RF, silu_slope(z_RF))
        dx_RD = plus(products("rf,fd->rd", dz_RF, gate_FD), products("rf,fd->rd", dup_RF, up_FD))
        dparameters = {
            "gate": products("rf,rd->fd", dz_RF, x_RD),
            "up": products("rf,rd->fd", dup_RF, x_RD),
            "down": products("rd,rf->df", dout_RD, hidden_RF),
        }
        return out_RD, dx_RD, dparameters

    return expert


def magnitudes(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    build: Callable[[Parameters], MeasuredExpert],
    parameters: Parameters,
    *,
    weights_at: WeightsAt = "output",
) -> Gradients:
    """Measure everything that `layer.gradients` returns: the same fields, holding magnitudes.

    Rule: the layer's formula and its derivative in measured numbers, e.g. for y the sum over slots of 2 |w
    f| + |w| M(f). Where every addend is 0 so is the magnitude, and an implementation must return 0 exactly.
    For gradients over all ranks, measure the `layer.global_batch`.

    >>> x, ids, w = torch.tensor([[1.0, -2.0]]), torch.tensor([[0, 1, -1]]), torch.tensor([[0.5, -4.0, 9.0]])
    >>> identity = lambda parameters: lambda rows, dout, e: (rows, dout, {})
    >>> m = magnitudes(x, ids, w, torch.ones(1, 2), identity, {})
    >>> m.y_TD.tolist(), m.dweights_TK.tolist()
    ([[9.0, 18.0]], [[3.0, 3.0, 0.0]])
    """
    (T, D), K = x_TD.shape, ids_TK.shape[1]
    y_TD, dx_TD = torch.zeros(2, T, D, dtype=torch.float64)  # (T, D) each
    dw_TK = torch.zeros(T, K, dtype=torch.float64)  # (T, K)
    expert = build(parameters)
    dp = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    for e in ids_TK.unique().tolist():
        if e < 0:
            continue
        here_TK = ids_TK == e  # (T, K); the R = T K places of the dense form, zero where not named
        w_R = exact(torch.where(here_TK, weights_TK, 0.0).flatten())
        x_RD = exact(torch.where(here_TK[:, :, None], x_TD[:, None], 0.0).reshape(-1, D))
        dy_RD = exact(torch.where(here_TK[:, :, None], dy_TD[:, None], 0.0).reshape(-1, D))
        if weights_at == "output":  # y = w f(x)
            out_RD, dx_RD, dp_e = expert(x_RD, products("r,rd->rd", w_R, dy_RD), e)
            dw_R = products("rd,rd->r", dy_RD, out_RD)
            out_RD = products("r,rd->rd", w_R, out_RD)
        else:  # y = f(w x)
            out_RD, dx_RD, dp_e = expert(products("r,rd->rd", w_R, x_RD), dy_RD, e)
            dw_R = products("rd,rd->r", x_RD, dx_RD)
            dx_RD = products("r,rd->rd", w_R, dx_RD)
        y_TD += over_slots(out_RD, here_TK)
        dx_TD += over_slots(dx_RD, here_TK)
        dw_TK += dw_R.magnitude.reshape(T, K)
        dp |= {(name, e): measured.magnitude for name, measured in dp_e.items()}
    return Gradients(y_TD, dx_TD, dw_TK, dp)


def over_slots(rows_RD: Measured, here_TK: Tensor) -> Tensor:
    """Sum the K rows of every token that `here` keeps, (T K, D) -> magnitude (T, D)."""
    T, K = here_TK.shape
    sum_of = torch.where(here_TK.reshape(-1, 1), rows_RD.value.abs() + rows_RD.magnitude, 0.0)  # (T K, D)
    return sum_of.reshape(T, K, -1).sum(dim=1)  # (T, D)
