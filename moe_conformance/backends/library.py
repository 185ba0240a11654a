"""The library that a backend adapts: the version that the ranks would import, and whether the adapter supports it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_conformance.contract import Unsupported


@dataclass(frozen=True)
class Library:
    """A Python library under test, installed or as a checkout that precedes the installed one on `sys.path`.

    Nothing of it is imported here.

    Args:
        distribution: Its name on the package index, such as "megatron-core".
        module: A module that only this library has, such as "megatron.core".
        supports: The versions that the adapter supports, such as ">=0.16,<0.21". The adapter itself looks at the
            objects of the library for what differs within them.
        install: The command that installs it.
        declared: Returns the version that the sources in a folder declare; for a checkout.
    """

    distribution: str
    module: str
    supports: str
    install: str
    declared: Callable[[Path], str]

    def version(self) -> str:
        """Return the version that would be imported; of a checkout with its commit, as in "0.20.0+d98e8a64ddf3".

        Raises:
            Unsupported: the library is not here, a checkout declares no version, or the version is not supported.
        """
        folder = self.folder()
        found = self._installed(folder)
        if found is None:
            if folder is None:
                raise Unsupported(f"{self.distribution} is not installed: {self.install}")
            found = f"{self._declared(folder)}+{commit_of(folder)}"
        if not SpecifierSet(self.supports).contains(Version(found).public, prereleases=True):
            raise Unsupported(
                f"{self.distribution} {found} is not among the versions that this adapter supports ({self.supports}): "
                f"install one of them, or name a checkout by --library"
            )
        return found

    def folder(self) -> Path | None:
        """Return the entry of `sys.path` from which the module would be imported; None if no entry has it."""
        path = Path(*self.module.split("."))
        for entry in map(Path, sys.path):
            if (entry / path / "__init__.py").is_file() or (entry / path.with_suffix(".py")).is_file():
                return entry.resolve()
        return None

    def _installed(self, folder: Path | None) -> str | None:
        """Return the version of the installed distribution, None if there is none or the module is not its own."""
        try:
            distribution = importlib.metadata.distribution(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
        # An editable install may be found by a hook of the import system, and by no entry.
        same = folder is None or Path(str(distribution.locate_file(""))).resolve() == folder
        return distribution.version if same else None

    def _declared(self, folder: Path) -> str:
        try:
            declared = self.declared(folder)
            return Version(declared).public
        except (OSError, LookupError, InvalidVersion) as error:
            raise Unsupported(f"the checkout {folder} of {self.distribution} declares no version: {error}") from error


def commit_of(folder: Path) -> str:
    """Return the first 12 digits of a checkout's commit, with ".modified" if files differ from it, or "unknown"."""
    git = ["git", "-C", str(folder)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:12]
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (".modified" if changed else "")
