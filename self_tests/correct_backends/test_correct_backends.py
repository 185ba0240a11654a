"""Backends of small libraries in the styles that people write, which are correct: the suite must pass them.

Every class in a file of this folder that sets `judged` itself is one: a class derived from it, which may be wrong
on purpose, does not inherit this. `judged` is, by the number of ranks, how many requirements at least are judged in
the quick profile: a backend that is refused everything proves nothing.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from moe_conformance.report import result
from self_tests import correct_backends
from self_tests.plugin import plugin_runs

ROOT = Path(__file__).parents[2]
GOOD = ("pass", "not kept")  # a SHOULD that is not kept fails no run


def discovered() -> dict[str, type]:
    """Return the backends of this folder, by the name that `--backend` takes."""
    found = {}
    for module in pkgutil.iter_modules(correct_backends.__path__, f"{correct_backends.__name__}."):
        if not module.name.rpartition(".")[2].startswith("test_"):
            of = importlib.import_module(module.name)
            for name, each in inspect.getmembers(of, inspect.isclass):
                if each.__module__ == of.__name__ and "judged" in vars(each):
                    found[f"{of.__name__}:{name}"] = each
    return found


def commits() -> int:
    """Count the commits, as .ci/run does for its rotation; 0 where git or the history is missing."""
    try:
        count = subprocess.run(
            ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(count.stdout)


def rotating(names: Sequence[str], commit: int) -> list[tuple[str, int]]:
    """Return two backends, each with its number of ranks: one on 4, which take longest, and another on 1 and on 2."""
    on_four, on_fewer = names[commit % len(names)], names[(commit + len(names) // 2) % len(names)]
    return [(on_four, 4), (on_fewer, 1), (on_fewer, 2)]


def judged_in(report: result.Report) -> Mapping[str, str]:
    """Return the verdict of every requirement of which some case was run to its end, or broke down."""
    verdicts = {each["id"]: each["verdict"] for each in report.requirements}
    return {id: verdict for id, verdict in verdicts.items() if verdict in (*GOOD, "fail", "crash", "hang", "unstable")}


class TestDiscovery:
    def test_a_class_derived_from_a_correct_backend_is_not_one(self) -> None:
        """A backend that is wrong on purpose, and derives from a correct one, is not run as a correct one."""
        folder = correct_backends.__name__
        assert f"{folder}.gathered_tokens:Gathered" in discovered()
        assert f"{folder}.gathered_tokens:FewerParameters" not in discovered()


class TestRotation:
    def test_every_backend_has_its_turn_on_every_number_of_ranks(self) -> None:
        """As many commits in a row as there are backends run each of them on 1, on 2 and on 4 ranks."""
        names = sorted(discovered())
        met = {turn for commit in range(len(names)) for turn in rotating(names, commit)}
        assert {(name, ranks) for name in names for ranks in (1, 2, 4)} == met

    def test_two_backends_have_their_turn(self) -> None:
        """A commit runs two different backends."""
        assert 2 == len({name for name, _ in rotating(["a", "b", "c"], 7)})


class TestCorrectBackends:
    @pytest.mark.parametrize(("backend", "ranks"), rotating(sorted(discovered()), commits()))
    def test_it_passes(self, backend: str, ranks: int, tmp_path: Path) -> None:
        """A run without waivers ends with exit status 0, and judges as many requirements as the backend states."""
        arguments = ("--backend", backend, "--ranks", str(ranks), "--report", str(tmp_path))
        pinned = ("--", "-k", "not drawn") if ranks == 4 else ()  # drawn batches take most of the time there
        done = plugin_runs.cli("run", *arguments, *pinned, cwd=ROOT)
        of, judged = discovered()[backend], judged_in(result.read(tmp_path))
        failed = {id for id, verdict in judged.items() if verdict not in GOOD}
        assert set() == failed, done.output
        assert 0 == done.status, done.output
        assert of.judged[ranks] <= len(judged), done.output  # type: ignore[attr-defined]
