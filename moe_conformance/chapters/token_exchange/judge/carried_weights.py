"""Judge of weights that a fused token exchange sends: weighted outputs, and gradients of the weights.

K slots, N experts held. Local expert n returns n + 1 times its row (see `records.Answered`); all numbers are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.chapters.token_exchange.judge.token_exchange import Script
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome


def judge_travelling_weights(outcome: Outcome, tally: Tally) -> None:
    """Decide whether y is the weighted sum of the expert outputs, with its gradients.

    Gradients are judged for arguments that require one. That of a slot's weight is the inner product of its expert's
    output with the upstream gradient, and zero for an empty slot; with S shards of an expert there are S outputs.

    Raises:
        WrongOutput, WrongForm: a combine does not return the sum.
        WrongGradient, AbsentGradient: the gradient of a token or of a weight is not that of the sum.
        ChangedInput: a call changed its input.
    """
    script = Script(outcome)
    for number, call, sent in script.answers:
        outputs, of_tokens, of_weights = [], [], []
        for rank, (given, upstream) in enumerate(zip(script.call(sent).given, call.upstream, strict=True)):
            x_TD, dy_TD = given["x_TD"].double(), upstream[""].double()
            gains_TK = _gains(script, rank, given["ids_TK"])
            weight_T1 = (gains_TK * given["weights_TK"].double()).sum(1, keepdim=True)
            outputs.append(weight_T1 * x_TD)
            of_tokens.append(weight_T1 * dy_TD)
            of_weights.append(gains_TK * (x_TD * dy_TD).sum(1, keepdim=True))
        script.judge_output(tally, number, outputs)
        whose = f"of dispatch (call {sent}) through combine (call {number})"
        for name, expected in (("x_TD", of_tokens), ("weights_TK", of_weights)):
            if name in script.call(sent).differentiable:
                script.judge_gradients(tally, sent, name, expected, f"the gradient of {name} {whose}")
    script.judge_arguments(tally)


def _gains(script: Script, rank: int, ids_TK: Tensor) -> Tensor:
    """Return the factor of every slot's expert, summed over the ranks that hold it; 0 for an empty slot."""
    gains_TK = torch.zeros(ids_TK.shape, dtype=torch.float64)
    for holder in script.group_of[rank]:
        for n, expert in enumerate(script.held[holder]):
            gains_TK += (n + 1) * (ids_TK == expert)
    return gains_TK
