"""Steps of training: gradients of the whole step, one factor of clipping, one update of every parameter.

Sources: those of `model`, `optimisers` and `gradients.norms`, in the order in which PyTorch documents a training loop
(backward, clip_grad_norm_, step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor

from moe_conformance.reference.gradients.norms import clipped, norm
from moe_conformance.reference.training.model import Graded, Key, Parameters, Tokens, graded
from moe_conformance.reference.training.optimisers import Kept, Optimiser

Grade = Callable[[Tokens, Parameters, int], Graded]
Clip = Callable[[Mapping[Key, Tensor], float], dict[Key, Tensor]]


@dataclass(frozen=True)
class State:
    """A model between two steps: its parameters, what the optimiser keeps of each, and the number of steps so far."""

    parameters: Mapping[Key, Tensor]
    kept: Mapping[Key, Kept]
    steps: int = 0


@dataclass(frozen=True)
class Step:
    """One step: loss and norm of the gradient as they are reported, the gradient that was used, and the state after."""

    loss: Tensor
    norm: Tensor  # before clipping
    clipped: Mapping[Key, Tensor]
    after: State


def begun(parameters: Parameters, optimiser: Optimiser) -> State:
    """Return a model that has not been trained."""
    exact = {key: value.double() for key, value in parameters.items()}
    return State(exact, {key: optimiser.nothing_kept(value) for key, value in exact.items()})


def by_one_factor(gradients: Mapping[Key, Tensor], largest: float) -> dict[Key, Tensor]:
    """Clip the gradients of all parameters, dense and of experts, by one factor."""
    return dict(zip(gradients, clipped({str(key): g for key, g in gradients.items()}, largest).values(), strict=True))


def step(
    state: State,
    tokens: Tokens,
    optimiser: Optimiser,
    *,
    top_k: int,
    largest_norm: float = inf,
    grade: Grade = graded,
    clip: Clip = by_one_factor,
) -> Step:
    """Train one step on all tokens of all ranks and microbatches.

    Other functions to grade or clip by are those of mistakes.

    Degenerate: a loss or gradient that is not finite: the step is skipped, and `after` is the state before it.

    Source: Pascanu et al. 2013 section 3.2; Loshchilov and Hutter 2019, algorithm 2; Micikevicius et al. 2018 section
    3.2 (skipped steps).
    """
    loss, gradients = grade(tokens, state.parameters, top_k)
    whole = norm({str(key): g for key, g in gradients.items()})
    if not bool(loss.isfinite() & whole.isfinite()):
        return Step(loss, whole, gradients, state)
    used, t = clip(gradients, largest_norm), state.steps + 1
    updated = {key: optimiser.update(theta, used[key], state.kept[key], t) for key, theta in state.parameters.items()}
    parameters = {key: theta for key, (theta, _) in updated.items()}
    return Step(loss, whole, used, State(parameters, {key: kept for key, (_, kept) in updated.items()}, t))


def train(
    parameters: Parameters, steps: Sequence[Tokens], optimiser: Optimiser, *, top_k: int, largest_norm: float = inf
) -> list[Step]:
    """Train some steps, one after the other.

    Decides: TRAIN-01, TRAIN-02, TRAIN-05. Source: as `step`.

    >>> import torch
    >>> from moe_conformance.reference.training.optimisers import SGD
    >>> zero = torch.zeros(1, 1, dtype=torch.float64)
    >>> p = {(f"layer0/{name}", None): zero + at for name, at in (("gate", 1.0), ("up", 1.0), ("down", 0.0))}
    >>> tokens = Tokens(torch.ones(1, 1), torch.zeros(1, 1), torch.tensor([True]))
    >>> first, second = train(p, [tokens, tokens], SGD(1.0), top_k=1)
    >>> down = first.after.parameters["layer0/down", None]
    >>> first.loss.item(), round(-down.item() / torch.ones(()).sigmoid().item(), 6)
    (0.5, 1.0)
    >>> second.after.steps
    2
    """
    state, found = begun(parameters, optimiser), list[Step]()
    for tokens in steps:
        found.append(step(state, tokens, optimiser, top_k=top_k, largest_norm=largest_norm))
        state = found[-1].after
    return found
