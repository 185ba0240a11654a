"""Judges of layers whose router drops slots: results are the sum over the kept slots and the shared experts.

The kept slots are computed from the spec (see `LayerExpected.kept`) and not inferred from y.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from moe_conformance.judging.compare.bounded import Worst, compare, compared
from moe_conformance.judging.comparisons import Comparisons, Note, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.layer.expected import LayerExpected
from moe_conformance.judging.shared.layer.layer import EVERY, expected_of, judge_layer_dx, judge_layer_gradients
from moe_conformance.judging.verdict import Indecisive, Tally, WrongForm, WrongOutput


@judge(WrongOutput, "combine")
def judge_lost_in_layer(reading: Reading) -> Comparisons:
    """Decide whether y of tokens that lost all slots is the shared experts' output, or zero, within rounding.

    Counts the elements of such tokens.

    Raises:
        WrongForm: y is missing, or not (T, D).
        WrongOutput: an element lies outside its bound.
        Indecisive: no token loses all of its slots.
    """
    config, expected = reading.outcome.workload.config, expected_of(reading)
    if all(bool(kept_TK.any(1).all()) for kept_TK in expected.kept.values()):
        raise Indecisive("no token loses all of its slots")
    right = "the output of its shared experts" if config.shared.ffn else "zero"
    for (_, rank), t, kept, worst in _outputs(reading, expected):
        if not kept:
            sentence = f"rank {rank} token {t} had all slots dropped; y is not {right}: {worst}"
            yield compared(rank, worst, "lost", sentence, config.hidden)
    yield Note(lambda: _by_design(reading, expected))


@judge(WrongOutput, "combine")
def judge_kept_in_layer(reading: Reading) -> Comparisons:
    """Decide whether y of tokens with kept slots is the sum of these and the shared experts, within rounding.

    Weights are those before the drop, unless the backend claims another rule. Counts the elements of such tokens.

    Raises:
        WrongForm: y is missing, or not (T, D).
        WrongOutput: an element lies outside its bound.
    """
    config, expected = reading.outcome.workload.config, expected_of(reading)
    also = " and the shared experts" if config.shared.ffn else ""
    for (m, rank), t, kept, worst in _outputs(reading, expected):
        if kept:
            slots = f"rank {rank} token {t} of microbatch {m} kept {kept} of {config.top_k} slots"
            sentence = f"{slots}; y is not the sum over these{also}: {worst}"
            yield compared(rank, worst, "kept", sentence, config.hidden)
    yield Note(lambda: _by_design(reading, expected))


def judge_dropped_in_layer(reading: Reading, tally: Tally) -> None:
    """Decide whether only kept slots and shared experts give gradients to tokens and parameters.

    A token that lost all its slots has the gradient through the shared experts. The weight of a dropped slot gives the
    router a gradient only through a sum that included it before the drop. An expert that keeps no slot ends with zeros.
    A gradient whose addends are all zero must be zero, not None.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: the ranks of a stage together do not name all of a parameter.
        AbsentGradient: a gradient is None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    judge_layer_dx(reading, tally)
    judge_layer_gradients(reading, tally, EVERY)


def _by_design(reading: Reading, expected: LayerExpected) -> str:
    """Return a note with the claim under which all outputs would be right, "" if there is none."""
    for rule, note in expected.rule.others():
        if all(worst.holds for *_, worst in _outputs(reading, expected.by(rule))):
            return note
    return _cause(reading, expected)


def _cause(reading: Reading, expected: LayerExpected) -> str:
    """Return a note with the option that the layer ignores, if that explains all outputs, else ""."""
    config = expected.workload.config
    other = "position" if config.capacity.drop_policy == "weights" else "weights"
    ignored: dict[str, dict[str, object]] = {
        "no slot was dropped": {"capacity.factor": None},
        f"slots are kept as by {other}": {"capacity.drop_policy": other},
    }
    for words, options in ignored.items():
        workload = replace(expected.workload, config=config.changed(options))
        if all(worst.holds for *_, worst in _outputs(reading, replace(expected, workload=workload))):
            return f"; likely cause: {words}"
    return ""


def _outputs(reading: Reading, expected: LayerExpected) -> Iterator[tuple[Place, int, int, Worst]]:
    """Yield the place, number, kept slots and worst element of y of every token.

    Raises:
        WrongForm: y is missing, or has another shape.
    """
    for place in expected.places:
        y_TD, (wanted_TD, allowed_TD) = _output(reading, place), expected.y(place)
        for t, kept in enumerate(expected.kept[place].sum(1).tolist()):
            yield place, t, kept, compare(y_TD[t], wanted_TD[t], allowed_TD[t])


def _output(reading: Reading, place: Place) -> Tensor:
    """Return y of a place, (T, D).

    Raises:
        WrongForm: y is missing, or has another shape.
    """
    (m, rank), y_TD = place, reading.seen(*place).y
    if y_TD is None or y_TD.shape != reading.batches[m][rank].x_TD.shape:
        raise WrongForm("combine", f"y of rank {rank} in microbatch {m} is None or not (T, D)", ranks=(rank,))
    return y_TD
