"""Calls the second oracle of shared experts as the recipe of its golden calls the first."""

from __future__ import annotations

import numpy as np

from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.shared_experts import second
from self_tests.chapters.shared_experts.second import Shared
from self_tests.goldens.second_oracles import second_oracle

ORACLE = second_oracle(
    SharedExpert=lambda gate_FD, up_FD, down_DF, bias_D=None: Shared(SwiGLU(gate_FD, up_FD, down_DF), bias_D),
    shared_expert=lambda x_TD, expert: np.array([second.answer(expert, x_D) for x_D in x_TD]),
    gate_factors=lambda x_TD, gate_D: np.array([second.factor(x_D, gate_D) for x_D in x_TD]),
    shared_part=lambda x_TD, shared, gate_D=None: np.array([second.added(x_D, shared, gate_D) for x_D in x_TD]),
)
