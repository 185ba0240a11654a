"""The command line: `run`, `new`, `doctor`, `list`, `explain`, `replay`, `record`, and what is made of reports.

What needs torch is imported by the command that needs it, so that `--help` does not wait for it.
"""

from __future__ import annotations

from moe_conformance.cli import beginning, recording, reports, running  # their commands join the group
from moe_conformance.cli.base import main as main

__all__ = ["beginning", "main", "recording", "reports", "running"]
