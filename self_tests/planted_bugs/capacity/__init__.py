"""Planted bugs of capacity, token drops and receive budgets."""
