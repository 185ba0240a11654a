"""Walks the installed wheel outside the checkout: a quick run of an adapter that only its dotted path names.

Run by `tox run -e wheel`, with the adapter's file as the argument.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import distribution
from pathlib import Path


def walk(adapter: Path, away: Path) -> int:
    """Run the installed suite on a copy of the adapter in the empty folder `away`; return the exit status.

    Raises:
        RuntimeError: the suite that runs is not the wheel's, or its report says that nothing passed.
    """
    shutil.copy(adapter, away)
    environment = {**os.environ, "PYTHONPATH": str(away)}
    where = [sys.executable, "-c", "import moe_conformance.contract as suite; print(suite.__file__)"]
    suite = subprocess.check_output(where, cwd=away, env=environment, text=True)
    if "site-packages" not in suite:
        raise RuntimeError(f"the suite is imported from {suite.strip()}, not from an installed wheel")
    if (names := top_level()) != {"moe_conformance"}:
        raise RuntimeError(f"the wheel puts {', '.join(sorted(names))} into site-packages, not moe_conformance alone")
    shutil.copy(Path(__file__).parent / "loaded_once.py", away)
    plain = [
        "-q",
        "--collect-only",
        "-p",
        "loaded_once",
        "--moe-backend",
        f"{adapter.stem}:Backend",
        "--moe-ranks",
        "1",
    ]
    checks = [sys.executable, "-m", "pytest", *plain, "--pyargs", "moe_conformance.distributed_tests"]
    if subprocess.run(checks, cwd=away, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        raise RuntimeError(f"the installed checks are not collected, or loaded under two names: {' '.join(checks)}")

    report = away / "report"
    backend = f"{adapter.stem}:Backend"
    run = ["moe-conformance", "run", "--backend", backend, "--profile", "quick", "--report", str(report)]
    status = subprocess.run(run, cwd=away, env=environment, check=False).returncode
    verdicts = Counter(requirement["verdict"] for requirement in requirements(report / "result.json"))
    print("the wheel's verdicts:", dict(verdicts))
    if not verdicts["pass"]:
        raise RuntimeError("no requirement passed: the wheel judged nothing")
    return status


def top_level() -> set[str]:
    """Return what the wheel puts into site-packages beside its own metadata."""
    tops = {path.parts[0] for path in distribution("moe-conformance").files or () if not path.is_absolute()}
    return {name for name in tops if name != ".." and not name.endswith(".dist-info")}


def requirements(result: Path) -> list[dict[str, str]]:
    """Return the report's entries, one per requirement."""
    entries: list[dict[str, str]] = json.loads(result.read_text("utf-8"))["requirements"]
    return entries


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(walk(Path(sys.argv[1]).resolve(), Path(folder)))
