"""Workloads that Hypothesis draws, and the format in which failing ones are stored."""

from __future__ import annotations

DRAWN_WITH = "drawn with "  # with a feature: the name in a waiver for every drawn batch that has it
