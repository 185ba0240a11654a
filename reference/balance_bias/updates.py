"""The expert bias: its update by the load of one router. Its part in the selection is in `routing.py`.

The load n_e of an expert on one rank is `losses.choice_counts` of the ids that the biased selection returned:
valid tokens only, and no row of padding to capacity (BIAS-05). Loads are int64, and compared exactly. Only
differences of biases have an effect: a constant added to all selects the same experts.

Sources: Wang et al. 2024 (auxiliary-loss-free load balancing), Algorithm 1; DeepSeek-V3 section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

import torch
from torch import Tensor

ForwardKind = Literal["training", "recomputed", "evaluation", "no_grad", "forced"]


@dataclass(frozen=True)
class Forward:
    """A forward of one microbatch through the router: its kind, and its loads over all ranks, int64 (E,)."""

    kind: ForwardKind
    loads_E: Tensor


@dataclass(frozen=True)
class Update:
    """The update of the bias, which a trainer asks for once per optimiser step."""


def router_loads(loads_by_rank: Sequence[Tensor], routers: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Sum the loads over the ranks that train the same router, int64 (E,) per rank -> the same.

    Rule: `routers` parts the ranks: each part is the tp x cp x dp ranks of one pipeline stage
    of one model. All ranks of a part have its sum; none has anything of another part.

    Degenerate: a rank without tokens adds zeros. Tokens copied over tp are counted tp-fold if their ranks are
    given; that changes no sign in `update`. A rank in no part, or in two, is an error.

    Decides: BIAS-02, BIAS-11. Source: Wang et al. 2024 (loads of the whole batch); behaviour of Megatron-Core.

    >>> loads = [torch.tensor([1, 0]), torch.tensor([5, 5]), torch.tensor([2, 3])]
    >>> [load.tolist() for load in router_loads(loads, [[0, 2], [1]])]
    [[3, 3], [5, 5], [3, 3]]
    """
    if sorted(rank for part in routers for rank in part) != list(range(len(loads_by_rank))):
        raise ValueError(f"routers {routers} for {len(loads_by_rank)} ranks: each rank trains exactly one")
    sums = list(loads_by_rank)
    for part in routers:
        for loads_E in (loads_by_rank[rank] for rank in part):
            _check_loads(loads_E, loads_by_rank[part[0]])
        for rank in part:
            sums[rank] = torch.stack([loads_by_rank[other] for other in part]).sum(dim=0)  # (E,)
    return tuple(sums)


def update(bias_E: Tensor, loads_E: Tensor, *, rate: float, centred: bool = False) -> Tensor:
    """Move the bias once against the loads, (E,) and int64 (E,) -> float64 (E,).

    Rule: b_e + u sign(m - n_e), m the mean load; the sign is that of the integer sum n - E n_e.
    With `centred` the changes are shifted to a mean of zero, which is allowed, as any shift common to all:
    compare `without_constant`.

    Degenerate: a load equal to the mean does not move; neither does anything where all are equal or u = 0.
    How far a load is from the mean plays no part. A negative rate or load is an error.

    Decides: BIAS-01. Source: Wang et al. 2024, Algorithm 1; DeepSeek-V3 section 2.1.2.

    >>> update(torch.zeros(4), torch.tensor([9, 3, 0, 0]), rate=0.5).tolist()
    [-0.5, 0.0, 0.5, 0.5]
    >>> update(torch.zeros(4), torch.tensor([9, 3, 0, 0]), rate=0.5, centred=True).tolist()
    [-0.625, -0.125, 0.375, 0.375]
    """
    if not 0 <= rate < inf:
        raise ValueError(f"rate = {rate}; give a finite rate >= 0")
    _check_loads(loads_E, bias_E)
    total, E = sum(loads_E.tolist()), len(loads_E)
    signs = [(total > E * n) - (total < E * n) for n in loads_E.tolist()]  # in Python's integers, of any size
    change_E = rate * torch.tensor(signs, dtype=torch.float64)  # (E,)
    if centred:
        change_E = change_E - change_E.mean()  # (E,)
    return bias_E.detach().double() + change_E  # (E,)


def without_constant(bias_E: Tensor) -> Tensor:
    """Take from a bias the constant that says nothing, (E,) -> float64 (E,) of mean zero.

    Decides: BIAS-01. Source: arithmetic, a constant added to all experts selects the same.

    >>> without_constant(torch.tensor([3.0, 4.0, 8.0])).tolist()
    [-2.0, -1.0, 3.0]
    """
    return bias_E.double() - bias_E.double().mean()  # (E,)


def trained(
    bias_E: Tensor, events: Sequence[Forward | Update], *, rate: float, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Follow one router through training, -> its bias, float64 (E,), and its counters, int64 (E,).

    Rule: counters add up the loads of "training" forwards; an `Update` moves the
    bias by them, once, and leaves them at zero. A forward that is "recomputed" was counted before; those of
    "evaluation", with "no_grad" or "forced" say nothing about the scores. Every router, so every layer, has
    a history of its own (BIAS-11).

    Degenerate: an update without loads before it, the second of two in a row included, moves nothing.

    Decides: BIAS-04, BIAS-06, BIAS-07, BIAS-11. Source: Wang et al. 2024, Algorithm 1 (per training batch and layer).

    >>> forwards = [Forward(kind, torch.tensor([0, 1])) for kind in ("training", "forced", "training")]
    >>> trained(torch.zeros(2), [*forwards, Update(), Update(), forwards[0]], rate=0.25)
    (tensor([ 0.2500, -0.2500], dtype=torch.float64), tensor([0, 1]))
    """
    bias_E = bias_E.detach().double()  # (E,)
    counters_E = torch.zeros(len(bias_E), dtype=torch.int64)  # (E,)
    for event in events:
        if isinstance(event, Update):
            bias_E = update(bias_E, counters_E, rate=rate, centred=centred)  # (E,)
            counters_E = torch.zeros_like(counters_E)  # (E,)
            continue
        _check_loads(event.loads_E, bias_E)
        if event.kind not in get_args(ForwardKind):
            raise ValueError(f"a forward of kind {event.kind!r}; give one of {get_args(ForwardKind)}")
        if event.kind == "training":
            counters_E = counters_E + event.loads_E  # (E,)
    return bias_E, counters_E


def growth(rate: float, updates: int) -> tuple[float, float]:
    """Say how far the biases of an idle and a busy expert are apart after updates with one load: (gap, error).

    Rule: the gap grows by 2 u at every update; float32 rounds each of the two at every update, by at
    most 2^-24 of the final gap. bf16 stands still before the gap is there: its spacing outgrows the rate.

    Decides: BIAS-09. Source: arithmetic; behaviour of Megatron-Core (float32 bias).

    >>> gap, error = growth(0.001, 1000)
    >>> gap, round(error, 6)
    (2.0, 0.000238)
    """
    gap = 2 * rate * updates
    return gap, 2 * updates * 2.0**-24 * gap


def _check_loads(loads_E: Tensor, like_E: Tensor) -> None:
    """Raise unless the loads are counts, int64 (E,), for as many experts as the other vector has."""
    if loads_E.dtype != torch.int64 or loads_E.shape != like_E.shape or loads_E.ndim != 1 or len(loads_E) == 0:
        sizes = f"{loads_E.dtype} {tuple(loads_E.shape)} beside {tuple(like_E.shape)}"
        raise ValueError(f"loads are {sizes}; give int64 (E,), E the same in both")
    if bool((loads_E < 0).any()):
        raise ValueError(f"loads {loads_E.tolist()} hold a negative count")
