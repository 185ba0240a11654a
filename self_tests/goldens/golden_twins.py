"""Holds what a chapter of the goldens stores against what a second oracle makes of the stored inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from moe_conformance.goldens import stored_values
from self_tests.oracles.agreement import RELATIVE


def stored(chapter: str) -> dict[str, Any]:
    """The stored inputs and outputs by name, as arrays."""
    return {name: value.numpy() for name, value in stored_values.read(stored_values.folder(), chapter).items()}


def given(values: Mapping[str, Any], case: str) -> dict[str, Any]:
    """The inputs of one case by quantity."""
    return {name.split("/")[2]: value for name, value in values.items() if name.startswith(f"{case}/in/")}


def told(case: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Answers of one case under the names that goldens have."""
    return {f"{case}/out/{quantity}": answer for quantity, answer in answers.items()}


def assert_twins(chapter: str, answers: Mapping[str, Any], *, unanswered: Collection[str] = ()) -> None:
    """Fail unless the chapter stores these answers, up to rounding, and nothing else but what is named unanswered."""
    found = {name: value for name, value in stored(chapter).items() if "/out/" in name}
    assert set(found) == {*answers, *unanswered}
    for name, answer in answers.items():
        expected = np.array(answer.detach() if isinstance(answer, Tensor) else answer)
        assert expected.shape == found[name].shape, name
        if found[name].dtype == np.int64:
            assert np.array_equal(expected, found[name]), name
        else:
            largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
            np.testing.assert_allclose(found[name], expected, RELATIVE, RELATIVE * largest, err_msg=name)
