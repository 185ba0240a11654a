"""Oracles of capacity, token drops and receive budgets."""
