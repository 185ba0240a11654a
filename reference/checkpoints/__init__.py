"""Oracles of checkpoints."""
