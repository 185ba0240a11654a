"""Injects every known fault of a rank into a real engine, and compares what the engine reports with what happened."""

from __future__ import annotations

from .faults import FAULTS, Fault
from .runner import Drill, Trial, table

__all__ = ["FAULTS", "Drill", "Fault", "Trial", "table"]
