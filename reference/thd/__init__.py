"""Oracles of packed sequences (THD)."""
