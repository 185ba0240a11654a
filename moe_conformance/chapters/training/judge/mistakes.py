"""What a mistake in a training step would give: other gradients, another way to clip, other updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from moe_conformance.chapters.training.judge.expected import Expected, Place
from moe_conformance.reference.gradients.norms import clip_factor, norm
from moe_conformance.reference.training.model import Graded, Key, Parameters, Tokens
from moe_conformance.reference.training.steps import State, by_one_factor, step

Mistake = tuple[str, Callable[[], State]]  # its words, and the state after the step with it


def of_step(expected: Expected, number: int, rank: int) -> Iterator[Mistake]:
    """Yield the mistakes of a step, as a rank would have them."""
    before, tokens = expected.state_before(number), expected.tokens(number)
    how = {"top_k": expected.workload.config.top_k, "largest_norm": expected.largest_norm}
    run = partial(step, before, tokens, expected.optimiser, **how)  # type: ignore[arg-type]
    for words, clip in _clips(expected):
        yield words, partial(_after, partial(run, clip=clip))
    for words, weights in _weights(expected, number, rank):
        yield words, partial(_after, partial(run, grade=partial(_graded, expected, number, weights)))


def _after(run: Callable[[], object]) -> State:
    return run().after  # type: ignore[attr-defined, no-any-return]


def _clips(expected: Expected) -> Iterator[tuple[str, Callable[[Mapping[Key, Tensor], float], dict[Key, Tensor]]]]:
    if expected.largest_norm == float("inf"):
        return
    yield "dense and expert gradients were clipped by norms of their own", _by_own_norms
    if expected.workload.layout.ep > 1:
        yield "gradients were clipped by the mean of the ranks' norms", partial(_by_mean_norm, expected)
    yield "gradients were not clipped", lambda gradients, _: dict(gradients)
    yield "gradients were clipped twice", _twice
    for size, names in expected.axes().items():
        yield f"the norm has expert gradients {size} times: {names}", partial(_expert_norm_times, size)


def _by_own_norms(gradients: Mapping[Key, Tensor], largest: float) -> dict[Key, Tensor]:
    dense = {key: g for key, g in gradients.items() if key[1] is None}
    own = {key: g for key, g in gradients.items() if key[1] is not None}
    return by_one_factor(dense, largest) | by_one_factor(own, largest)


def _by_mean_norm(expected: Expected, gradients: Mapping[Key, Tensor], largest: float) -> dict[Key, Tensor]:
    factor = clip_factor(mean_of_norms(expected, gradients), largest)
    return {key: factor * g for key, g in gradients.items()}


def _twice(gradients: Mapping[Key, Tensor], largest: float) -> dict[Key, Tensor]:
    factor = clip_factor(float(norm({str(key): g for key, g in gradients.items()})), largest)
    return {key: factor * factor * g for key, g in gradients.items()}


def _expert_norm_times(size: int, gradients: Mapping[Key, Tensor], largest: float) -> dict[Key, Tensor]:
    factor = clip_factor(norm_of(gradients, expert_times=size), largest)
    return {key: factor * g for key, g in gradients.items()}


def mean_of_norms(expected: Expected, gradients: Mapping[Key, Tensor]) -> float:
    """Return the mean of what ranks have as the norm of dense parameters and of the experts that they hold."""
    ep, held = expected.workload.layout.ep, expected.workload.config.experts // expected.workload.layout.ep
    parts = [{key: g for key, g in gradients.items() if key[1] is None or key[1] // held == i} for i in range(ep)]
    return sum(map(norm_of, parts)) / ep


def norm_of(gradients: Mapping[Key, Tensor], *, expert_times: float = 1.0, dense_times: float = 1.0) -> float:
    """Return the norm of gradients whose elements are counted so many times each."""
    times = {key: dense_times if key[1] is None else expert_times for key in gradients}
    return float(sum(times[key] * float(g.square().sum()) for key, g in gradients.items()) ** 0.5)


# ---- gradients -------------------------------------------------------------------------------------------------------

Weights = Mapping[Place, float]  # by which the mean loss of the counted tokens of a place is in the loss of the step


def _weights(expected: Expected, number: int, rank: int) -> Iterator[tuple[str, Weights]]:
    """Yield wrong ways to put the losses of places together."""
    places = expected.places(number)
    n = {place: int(expected.tokens(number, [place]).counted_T.sum()) for place in places}
    ranks, microbatches = sorted({r for _, r in places}), sorted({m for m, _ in places})
    of_step, M, W = sum(n.values()), len(microbatches), len(ranks)
    right = {place: n[place] / of_step for place in places}
    if M * W > 1:
        yield "a mean was taken of the means of microbatches and ranks", dict.fromkeys(places, 1 / (M * W))
    if W > 1:
        of_rank = {r: max(sum(n[m, r] for m in microbatches), 1) for r in ranks}
        yield "a mean was taken of the means of ranks", {(m, r): n[m, r] / of_rank[r] / W for m, r in places}
        yield "only its own tokens are in it", {place: share * (place[1] == rank) for place, share in right.items()}
    for name in ("ep_etp", "edp", "tp", "dp_cp"):
        group = next(ranks for ranks in expected.workload.layout.groups()[name] if rank in ranks)
        if 1 < len(group) < W:
            yield f"only the tokens of its {name} group are in it", {p: s * (p[1] in group) for p, s in right.items()}
    if M > 1:
        of_m = {m: max(sum(n[m, r] for r in ranks), 1) for m in microbatches}
        yield "a mean was taken of the means of microbatches", {(m, r): n[m, r] / of_m[m] / M for m, r in places}
        yield (
            "what is there is doubled with every microbatch",
            {(m, r): share * 2 ** (M - 1 - m) for (m, r), share in right.items()},
        )
        for left in microbatches:
            yield f"microbatch {left} is missing in it", {p: share * (p[0] != left) for p, share in right.items()}
    sizes = {place: len(expected.tokens(number, [place]).x_TD) for place in places}
    all_tokens = sum(sizes.values())
    yield "it was divided by all tokens, those that do not count too", {p: n[p] / all_tokens for p in places}


def _graded(expected: Expected, number: int, weights: Weights, _: Tokens, parameters: Parameters, top_k: int) -> Graded:
    """Grade every place by itself, and add up by weight."""
    parts: Sequence[tuple[float, Graded]] = [
        (weight, expected.graded(number, [place])) for place, weight in weights.items() if weight
    ]
    loss = sum((weight * part.loss for weight, part in parts), start=0 * parts[0][1].loss)
    keys = parts[0][1].gradients
    total = {key: sum((w * p.gradients[key] for w, p in parts), start=0 * keys[key]) for key in keys}
    return Graded(loss, total)
