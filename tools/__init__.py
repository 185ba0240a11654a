"""Programs for whoever develops the suite; none of them is installed."""

from __future__ import annotations
