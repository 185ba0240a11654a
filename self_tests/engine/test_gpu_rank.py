"""The checks around every job on a GPU, as far as they can be tested without one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch

from moe_conformance.engine.gpu.job_checks import MESSAGE, HostSyncs, LateError, MemoryBaseline, wait_for_gpu

CPU = torch.device("cpu")
MARK = 12345  # a size that no other tensor of this process has


def bytes_of_marked_tensors() -> int:
    """Returns the bytes of all tensors with MARK elements that are alive."""
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == MARK)


class TestMemory:
    def test_nothing_more_is_nothing_left(self) -> None:
        """A tensor that existed before, or was freed again, is not reported."""
        before = torch.zeros(MARK)
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        during = torch.zeros(MARK)
        del during
        assert () == baseline.left()
        assert before is not None

    def test_what_is_left_is_told_once(self) -> None:
        """The growth becomes the baseline: the next job is not blamed for it."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held = torch.zeros(MARK, dtype=torch.float64)
        assert (f"{8 * MARK} bytes of device memory",) == baseline.left()
        assert () == baseline.left()
        assert held is not None

    def test_garbage_in_a_cycle_is_collected_first(self) -> None:
        """A tensor that only a reference cycle holds is not reported."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        cycle: list[object] = [torch.zeros(MARK)]
        cycle.append(cycle)
        del cycle
        assert () == baseline.left()

    def test_less_than_before_lowers_the_baseline(self) -> None:
        """What a job frees lowers the baseline, so that a later job that allocates it is reported."""
        held = [torch.zeros(MARK)]
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held.clear()
        assert () == baseline.left()
        held.append(torch.zeros(MARK))
        assert (f"{4 * MARK} bytes of device memory",) == baseline.left()

    def test_what_is_settled_is_not_left(self) -> None:
        """A reset of the baseline makes the present memory the baseline."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held = torch.zeros(MARK)
        baseline.reset()
        assert () == baseline.left()
        assert held is not None


class TestPoisoned:
    def test_a_late_error_says_that_the_function_had_returned(self) -> None:
        """The message is one line, whatever CUDA appends."""
        late = LateError(RuntimeError("CUDA error: device-side assert triggered\nFor debugging consider"))
        expected = "the function returned, but its GPU work failed: CUDA error: device-side assert triggered"
        assert expected == str(late)

    def test_the_cpu_has_nothing_to_wait_for(self) -> None:
        """On the CPU the check leaves CUDA alone."""
        wait_for_gpu(CPU)
        assert not torch.cuda.is_initialized()


@pytest.fixture
def listening() -> Iterator[HostSyncs]:
    """A counter that counts warnings, as it would on a GPU."""
    with warnings.catch_warnings():
        counter = HostSyncs(torch.device("cuda"))
        counter.start_counting()
        yield counter
        counter.stop_counting()


def synchronise(times: int) -> None:
    """Warns as torch does when the host waits; every time from the same line."""
    for _ in range(times):
        warnings.warn(f"{MESSAGE} (Triggered internally at CUDAFunctions.cpp:137.)", UserWarning, stacklevel=1)


class TestHostSyncs:
    def test_each_synchronisation_counts(self, listening: HostSyncs) -> None:
        """Warnings from one source line are counted every time."""
        synchronise(3)
        assert 3 == listening.count

    def test_a_function_that_records_warnings_sees_only_others(self, listening: HostSyncs) -> None:
        """Counted warnings do not appear among those that the function records."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            synchronise(2)
            warnings.warn("another", UserWarning, stacklevel=1)
        assert (2, ["another"]) == (listening.count, [str(one.message) for one in caught])

    def test_warnings_go_their_way_afterwards(self) -> None:
        """The replaced hook is restored."""
        before = warnings._showwarnmsg  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            counter = HostSyncs(torch.device("cuda"))
            counter.start_counting()
            counter.stop_counting()
        assert before is warnings._showwarnmsg  # type: ignore[attr-defined]

    def test_on_the_cpu_nothing_is_counted(self) -> None:
        """The count is None, and not zero, on the CPU."""
        before = warnings._showwarnmsg  # type: ignore[attr-defined]
        with HostSyncs(CPU) as counter:
            assert before is warnings._showwarnmsg  # type: ignore[attr-defined]
        assert counter.count is None
