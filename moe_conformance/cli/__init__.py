"""The command line: `run`, `parity`, `new`, `doctor`, `list`, `explain`, `replay`, `record`, and commands on reports.

What needs torch is imported by the command that needs it, so that `--help` does not wait for it.
"""

from __future__ import annotations

from moe_conformance.cli import beginning, parity, recording, reports, running  # their commands join the group
from moe_conformance.cli.base import main as main

__all__ = ["beginning", "main", "parity", "recording", "reports", "running"]
