"""Causes of y, dx, weights or their gradients that are out of their bounds: of all tokens, a rank or a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, within
from moe_conformance.judging.explain.bounded import Candidate, Cause, Found, cause_of, outside
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.scopes import Place

Candidates = Callable[[Sequence[Place]], Iterable[Candidate]]  # what mistakes give for the tokens of some places
Tensors = Mapping[Place, Tensor]
Targets = Mapping[Place, Target]


def explain_tokens(
    name: str,
    actual: Tensors,
    targets: Targets,
    candidates: Candidates,
    *,
    names: Mapping[str, float],
    dtype: torch.dtype,
    note: Callable[[Place, int], str] = lambda place, token: "",
) -> Found:
    """Return findings that explain a wrong result per token: one cause for all, one per wrong rank, or one per token.

    A cause has to explain the microbatches in which something is wrong, and no others.

    Args:
        name: "y", "dx", "dweights" or "the weights".
        actual: the actual values, (T, ...) of every place, of the right shape.
        targets: the expected values and the allowed errors.
        candidates: the mistakes that this judge knows, see `bounded.cause_of`.
        names: factors that have a name.
        dtype: of the tokens.
        note: further words about a token, added after its number.
    """
    wrong = [place for place in actual if not within(actual[place], *targets[place])]
    microbatches = {m for m, _ in wrong}
    places = tuple(place for place in actual if place[0] in microbatches)
    ranks = tuple(sorted({rank for _, rank in wrong}))
    tokens = [finding for place in places for finding in _wrong_tokens(name, place, actual, targets, note)]

    def explained(of: Sequence[Place], more: Iterable[Candidate]) -> Cause | None:
        value = torch.cat([actual[place].double() for place in of])
        return cause_of(value, _joined(targets, of), chain(candidates(of), more), names, dtype)

    cause = explained(places, ())
    if cause:
        sentence = cause.sentence(name, tokens[0].sentence)
        return [Finding("cause", sentence, ranks, _off(cause), _beyond(tokens))], cause.ratio
    causes: dict[Cause, list[int]] = {}
    for rank in ranks:
        of = tuple(place for place in places if place[1] == rank)
        cause = explained(of, _of_others(targets, of))
        if cause is None:
            return tokens, None
        causes.setdefault(cause, []).append(rank)
    findings = []
    for cause, alike in causes.items():
        whose = f"rank {alike[0]}" if len(alike) == 1 else f"ranks {alike}"
        who = f"{name} of {whose} only" if cause.ratio is None else f"{name} on {whose}"
        theirs = [finding for finding in tokens if finding.ranks[0] in alike]
        sentence = cause.sentence(who, theirs[0].sentence)
        findings.append(Finding("cause of a rank", sentence, tuple(alike), _off(cause), _beyond(theirs)))
    return findings, None


def _off(cause: Cause) -> float:
    return 0.0 if cause.ratio is None else abs(cause.ratio - 1)


def _beyond(tokens: Sequence[Finding]) -> float:
    return max(finding.beyond or 0.0 for finding in tokens)


def _joined(targets: Targets, places: Sequence[Place]) -> Target:
    return Target(*(torch.cat(parts) for parts in zip(*(targets[place] for place in places), strict=True)))


def _of_others(targets: Targets, places: Sequence[Place]) -> Iterator[Candidate]:
    """Yield, with its words, the result of another rank or of another microbatch at the same places."""
    rank = places[0][1]
    for other in sorted({other for _, other in targets} - {rank}):
        if all((m, other) in targets for m, _ in places):
            yield f"it is that of rank {other}", _joined(targets, [(m, other) for m, _ in places]).expected
    if len(places) == 1:
        for m, other in targets:
            if other == rank and m != places[0][0]:
                yield f"it is that of microbatch {m}", targets[m, rank].expected


def _wrong_tokens(
    name: str, place: Place, actual: Tensors, targets: Targets, note: Callable[[Place, int], str]
) -> Iterator[Finding]:
    (m, rank), (expected_T, allowed_T) = place, targets[place]
    of = f" of microbatch {m}" if m else ""
    for t, row in enumerate(actual[place]):
        if not compare(row, expected_T[t], allowed_T[t]).holds:
            who = f"{name} of rank {rank} token {t}{of}{note(place, t)}"
            yield outside(who, rank, row, Target(expected_T[t], allowed_T[t]))
