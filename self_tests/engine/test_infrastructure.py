"""Faults of the machine are distinguished from those of the code under test, by messages of libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.engine import Engine, Job
from moe_conformance.engine.infrastructure import classify

# In the words of the CUDA driver and runtime, NCCL, torch and Python, as their documentation and sources have them.
MACHINE = {
    "GPU reported Xid 79": "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.",
    "GPU reported Xid 48": "[ 12.5] NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error (DBE) was detected",
    "GPU reported Xid 74": "NVRM: Xid (PCI:0000:87:00): 74, pid='<unknown>', NVLink: fatal error detected on link 6",
    "GPU reported Xid 94": "NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error",
    "memory error of a GPU": "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might",
    "memory error of a GPU: node7:88:91 [0] x.cc:12 NCCL WARN": "a\nnode7:88:91 [0] x.cc:12 NCCL WARN Cuda failure "
    "'uncorrectable ECC error encountered'\nb",
    "link between GPUs failed": "CUDA error: uncorrectable NVLink error detected during the execution",
    "GPU lost": "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system",
    "GPU busy or unavailable": "RuntimeError: CUDA error: all CUDA-capable devices are busy\n"
    "CUDA-capable device(s) is/are busy or unavailable",
    "no usable GPU": "RuntimeError: No CUDA GPUs: no CUDA-capable device is detected",
    "no usable GPU: RuntimeError: Found no": "RuntimeError: Found no NVIDIA driver on your system.",
    "driver too old": "CUDA driver version is insufficient for CUDA runtime version",
    "links between GPUs not ready": "CUDA initialization: Unexpected error. Error 802: system not yet initialized",
    "NCCL met a system error": "DistBackendError: NCCL error in: x.cpp:77, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call failed or device error. \n"
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-a1b2c3 (size 9637888)",
    "NCCL did not start": "NCCL WARN Bootstrap : no socket interface found",
    "network unreachable": "Last error: socketStartConnect: Connect to 10.0.0.7<52822> failed : No route to host",
    "host memory exhausted": "rank 3 could not be forked: OSError: [Errno 12] Cannot allocate memory",
    "limit of processes reached": "rank 3 could not be forked: BlockingIOError: [Errno 11] Try again",
    "no space left on a disk": "Last error:\nError while attaching to /dev/shm/nccl-1 : No space left on device (28)",
    "limit of open files reached": "OSError: [Errno 24] Too many open files: '/dev/shm/x'",
}

CODE = [
    "",
    "ValueError: 3 rows expected, got 4",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "RuntimeError: CUDA error: out of memory",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error: unspecified launch failure",
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f12_34567000",
    "NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, Graphics SM Warp Exception on (GPC 0, SM 0): Out Of Range Address",
    "NVRM: Xid (PCI:0000:3b:00): 43, pid=4711, Ch 00000008",
    "DistBackendError: NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 700 'an illegal memory access was encountered'",
    "DistBackendError: ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on 3b000",
    "DistBackendError: ncclInvalidArgument: Invalid value for an argument.",
    "DistBackendError: ncclSystemError: System call failed.\nsocketProgress: Connection closed by remote peer",
    "DistBackendError: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
    "RuntimeError: DefaultCPUAllocator: can't allocate memory. Error code 12 (Cannot allocate memory)",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "the experiment's ECC flag is off, and Xid is no word of ours",
]


class TestClassify:
    @pytest.mark.parametrize(("reason", "text"), MACHINE.items(), ids=MACHINE)
    def test_faults_of_the_machine_are_recognised(self, reason: str, text: str) -> None:
        """The result names the fault and quotes the line that reports it."""
        found = classify(text)
        assert found is not None
        assert found.startswith(reason)
        assert found.partition(": ")[2] in text

    @pytest.mark.parametrize("text", CODE)
    def test_faults_of_the_code_are_not_excused(self, text: str) -> None:
        """Errors that code can cause itself, and a lost peer, are not faults of the machine."""
        assert classify(text) is None

    def test_a_text_that_tells_of_both_is_the_codes(self) -> None:
        """An error on the device makes the driver report errors as a consequence."""
        both = "CUDA error: device-side assert triggered\nNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
        assert classify(both) is None

    def test_the_first_xid_that_is_the_machines_counts(self) -> None:
        """Xids that the application causes may precede and follow it."""
        log = "NVRM: Xid (PCI:0000:3b:00): 45, Ch 1\nNVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: new row marked"
        assert "GPU reported Xid 63: NVRM: Xid (PCI:0000:3b:00): 63, Row Remapper: new row marked" == classify(log)


ECC = "CUDA error: uncorrectable ECC error encountered"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file."""
    with Engine(preload=("self_tests.engine.gpu_jobs",)) as engine:
        yield engine


class TestJobs:
    def test_an_exception_that_tells_of_the_machine_excuses_its_rank(self, engine: Engine) -> None:
        """The rank is at fault, and `infrastructure` names the machine's fault."""
        result = engine.run(Job("self_tests.engine.gpu_jobs:raise_sentences", {1: ECC}, 2, {}))
        assert ((1,), f"memory error of a GPU: RuntimeError: {ECC}") == (result.blamed, result.infrastructure)

    def test_what_a_lost_rank_printed_tells(self, engine: Engine) -> None:
        """For a process that exits without an exception, its output is classified."""
        result = engine.run(Job("self_tests.engine.gpu_jobs:say_and_die", (0, XID), 2, {}))
        assert ((0,), f"GPU reported Xid 79: {XID}") == (result.blamed, result.infrastructure)

    def test_a_rank_with_a_fault_of_its_own_is_not_excused_by_another(self, engine: Engine) -> None:
        """The job is excused only if the machine explains every blamed rank."""
        result = engine.run(Job("self_tests.engine.gpu_jobs:raise_sentences", {0: ECC, 1: "wrong shape"}, 2, {}))
        assert ((0, 1), None) == (result.blamed, result.infrastructure)

    def test_other_failures_and_success_are_nothing_of_the_machine(self, engine: Engine) -> None:
        """Without a fault of the machine `infrastructure` is None."""
        failed = engine.run(Job("self_tests.engine.gpu_jobs:raise_sentences", {0: "wrong shape"}, 2, {}))
        passed = engine.run(Job("self_tests.engine.gpu_jobs:raise_sentences", {}, 2, {}))
        assert ((False, None), (True, None)) == (
            (failed.ok, failed.infrastructure),
            (passed.ok, passed.infrastructure),
        )
