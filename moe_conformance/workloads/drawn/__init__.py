"""Workloads that Hypothesis draws, and the form in which a failing one is kept."""
