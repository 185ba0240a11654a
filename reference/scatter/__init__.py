"""Oracles of scatter-add."""
