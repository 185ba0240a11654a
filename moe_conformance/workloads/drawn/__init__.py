"""Workloads that Hypothesis draws, and the form in which a failing one is kept."""

from __future__ import annotations

DRAWN_WITH = "drawn with "  # and a feature: what a waiver calls every drawn batch that has it
