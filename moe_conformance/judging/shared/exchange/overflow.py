"""The elements of an output that must be finite: those that cannot overflow in any order of summation."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.reference.exchange import overflow
from moe_conformance.reference.experts import Parameters


def must_be_finite(reading: Reading, place: Place) -> Tensor:
    """Return a bool mask (T, D) of the elements of y at a place that must be finite if its tokens are.

    The suite's experts write every element once, so that only the expected value has to fit the dtype.
    """
    m, rank = place
    workload = reading.outcome.workload
    batch, config = workload.batches[m][rank], workload.config
    addends = batch.ids_TK.shape[1] + 2  # slots, the product with the weight, and the expert's own
    if not workload.parameters:
        largest = torch.finfo(config.dtype).max / (1 + torch.finfo(config.dtype).eps / 2) ** addends
        return reading.expected.y[m][rank].double().abs() <= largest
    parameters = cast(Parameters, workload.parameters)
    F, D = next(value for (name, _), value in parameters.items() if name == "gate").shape
    return overflow.must_be_finite(
        batch.x_TD,
        batch.ids_TK,
        batch.weights_TK,
        overflow.swiglu_peaks(parameters),
        config.dtype,
        addends + F + D,
        weights_at="input" if reading.ranks[0].weights_at == "input" else "output",
    )
