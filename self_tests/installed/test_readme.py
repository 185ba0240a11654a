"""The adapter that README quotes is a file that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moe_conformance.report import result

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


class TestReadme:
    def test_it_quotes_the_adapter(self) -> None:
        """README's only block of Python is the example, from its imports on."""
        text = (EXAMPLES / "my_adapter.py").read_text().partition("from __future__ import annotations\n\n")[2]
        blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
        assert [text] == [block.partition("```")[0] for block in blocks]

    def test_its_adapter_passes(self, tmp_path: Path) -> None:
        """A run of it on two ranks ends with exit code 0, and forty requirements and more have passed."""
        command = ["-m", "moe_conformance.cli", "run", "--backend", "my_adapter:Backend", "--ranks", "2"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        done = subprocess.run(
            [sys.executable, *command, "--report", str(tmp_path)],
            cwd=tmp_path,
            env={**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        passed = [each for each in result.read(tmp_path).requirements if each["verdict"] == "pass"]
        assert 40 <= len(passed), done.stdout
