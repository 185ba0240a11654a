"""Calls the second oracle of the balance bias as the recipe of its golden calls the first."""

from __future__ import annotations

import numpy as np

from self_tests.chapters.balance_bias import second
from self_tests.chapters.balance_bias.second import Forward
from self_tests.goldens.second_oracles import second_oracle

ORACLE = second_oracle(
    router_loads=lambda loads, routers: second.summed_loads([each.tolist() for each in loads], routers),
    update=lambda bias_E, loads_E, **how: second.moved(bias_E.tolist(), loads_E.tolist(), **how),
    without_constant=second.less_their_mean,
    Forward=lambda kind, loads_E: Forward(kind, loads_E.tolist()),
    Update=second.Update,
    trained=lambda bias_E, events, **how: second.after(bias_E.tolist(), events, **how),
    growth=second.grown,
    quantile_bounds=lambda parts, bias_E, *, top_k, padding=None, memory=0.0: second.legal_range(
        parts, bias_E.tolist(), top_k, padding, memory
    ),
    outside=lambda bias_E, low, high: second.missed(bias_E.tolist(), low, high),
    cutoffs=lambda scores_TE, bias_E, *, top_k: np.array(
        [second.cutoff(row, bias_E.tolist(), top_k) for row in scores_TE.tolist()]
    ),
)
