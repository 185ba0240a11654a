"""TT-12: torchao adds a filter of warnings when it is imported. Exits 1 while the finding is there."""

from __future__ import annotations

import importlib
import sys
import warnings


def ignored() -> bool:
    """Return whether the warning that NumPy is missing is ignored in the whole process."""
    return any(action == "ignore" and "NumPy" in getattr(text, "pattern", "") for action, text, *_ in warnings.filters)


before = ignored()
importlib.import_module("torchao")
after = ignored()
print(f"observed: the warning that NumPy is missing is ignored before the import: {before}, after it: {after}")
print("expected: the warning that NumPy is missing is ignored before the import: False, after it: False")
sys.exit(int(after))
