"""Oracles of the balancing bias."""
