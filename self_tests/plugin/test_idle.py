"""The plug-in is loaded by every pytest run of its environment, and leaves those alone that do not ask for it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from self_tests.plugin import plugin_runs


class TestUnrelatedRun:
    def test_nothing_is_imported_and_nothing_changes(self, tmp_path: Path) -> None:
        """In another project's run there is no torch, no signal handler and no fixture of ours."""
        (tmp_path / "test_other.py").write_text(
            textwrap.dedent(
                """
                import signal
                import sys

                def test_light(pytestconfig):
                    assert pytestconfig.pluginmanager.hasplugin("moe_conformance")
                    heavy = {"torch", "rich", "click", "moe_conformance.spec", "moe_conformance.engine"}
                    assert set() == heavy & set(sys.modules)
                    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)

                def test_own_fixture(outcome):
                    assert 3 == outcome
                """
            )
        )
        (tmp_path / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef outcome():\n    return 3\n")
        done = plugin_runs.pytest_on("-q", "test_other.py", cwd=tmp_path)
        assert 0 == done.status
        assert "2 passed" in done.output
        assert "requirement" not in done.output
