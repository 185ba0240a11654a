"""Runs importable functions on the ranks of a process group, from one driver process.

    with Engine(preload=("my_package.jobs",)) as engine:
        result = engine.run(Job("my_package.jobs:double", payload=21, world=2, groups={}))
        assert result.ok and result.ranks[1].value == 42

Every rank is a process, forked from one that has imported torch and the preload. Ranks are kept for the next job and
replaced after a fault. A fault on a rank is part of the result (which rank, what, where), never an exception on the
driver.
"""

from __future__ import annotations

from .engine import Engine
from .records import NO_ANSWER, EngineError, Job, JobResult, RankContext, RankResult
from .running import Running

__all__ = ["NO_ANSWER", "Engine", "EngineError", "Job", "JobResult", "RankContext", "RankResult", "Running"]
