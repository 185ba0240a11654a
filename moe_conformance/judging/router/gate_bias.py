"""The bias of a router's gate: it is in the logits that select and that weigh, and has its gradient."""

from __future__ import annotations

from contextlib import suppress

from moe_conformance.judging.compare.bounded import Target
from moe_conformance.judging.explain.bounded_gradients import Held, Oracle, explain_gradients
from moe_conformance.judging.findings import fail, ratio_names
from moe_conformance.judging.observed.finished_gradients import finals_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import shard_of, stages
from moe_conformance.judging.router.expected import RouterExpected
from moe_conformance.judging.router.routers import expected_of, judge_router_weights, judge_selection
from moe_conformance.judging.verdict import AbsentGradient, NotOffered, Tally, Uncovered, WrongForm, WrongGradient
from moe_conformance.workloads.records.workload import ParameterKey

_GATE_BIAS: ParameterKey = ("gate_bias", None)


def judge_gate_bias(reading: Reading, tally: Tally) -> None:
    """Decide whether selection and weights are those of logits with the gate bias, and whether it gets its gradient.

    That is the gradient over the tokens of the pipeline stage; where the backend finishes no gradients, values are
    all that is judged.

    Raises:
        WrongForm, WrongSelection, WrongWeight: as `judge_selection` and `judge_router_weights`.
        Uncovered: a rank does not name the gate bias.
        AbsentGradient: its gradient is None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    judge_selection(reading, tally)
    judge_router_weights(reading, tally)
    with suppress(NotOffered):
        _judge_gradient(reading, tally)


def _judge_gradient(reading: Reading, tally: Tally) -> None:
    expected, finals = expected_of(reading), finals_of(reading)
    for stage, ranks in enumerate(stages(expected.workload.layout)):
        held = []
        for rank in ranks:
            if _GATE_BIAS not in finals[rank]:
                sentence = f"the gate bias is not yielded by 'named' on rank {rank} after finishing"
                raise Uncovered("finish", sentence, ranks=(rank,))
            grad = finals[rank][_GATE_BIAS]
            target = Target(*(shard_of(each, grad.shard) for each in expected.gate_bias_gradient(stage)))
            if grad.value is None:
                raise AbsentGradient("finish", f"the gradient of the gate bias on rank {rank} is None", ranks=(rank,))
            if grad.value.shape != target.expected.shape:
                shapes = f"{tuple(grad.value.shape)} instead of {tuple(target.expected.shape)}"
                sentence = f"the gradient of the gate bias on rank {rank} has the shape {shapes}"
                raise WrongForm("finish", sentence, ranks=(rank,))
            held.append(Held(rank, stage, _GATE_BIAS, grad.shard, grad.value, target))
        if [each for each in held if not each.holds(tally)]:
            names = ratio_names({"the scale": expected.workload.config.routing.scale}) | reading.router_ratios
            findings, ratio = explain_gradients(_gradients_of(expected), held, names)
            fail(WrongGradient, "finish", findings, ratio=ratio)


def _gradients_of(expected: RouterExpected) -> Oracle:
    return Oracle(
        expected.workload,
        expected.divisor,
        lambda places: {_GATE_BIAS: expected.solve(places)[1][:, -1]},
        lambda places: iter(()),
    )
