"""Early uses of asynchronous collectives are detected in every run, and correct code has no hazard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_conformance.engine import Engine, Job, JobResult
from moe_conformance.engine.ledger.entry import Asynchrony
from self_tests.engine.ledger_jobs import CALLS

JOBS = "self_tests.engine.ledger_jobs"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file."""
    with Engine(preload=(JOBS, "torch._dynamo")) as engine:  # functional collectives import it
        yield engine


@pytest.fixture
def run(engine: Engine) -> Callable[..., JobResult]:
    """Runs a function of ledger_jobs on two ranks."""

    def run(function: str, asynchrony: Asynchrony, payload: Any = None) -> JobResult:
        return engine.run(Job(f"{JOBS}:{function}", payload, 2, {}, asynchrony=asynchrony))

    return run


def hazards(result: JobResult) -> list[list[tuple[str, str]]]:
    """Returns every rank's hazards: their kinds, with the operators of the early uses."""
    return [[(one.kind, one.where.partition("(")[2].rstrip(")")) for one in rank.hazards] for rank in result.ranks]


class TestWaits:
    @pytest.mark.parametrize("asynchrony", ["plain", "poisoned", "watched"])
    def test_a_forgotten_handle_is_told(self, run: Callable[..., JobResult], asynchrony: str) -> None:
        """The rank that did not wait is blamed; the line of its call is named."""
        result = run("never_wait", asynchrony)
        assert (False, (1,)) == (result.ok, result.blamed)
        assert [[], [("never waited", "")]] == hazards(result)
        assert ("ok", False) == (result.ranks[1].status, result.ranks[1].secondary)
        assert "all_reduce on group (0, 1), issued at" in result.ranks[1].error
        assert result.ranks[1].error.endswith("was never waited for")
        assert "ledger_jobs.py:" in result.ranks[1].hazards[0].issued

    @pytest.mark.parametrize("asynchrony", ["plain", "poisoned", "watched"])
    def test_a_functional_result_that_nobody_uses_needs_no_wait(
        self, run: Callable[..., JobResult], asynchrony: str
    ) -> None:
        """Using the result of a functional collective would wait for it."""
        assert run("drop_a_functional_result", asynchrony).ok


class TestPoison:
    @pytest.mark.parametrize(
        "function", ["read_early_through_a_view", "read_early_in_backward", "read_raw_functional_early"]
    )
    def test_what_is_read_early_is_nan(self, run: Callable[..., JobResult], function: str) -> None:
        """An early read gives NaN, in whichever way it is made."""
        for _ in range(3):
            for rank in run(function, "poisoned").ranks:
                early = rank.value[0] if isinstance(rank.value, tuple) else rank.value
                assert early.isnan().all()

    def test_the_result_is_right_after_the_wait(self, run: Callable[..., JobResult]) -> None:
        """The early use changes only what was computed from it."""
        for rank in run("read_early_through_a_view", "poisoned").ranks:
            assert torch.equal(torch.tensor([[1.0, 2.0, 3.0], [101.0, 102.0, 103.0]]), rank.value[1])

    def test_the_tensor_in_a_waiting_one_is_nan_until_then(self, run: Callable[..., JobResult]) -> None:
        """AsyncCollectiveTensor waits by itself, but not if its inner tensor is used."""
        for rank in run("read_element_early", "poisoned").ranks:
            early, late = rank.value
            assert early.isnan().all()
            assert [102.0, 104.0, 106.0] == late.tolist()

    @pytest.mark.parametrize(
        ("dtype", "poison"),
        [(torch.int64, -(2**63)), (torch.int32, -(2**31)), (torch.int8, -128), (torch.uint8, 255)],
        ids=str,
    )
    def test_integers_that_are_read_early_are_no_counts(
        self, run: Callable[..., JobResult], dtype: torch.dtype, poison: int
    ) -> None:
        """They are the smallest of their dtype; where that is zero, which is a count, the largest."""
        for rank in run("read_counts_early", "poisoned", dtype).ranks:
            early, late = rank.value
            assert ([poison] * 2, [1, 1]) == (early.tolist(), late.tolist())

    def test_a_change_of_what_is_sent_is_told_and_not_sent(self, run: Callable[..., JobResult]) -> None:
        """The transport sends what the buffer held at the call."""
        result = run("change_what_is_sent", "poisoned")
        assert ([[("sent data changed", "")], []], (0,)) == (hazards(result), result.blamed)
        assert [1.0, 2.0, 101.0, 102.0] == result.ranks[0].value.tolist()
        assert [3.0, 4.0, 103.0, 104.0] == result.ranks[1].value.tolist()

    def test_a_write_into_an_output_is_told(self, run: Callable[..., JobResult]) -> None:
        """A write into an output before the wait is lost, and reported."""
        result = run("write_early", "poisoned")
        assert [[("output written", "")]] * 2 == hazards(result)


class TestWatch:
    @pytest.mark.parametrize(
        ("function", "operator"),
        [
            ("read_early_through_a_view", "aten.sum.default"),
            ("read_early_in_backward", "aten.mul.Tensor"),
            ("read_raw_functional_early", "aten.add.Tensor"),
            ("read_element_early", "aten.add.Tensor"),
            ("read_counts_early", "aten.clone.default"),
            ("read_bools_early", "aten.sum.default"),
            ("write_early", "aten.fill_.Scalar"),
            ("pass_on_early", "all_gather_into_tensor"),
        ],
    )
    def test_the_line_of_an_early_touch_is_named(
        self, run: Callable[..., JobResult], function: str, operator: str
    ) -> None:
        """On every rank, for any dtype, forward and backward."""
        result = run(function, "watched")
        assert (0, 1) == result.blamed
        assert [[("output touched", operator)]] * 2 == hazards(result)
        (hazard,) = result.ranks[0].hazards
        line = _line(hazard.where)
        assert any(word in line for word in ("early", "received * 2", "read(", "view", "gathered"))
        assert hazard.issued != hazard.where.partition(" ")[0]

    def test_the_line_that_changes_what_is_sent_is_named(self, run: Callable[..., JobResult]) -> None:
        """Only the rank that does it is blamed."""
        result = run("change_what_is_sent", "watched")
        assert ([[("sent data changed", "aten.mul_.Tensor")], []], (0,)) == (hazards(result), result.blamed)
        assert "sent.mul_(2)" in _line(result.ranks[0].hazards[0].where)


def _line(where: str) -> str:
    """The text of a line that a hazard names."""
    file, _, number = where.partition(" ")[0].rpartition(":")
    with open(file, encoding="utf-8") as source:
        return source.read().splitlines()[int(number) - 1]


class TestCorrectCode:
    @pytest.mark.parametrize("asynchrony", ["poisoned", "watched"])
    def test_correct_uses_bring_the_same_as_without(self, run: Callable[..., JobResult], asynchrony: str) -> None:
        """Correct uses (overlap, views, in-place buffers, roots, messages, polling, futures) give the same results."""
        plain, other = run("use_correctly", "plain"), run("use_correctly", asynchrony)
        assert (True, True) == (plain.ok, other.ok)
        for expected, rank in zip(plain.ranks, other.ranks, strict=True):
            torch.testing.assert_close(rank.value, expected.value, rtol=0, atol=0)

    @pytest.mark.parametrize("asynchrony", ["poisoned", "watched"])
    def test_sharded_training_brings_the_same_as_without(self, run: Callable[..., JobResult], asynchrony: str) -> None:
        """FSDP and DTensor steps give the same gradients as in "plain" mode."""
        plain, other = run("train_sharded", "plain"), run("train_sharded", asynchrony)
        assert ([None, None], True) == ([rank.error for rank in other.ranks], plain.ok)
        for expected, rank in zip(plain.ranks, other.ranks, strict=True):
            torch.testing.assert_close(rank.value, expected.value, rtol=0, atol=0)

    @pytest.mark.parametrize("asynchrony", ["poisoned", "watched"])
    def test_no_kind_of_call_is_a_hazard(self, run: Callable[..., JobResult], asynchrony: str) -> None:
        """No recorded kind of call is a hazard if it is used correctly."""
        errors = {name: [rank.error for rank in run("call", asynchrony, name).ranks] for name in CALLS}
        assert {name: [None, None] for name in CALLS} == errors
