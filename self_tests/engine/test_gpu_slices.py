"""Several test processes divide the visible GPUs among them."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.engine.gpu.slices import share, visible
from moe_conformance.plugin.run import gpu_environment, gpu_sentences

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1f2a9c3e-0a41-5f7d-9b7e-3c0b5c1d2e4f")


class TestVisible:
    @pytest.mark.parametrize(
        ("text", "count", "expected"),
        [
            (None, 0, ()),
            (None, 3, ("0", "1", "2")),
            ("", 4, ()),
            ("2", 4, ("2",)),
            ("3, 1,0", 4, ("3", "1", "0")),
            ("0,1,-1,2", 4, ("0", "1")),
            ("1,1", 4, ()),
            ("NoDevFiles", 4, ()),
            (",".join(UUIDS), 2, UUIDS),
            ("MIG-GPU-8932f937/1/0,MIG-5aa0e1ff", 1, ("MIG-GPU-8932f937/1/0", "MIG-5aa0e1ff")),
        ],
    )
    def test_it_reads_the_variable_like_cuda(self, text: str | None, count: int, expected: Any) -> None:
        """Order and names are kept; the first entry that names no device ends the list, a repeated one empties it."""
        assert expected == visible(text, count)


class TestShare:
    @pytest.mark.parametrize(
        ("count", "workers", "expected"),
        [
            (8, 2, ["0,1,2,3", "4,5,6,7"]),
            (5, 2, ["0,1", "2,3,4"]),
            (3, 3, ["0", "1", "2"]),
            (2, 4, ["0", "1", "0", "1"]),
            (2, 3, ["0", "1", "0"]),
            (1, 2, ["0", "0"]),
            (0, 2, ["", ""]),
        ],
    )
    def test_slices_cover_the_devices_in_order(self, count: int, workers: int, expected: list[str]) -> None:
        """Slices are contiguous; with fewer GPUs than processes they are assigned round-robin."""
        devices = visible(None, count)
        assert expected == [share(devices, worker, workers).variable for worker in range(workers)]

    def test_names_are_kept(self) -> None:
        """A UUID is passed on unchanged."""
        assert [(UUIDS[0],), (UUIDS[1],)] == [share(UUIDS, worker, 2).devices for worker in range(2)]

    def test_a_process_in_place_of_a_lost_one_has_a_slice(self) -> None:
        """A replacement process has a number beyond the count of processes."""
        devices = visible(None, 4)
        assert share(devices, 1, 2).devices == share(devices, 3, 2).devices

    @pytest.mark.parametrize(
        ("count", "worker", "workers", "expected"),
        [
            (4, 1, 2, "process 1 has GPUs 2, 3 of 4 to itself"),
            (2, 0, 2, "process 0 has GPU 0 of 2 to itself"),
            (2, 3, 5, "process 3 shares GPU 1 with 1 more"),
            (2, 4, 5, "process 4 shares GPU 0 with 2 more"),
            (0, 1, 2, "process 1 has no GPU"),
        ],
    )
    def test_words_say_what_a_process_has(self, count: int, worker: int, workers: int, expected: str) -> None:
        """The sentence says whether the GPU is shared, and with how many processes."""
        assert expected == share(visible(None, count), worker, workers).words


class TestWorkers:
    @pytest.mark.parametrize(
        ("worker", "count", "devices", "expected"),
        [
            ("gw1", "2", "4,5,6,7", {"CUDA_VISIBLE_DEVICES": "6,7"}),
            ("gw0", "2", ",".join(UUIDS), {"CUDA_VISIBLE_DEVICES": UUIDS[0]}),
            ("gw2", "3", "0", {"CUDA_VISIBLE_DEVICES": "0"}),
            ("gw1", "2", "", {}),
            ("", "", "0,1", {}),
        ],
    )
    def test_the_ranks_of_a_worker_see_its_slice(
        self, monkeypatch: pytest.MonkeyPatch, worker: str, count: str, devices: str | None, expected: Any
    ) -> None:
        """The variable is set to the slice of the run's GPUs; without workers or GPUs it is not set."""
        for name, value in (("", worker), ("_COUNT", count)):
            monkeypatch.setenv(f"PYTEST_XDIST_WORKER{name}", value)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert expected == gpu_environment()

    def test_the_run_says_who_has_what(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The run prints one sentence per worker."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
        assert ["process 0 has GPU 0 of 3 to itself", "process 1 has GPUs 1, 2 of 3 to itself"] == gpu_sentences(2)
