"""Oracles of forced routing."""
