"""Explanations of wrong selections: the experts of a token, or one wrong rule that explains all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.expected import Limit, RouterExpected
from moe_conformance.reference.routing import routes, selection


def explain_selection(expected: RouterExpected, illegal: Mapping[Place, Sequence[int]]) -> list[Finding]:
    """Return findings for wrong selections: the rule by which all were made, else the right experts of each."""
    cause = next((words for words, legal in _other_choices(expected) if legal), None)
    findings = [
        Finding("choice", *_choice(expected, place, token)) for place, tokens in illegal.items() for token in tokens
    ]
    if cause is None:
        return findings
    ranks = tuple(sorted({place[1] for place, tokens in illegal.items() if tokens}))
    example = max(findings, key=lambda finding: finding.size).sentence
    wrong = f"{len(findings)} of {sum(map(len, expected.ids.values()))} tokens are wrong"
    return [Finding("cause", f"the selection is wrong; likely cause: {cause}; {wrong}; for example {example}", ranks)]


def _choice(expected: RouterExpected, place: Place, token: int) -> tuple[str, tuple[int, ...], float]:
    """Return a description of one choice, its expected experts, and by how much its score is too low."""
    scores_E = expected.selection_scores(place, expected.bias_E)[token]
    chosen, right = sorted(expected.ids[place][token].tolist()), sorted(expected.choice(place)[token].tolist())

    def scored(ids: Sequence[int]) -> str:
        return ", ".join(f"{e} ({float(scores_E[e]):.4g})" for e in ids)

    margin = float(selection.margins(scores_E[None], expected.ids[place][token][None], **expected.limit))
    doubt = float(expected.doubt(place)[token])
    sentence = (
        f"rank {place[1]} token {token} selected {scored([e for e in chosen if e not in right] or chosen)} instead of "
        f"{scored([e for e in right if e not in chosen] or right)} (margin {margin:.3g}, rounding allows {-doubt:.2g})"
    )
    return sentence, (place[1],), min(-margin, 1e300)


def _other_choices(expected: RouterExpected) -> Iterator[tuple[str, bool]]:
    """Yield wrong rules in words, and whether all choices agree with the rule."""

    def legal(by: str, limit: Limit | None = None) -> bool:
        return all(bool(expected.legal(at, _other_scores(expected, at, by), limit).all()) for at in expected.places)

    if expected.bias_E is not None:
        yield "the expert bias was left out", legal("no bias")
        yield "the expert bias was added to the logits", legal("biased logits")
        yield "the expert bias was subtracted", legal("negative bias")
    yield "the lowest scores were selected", legal("lowest")
    groups = expected.limit["groups"]
    if groups is None:
        return
    everything: Limit = {"groups": None, "group_score": "max"}
    yield "the group limit was left out", legal("right", everything)
    yield "experts of unselected groups had the score 0 instead of -inf", legal("closed at 0", everything)
    if expected.bias_E is not None:
        yield "the groups were scored without the expert bias", legal("unbiased groups", everything)
    for other in get_args(routes.GroupScore):
        if other != expected.limit["group_score"] and _possible(expected, other):
            yield (
                f"the groups were scored by {other}",
                legal("right", {"groups": groups, "group_score": other}),
            )


def _possible(expected: RouterExpected, group_score: routes.GroupScore) -> bool:
    """Return whether groups are large enough for a way of scoring groups."""
    config = expected.workload.config
    assert config.routing.groups is not None  # callers have groups
    addends = {"max": 1, "top2_sum": 2, "topk_sum": config.top_k // config.routing.groups[1]}[group_score]
    return 1 <= addends <= config.experts // config.routing.groups[0]


def _other_scores(expected: RouterExpected, place: Place, by: str) -> Tensor:
    """Return the selection scores (T, E) under a wrong rule."""
    right_TE = expected.selection_scores(place, expected.bias_E)
    plain_TE = expected.selection_scores(place, None)
    if by in ("closed at 0", "unbiased groups"):
        scored_TE = plain_TE if by == "unbiased groups" else right_TE
        config = expected.workload.config
        assert config.routing.groups is not None
        open_TE = selection.group_mask(
            scored_TE, config.routing.groups, top_k=config.top_k, group_score=config.routing.group_score
        )
        return torch.where(open_TE, right_TE, 0.0 if by == "closed at 0" else -torch.inf)
    if by == "biased logits":
        assert expected.bias_E is not None
        return routes.scores(expected.logits(place) + expected.bias_E.double(), expected.weighing["score"])
    return {"no bias": plain_TE, "negative bias": 2 * plain_TE - right_TE, "lowest": -right_TE, "right": right_TE}[by]
