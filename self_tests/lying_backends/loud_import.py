"""A module that sets a variable of the environment by being imported; a plant wants it to be imported."""

from __future__ import annotations

import os

os.environ["MOE_CONFORMANCE_QUIET"] = "yes"
