"""The smallest examples that failed, kept in the report folder as files that `moe-conformance replay` runs."""

from __future__ import annotations

import json
from pathlib import Path

from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial
from moe_conformance.workloads.drawn.example import to_json


def keep(run: Run, trial: Trial, ended: Ending) -> tuple[str, ...]:
    """Write each drawn workload that failed into the report folder; return the command that replays each.

    Nothing is written where there is no such folder, or nothing was drawn.
    """
    if not run.options.report or trial.cell is None:
        return ()
    commands: list[str] = []
    for number, mismatch in enumerate(ended.failed):
        assert mismatch.outcome is not None  # those in `failed` have one
        name = "-".join(["drawn", trial.cell.id, mismatch.requirement or mismatch.stage])
        path = Path(run.options.report) / f"{name}{f'-{number}' if number else ''}.json"
        said = {"backend": run.target, "versions": dict(run.versions), "diagnosis": str(mismatch)}
        content = {"said": said, "workload": to_json(mismatch.outcome.workload)}
        path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        commands.append(run.options.replay(path))
    return tuple(commands)
