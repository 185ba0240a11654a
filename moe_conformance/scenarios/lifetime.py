"""A training step that compares settings of the process before the import of a backend and after its session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from moe_conformance.backends.registry import load
from moe_conformance.contract import Session
from moe_conformance.scenarios.offers import names
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.scenarios.sessions import build, closed, opened
from moe_conformance.scenarios.settings import settings
from moe_conformance.scenarios.step import TrainingStep

_IMPORT = """
import json, sys
import moe_conformance.scenarios.moe_step
from moe_conformance.scenarios.lifetime import import_all
print(json.dumps(import_all(*sys.argv[1:])))
"""
_IMPORT_LIMIT_S = 120.0
_SURFACES = names()


class Lifetime(TrainingStep):
    """Opens a session, takes the step, builds every other surface, also with a config to refuse, and closes."""

    def run(self, backend_name: str) -> RankOutcome:
        """Run the step, and return its outcome with the settings that differ."""
        closed(self.context)
        before = settings()
        outcome = super().run(backend_name)
        self._build_everything(opened(self.context, backend_name, self.workload.layout).session)
        closed(self.context)
        found = {f"{name}, from opening to closing": both for name, both in _differing(before, settings()).items()}
        seen = len(before)
        if self.context.rank == 0 and self.workload.twist.lifetime == "process":  # the same modules on every rank
            changed, names = _imported(backend_name)
            found |= {f"{name}, by importing": both for name, both in changed.items()}
            seen += names
        return replace(outcome, settings_changed=found, settings_seen=seen)

    def _build_everything(self, session: Session) -> None:
        """Build every surface that a session may offer, also with a number of experts that ep does not divide."""
        for surface in _SURFACES:
            for more in (0, 1):
                with suppress(Exception):  # refused: what is left behind is looked at
                    build(session, surface, replace(self.config, experts=self.config.experts + more))


def import_all(backend_name: str) -> tuple[dict[str, tuple[str, str]], int]:
    """Import a backend and its `preload` modules; return the settings that differ, and how many settings there are."""
    import_module("torch.fx.experimental.symbolic_shapes")  # it brings sympy and its filter, which are torch's
    before = settings()
    for module in getattr(load(backend_name), "preload", ()):
        import_module(module)
    return _differing(before, settings()), len(before)


def _imported(backend_name: str) -> tuple[dict[str, tuple[str, str]], int]:
    """Call `import_all` in a new process, since the backend has already been imported in this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, backend_name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_IMPORT_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"importing {backend_name} in a new process failed: {done.stderr[-500:]}")
    changed, names = json.loads(done.stdout.splitlines()[-1])
    return {name: (before, after) for name, (before, after) in changed.items()}, names


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys([*before, *after])
    pairs = {name: (before.get(name, "not set"), after.get(name, "not set")) for name in names}
    return {name: both for name, both in pairs.items() if both[0] != both[1]}
