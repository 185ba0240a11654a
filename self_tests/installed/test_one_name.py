"""No file is loaded under two names, whichever way pytest is pointed at the checks (docs/decisions/0010)."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("reference", "goldens", "distributed_tests")
COLLECT = ("--collect-only", "-q", "-p", "self_tests.installed.loaded_once", "-p", "no:cacheprovider")


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


class TestPytest:
    @pytest.mark.parametrize(
        "paths",
        [
            ("distributed_tests",),
            ("moe_conformance/distributed_tests",),
            ("--pyargs", "moe_conformance.distributed_tests"),
            ("distributed_tests/test_exchange.py", "self_tests/spec/test_spec.py"),
        ],
        ids=lambda paths: paths[-1],
    )
    def test_checks_have_one_name(self, paths: tuple[str, ...]) -> None:
        """By folder, by link, by package, and beside tests that load the checks themselves."""
        run = pytest_run(*COLLECT, "--moe-backend", "native", "--moe-ranks", "1", *paths)
        assert 0 == run.returncode, run.stdout + run.stderr
        assert "of which under another name: []" in run.stdout
        assert "checks loaded: 0" not in run.stdout
        assert "loaded twice" not in run.stdout

    def test_ids_are_those_of_the_path(self) -> None:
        """An item is named after the path that pytest was given: in a checkout that of the folder at its top."""
        run = pytest_run(*COLLECT, "--moe-backend", "native", "--moe-ranks", "1", "distributed_tests/test_exchange.py")
        assert "\ndistributed_tests/test_exchange.py::TestDispatch::" in f"\n{run.stdout}"

    def test_doctests_are_found_through_the_link(self) -> None:
        """And their modules are those that the suite imports."""
        run = pytest_run(*COLLECT, "--doctest-modules", "moe_conformance/reference/rounding")
        assert 0 == run.returncode, run.stdout + run.stderr
        assert "moe_conformance.reference.rounding" in run.stdout


class TestPackages:
    @pytest.mark.parametrize("name", PACKAGES)
    def test_the_short_name_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The folders lie on the path of a checkout; importing one by its own name says which name to use."""
        monkeypatch.syspath_prepend(str(ROOT))
        with pytest.raises(ImportError, match=f"moe_conformance.{name}"):
            importlib.import_module(name)
        assert name not in sys.modules

    @pytest.mark.parametrize("name", [*PACKAGES, "waivers"])
    def test_a_checkout_holds_relative_links(self, name: str) -> None:
        """So that a clone, wherever it lies, is whole."""
        link = ROOT / "moe_conformance" / name
        assert link.is_symlink()
        assert f"../{name}" == os.readlink(link)
