"""Runs importable functions on ranks: real processes with a process group, driven from one process.

    with Engine(preload=("my_package.jobs",)) as engine:
        result = engine.run(Job("my_package.jobs:double", payload=21, world=2, groups={}))
        assert result.ok and result.ranks[1].value == 42

The ranks are forked from a process that has torch and the preload imported already, stay for the next job,
and are replaced after a fault. A fault on a rank is a result (who, how, where), never an exception on the
driver.
"""

from __future__ import annotations

from .engine import Engine
from .records import NO_ANSWER, EngineError, Job, JobResult, RankContext, RankResult
from .running import Running

__all__ = ["NO_ANSWER", "Engine", "EngineError", "Job", "JobResult", "RankContext", "RankResult", "Running"]
