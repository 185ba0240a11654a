"""Each golden's recipe, called with the second oracle, gives what is stored."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_conformance.goldens import stored_values
from moe_conformance.goldens.chapter import Chapter
from moe_conformance.goldens.chapters import chapters
from moe_conformance.goldens.chapters import scatter as scatter_chapter
from moe_conformance.reference.routing import routes
from self_tests.oracles.agreement import RELATIVE

SECONDS = Path(__file__).parents[1] / "chapters"
REFERENCE = str(Path(str(routes.__file__)).parents[1])


def second_of(name: str) -> ModuleType:
    """Return what calls the second oracle for a golden: that of the chapter whose name the golden's begins with."""
    (chapter,) = (each for each in SECONDS.iterdir() if name == each.name or name.startswith(f"{each.name}_"))
    return import_module(f"self_tests.chapters.{chapter.name}.golden")


def assert_same(name: str, stored: Tensor, answer: Tensor) -> None:
    """Fail unless integers are equal and float64 numbers equal up to rounding, NaN and infinities to themselves."""
    assert (stored.dtype, stored.shape) == (answer.dtype, answer.shape), name
    if stored.is_floating_point():
        expected = answer.numpy()
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        np.testing.assert_allclose(stored.numpy(), expected, RELATIVE, RELATIVE * largest, err_msg=name)
    else:
        assert torch.equal(answer, stored), name


@contextmanager
def without_reference() -> Iterator[None]:
    """Fail if a function of reference/ is called."""
    called = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(REFERENCE):
            called.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert set() == called


def compared(name: str, recipe: Chapter, values: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the name of each output of a golden after it was compared with what the second oracle gives."""
    second = second_of(name)
    inputs = {key: value for key, value in values.items() if "/in/" in key}
    with without_reference():
        answers = recipe.work_out(inputs, second.ORACLE)
    assert {key for key in values if "/out/" in key} == set(answers)
    for key in sorted({*answers} - {*getattr(second, "UNANSWERED", ())}):
        assert_same(key, values[key], answers[key])
        yield key


class TestSecondOracles:
    @pytest.mark.parametrize("name", chapters())
    def test_they_give_what_is_stored(self, name: str) -> None:
        """Every output but those that the chapter's `golden.py` names as unanswered, of the stored inputs."""
        values = stored_values.read(stored_values.folder(), name)
        outputs = {key for key in values if "/out/" in key}
        unanswered = outputs & {*getattr(second_of(name), "UNANSWERED", ())}
        assert outputs - unanswered == set(compared(name, chapters()[name], values))

    def test_what_they_do_not_answer_is_stored(self) -> None:
        """All names of unanswered outputs, of all chapters together, are names of outputs."""
        stored = {key for name in chapters() for key in stored_values.read(stored_values.folder(), name)}
        named = {key for name in chapters() for key in getattr(second_of(name), "UNANSWERED", ())}
        assert {"bits/out/same-others", "not-positive/out/valid_N", "views/out/slices"} == named
        assert named <= stored

    def test_they_are_not_those_of_reference(self) -> None:
        """The recipe called with the first oracle calls reference/, which the comparison would report."""
        recipe = chapters()["groups"]
        inputs = recipe.draw(np.random.default_rng(recipe.seed))
        with pytest.raises(AssertionError, match="valid"), without_reference():
            recipe.work_out(inputs, recipe.oracle)

    @pytest.mark.parametrize(
        ("key", "at", "change"),
        [
            ("softmax/out/ids_TK", (4, 2), 1),
            ("softmax/out/weights_TK", (2, 0), 1e-10),
            ("softmax/out/dlogits_TE", (6, 11), 1e-10),
        ],
    )
    def test_a_changed_value_is_reported(self, key: str, at: tuple[int, int], change: float) -> None:
        """An output that the recipe does not give, of whole numbers, values or gradients, is named."""
        values = stored_values.read(stored_values.folder(), "routing")
        values[key][at] += change
        with pytest.raises(AssertionError, match=key):
            list(compared("routing", chapters()["routing"], values))


class TestByHand:
    """What no second oracle answers, or torch itself does."""

    stored = stored_values.read(stored_values.folder(), "scatter")

    def test_real_tensors_lie_where_their_strides_say(self) -> None:
        """Of a 4 x 6 buffer, 8 bytes an element: offset, two sizes, two strides, bytes."""
        by_hand = [
            [8 * (6 + 2), 3, 2, 6, 2, 8],  # rows from 1 on, every second column from 2 on
            [8 * 3, 3, 4, 1, 6, 8],  # columns from 3 on, as rows
            [8 * 12, 2, 6, 0, 1, 8],  # row 2 twice
            [0, 3, 0, 6, 1, 8],  # rows from 1 on, no column
        ]
        assert by_hand == self.stored["views/out/slices"].tolist()

    def test_gradients_are_recorded_as_torch_records_them(self) -> None:
        """In every stored nesting of modes, where an input requires a gradient and where none does."""
        recorded = []
        for modes in scatter_chapter.NESTED:
            x, y = torch.ones(1, requires_grad=True), torch.ones(1)
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(getattr(torch, mode)())
                recorded.append([False, (2 * y).requires_grad, (x * y).requires_grad])
        assert np.array_equal(recorded, self.stored["modes/out/recorded_MR"])
