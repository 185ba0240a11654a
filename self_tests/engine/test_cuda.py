"""The suite on GPUs. Without any these tests are not run; where a CPU can run the same code, it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_conformance.engine import Engine, Job, JobResult
from self_tests.plugin import plugin_runs

JOBS = "self_tests.engine.gpu_jobs"
GPUS = torch.cuda.device_count()

on_gpu = pytest.mark.skipif(GPUS < 1, reason="not run: no GPU")
on_gpus = pytest.mark.skipif(GPUS < 2, reason="not run: no GPU" if GPUS < 1 else "not run: only one GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def engine_on(device: str, gpus: int | None = None) -> Engine:
    """Returns an engine whose ranks see only the first `gpus` GPUs."""
    seen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    return Engine(device=device, preload=(JOBS,), environment=seen)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine on the first GPU."""
    with engine_on("cuda", gpus=1) as engine:
        yield engine


@pytest.fixture
def run(engine: Engine) -> Callable[..., JobResult]:
    """Runs a function of gpu_jobs on the first GPU, on one rank unless told."""

    def run(function: str, payload: Any = None, world: int = 1, **settings: Any) -> JobResult:
        return engine.run(Job(f"{JOBS}:{function}", payload, world, {}, **settings))

    return run


def expected_exchange(world: int) -> list[tuple[list[float], list[float]]]:
    """Returns, per rank, what `exchange` receives (rank + 1 numbers w from every rank w) and the sum of all ranks."""
    total = [float(sum(range(world)))]
    found = []
    for rank in range(world):
        received: list[float] = []
        for source in range(world):
            received += [float(source)] * (rank + 1)
        found.append((received, total))
    return found


class TestTransports:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_ranks_of_one_gpu_exchange_over_gloo(self, device: str, world: int) -> None:
        """More ranks than GPUs share them; a single rank has one to itself, and NCCL."""
        with engine_on(device, gpus=1) as engine:
            result = engine.run(Job(f"{JOBS}:exchange", None, world, {}))
        where = "cpu" if device == "cpu" else "cuda:0"
        transport = "ProcessGroupNCCL" if device == "cuda" and world == 1 else "ProcessGroupGloo"
        assert result.ok, result.ranks
        assert expected_exchange(world) == [rank.value[2:] for rank in result.ranks]
        assert {(where, transport)} == {rank.value[:2] for rank in result.ranks}

    @on_gpus
    def test_ranks_with_a_gpu_each_exchange_over_nccl(self) -> None:
        """Rank r has GPU r."""
        with engine_on("cuda", gpus=2) as engine:
            result = engine.run(Job(f"{JOBS}:exchange", None, 2, {}))
        assert result.ok, result.ranks
        assert expected_exchange(2) == [rank.value[2:] for rank in result.ranks]
        assert [(f"cuda:{r}", "ProcessGroupNCCL") for r in range(2)] == [rank.value[:2] for rank in result.ranks]

    @on_gpu
    def test_a_rank_that_raises_on_a_shared_gpu_is_blamed(self, run: Callable[..., JobResult]) -> None:
        """And the next job runs."""
        result = run("raise_sentences", {1: "wrong shape"}, world=2)
        assert ((1,), "RuntimeError: wrong shape") == (result.blamed, result.ranks[1].error)
        assert run("exchange", world=2).ok


class TestMemory:
    @on_gpu
    @pytest.mark.parametrize(("where", "expected"), [("nowhere", False), ("cycle", False), ("module", True)])
    def test_device_memory_that_a_job_leaves_is_told(
        self, run: Callable[..., JobResult], where: str, expected: bool
    ) -> None:
        """What is freed, or would be by the collector, is not left."""
        (rank,) = run("hold", where).ranks
        assert expected == any("bytes of device memory" in each for each in rank.left), rank.left

    @on_gpu
    def test_what_is_kept_is_not_left(self, run: Callable[..., JobResult]) -> None:
        """A job that adds to `kept` made something to last; the next finds it there and is not blamed for it."""
        assert () == run("hold", "kept").ranks[0].left
        assert () == run("hold", "nowhere").ranks[0].left

    @on_gpu
    def test_workspaces_of_libraries_are_not_left(self, run: Callable[..., JobResult]) -> None:
        """The first product of matrices takes one that stays."""
        result = run("multiply")
        assert (64.0, ()) == (result.ranks[0].value, result.ranks[0].left)


class TestPoisoned:
    @on_gpu
    @pytest.mark.parametrize("swallow", [False, True])
    def test_a_job_that_loses_its_gpu_is_told_and_its_process_replaced(
        self, run: Callable[..., JobResult], swallow: bool
    ) -> None:
        """Though the function returned; the next job has a new process with a working GPU."""
        (rank,) = run("fail_late", swallow).ranks
        assert ("raised", "moe_conformance.engine.gpu.job_checks.LateError") == (rank.status, rank.error_type)
        assert "device-side assert" in rank.error
        assert rank.infrastructure is None
        assert 64.0 == run("multiply").ranks[0].value


class TestHostSyncs:
    @on_gpu
    def test_each_wait_for_the_gpu_counts(self, run: Callable[..., JobResult]) -> None:
        """Three reads from one line are three."""
        counts = [run("read_on_the_host", times).ranks[0].host_syncs for times in (0, 3, 5)]
        assert [0, 3, 5] == counts

    def test_a_cpu_has_no_count(self) -> None:
        """None, not zero: nobody has looked."""
        with engine_on("cpu") as engine:
            (rank,) = engine.run(Job(f"{JOBS}:read_on_the_host", 3, 1, {})).ranks
        assert (3.0, None) == (rank.value, rank.host_syncs)


class TestDelays:
    EARLY, RIGHT = [-1.0] * 4, [5.0] * 4  # what the jobs set before, and what is to come

    @on_gpu
    @pytest.mark.parametrize(("wait", "expected"), [(False, EARLY), (True, RIGHT)])
    def test_an_early_read_is_seen_where_communication_is_late(
        self, run: Callable[..., JobResult], wait: bool, expected: Callable[[int], Any]
    ) -> None:
        """Who reads the output before `wait()` finds what was there; who waits finds what came."""
        (rank,) = run("gather_early", wait, asynchrony="delayed_communication").ranks
        assert expected == rank.value

    @on_gpu
    @pytest.mark.parametrize(("wait", "expected"), [(False, EARLY), (True, RIGHT)])
    def test_a_missing_wait_for_the_input_is_seen_where_computation_is_late(
        self, run: Callable[..., JobResult], wait: bool, expected: Callable[[int], Any]
    ) -> None:
        """A collective on a stream that does not wait for its input sends what was there."""
        (rank,) = run("gather_aside", wait, asynchrony="delayed_compute").ranks
        assert expected == rank.value

    @on_gpu
    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("asynchrony", ["delayed_compute", "delayed_communication"])
    def test_correct_code_stays_right(self, run: Callable[..., JobResult], asynchrony: str, world: int) -> None:
        """Over NCCL and, where ranks share the GPU, over gloo."""
        result = run("exchange", world=world, asynchrony=asynchrony)
        assert expected_exchange(world) == [rank.value[2:] for rank in result.ranks]


class TestSuite:
    ONLY = "EXCH-05,EXCH-07,EXPT-01,GRAD-03,ROUTE-04"
    NOT_OFFERED = (
        "identity-in-flight",
        "input-weights",
        "knob-",
        "equal-splits",
    )  # workloads of which native has some refused

    @pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), pytest.param("cuda", 1, marks=on_gpu)])
    def test_native_passes_on_one_rank(self, tmp_path: Path, device: str, ranks: int) -> None:
        """On a GPU over NCCL."""
        self.assert_native_passes(tmp_path, device, ranks)

    @on_gpu
    def test_native_passes_on_two_ranks_of_one_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over gloo."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        self.assert_native_passes(tmp_path, "cuda", 2)

    @on_gpus
    def test_native_passes_on_two_gpus(self, tmp_path: Path) -> None:
        """Over NCCL."""
        self.assert_native_passes(tmp_path, "cuda", 2)

    def assert_native_passes(self, folder: Path, device: str, ranks: int) -> None:
        """Judges native and looks at every verdict."""
        asked = ("--backend", "native", "--device", device, "--ranks", str(ranks), "--only", self.ONLY)
        done = plugin_runs.cli("run", *asked, "--report", str(folder), cwd=folder)
        assert 0 == done.status, done.output
        report = plugin_runs.result(folder)
        offered = {
            name: verdict for name, verdict in plugin_runs.verdicts(report).items()
            if not any(part in name for part in self.NOT_OFFERED)
        }  # fmt: skip
        assert {"pass"} == set(offered.values())
        assert device == report["device"]
