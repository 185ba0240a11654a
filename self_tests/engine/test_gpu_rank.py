"""What a rank watches on a GPU, as far as its logic can be seen without one."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from moe_conformance.engine.gpu.job_checks import MESSAGE, HostSyncs, LateError, MemoryBaseline, wait_for_gpu

CPU = torch.device("cpu")
MARK = 12345  # a size that no other tensor of this process has


def bytes_of_marked_tensors() -> int:
    """Returns the bytes of the living tensors with MARK elements."""
    return sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == MARK)


class TestMemory:
    def test_nothing_more_is_nothing_left(self):
        """A tensor that was there before, or is gone again, is no growth."""
        before = torch.zeros(MARK)
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        during = torch.zeros(MARK)
        del during
        assert () == baseline.left()
        assert before is not None

    def test_what_is_left_is_told_once(self):
        """The growth becomes the baseline: the next job is not blamed for it."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held = torch.zeros(MARK, dtype=torch.float64)
        assert (f"{8 * MARK} bytes of device memory",) == baseline.left()
        assert () == baseline.left()
        assert held is not None

    def test_garbage_in_a_cycle_is_collected_first(self):
        """A tensor that only a reference cycle holds is nobody's."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        cycle: list[object] = [torch.zeros(MARK)]
        cycle.append(cycle)
        del cycle
        assert () == baseline.left()

    def test_less_than_before_lowers_the_baseline(self):
        """What a job frees, a later one may not take in silence."""
        held = [torch.zeros(MARK)]
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held.clear()
        assert () == baseline.left()
        held.append(torch.zeros(MARK))
        assert (f"{4 * MARK} bytes of device memory",) == baseline.left()

    def test_what_is_settled_is_not_left(self):
        """A job that makes something to last moves the baseline."""
        baseline = MemoryBaseline(bytes_of_marked_tensors)
        held = torch.zeros(MARK)
        baseline.reset()
        assert () == baseline.left()
        assert held is not None


class TestPoisoned:
    def test_a_late_error_says_that_the_function_had_returned(self):
        """One line, whatever CUDA adds."""
        late = LateError(RuntimeError("CUDA error: device-side assert triggered\nFor debugging consider"))
        expected = "the function returned, but its GPU work failed: CUDA error: device-side assert triggered"
        assert expected == str(late)

    def test_the_cpu_has_nothing_to_wait_for(self):
        """The check is free there."""
        wait_for_gpu(CPU)


@pytest.fixture
def listening():
    """A counter that listens, as it would on a GPU."""
    with warnings.catch_warnings():
        counter = HostSyncs(torch.device("cuda"))
        counter.start_counting()
        yield counter
        counter.stop_counting()


def synchronise(times: int) -> None:
    """Warns as torch does when the host waits; each time from the same line."""
    for _ in range(times):
        warnings.warn(f"{MESSAGE} (Triggered internally at CUDAFunctions.cpp:137.)", UserWarning, stacklevel=1)


class TestHostSyncs:
    def test_each_synchronisation_counts(self, listening):
        """Also from one source line."""
        synchronise(3)
        assert 3 == listening.count

    def test_a_function_that_records_warnings_sees_only_others(self, listening):
        """What is counted does not mix with what the function is asked about."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            synchronise(2)
            warnings.warn("another", UserWarning, stacklevel=1)
        assert (2, ["another"]) == (listening.count, [str(one.message) for one in caught])

    def test_warnings_go_their_way_afterwards(self):
        """What was replaced to listen is put back."""
        before = warnings._showwarnmsg
        with warnings.catch_warnings():
            counter = HostSyncs(torch.device("cuda"))
            counter.start_counting()
            counter.stop_counting()
        assert before is warnings._showwarnmsg

    def test_on_the_cpu_nothing_is_counted(self):
        """None, not zero: nobody has looked."""
        before = warnings._showwarnmsg
        with HostSyncs(CPU) as counter:
            assert before is warnings._showwarnmsg
        assert counter.count is None
