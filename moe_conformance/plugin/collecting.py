"""Collects the checks under one module name, whichever path pytest was given.

Pytest would name the module of `distributed_tests/test_x.py` after its folder and load it a second time, in addition
to `moe_conformance.distributed_tests.test_x`: see docs/decisions/0010.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from moe_conformance.discovery import CHECKS

# In a checkout the folder that a link in the package points to, where a wheel is installed the folder itself.
FOLDER = (Path(__file__).parent.parent / "distributed_tests").resolve()


def holds(path: Path) -> bool:
    """Whether a path is the folder of the checks or below it, by whatever link."""
    return FOLDER in (resolved := path.resolve(), *resolved.parents)


def are_named(config: pytest.Config) -> bool:
    """Whether the command line names the checks, by a path or by the name of their package."""
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    by_package = config.option.pyargs and any(argument.startswith(CHECKS) for argument in config.args)
    return by_package or any(holds(path) for path in paths)


class CheckModule(pytest.Module):
    """A file of checks."""

    def _getobj(self) -> ModuleType:
        """Import it by its full name.

        Raises:
            CollectError: it skips itself, as by `importorskip`: all of its checks would be missing.
        """
        below = self.path.resolve().relative_to(FOLDER).with_suffix("")
        try:
            return importlib.import_module(".".join((CHECKS, *below.parts)))
        except pytest.skip.Exception as skipped:
            raise self.CollectError(f"{self.path.name} skips itself: {skipped}; its checks would be missing") from None
