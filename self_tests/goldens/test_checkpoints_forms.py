"""The goldens of stored forms are what the longhand makes of the stored bits, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_conformance.goldens.chapters.checkpoints_forms import EXPERTS, FORMS, ORDERS, PARTS, D, F
from self_tests.chapters.checkpoints.second import forms
from self_tests.chapters.checkpoints.second.forms import Form
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def of_fused(fused_2FD: Any) -> dict[str, Any]:
    """Gate and up found in a fused matrix, and its parts."""
    found = {}
    for order in ORDERS:
        form = Form(stacked=False, fused=order, transposed=False)
        down_DF = np.zeros((D, F), dtype=np.int64)
        read = forms.read({"0.gate_up": fused_2FD, "0.down": down_DF}, form, 1, F, D)
        gate_FD, up_FD = read["gate", 0], read["up", 0]
        answers = {"gate_FD": gate_FD, "up_FD": up_FD, "again_2FD": forms.stored(read, form)["0.gate_up"]}
        for parts in PARTS:
            cut = [forms.fused_part(gate_FD, up_FD, order, part, parts) for part in range(parts)]
            answers[f"of-{parts}"] = np.array(cut)
        found |= {f"{order}.{name}": value for name, value in answers.items()}
    return found


def of_form(own: Mapping[str, Any], form: Form, E: int) -> dict[str, Any]:
    """A file of this form, those of experts apart stacked, and what is read from it."""
    held = {(name, e): own[name][e] for name in own for e in range(E)}
    file = forms.stored(held, form)
    read = forms.read(file, form, E, F, D)
    found = {"read_E3FD": [[read["gate", e], read["up", e], read["down", e].T] for e in range(E)]}
    for name in {name.split(".")[-1] for name in file}:
        found[name] = file[name] if form.stacked else [file[f"{e}.{name}"] for e in range(E)]
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored tensor of every form, every part of a fused one."""
        values = stored("checkpoints_forms")
        answers = told("fused", of_fused(values["fused/in/fused_2FD"]))
        for case, E in EXPERTS.items():
            for name, form in FORMS.items():
                own = Form(form.stacked, form.fused, form.transposed)
                answers |= told(f"{case}-{name}", of_form(given(values, case), own, E))
        assert_twins("checkpoints_forms", answers)
