"""Judges of balance biases as state: updated in place, saved, loaded, precise, not trained by the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.chapters.balance_bias.judge.balancing_steps import History, declared, history_of
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.verdict import ChangedState, Tally, WrongBias, WrongGradient, WrongSelection
from moe_conformance.reference.balance_bias.updates import growth
from moe_conformance.scenarios.outcome import Outcome

_FLOAT32 = 2.0**-24
_MARGIN = 2.0**-13  # smallest difference of float32 selection scores about 1


@judge(WrongBias, "finish")
def judge_in_place(outcome: Outcome) -> Comparisons:
    """Decide whether updates are visible in earlier references and in the state dictionary.

    Raises:
        WrongBias: a reference or the state dictionary has other values.
    """
    history = history_of(outcome)
    words = {
        "held": ("a reference that was taken before the first step", "the update made a new tensor"),
        "saved": ("the state dictionary", "the tensor that is saved is not the one that is updated"),
    }
    for call in history.steps:
        for rank in history.ranks:
            for number, seen in enumerate(history.seen(call, "updates")[rank]):
                for layer in history.layers:
                    now_E = seen["now"][layer]
                    for where, (what, cause) in words.items():
                        found_E = seen[where][layer]
                        if found_E is not None and torch.equal(found_E, now_E):
                            yield Comparison(rank, elements=len(now_E))
                            continue
                        holds = "does not hold it" if found_E is None else f"holds {_difference(found_E, now_E)}"
                        said = f"rank {rank}: after update {number} of step {call} {what} {holds}"
                        said = f"{said} (the bias of router {layer})"
                        likely = f"; likely cause: {cause}" if found_E is not None else ""
                        yield Comparison(rank, Finding(where, said + likely, (rank,)))


def _difference(found_E: Tensor, now_E: Tensor) -> str:
    e = int((found_E.double() != now_E.double()).long().argmax())
    return f"{float(found_E[e]):.9g} for expert {e} instead of {float(now_E[e]):.9g}"


@judge(WrongSelection, "route")
def judge_selection(outcome: Outcome) -> Comparisons:
    """Decide whether every forward selects experts by the bias after the last update.

    Tokens whose experts nearly tie are not compared.

    Raises:
        WrongSelection: a token selects other experts.
    """
    history = history_of(outcome)
    for call in history.steps:
        for rank in history.ranks:
            for place in range(len(history.batches(call, rank))):
                for layer in history.layers:
                    ids_TK = history.ids(call, place, layer, rank).sort(1).values
                    right_TK, margins_T = history.choice(call, place, layer, rank)
                    right_TK, clear_T = right_TK.sort(1).values, margins_T > _MARGIN
                    wrong = ((ids_TK != right_TK).any(1) & clear_T).nonzero().flatten().tolist()
                    if not wrong:
                        yield Comparison(rank, pairs=int(clear_T.sum()) * ids_TK.shape[1])
                        continue
                    t = wrong[0]
                    said = f"rank {rank}: in step {call} token {t} of forward {place} selected experts"
                    said = f"{said} {ids_TK[t].tolist()} in router {layer}, expected {right_TK[t].tolist()} by scores"
                    why = f"and bias, whose sums differ by {float(margins_T[t]):.2g} or more"
                    cause = "likely cause: another bias is added, or with too few digits"
                    yield Comparison(rank, Finding("selection", f"{said} {why}; {cause}", (rank,)))


@judge(WrongBias, "finish")
def judge_reload(outcome: Outcome) -> Comparisons:
    """Decide whether loading restores the saved bits, and the next step gives the same biases as before.

    Raises:
        WrongBias: a bias differs after loading, or after the same step.
    """
    history = history_of(outcome)
    methods = [call.method for call in history.workload.calls]
    save, load = methods.index("save"), methods.index("load")
    for rank in history.ranks:
        pairs = [("after loading", history.seen(save, "now")[rank], history.seen(load, "now")[rank])]
        again = [history.seen(call + 1, "updates")[rank][-1]["now"] for call in (save, load)]
        pairs.append(("after the step that follows loading", *again))
        for when, before, after in pairs:
            for layer, (was_E, is_E) in enumerate(zip(before, after, strict=True)):
                if was_E.dtype == is_E.dtype and torch.equal(was_E, is_E):
                    yield Comparison(rank, elements=len(was_E))
                    continue
                said = f"rank {rank}: {when} the bias of router {layer} is {_difference(is_E, was_E)}"
                yield Comparison(rank, Finding("reload", f"{said}; likely cause: it is not saved, or rounded", (rank,)))


@judge(WrongBias, "finish")
def judge_growth(outcome: Outcome) -> Comparisons:
    """Decide whether every update moves the biases of an idle and a busy expert apart by twice the rate.

    Raises:
        WrongBias: they move by another amount than rounding in float32 explains.
    """
    history = history_of(outcome)
    for rank in history.ranks:
        for layer in history.layers:
            yield from _growth(history, rank, layer)


def _growth(history: History, rank: int, layer: int) -> Comparisons:
    """Yield comparisons of pairs of experts in one router, up to the first wrong one."""
    E, rate = history.workload.config.experts, history.workload.config.balance.rate
    first_E = history.bias(history.steps[0], rank, layer).double()
    always = [torch.ones(E, dtype=torch.bool), torch.ones(E, dtype=torch.bool)]
    load = [call.method for call in history.workload.calls].index("load")
    for point in history.points(rank, layer, declared(history.outcome)):
        if point.call > load:
            break  # biases were replaced by loading
        n_E = point.loads_E
        always = [always[0] & (E * n_E < n_E.sum()), always[1] & (E * n_E > n_E.sum())]
        bias_E = history.seen(point.call, "updates")[rank][point.number]["now"][layer]
        grown_E = bias_E.double() - first_E
        gap, error = growth(rate, point.updates)
        error += 4 * point.updates * _FLOAT32 * (1 + float(first_E.abs().max()))
        for low in always[0].nonzero().flatten().tolist():
            for busy in always[1].nonzero().flatten().tolist():
                found = float(grown_E[low] - grown_E[busy])
                ratio = abs(found - gap) / error
                if ratio <= 1:
                    yield Comparison(rank, elements=1, worst=ratio)
                    continue
                said = f"rank {rank}: {point.updates} updates by {rate} moved the biases of experts {low} (idle)"
                said = f"{said} and {busy} (busy) of router {layer} apart by {found:.9g}, expected {gap:.9g}"
                said = f"{said} within {error:.1g}; likely cause: the bias is kept in {_kept(bias_E)}"
                yield Comparison(rank, Finding("growth", said, (rank,)), worst=ratio)
                return


def _kept(bias_E: Tensor) -> str:
    if bias_E.dtype in (torch.bfloat16, torch.float16):
        return f"{bias_E.dtype}"
    rounded = bool((bias_E.to(torch.bfloat16).to(bias_E.dtype) == bias_E).all())
    return "torch.bfloat16 between updates" if rounded else "too few digits"


def judge_untrained(outcome: Outcome, tally: Tally) -> None:
    """Decide whether biases have no gradient, and are not changed by an optimizer that changes the routers.

    Raises:
        WrongGradient: a bias has a gradient that is not zero.
        ChangedState: the optimizer changed a bias.
    """
    _judge_gradients(outcome, tally)
    _judge_optimised(outcome, tally)


@judge(WrongGradient, "gradient")
def _judge_gradients(outcome: Outcome) -> Comparisons:
    history = history_of(outcome)
    for call in history.steps:
        for rank in history.ranks:
            for layer, gradient_E in enumerate(history.seen(call, "gradients")[rank]):
                if gradient_E is None or not bool(gradient_E.any()):
                    yield Comparison(rank, elements=history.workload.config.experts)
                    continue
                size = f"{float(gradient_E.abs().max()):.3g}"
                said = f"rank {rank}: the bias of router {layer} has a gradient of up to {size} in step {call}"
                yield Comparison(rank, Finding("gradient", f"{said}; expected none", (rank,)))


@judge(ChangedState, "finish")
def _judge_optimised(outcome: Outcome) -> Comparisons:
    history = history_of(outcome)
    call = [entry.method for entry in history.workload.calls].index("optimise")
    for rank in history.ranks:
        before, after = (history.seen(call, name)[rank]["now"] for name in ("before", "after"))
        if not history.seen(call, "changed")[rank]:
            said = f"rank {rank}: an optimizer over all parameters, each with a gradient, changed no element"
            said = f"{said} of the routers; expected: parameters() has them"
            yield Comparison(rank, Finding("routers", said, (rank,)))
            continue
        for layer, (was_E, is_E) in enumerate(zip(before, after, strict=True)):
            if torch.equal(was_E, is_E):
                yield Comparison(rank, elements=len(was_E))
                continue
            said = f"rank {rank}: a step of the optimizer left the bias of router {layer} at {_difference(is_E, was_E)}"
            yield Comparison(rank, Finding("optimised", f"{said}; likely cause: it is one of the parameters", (rank,)))
