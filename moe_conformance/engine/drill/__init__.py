"""Plays every known fault of a rank to a real engine, and holds what the engine says against what happened."""

from __future__ import annotations

from .faults import FAULTS, Fault
from .runner import Drill, Trial, table

__all__ = ["FAULTS", "Drill", "Fault", "Trial", "table"]
