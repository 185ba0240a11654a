"""Judge of the indexed and the dense form of a routing: both have the same triples and gradients."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from moe_conformance.contract import Routing
from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import Tally, WrongForm, WrongGradient, WrongSelection
from moe_conformance.scenarios.outcome import Outcome

_Triples = Counter[tuple[int, int, float]]


def judge_forms(outcome: Outcome, tally: Tally) -> None:
    """Decide whether both conversions keep every triple of token, expert and weight, and pass gradients.

    Raises:
        WrongForm: a table has another shape, or a map is not boolean.
        WrongSelection: a triple is missing, or is not in the routing, or an element outside of the map has a weight.
        AbsentGradient, WrongGradient: the gradient of the weights is None or wrong.
    """
    call = outcome.workload.calls[0]
    routing = call.given[0]["routing"]
    expected = _indexed(routing.ids_TK, routing.weights_TK)
    _same("the dense form", expected, _dense_of(outcome, 0, routing))
    (ids_TK,), (weights_TK,) = values(outcome, 1, "ids_TK"), values(outcome, 1, "weights_TK")
    if len(ids_TK) != len(routing.ids_TK) or ids_TK.shape != weights_TK.shape:
        shapes = f"{tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        sentence = f"ids and weights of {len(routing.ids_TK)} tokens have the shapes {shapes}"
        raise WrongForm("route", sentence, ranks=(0,))
    _same("the indexed form", expected, _indexed(ids_TK, weights_TK))
    _same("the dense form of the indexed one", expected, _dense_of(outcome, 2, routing))
    tally.add(pairs=max(1, expected.total()), rank=0)
    upstream_TE = outcome.workload.calls[2].upstream[0]["weights_TE"]
    filled_TK = routing.ids_TK >= 0
    expected_TK = torch.where(filled_TK, upstream_TE.gather(1, routing.ids_TK.clamp_min(0)), 0.0)
    gradient_TK = answers(outcome, 0)[0].gradients["routing.weights_TK"]
    what = "the gradient of the weights"
    judge_tensor(gradient_TK, expected_TK, tally, error=WrongGradient, stage="gradient", what=what, row="token")


def _indexed(ids_TK: Tensor, weights_TK: Tensor) -> _Triples:
    table = zip(ids_TK.tolist(), weights_TK.detach().double().tolist(), strict=True)
    return Counter((t, e, w) for t, row in enumerate(table) for e, w in zip(*row, strict=True) if e >= 0)


def _dense_of(outcome: Outcome, call: int, routing: Routing) -> _Triples:
    """Return the triples of a dense form, including weights outside of the map."""
    (weights_TE,), (map_TE,) = values(outcome, call, "weights_TE"), values(outcome, call, "map_TE")
    shape = (len(routing.ids_TK), routing.experts)
    if map_TE.dtype != torch.bool or map_TE.shape != shape or weights_TE.shape != shape:
        form = f"{map_TE.dtype} {tuple(map_TE.shape)} with weights {tuple(weights_TE.shape)}"
        raise WrongForm("route", f"the dense form is a map {form} instead of a boolean one of {shape}", ranks=(0,))
    set_TE = map_TE | (weights_TE != 0)
    return Counter((t, e, float(weights_TE[t, e])) for t, e in set_TE.nonzero().tolist())


def _same(said: str, expected: _Triples, found: _Triples) -> None:
    findings = []
    if missing := expected - found:
        findings.append(Finding("missing", f"{said} lacks {_words(missing)}", (0,)))
    if extra := found - expected:
        findings.append(Finding("extra", f"{said} has {_words(extra)}, which the routing does not have", (0,)))
    if findings:
        fail(WrongSelection, "route", findings)


def _words(triples: _Triples) -> str:
    return some(f"token {t} expert {e} weight {w:g}" for t, e, w in sorted(triples.elements()))
